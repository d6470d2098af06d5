"""Users in a closed loop for doctor_real.py: each asks again as soon as it has its answer.

Threads with the doctor's own client. Knows three kinds of traffic; no engine.
"""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from headrace.doctor.endpoint import Endpoint
from headrace.doctor.observation import Answer

WORDS = ("river", "stone", "window", "market", "paper", "garden", "engine", "silver", "morning",
         "forest", "bridge", "letter", "ocean", "candle", "harbor", "signal", "winter")  # fmt: skip
LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Traffic:
    users: int
    prompt_words: int = 40
    answer_tokens: int = 48
    shared_words: int = 0  # of a prefix that all prompts have
    schema: str = ""  # of answers, as JSON


@dataclass(frozen=True, kw_only=True)
class Served:
    tokens_s: float
    ttft_s: float  # mean
    requests: int
    failed: int
    why: str  # the first failure


@dataclass
class Users:
    """Runs until its `with` block ends; `measure` marks a while of it, and `served` has what was
    served then: after the block, when answers that were in the middle have come to their end."""

    endpoint: Endpoint
    model: str | None
    traffic: Traffic
    seed: int = 1
    _answers: list[tuple[float, Answer]] = field(default_factory=list)
    _measured: tuple[float, float] = (0.0, 0.0)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Users:
        for number in range(self.traffic.users):
            thread = threading.Thread(target=self._user, args=(number,), daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(LIMIT_S)

    def measure(self, seconds: float) -> None:
        began = time.perf_counter()
        time.sleep(seconds)
        self._measured = (began, time.perf_counter())

    def served(self) -> Served:
        """By arrivals: a token counts where it came within the time."""
        assert all(not thread.is_alive() for thread in self._threads)
        began, ended = self._measured
        tokens, firsts, failed, why = 0.0, [], 0, ""
        for _, answer in list(self._answers):
            if answer.error is not None:
                failed, why = failed + 1, why or answer.error
                continue
            times = [answer.scheduled_s + at for at in answer.arrivals_s]
            inside = sum(1 for at in times if began <= at < ended)
            tokens += inside * answer.tokens / max(len(times), 1)
            if began <= times[0] < ended and answer.ttft_s is not None:
                firsts.append(answer.ttft_s)
        return Served(
            tokens_s=tokens / (ended - began),
            ttft_s=statistics.fmean(firsts) if firsts else float("nan"),
            requests=len(firsts),
            failed=failed,
            why=why,
        )

    def _user(self, number: int) -> None:
        draw = random.Random(f"{self.seed} {number}")
        shared = " ".join(random.Random(self.seed).choices(WORDS, k=self.traffic.shared_words))
        while not self._stop.is_set():
            body = self._body(draw, shared)
            now = time.perf_counter()
            answer = self.endpoint.ask(body, scheduled_s=now, timeout_s=LIMIT_S)
            self._answers.append((now, answer))
            if answer.error is not None:
                time.sleep(0.2)

    def _body(self, draw: random.Random, shared: str) -> dict[str, Any]:
        words = " ".join(draw.choices(WORDS, k=self.traffic.prompt_words))
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": f"{shared} {words}".strip()}],
            "max_tokens": self.traffic.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        if self.model is not None:
            body["model"] = self.model
        if self.traffic.schema:
            body.pop("ignore_eos")
            schema = {"name": "row", "schema": json.loads(self.traffic.schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body
