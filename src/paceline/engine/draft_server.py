"""A draft worker that serves engines on other hosts: its model and machine are its own, the rest theirs."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec

from paceline.config import Config
from paceline.drafters.base import Drafter
from paceline.drafters.registry import NamedDrafter, named
from paceline.engine.build import build_drafter
from paceline.engine.channel import Keys, Listener
from paceline.engine.draft_messages import DraftGroupSpec, fingerprint
from paceline.engine.draft_worker import DraftWorker
from paceline.errors import ConfigError, ModelError
from paceline.loading import load
from paceline.loading.heads import is_head


class DraftServer:
    """Listens from the start on; the drafter is made when the first engine says what it needs.

    own: what this host decides: `speculation.draft` and its precision, `device`, `threads` and
    `groups.draft_devices`. Nothing that an engine sends names a file here.
    """

    def __init__(self, own: Config, endpoint: str, keys: Keys) -> None:
        """Raises ModelError if the model cannot be loaded, EngineError if the port is taken."""
        self._own = own
        self._vocabulary = ""
        drafters = named(own.speculation.draft)
        _check_served(drafters)
        if any(each.kind.weights for each in drafters):
            self._vocabulary = fingerprint(load(own.speculation.draft).tokenizer.vocabulary())
        self._listener = Listener(endpoint, keys.worker, keys.engine_public)
        self.endpoint = self._listener.endpoint

    def run(self, stop: threading.Event) -> None:
        try:
            DraftWorker(self._listener, self._make).run(stop)
        finally:
            self._listener.close()

    def _make(self, spec: DraftGroupSpec) -> Drafter:
        if self._vocabulary and spec.vocabulary and spec.vocabulary != self._vocabulary:
            raise ModelError(
                f"target and draft have different vocabularies: it serves {self._own.speculation.draft}. "
                "Choose a draft model of the target's own family."
            )
        return build_drafter(hosted(spec, self._own))


def _check_served(drafters: Sequence[NamedDrafter]) -> None:
    if len(drafters) > 1:
        raise ConfigError(f"{' + '.join(each.name for each in drafters)}: one drafter is served at a time.")
    (drafter,) = drafters
    kind = drafter.kind
    if kind.in_process or kind.features or (kind.weights == "named" and is_head(drafter.name)):
        raise ConfigError(
            f"{drafter.name} works with the target's own weights, not on this host: run it beside the "
            "target, or serve a draft model."
        )


def hosted(spec: DraftGroupSpec, own: Config) -> DraftGroupSpec:
    """The engine's wishes, on this host's terms."""
    spec = spec.abroad()
    theirs = spec.config
    speculation = msgspec.structs.replace(
        theirs.speculation,
        draft=own.speculation.draft,
        draft_dtype=own.speculation.draft_dtype,
        unpickle_head=own.speculation.unpickle_head,
        suffix_max_memory=own.speculation.suffix_max_memory,
    )
    groups = msgspec.structs.replace(theirs.groups, draft_devices=own.groups.draft_devices)
    config = msgspec.structs.replace(
        theirs, speculation=speculation, groups=groups, device=own.device, threads=own.threads
    )
    return msgspec.structs.replace(spec, config=config, threads=own.threads)
