"""What speculative decoding gives, by formula: accepted tokens a step, and what drafting costs.

Each draft token is taken to be accepted with the same chance, independent of the others, as the
original papers do. Knows no model and no GPU: steps are lengths that the caller gives.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.errors import ConfigError


def accepted_tokens(draft_tokens: int, acceptance: float) -> float:
    """Tokens that one step yields on average: the accepted draft tokens up to the first refusal,
    and one from the model itself. 1 + a + a^2 + ... + a^k = (1 - a^(k+1)) / (1 - a)."""
    if draft_tokens < 0:
        raise ConfigError(
            f"draft tokens are {draft_tokens}; they can't be negative.",
            "Give 0 or more.",
            param="draft_tokens",
        )
    if not 0 <= acceptance <= 1:
        raise ConfigError(
            f"the acceptance is {acceptance}; it is a share of the draft tokens.",
            "Give a value from 0 to 1, such as 0.8.",
            param="acceptance",
        )
    return sum(acceptance**power for power in range(draft_tokens + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """A way to draft: so many tokens a step, so often accepted, each at a share of a plain step."""

    draft_tokens: int = 5
    acceptance: float = 0.8
    draft_share: float = 0.1  # one draft token takes this share of the model's plain step

    @property
    def tokens_per_step(self) -> float:
        return accepted_tokens(self.draft_tokens, self.acceptance)

    def gain(self, plain_step_s: float, verify_step_s: float) -> float:
        """How many times faster tokens come. `verify_step_s` is a step that computes draft_tokens
        + 1 tokens for every sequence: nearly a plain step in a small batch, several in a full one,
        which is why speculation stops paying under load."""
        drafting_s = self.draft_tokens * self.draft_share * plain_step_s
        return self.tokens_per_step * plain_step_s / (verify_step_s + drafting_s)
