"""Every error a user can meet. Each message names the cause and the remedy."""

from __future__ import annotations


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
