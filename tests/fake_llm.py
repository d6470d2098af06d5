"""A stand-in for headrace.llm with no model behind it: it answers by saying what it was told.

Ids are places in one growing list of words. A message may ask for more: "slow" (many tokens, each
a while), "interrupt" (Ctrl-C arrives after the third token), "escape" (a control sequence),
"boom" (an unexpected failure).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from headrace.core.config import EngineConfig
from headrace.core.request import FinishReason, SamplingParams, TokenEvent

WORDS: list[str] = []


def ids_of(text: str) -> list[int]:
    found = []
    for word in text.split():
        if word not in WORDS:
            WORDS.append(word)
        found.append(WORDS.index(word))
    return found


class Tokenizer:
    def encode(self, text: str) -> list[int]:
        return ids_of(text)


class Template:
    def encode(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        return ids_of(" ".join(f"<{m['role']}> {m['content']}" for m in messages))


class LLM:
    made: ClassVar[list[dict[str, Any]]] = []
    asked: ClassVar[list[tuple[str, SamplingParams]]] = []
    held: ClassVar[list[Iterator[TokenEvent]]] = []
    closed: ClassVar[int] = 0
    context: ClassVar[int] = 100
    template: ClassVar[Template | None] = Template()

    def __init__(self, model: str | None = None, **options: Any) -> None:
        LLM.made.append({"model": model, **options})
        self.tokenizer = Tokenizer()
        self.chat_template = LLM.template
        config = options.get("config") or EngineConfig()
        self.context_tokens = options.get("context_tokens") or config.context_tokens or LLM.context
        self.notes: tuple[str, ...] = ()
        self.model_path = Path(model or "model.gguf")

    def memory_report(self) -> str:
        return "a ledger"

    def threads_report(self) -> str | None:
        return "1.1 of 2 threads"

    def stream(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[TokenEvent]:
        # Held, so that only close() can end it: forgetting the last reference would too.
        LLM.held.append(self._stream(prompt_token_ids, params))
        return LLM.held[-1]

    def _stream(self, prompt_token_ids: list[int], params: SamplingParams) -> Iterator[TokenEvent]:
        prompt = " ".join(WORDS[i] for i in prompt_token_ids)
        LLM.asked.append((prompt, params))
        last = prompt.rpartition("<user>")[2].split()
        if "boom" in last:
            raise ZeroDivisionError("made to fail")
        words = ["said:", *last]
        words += ["\x1b[31m"] * ("escape" in last) + [str(i) for i in range(300) if "slow" in last]
        words += ["more"] * (5 if "interrupt" in last else 0)
        assert params.max_tokens is not None
        limit = min(params.max_tokens, self.context_tokens - len(prompt_token_ids))
        cut = len(words) > limit
        try:
            for place, word in enumerate(words[:limit]):
                if "slow" in last:
                    time.sleep(0.02)
                if "interrupt" in last and place == 2:
                    signal.raise_signal(signal.SIGINT)
                end = FinishReason.LENGTH if cut else FinishReason.STOP
                yield TokenEvent(
                    request_id="r",
                    token_id=0,
                    text=word if place == 0 else f" {word}",
                    logprob=0.0,
                    finish_reason=end if place + 1 == min(limit, len(words)) else None,
                )
        finally:
            LLM.closed += 1
