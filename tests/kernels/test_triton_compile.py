"""Every Triton kernel compiles for sm_90 ahead of time, without a GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not published for this system")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from paceline.kernels.triton import all_reduce, attention, dense, sampling  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
HALF, FLOAT, INT, LONG = "*bf16", "*fp32", "*i32", "*i64"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compile_kernel(kernel: Any, types: list[str], constants: dict[str, Any], *, fuse: bool = True) -> Any:
    """types: of the parameters that are no constants, in order."""
    free = [name for name in kernel.arg_names if name not in constants]
    signature = dict(zip(free, types, strict=True)) | dict.fromkeys(constants, "constexpr")
    positions = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    # Tensors begin at multiples of 16 bytes, which a launch sees and lets loads be wide.
    pointers = [i for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*")]
    aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}
    source = ASTSource(kernel, signature, constexprs=positions, attrs=aligned)
    compiled = triton.compile(source, target=HOPPER, options={"enable_fp_fusion": fuse})
    assert ".target sm_90" in compiled.asm["ptx"]
    assert compiled.asm["cubin"]
    return compiled


@pytest.mark.parametrize(
    ("cache", "group", "dim", "window"), [(FLOAT, 1, 64, 0), (HALF, 4, 128, 0), (HALF, 8, 256, 1024)]
)
def test_attention(cache: str, group: int, dim: int, window: int) -> None:
    shape = {"WINDOW": window, "DIM": dim, "DIM_PAD": dim, "SPLIT": attention.SPLIT}
    groups = {"TOKENS": 8, "GROUP": group, "GROUP_PAD": max(2, group), "BLOCK": attention.BLOCK}
    types = [cache, cache, cache, FLOAT, FLOAT, *[INT] * 8, "i32", "fp32"]
    compiled = compile_kernel(attention.attend_kernel, types, shape | groups)
    # What a multiprocessor of an H100 can give to one program.
    assert compiled.metadata.shared <= 227 * 1024
    compile_kernel(attention.combine_kernel, [FLOAT, FLOAT, INT, FLOAT, "i32"], shape)


@pytest.mark.parametrize("joined", [True, False])
def test_norms(joined: bool) -> None:
    constants: dict[str, Any] = {"SIZE": 3000, "PAD": 4096, "HAS_BRANCH": joined}
    if not joined:
        constants |= {"branch_ptr": None, "total_ptr": None}
    compile_kernel(dense.norm_kernel, [FLOAT] * (5 if joined else 3) + ["fp32"], constants)


def test_rope_and_store() -> None:
    constants = {"HALF": 40, "HALF_PAD": 64, "GROUP": 3, "GROUP_PAD": 4}
    types = [*[FLOAT] * 5, HALF, HALF, LONG, HALF, "i32", "i32", "i32"]
    compile_kernel(dense.rope_store_kernel, types, constants)


@pytest.mark.parametrize("silu", [True, False])
def test_gates(silu: bool) -> None:
    compile_kernel(dense.gate_kernel, [FLOAT] * 3 + ["i32"], {"SILU": silu, "BLOCK": 1024})
    biases = {"HAS_GATE_BIAS": True, "HAS_UP_BIAS": True, "SILU": silu}
    tile = {"ROWS": 16, "OUTPUTS": 32, "INPUTS": 128}
    types = [HALF, HALF, HALF, FLOAT, FLOAT, FLOAT, "i32", "i32", "i32"]
    compile_kernel(dense.gated_linear_kernel, types, biases | tile)


@pytest.mark.parametrize(("count", "named"), [(1, False), (8, True)])
def test_sampling_rounds_as_the_noise_is_defined(count: int, named: bool) -> None:
    types = [FLOAT, FLOAT, INT, INT, FLOAT, INT, FLOAT, "i32", "i32"]
    constants = {"NAMED": named, "COUNT": count, "BLOCK": 1024}
    compiled = compile_kernel(sampling.rank_kernel, types, constants, fuse=False)
    ptx = compiled.asm["ptx"]
    assert not re.search(r"\bfma\.", ptx)
    assert set(re.findall(r"\bdiv\.\S*f32", ptx)) == {"div.rn.f32"}
    # Without .rn the assembler could fuse what the compiler kept apart.
    assert set(re.findall(r"\b(?:mul|add|sub)\.\S*f32", ptx)) <= {"mul.rn.f32", "add.rn.f32", "sub.rn.f32"}


@pytest.mark.parametrize(("count", "named"), [(1, False), (8, True)])
def test_merging_candidates(count: int, named: bool) -> None:
    constants = {"COUNT": count, "COUNT_PAD": count, "BLOCKS_PAD": 256, "PAD": 256 * count}
    constants["NAMED"] = named
    types = [FLOAT, INT, INT, FLOAT, FLOAT, INT, FLOAT, "*i1", "i32"]
    compile_kernel(sampling.merge_kernel, types, constants, fuse=False)


def test_all_reduce_stores_and_polls_words_that_cannot_tear() -> None:
    types = [FLOAT, FLOAT, LONG, LONG, INT, "i32", "i32", "i32"]
    ptx = compile_kernel(all_reduce.all_reduce_kernel, types, {"RANKS": 8, "BLOCK": 512}).asm["ptx"]
    assert "st.global.wt.b64" in ptx
    assert "ld.volatile.global.b64" in ptx
