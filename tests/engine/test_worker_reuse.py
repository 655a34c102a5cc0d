"""Which engines a draft worker gives the drafter that it has already."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.core.drafting import DrafterNeeds
from paceline.engine.draft_worker import DraftWorker


@pytest.mark.parametrize("learns", [False, True])
def test_what_one_engine_taught_is_not_for_another(learns: bool) -> None:
    made: list[object] = []

    def factory(_: object) -> Any:
        made.append(object())
        return SimpleNamespace(needs=DrafterNeeds("toy", learns_outputs=learns))

    worker = DraftWorker(cast(Any, None), factory)
    spec = cast(Any, "spec")
    first = worker._drafter(spec, 1)
    assert worker._drafter(spec, 1) is first
    assert (worker._drafter(spec, 2) is first) is not learns
    assert len(made) == 1 + learns
