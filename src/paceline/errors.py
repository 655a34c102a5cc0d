"""Every error a user can meet. Each message names the cause and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PacelineError(Exception):
    """Base of all errors raised on purpose. `str(error)` is ready to be shown to a user."""


class ConfigError(PacelineError):
    """An option or configuration file that cannot be honoured; raised at start-up."""


class ModelError(PacelineError):
    """A model that cannot be loaded: missing, truncated, unsupported or unsafe."""


class KernelError(PacelineError):
    """The native kernels cannot be built or loaded."""


class RequestError(PacelineError):
    """One request that cannot be served (HTTP 400). Never affects another request."""


class EngineError(PacelineError):
    """The engine itself failed; requests in flight end with this."""


def shown(value: object) -> str:
    """`value` as it appears in a message: short, and never itself an error."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - numbers of thousands of digits among others
        text = f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= 80 else f"{text[:77]}..."


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the one that may be meant, if any, and all there are."""
    names = {each.lower(): each for each in sorted(known)}
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    listed = f"the known ones are {', '.join(names.values())}."
    return f"did you mean {names[close[0]]!r}? {listed[0].upper()}{listed[1:]}" if close else listed
