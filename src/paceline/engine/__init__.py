"""The composition of core, execution and drafters, and the faces a program uses."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.engine.async_llm import AsyncLLM
    from paceline.engine.llm import LLM
    from paceline.engine.outputs import Chunk, RequestOutput

__all__ = ["LLM", "AsyncLLM", "Chunk", "RequestOutput"]

# Imported on first use: a draft worker, which is a process of its own, starts without what it does not need.
_HOME = {"LLM": "llm", "AsyncLLM": "async_llm", "Chunk": "outputs", "RequestOutput": "outputs"}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
