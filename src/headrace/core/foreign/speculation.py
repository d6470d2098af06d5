"""Speculative decoding in other engines' words: the method, the draft model, tokens at a time.

vLLM has it as JSON in one flag, others in several flags.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.core.foreign.values import COUNT, TEXT, Kind, Names

_TOKENS = "num_speculative_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """`method`: draft (a model of its own), ngram, eagle, eagle3, mtp or medusa; `tokens` are
    proposed at a time, without the one that the model itself adds. None: the engine's default."""

    method: str
    draft: str | None = None
    tokens: int | None = None


def methods(**theirs: str) -> Names:
    """Our names with another engine's, the other way around."""
    return Names({word: ours for ours, word in theirs.items()})


@dataclass(frozen=True, slots=True)
class SpeculationJson:
    """vLLM's --speculative-config: {"method": "ngram", "num_speculative_tokens": 3}."""

    methods: Names

    def read(self, value: object) -> Speculation | None:
        if value is None or isinstance(value, Speculation):
            return value
        found = value
        if isinstance(value, str):
            try:
                found = json.loads(value)
            except ValueError:
                found = None
        if not isinstance(found, Mapping):
            raise ValueError(
                'a JSON object such as {"method": "ngram", "num_speculative_tokens": 3}'
            )
        tokens = found.get(_TOKENS)
        if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int)):
            raise ValueError(f"{_TOKENS} to be a whole number")
        draft = found.get("model")
        method = self.methods.read(found["method"]) if "method" in found else "draft"
        return Speculation(
            method=str(method), draft=None if draft is None else str(draft), tokens=tokens
        )

    def part(self, flag: str) -> tuple[str, Kind] | None:
        """The field and the kind of a part that has a flag of its own, as in
        --speculative-config.method; None where the part has no field here."""
        name = flag.partition(".")[2].replace("-", "_")
        found: dict[str, tuple[str, Kind]] = {
            "method": ("speculation.method", self.methods),
            "model": ("speculation.draft", TEXT),
            _TOKENS: ("speculation.tokens", COUNT),
        }
        return found.get(name)

    def write(self, value: object) -> str | None:
        assert isinstance(value, Speculation)
        method = self.methods.write(value.method)
        if method is None:
            return None
        parts = {"method": method, "model": value.draft, _TOKENS: value.tokens}
        return json.dumps({name: part for name, part in parts.items() if part is not None})
