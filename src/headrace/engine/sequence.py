"""A sequence: one request being computed. Its tokens, its blocks, and when it ends.

Knows token ids only: stop strings are the affair of whoever turns tokens into text.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field

from headrace.core.request import FinishReason, GenerateRequest
from headrace.core.step import Draw


@dataclass(slots=True, eq=False)
class Sequence:
    """token_ids   [ prompt ............ | generated ...... ]
    [ computed: in blocks ....... | to compute ]
    """

    sequence_id: int
    request: GenerateRequest
    max_tokens: int  # of output: what was asked for, within the context
    stop_ids: frozenset[int]
    token_ids: list[int]
    seed: int
    computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        sequence_id: int,
        request: GenerateRequest,
        context_tokens: int,
        eos_ids: frozenset[int],
    ) -> Sequence:
        params = request.params
        room = context_tokens - len(request.prompt_token_ids)
        return cls(
            sequence_id=sequence_id,
            request=request,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_ids=frozenset(params.stop_token_ids)
            | (frozenset() if params.ignore_eos else eos_ids),
            token_ids=list(request.prompt_token_ids),
            seed=secrets.randbits(64) if params.seed is None else params.seed,
        )

    @property
    def generated_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def wanted_tokens(self) -> int:
        """Still to be computed before the next token can be drawn."""
        return len(self.token_ids) - self.computed_tokens

    @property
    def most_tokens(self) -> int:
        """The longest this sequence can become. The last token is never computed."""
        return len(self.request.prompt_token_ids) + self.max_tokens - 1

    def next_draw(self) -> Draw:
        params = self.request.params
        return Draw(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            uniform=uniform(self.seed, self.generated_tokens),
        )

    def append(self, token_id: int) -> FinishReason | None:
        """Take a drawn token; why the sequence ends with it, if it does."""
        self.token_ids.append(token_id)
        if token_id in self.stop_ids:
            return FinishReason.STOP
        if self.generated_tokens >= self.max_tokens:
            return FinishReason.LENGTH
        return None


def uniform(seed: int, index: int) -> float:
    """The index-th number in [0, 1) of a seed: the same in every batch and on every machine."""
    digest = hashlib.blake2b(
        seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8
    )
    return (int.from_bytes(digest.digest(), "little") >> 11) / 2**53
