"""The selectors by name."""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.combined import Combined
from paceline.core.draft_cost import Costs
from paceline.core.followers import Followers
from paceline.core.recent import Recent
from paceline.core.selection import Selector
from paceline.core.single_choice import Bandit, Classifier, Everyone, Reactive

SELECTORS: dict[str, Callable[[Followers, Costs, Recent], Selector]] = {
    "combined": Combined,
    "everyone": Everyone,
    "reactive": Reactive,
    "bandit": Bandit,
    "classifier": Classifier,
}
