"""Headrace: an LLM inference engine and everything around it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from headrace.core.request import BeamParams, RequestOutput, SamplingParams, TokenEvent

if TYPE_CHECKING:
    __version__: str
    from headrace.async_engine import AsyncEngine
    from headrace.llm import LLM

__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamParams",
    "RequestOutput",
    "SamplingParams",
    "TokenEvent",
    "__version__",
]

_LATE = {
    "LLM": "headrace.llm",
    "AsyncEngine": "headrace.async_engine",
}


def __getattr__(name: str) -> object:
    # Late: `import headrace` stays quick, and `headrace --help` loads no kernels.
    if name == "__version__":
        from headrace.core.version import headrace_version

        return headrace_version()
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
