"""How a model likes to be sampled, for whatever a caller does not say.

Four numbers, checked. Where they come from is weights/habits.py's affair: a model's own
generation_config.json, its GGUF header, the catalog, or nobody.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.core.errors import ConfigError, remedy_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """The defaults are nobody's: temperature 1 over all tokens, as OpenAI and vLLM have it."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, good, expected in (
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (all) or more"),
            ("repetition_penalty", 0 < self.repetition_penalty <= 100, "above 0 and at most 100"),
        ):
            if not good:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}; expected {expected}.",
                    remedy_for(name, expected),
                    param=name,
                )


NEUTRAL = Habits()
