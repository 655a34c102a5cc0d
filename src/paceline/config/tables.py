"""One typed tree of every engine option."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Dtype = Literal["auto", "float32", "bfloat16", "int8"]
Device = Literal["auto", "cpu", "cuda"]
SuffixCache = Literal["off", "tenant", "shared"]
Name = Annotated[str, Meta(min_length=1, description="a text that is not empty")]
_MOST_TOKENS = 2**31 - 1
"""Slots and positions are 32-bit in the kernels."""


Selector = Literal["auto", "combined", "reactive", "bandit", "classifier", "everyone"]


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of options; a frozen value, so that it can be shared between threads and processes."""


class SpeculationConfig(Table, frozen=True):
    """draft: "ngram", "suffix", "layers" (the first of the target), "eagle3" (the head shipped for it), "mtp"
    (its own modules), a model (as `Config.model`) or a head, in a folder or on a hub; several joined by +;
    "auto" = "ngram", with "eagle3" for the embedded model where its head is installed and works in turn; or
    "none".  draft_dtype: of a drafter with weights; auto = for a head the target's, but
    8 bits instead of 16 on a CPU.  unpickle_head: read a head's pickled weights (*.bin), where it has no
    others; that is more than reading numbers, and for heads whose authors are trusted.

    num_speculative_tokens: guesses per request and step, whatever the batch; unset = as many as pay for
    themselves by measured costs and acceptance, up to 15 in the modes overlapped and serial-chain;
    in the other modes, which are there to be compared with, always 7; of a fixed shape all nodes.
    `length_by_batch_size`, pairs of (smallest batch size, length), replaces it where given, with 0 below the
    first pair. A request's own number goes before both.
    selector: how that is decided where draft and target work in turn, and which of several drafters is asked:
    "combined" = every guess and question that pays for itself; the others are there to be compared with, and
    choose one drafter per step: "reactive" by what was accepted of late, "bandit" by tokens per second,
    "classifier" by how sure the cheapest is; "everyone" asks all, always. "auto" = combined where the number
    of guesses is not fixed, else everyone; with any other, num_speculative_tokens is the most there may be.
    prompt_lookup_max, prompt_lookup_min: longest and shortest n-gram that the n-gram drafter looks up.
    prompt_lookup_branches: places that it offers at once, as branches of a tree; 1 = as vLLM.
    draft_layers: layers of the target that the drafter `layers` runs, 0 = a third of them.
    suffix_cache: whose finished outputs the suffix drafter learns from besides the request itself: "off" =
    nobody's, "tenant" = those of the same `SamplingParams.tenant`, "shared" = everybody's.
    suffix_max_cached_requests, suffix_max_memory: outputs, and MiB, that it remembers at most, the latest.
    suffix_cache_file: where they are kept from run to run.  suffix_max_depth: tokens of context it compares.
    suffix_factor, suffix_offset: a match of m tokens is worth `factor * m + offset` guesses.
    suffix_min_token_prob: chance of being reached below which it guesses nothing.  suffix_tree: the likeliest
    nodes of all continuations, not only the likeliest path.
    """

    draft: Name = "auto"
    num_speculative_tokens: (
        Annotated[int, Meta(ge=0, le=256, description="a whole number from 0 to 256 (0 = no speculation)")]
        | None
    ) = None
    draft_dtype: Dtype = "auto"
    unpickle_head: bool = False
    length_by_batch_size: Annotated[
        tuple[tuple[Annotated[int, Meta(ge=1)], Annotated[int, Meta(ge=0, le=256)]], ...],
        Meta(description="a list of [smallest batch size from 1, length from 0 to 256] pairs"),
    ] = ()
    selector: Selector = "auto"
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=64, description="a whole number from 1 to 64")] = 4
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=64, description="a whole number from 1 to 64")] = 2
    prompt_lookup_branches: Annotated[int, Meta(ge=1, le=64, description="a whole number from 1 to 64")] = 1
    draft_layers: Annotated[int, Meta(ge=0, le=1000, description="a whole number from 0 to 1000")] = 0
    suffix_cache: SuffixCache = "off"
    suffix_max_cached_requests: Annotated[
        int, Meta(ge=1, le=10**6, description="a whole number from 1 to 1000000")
    ] = 10_000
    suffix_max_memory: Annotated[int, Meta(ge=1, le=2**16, description="MiB from 1 to 65536")] = 256
    suffix_cache_file: str = ""
    suffix_max_depth: Annotated[int, Meta(ge=1, le=64, description="a whole number from 1 to 64")] = 24
    suffix_factor: Annotated[float, Meta(ge=0, le=64, description="a number from 0 to 64")] = 1.0
    suffix_offset: Annotated[float, Meta(ge=-64, le=256, description="a number from -64 to 256")] = 3.0
    suffix_min_token_prob: Annotated[float, Meta(gt=0, le=1, description="above 0, at most 1")] = 0.1
    suffix_tree: bool = True


