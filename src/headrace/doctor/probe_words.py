"""What probes say: prompts that nobody has sent before, and the bodies of their requests.

Values only: probe.py sends them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

TOKENS_A_WORD = 1.35  # to plan with; what a prompt really has comes with each answer
_WORDS = (
    "river", "stone", "window", "market", "paper", "garden", "engine", "silver", "morning",
    "forest", "bridge", "letter", "ocean", "mountain", "candle", "harbor", "signal", "winter",
    "copper", "meadow", "ladder", "planet", "basket", "orange", "thunder",
)  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 8, "maxItems": 8},
    },
    "required": ["name", "numbers"],
    "additionalProperties": False,
}
# Engines whose servers take ignore_eos beside OpenAI's fields, so that answers have a known length.
_IGNORE_EOS = frozenset({"headrace", "vllm", "sglang", "llama.cpp", "lmdeploy", "trtllm"})


class Drawn:
    """Words by chance: the first ones of a prompt are drawn too, so no prefix of it is cached."""

    def __init__(self, seed: int | None) -> None:
        self._random = random.Random(seed)

    def prompt(self, tokens: int) -> str:
        return self.words(max(4, int(tokens / TOKENS_A_WORD)))

    def words(self, count: int) -> str:
        return " ".join(self._random.choices(_WORDS, k=count))

    def question(self) -> str:
        return f"Question: {self._random.random()}?"

    def titled(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """A title changes a schema's text and nothing else: what compiling it takes."""
        return {**schema, "title": f"{self._random.random()}"}


def chat_body(prompt: str, tokens: int, *, model: str | None, engine: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
    }
    if model is not None:
        body["model"] = model
    if engine in _IGNORE_EOS:
        body["ignore_eos"] = True
    return body


def with_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    wanted = {"name": "row", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": wanted}}
