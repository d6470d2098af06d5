"""One replica that could be rented: a model on so many GPUs of a kind, and its settings.

Plain values with names as a user types them. Knows no sizes and no speeds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Candidate:
    model: str
    gpu: str
    tp: int  # GPUs of one replica, working on every layer together
    precision: str  # of the weights
    kv_dtype: str
    max_sequences: int
    batch_tokens: int  # most tokens of a step
    prefix_cache: bool = True

    @property
    def rented(self) -> tuple[str, str, int, str]:
        """What is rented and loaded; the other fields are settings that cost nothing."""
        return (self.model, self.gpu, self.tp, self.precision)

    @property
    def shape(self) -> tuple[str, str, int, str, str]:
        """What memory and step times depend on."""
        return (*self.rented, self.kv_dtype)

    @property
    def cards(self) -> str:
        """What is rented, without the model: "2 x h200-sxm, fp8"."""
        cards = f"{self.tp} x {self.gpu}" if self.tp > 1 else self.gpu
        return f"{cards}, {self.precision}"

    @property
    def label(self) -> str:
        return f"{self.cards}, kv {self.kv_dtype}"

    def facts(self) -> dict[str, Any]:
        return asdict(self)