Mode = Literal[
    "autoregressive", "serial-chain", "serial-tree", "swiftspec", "discard", "outcome-cache", "overlapped"
]
Growth = Literal["auto", "chain", "fixed-shape", "best-first", "layers", "calibrated"]
Placement = Literal["auto", "serial", "disaggregated"]


class TreeConfig(Table, frozen=True):
    """How a draft model's tree grows. growth: the rule; auto = what the mode is known for.

    tree_width: leaves that one draft pass expands.  tree_passes: draft passes per verification where they
    are counted, 0 = as many as the rule finds worth it, or, where the drafter works ahead unseen and has to
    end by itself, the default's number.  tree_shape: children per node at each depth, of the fixed shape; all
    its nodes are verified unless a number is given.  fan_out: outcomes drafted for at each place of a chain,
    of the outcome cache.
    """

    growth: Growth = "auto"
    tree_width: Annotated[int, Meta(ge=1, le=64, description="a whole number from 1 to 64")] = 8
    tree_passes: Annotated[int, Meta(ge=0, le=64, description="a whole number from 0 to 64")] = 4
    tree_shape: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=64)], ...],
        Meta(min_length=1, max_length=64, description="a list of 1 to 64 whole numbers from 1 to 64"),
    ] = (3, 2, 1, 1)
    fan_out: Annotated[int, Meta(ge=1, le=16, description="a whole number from 1 to 16")] = 3


class GroupsConfig(Table, frozen=True):
    """Where draft and target run. placement: "serial" = in turn, in one process; "disaggregated" = at the
    same time, the drafter in a process of its own; "auto" = whichever is faster here, measured at start-up;
    unset = as the mode needs it.

    mode: how draft and target work together, for comparison; unset = the best known for the placement.
    target_devices, draft_devices: processor cores as in "0-3,8"; a group of several ranks (tensor parallel)
    gives each rank its own, as in "0-3/4-7". On CUDA: numbers of devices, as in "0/1".
    draft_address: tcp://HOST:PORT of a `paceline draft` on another host.  draft_key_file: its key.
    draft_timeout: seconds without a sign of life after which a drafter is given up until it is back.
    """

    placement: Placement | None = None
    mode: Mode | None = None
    target_devices: str = ""
    draft_devices: str = ""
    draft_address: str = ""
    draft_key_file: str = ""
    draft_timeout: Annotated[float, Meta(gt=0, le=3600, description="seconds above 0, at most 3600")] = 2.0


class SchedulerConfig(Table, frozen=True):
    """max_num_seqs: requests running at once.  max_batch_tokens: tokens in one target pass, guesses
    included.  kv_tokens: tokens of KV cache in all, 0 = chosen from the memory there is.
    context_length: tokens of one request, prompt and output, 0 = the model's own.
    """

    max_num_seqs: Annotated[int, Meta(ge=1, le=65536, description="a whole number from 1 to 65536")] = 16
    max_batch_tokens: Annotated[int, Meta(ge=1, le=2**20, description="a whole number from 1 to 1048576")] = (
        512
    )
    kv_tokens: Annotated[
        int, Meta(ge=0, le=_MOST_TOKENS, description="a whole number from 0 (0 = automatic) to 2147483647")
    ] = 0
    context_length: Annotated[
        int,
        Meta(ge=0, le=_MOST_TOKENS, description="a whole number from 0 (0 = the model's own) to 2147483647"),
    ] = 0
    prefix_cache: bool = True


class Config(Table, frozen=True):
    """model: "embedded", a directory or GGUF file, or a Hugging Face name.

    exact: where kernels are not batch-invariant by themselves (plain torch, CUDA), compute every token on its
    own: slower, and the output is plain decoding's, bit for bit.
    threads: 0 = all cores this process may use.  seed: of requests that give none; unset = drawn from the
    system and reported.
    """

    model: Name = "embedded"
    dtype: Dtype = "auto"
    exact: bool = False
    device: Device = "auto"
    threads: Annotated[
        int, Meta(ge=0, le=1024, description="a whole number from 0 (0 = all cores) to 1024")
    ] = 0
    seed: (
        Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="a whole number of at most 64 bits")]
        | None
    ) = None
    speculation: SpeculationConfig = SpeculationConfig()
    tree: TreeConfig = TreeConfig()
    groups: GroupsConfig = GroupsConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
