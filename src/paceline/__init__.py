"""Paceline: speculative decoding whose output is exactly the target model's own."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.config import Config, load_config
    from paceline.core.params import SamplingParams
    from paceline.engine import LLM, AsyncLLM, Chunk, RequestOutput
    from paceline.errors import (
        ConfigError,
        EngineError,
        KernelError,
        ModelError,
        PacelineError,
        RequestError,
    )

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "Chunk",
    "Config",
    "ConfigError",
    "EngineError",
    "KernelError",
    "ModelError",
    "PacelineError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "load_config",
]

# Imported on first use, so that `import paceline` and the command line's help cost no torch.
_HOME = {
    **dict.fromkeys(["LLM", "AsyncLLM", "Chunk", "RequestOutput"], "paceline.engine"),
    **dict.fromkeys(["Config", "load_config"], "paceline.config"),
    "SamplingParams": "paceline.core.params",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME.get(name, "paceline.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
