"""The composition of core, execution and drafters, and the faces a program uses."""

from paceline.engine.async_llm import AsyncLLM
from paceline.engine.llm import LLM
from paceline.engine.outputs import Chunk, RequestOutput

__all__ = ["LLM", "AsyncLLM", "Chunk", "RequestOutput"]
