"""Whether the figures can be true: identities that hold for every honest measurement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from paceline.bench.matrix import PLAIN, Load
from paceline.bench.records import Cell, RequestRecord

TOLERANCE = 0.03
"""Between inter-token latency per chunk over acceptance length, and time per token."""
_SHOWN = 3


class Check(Struct, kw_only=True):
    """passed: None = there was nothing to check.  checked: how many cells or requests were looked at.
    failures: the first of those that failed, in words."""

    name: str
    passed: bool | None
    checked: int
    failed: int = 0
    failures: list[str] = []

    def line(self) -> str:
        verdict = {True: "passed", False: "FAILED", None: "nothing to check"}[self.passed]
        told = f", {self.failed} of {self.checked} failed: " + "; ".join(self.failures) if self.failed else ""
        return f"{verdict}: {self.name}{told}"


Found = Iterator[str | None]
"""For everything that is looked at: what is wrong with it, or None."""


def checks_of(cells: Sequence[Cell]) -> list[Check]:
    return [
        _check("every request ended well", _ended(cells)),
        _check("acceptance length <= guesses per verification + 1", _lengths(cells)),
        _check("accepted <= drafted, and per-position acceptance never rises", _accepted(cells)),
        _check("tokens of all chunks = tokens of the output", _chunks(cells)),
        _check(
            f"itl per chunk / acceptance length = tpot within {TOLERANCE:.0%}, where each step is a chunk",
            _latencies(cells),
        ),
        _check("draft + verify + sample + idle <= wall time", _shares(cells)),
        _check("the process ran all the time", _still(cells)),
        _check(_equality_name(cells), _equal(cells)),
    ]


def _check(name: str, found: Found) -> Check:
    told = list(found)
    wrong = [each for each in told if each is not None]
    return Check(
        name=name,
        passed=not wrong if told else None,
        checked=len(told),
        failed=len(wrong),
        failures=wrong[:_SHOWN],
    )


def _where(cell: Cell) -> str:
    load = Load(cell.batch, cell.rate, cell.burstiness).name
    return f"{cell.contender}, {cell.workload}, {load}, repeat {cell.repeat}"


def _ended(cells: Iterable[Cell]) -> Found:
    for cell in cells:
        for request in cell.requests:
            wrong = f"{_where(cell)}: {request.prompt}: {request.error}"
            yield wrong if request.error is not None else None


def _lengths(cells: Iterable[Cell]) -> Found:
    for cell in cells:
        total = cell.total_speculation()
        length = total.mean_acceptance_length if total is not None else None
        if length is not None and cell.max_guesses is not None:
            wrong = f"{_where(cell)}: {length:.3f} with {cell.max_guesses} guesses"
            yield wrong if length > cell.max_guesses + 1 else None


def _accepted(cells: Iterable[Cell]) -> Found:
    for cell in cells:
        total = cell.total_speculation()
        if total is None:
            continue
        depths = [total.num_drafts, *total.accepted_by_depth]
        if total.num_accepted_tokens > total.num_draft_tokens:
            told = f"{total.num_accepted_tokens} accepted of {total.num_draft_tokens}"
            yield f"{_where(cell)}: {told}"
        elif depths != sorted(depths, reverse=True):
            yield f"{_where(cell)}: drafts, and those accepted to each depth: {depths}"
        else:
            yield None


def _chunks(cells: Iterable[Cell]) -> Found:
    for cell in cells:
        for request in cell.ended:
            if request.chunk_tokens and request.tokens is not None:
                counted = sum(request.chunk_tokens)
                wrong = f"{_where(cell)}: {request.prompt}: {counted} in chunks, {request.tokens} in all"
                yield wrong if counted != request.tokens else None


def _latencies(cells: Iterable[Cell]) -> Found:
    for cell in cells:
        for request in cell.ended:
            length, tpot = _step_length(request), request.times.tpot_s
            gaps = request.times.chunk_gaps_s()
            if length is None or not tpot or not gaps:
                continue
            derived = sum(gaps) / len(gaps) / length
            wrong = f"{_where(cell)}: {request.prompt}: {derived:.6f} s and {tpot:.6f} s"
            yield wrong if abs(derived / tpot - 1) > TOLERANCE else None


def _step_length(request: RequestRecord) -> float | None:
    """The acceptance length, where every step verified a draft and kept its bonus token; tokens per step
    where some did not. None where chunks are no steps, because the first one holds more than its step's
    token, or nothing is known of them."""
    told = request.speculation
    if told is None or not told.num_steps or request.chunk_tokens[:1] != [1]:
        return None
    whole = told.num_drafts == told.num_steps
    whole = whole and told.num_emitted_tokens == told.num_accepted_tokens + told.num_steps
    return told.mean_acceptance_length if whole else told.tokens_per_step


def _shares(cells: Iterable[Cell]) -> Found:
    for cell in cells:
        if cell.shares is not None:
            wrong = f"{_where(cell)}: {cell.shares.sum_s:.3f} s of {cell.duration_s:.3f} s"
            yield wrong if cell.shares.sum_s > cell.duration_s * (1 + 1e-6) else None


def _still(cells: Iterable[Cell]) -> Found:
    for cell in cells:
        if cell.stood_still_s is not None:
            wrong = f"{_where(cell)}: stood still for {cell.stood_still_s:.1f} s"
            yield wrong if cell.disturbed else None


def _equality_name(cells: Iterable[Cell]) -> str:
    plain = any(cell.contender == PLAIN for cell in cells)
    return f"outputs equal {'those without speculation' if plain else 'each other'}"


def _equal(cells: Sequence[Cell]) -> Found:
    """With every load and in every repeat: what shares a batch must not matter either."""
    first: dict[tuple[str, str], RequestRecord] = {}
    for cell in sorted(cells, key=lambda cell: cell.contender != PLAIN):
        for request in cell.ended:
            reference = first.setdefault((cell.workload, request.prompt), request)
            if reference is request:
                continue
            same = _output(reference, request) == _output(request, reference)
            yield None if same else f"{_where(cell)}: {request.prompt}: {_parting(reference, request)}"


def _output(request: RequestRecord, beside: RequestRecord) -> object:
    """Token ids where both have them."""
    known = request.token_ids is not None and beside.token_ids is not None
    return request.token_ids if known else request.text


def _parting(one: RequestRecord, other: RequestRecord) -> str:
    pair = one.token_ids, other.token_ids
    unit = "character" if None in pair else "token"
    first, second = (one.text, other.text) if pair[0] is None or pair[1] is None else (pair[0], pair[1])
    places = (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return f"another {unit} {next(places, min(len(first), len(second)))}"
