"""Active probes: a few requests of known shape, timed by this client, within a budget.

Short and long prompts, a prefix that is repeated, bursts, bare prompts of a few tokens, one long
answer into which a long prompt falls, and answers with a grammar and with penalties beside plain
ones. At most 60 s and 20,000
tokens in all; what no longer fits is left out and says so. The client measures itself meanwhile:
a thread that only wants to wake up every 5 ms shows how late this process runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from headrace.doctor.endpoint import CHAT, TEXT, Endpoint, EndpointError
from headrace.doctor.meanwhile import Sampler, Ticker
from headrace.doctor.mishaps import SILENT
from headrace.doctor.observation import Answer, ClientHealth, GpuNow, Probe
from headrace.doctor.probe_plan import Plan
from headrace.doctor.probe_words import SCHEMA, TOKENS_A_WORD, Drawn, chat_body, with_schema
from headrace.doctor.scrape import Reading, change

_SILENT = 2  # requests in a row that nobody took: the endpoint is gone


class _Gone(Exception):
    """The endpoint takes no connections any more."""


@dataclass(slots=True)
class _Kept:
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    bursts: list[tuple[Answer, ...]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    levels: dict[str, list[float]] = field(default_factory=dict)
    gpus: tuple[GpuNow, ...] = ()
    spent_tokens: int = 0
    looking_cpu_s: float = 0.0  # what reading metrics during bursts took this process
    refused: int = 0  # requests in a row that nobody took
    stopped: str | None = None


class Prober:
    """`read` gives the metrics at any time, or None where there are none."""

    def __init__(
        self,
        endpoint: Endpoint,
        plan: Plan,
        *,
        model: str | None,
        engine: str = "",
        read: Callable[[], Reading | None] = lambda: None,
        is_local: bool = False,
        seed: int | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._endpoint = endpoint
        self._plan = plan
        self._model = model
        self._engine = engine
        self._read = read
        self._is_local = is_local
        self._drawn = Drawn(seed)
        self._say = say
        self._kept = _Kept()
        self._end_s = 0.0

    def run(self) -> Probe:
        plan, kept = self._plan, self._kept
        started = time.perf_counter()
        self._end_s = started + plan.limit_s
        cpu_before = time.process_time()
        before = self._read()
        client = Ticker()
        with client:
            connects = self._connects()
            stages: tuple[tuple[str, int, Callable[[], None]], ...] = (
                ("short", plan.repeats * 80, self._short),
                ("bursts", plan.bursts * (plan.concurrency * 100 + 80), self._bursts),
                ("sizes", plan.size_repeats * (sum(plan.sizes) + 20), self._sizes),
                ("prefix", 2 * plan.prefix_pairs * (plan.prefix_tokens + 40), self._prefix),
                ("stream", plan.stream_tokens + plan.long_tokens + 120, self._stream),
                ("compared", 4 * plan.compared * 110, self._compared),
                ("long", plan.long_repeats * (plan.medium_tokens + plan.long_tokens), self._long),
            )
            for name, tokens, stage in stages:
                reason = self._no_room(tokens)
                if reason is None and name != "short" and not self._any_good("short"):
                    reason = "short requests failed already"
                if reason is not None:
                    kept.skipped[name] = reason
                    continue
                self._say(name)
                try:
                    stage()
                except _Gone as gone:
                    kept.stopped = f"{name}: {gone}"
                    break
        spent_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_before
        after = self._read()
        return self._result(before, after, client, connects, cpu_s, spent_s)

    def _result(
        self,
        before: Reading | None,
        after: Reading | None,
        client: Ticker,
        connects: Mapping[str, float | None],
        cpu_s: float,
        spent_s: float,
    ) -> Probe:
        kept = self._kept
        groups = {name: tuple(answers) for name, answers in kept.answers.items()}
        late = sorted(
            max(0.0, a.sent_s - (a.connect_s or 0.0))
            for burst in kept.bursts
            for a in burst
            if a.sent_s is not None
        )
        deltas = change(before, after).deltas if before and after else {}
        stream = groups.pop("stream", ())
        intruder = groups.pop("intruder", ())
        return Probe(
            **groups,
            bursts=tuple(kept.bursts),
            stream=stream[0] if stream else None,
            intruder=intruder[0] if intruder else None,
            intruder_at_s=(
                intruder[0].scheduled_s - stream[0].scheduled_s if stream and intruder else None
            ),
            deltas=deltas,
            warm_deltas=self._warm_deltas,
            burst_levels={name: tuple(values) for name, values in kept.levels.items()},
            gpus=kept.gpus,
            client=ClientHealth(
                lag_p99_s=client.p99(),
                lag_mean_s=client.mean(),
                dispatch_p99_s=late[int(0.99 * (len(late) - 1))] if late else None,
                cpu_share=cpu_s / max(spent_s, 1e-9),
                dns_s=connects.get("dns_s"),
                connect_s=connects.get("connect_s"),
                tls_s=connects.get("tls_s"),
            ),
            spent_tokens=kept.spent_tokens,
            spent_s=spent_s,
            skipped=dict(kept.skipped),
            cpu_s=max(0.0, cpu_s - client.cpu_s - kept.looking_cpu_s),
            stopped=kept.stopped,
        )

    _warm_deltas: Mapping[str, float] = {}

    def _connects(self) -> dict[str, float | None]:
        times = []
        for _ in range(3):
            try:
                times.append(self._endpoint.connect_times())
            except EndpointError:
                break
        if not times:
            return {}
        tls = [each.tls_s for each in times if each.tls_s is not None]
        return {
            "dns_s": times[0].dns_s,
            "connect_s": min(each.connect_s for each in times),
            "tls_s": min(tls) if tls else None,
        }

    # The stages.

    def _short(self) -> None:
        self._ask("warm_up", self._drawn.prompt(self._plan.short_tokens), 4)  # connections, caches
        self._kept.answers.pop("warm_up", None)
        for _ in range(self._plan.repeats):
            self._ask(
                "short", self._drawn.prompt(self._plan.short_tokens), self._plan.answer_tokens
            )

    def _bursts(self) -> None:
        plan = self._plan
        for _ in range(plan.bursts):
            if self._no_room(plan.concurrency * 100 + 80):
                return
            self._ask("references", self._drawn.prompt(plan.short_tokens), plan.answer_tokens)
            with Sampler(self._read, self._is_local) as sampler:
                burst = self._burst()
            if any(self._was_stopped(answer) for answer in burst):
                self._kept.skipped["burst"] = f"{plan.limit_s:g} s were spent in the middle of it"
                return
            self._kept.bursts.append(burst)
            self._is_there(burst[-1])
            for name, values in sampler.levels.items():
                self._kept.levels.setdefault(name, []).extend(values)
            self._kept.gpus = sampler.gpus or self._kept.gpus
            self._kept.looking_cpu_s += sampler.cpu_s

    def _burst(self) -> tuple[Answer, ...]:
        plan = self._plan
        bodies = [
            self._body(self._drawn.prompt(plan.short_tokens), plan.burst_tokens)
            for _ in range(plan.concurrency)
        ]
        with ThreadPoolExecutor(plan.concurrency) as pool:
            scheduled = time.perf_counter() + 0.02  # when every thread is there
            limit_s = self._left_s()

            def one(body: dict[str, Any]) -> Answer:
                time.sleep(max(0.0, scheduled - time.perf_counter()))
                return self._endpoint.ask(body, scheduled_s=scheduled, timeout_s=limit_s)

            answers = tuple(pool.map(one, bodies))
        for answer in answers:
            self._count(answer, plan.short_tokens, plan.burst_tokens)
        if any(answer.is_good for answer in answers):
            self._kept.refused = 0  # all were asked at once: it may have taken some after others
        return answers

    def _sizes(self) -> None:
        """A prompt of n tokens is a step of n rows, without a chat template around it."""
        for _ in range(self._plan.size_repeats):
            for count in self._plan.sizes:
                answer = self._ask("sizes", self._drawn.words(count), 4, path=TEXT)
                if (answer.error or "").startswith("HTTP 4"):
                    self._kept.answers.pop("sizes", None)
                    self._kept.skipped["sizes"] = f"this endpoint refuses it ({answer.error})"
                    return

    def _prefix(self) -> None:
        before = self._read()
        for _ in range(self._plan.prefix_pairs):
            prefix = self._drawn.prompt(self._plan.prefix_tokens)
            self._ask("beside", self._drawn.prompt(self._plan.short_tokens), 4)
            if self._any_good("sizes"):
                self._ask("question", self._drawn.question(), 4, path=TEXT)
            for name in ("cold", "warm"):
                self._ask(name, f"{prefix} {self._drawn.question()}", 4)
        after = self._read()
        self._warm_deltas = change(before, after).deltas if before and after else {}

    def _stream(self) -> None:
        plan = self._plan
        body = self._body(self._drawn.prompt(plan.short_tokens), plan.stream_tokens)
        short = self._kept.answers.get("short", [])
        tpots = [a.tpot_s for a in short if a.tpot_s is not None]
        half_s = 0.5 * plan.stream_tokens * (min(tpots) if tpots else 0.02)
        scheduled = time.perf_counter()
        limit_s = self._left_s()
        with ThreadPoolExecutor(2) as pool:
            stream = pool.submit(self._endpoint.ask, body, scheduled_s=scheduled, timeout_s=limit_s)
            time.sleep(min(half_s, limit_s / 2))
            intruder = self._ask("intruder", self._drawn.prompt(plan.long_tokens), 4)
            answer = stream.result()
        self._keep("stream", answer, plan.short_tokens, plan.stream_tokens)
        if not intruder.is_good:
            self._kept.answers.pop("intruder", None)
            self._kept.skipped["intruder"] = intruder.error or "no answer"

    def _long(self) -> None:
        for _ in range(self._plan.long_repeats):
            for name, tokens in (
                ("medium", self._plan.medium_tokens),
                ("long", self._plan.long_tokens),
            ):
                if not self._no_room(tokens + 40):
                    self._ask(name, self._drawn.prompt(tokens), 4)

    def _compared(self) -> None:
        schema = dict(self._plan.schema or SCHEMA)
        refused: set[str] = set()
        for _ in range(self._plan.compared):
            fresh = self._drawn.titled(schema)
            kinds: tuple[tuple[str, dict[str, Any]], ...] = (
                ("plain", {}),
                ("grammar", with_schema(schema)),
                ("grammar_new", with_schema(fresh)),
                ("penalty", {"frequency_penalty": 0.3, "presence_penalty": 0.3}),
            )
            if self._plan.schema is not None:
                kinds = (*kinds, ("grammar_small", with_schema(SCHEMA)))
            for name, more in kinds:
                if name in refused or self._no_room(120):
                    continue
                prompt = f"{self._drawn.prompt(self._plan.short_tokens)} Write one object as JSON."
                answer = self._ask(name, prompt, self._plan.answer_tokens, more)
                if (answer.error or "").startswith("HTTP 4"):
                    refused.add(name)
                    self._kept.answers.pop(name, None)
                    self._kept.skipped[name] = f"this endpoint refuses it ({answer.error})"

    # One request, and what it costs.

    def _ask(
        self,
        name: str,
        prompt: str,
        tokens: int,
        more: Mapping[str, Any] | None = None,
        path: str = CHAT,
    ) -> Answer:
        body = self._body(prompt, tokens) | dict(more or {})
        if path == TEXT:
            del body["messages"]
            body["prompt"] = prompt
        if more and "response_format" in more:
            body.pop("ignore_eos", None)  # a grammar ends by itself
        answer = self._endpoint.ask(
            body, scheduled_s=time.perf_counter(), timeout_s=self._left_s(), path=path
        )
        self._keep(name, answer, int(len(prompt.split()) * TOKENS_A_WORD), tokens)
        return answer

    def _keep(self, name: str, answer: Answer, prompt_tokens: int, tokens: int) -> None:
        self._count(answer, prompt_tokens, tokens)
        if self._was_stopped(answer):
            self._kept.skipped[name] = f"{self._plan.limit_s:g} s were spent in the middle of it"
        else:
            self._kept.answers.setdefault(name, []).append(answer)
        self._is_there(answer)

    def _is_there(self, answer: Answer) -> None:
        """One that died in the middle is not asked for the rest. What it gave is kept."""
        if self._kept.refused >= _SILENT and self._any_good("short"):
            raise _Gone(answer.error or "no answer")

    def _was_stopped(self, answer: Answer) -> bool:
        """By our own limit: that is no fault of the endpoint."""
        return answer.error is not None and time.perf_counter() >= self._end_s

    def _count(self, answer: Answer, prompt_tokens: int, tokens: int) -> None:
        """What the endpoint counted; what was asked for where it does not say."""
        if (answer.error or "").startswith(SILENT):
            self._kept.refused += 1
            return
        self._kept.refused = 0
        prompt = prompt_tokens if answer.prompt_tokens is None else answer.prompt_tokens
        self._kept.spent_tokens += prompt + (answer.tokens if answer.is_counted else tokens)

    def _body(self, prompt: str, tokens: int) -> dict[str, Any]:
        return chat_body(prompt, tokens, model=self._model, engine=self._engine)

    def _left_s(self) -> float:
        return max(0.5, self._end_s - time.perf_counter())

    def _no_room(self, tokens: int) -> str | None:
        if time.perf_counter() > self._end_s:
            return f"{self._plan.limit_s:g} s were spent"
        if self._kept.spent_tokens + tokens > self._plan.limit_tokens:
            return f"it would pass {self._plan.limit_tokens:,} tokens"
        return None

    def _any_good(self, name: str) -> bool:
        return any(answer.is_good for answer in self._kept.answers.get(name, ()))
