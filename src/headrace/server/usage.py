"""How many tokens a request took, as OpenAI counts them."""

from __future__ import annotations

import msgspec


class PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptDetails = msgspec.field(default_factory=PromptDetails)

    def count(self, tokens: int) -> None:
        self.completion_tokens += tokens
        self.total_tokens = self.prompt_tokens + self.completion_tokens
