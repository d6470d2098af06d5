"""Headrace: an LLM inference engine and everything around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.core.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from headrace.llm import LLM

__all__ = ["LLM", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> object:
    # Late: `import headrace` stays quick, and `headrace --help` loads no kernels.
    if name == "LLM":
        from headrace.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
