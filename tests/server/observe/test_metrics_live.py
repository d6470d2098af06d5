"""What is counted while something runs: a simulated engine, a request on its way, a real server."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families as parse
from tests.server.observe.test_metrics import FakeEngine, Scrape

from headrace.assemble import read_tokenizer
from headrace.core.clock import VirtualClock
from headrace.core.request import FinishReason, GenerateRequest, SamplingParams
from headrace.core.server_config import ServerConfig
from headrace.core.step import RunnerLimits
from headrace.engine.loop import Engine
from headrace.policies.queue import QueueBounds
from headrace.server.access.keys_file import read_keys
from headrace.server.link.engine_link import OnStart
from headrace.server.link.snapshot import take_snapshot
from headrace.server.link.wire import Row
from headrace.server.observe.metrics import Metrics
from headrace.server.request.call import Call
from headrace.server.request.generation import generate
from headrace.simulate.drive import Arrival, drive
from headrace.simulate.runner import SimulatedRunner
from headrace.weights.load import open_weights


def test_a_snapshot_is_the_engines_own_count() -> None:
    clock = VirtualClock()
    limits = RunnerLimits(
        total_blocks=8,
        block_tokens=4,
        max_batch_tokens=32,
        max_sequences=4,
        context_tokens=32,
        steps_in_flight=1,
    )
    runner = SimulatedRunner(limits, cost=lambda plan: 0.01, clock=clock)
    engine = Engine(runner, frozenset(), clock=clock)
    arrivals = [
        Arrival(
            request=GenerateRequest(
                request_id=str(i),
                prompt_token_ids=[1, 2, 3, 4, 5, 6],
                params=SamplingParams(max_tokens=12, ignore_eos=True),
            )
        )
        for i in range(4)
    ]
    list(drive(engine, clock, arrivals))
    engine.stats.preemptions, engine.stats.preempted_tokens, engine.stats.cow_copies = 3, 5, 7
    found = take_snapshot(engine, publish_s=0.25)
    assert found.generated_tokens == 48
    assert (found.preemptions, found.preempted_tokens, found.cow_copies) == (3, 5, 7)
    assert found.free_blocks + found.cached_blocks == 8
    assert found.used_blocks == found.running_sequences == found.waiting_sequences == 0
    assert (found.prefix_queries_tokens, found.prefix_hits_tokens) == (24, 12)
    assert found.prefix_misses["never_seen"] == 1
    assert (found.steps, found.computed_prompt_tokens) == (engine.stats.steps, 24 - 12)
    # Every step is one of them; together they had all that was computed and all that was drawn.
    assert sum(found.step_tokens) == found.steps
    assert found.step_tokens_sum == found.computed_prompt_tokens + found.generated_tokens
    assert found.step_s["publish"] == 0.25
    assert found.resident_bytes > 1 << 20


def test_a_request_left_the_queue_before_its_first_step_not_after(default_model_path: Path) -> None:
    """The engine tells of it together with that step's tokens."""
    told_s: list[float] = []

    class Stream:
        right_guesses = wrong_guesses = 0

        def __init__(self, request: GenerateRequest, on_start: OnStart, prefill: str) -> None:
            self.request, self.on_start = request, on_start

        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        async def tokens(self) -> list[Row]:
            await asyncio.sleep(0.05)  # the step
            told_s.append(time.monotonic())
            self.on_start(0.0, 0)
            return [(0, 1, 0.0, FinishReason.LENGTH, None)]

    file = open_weights(default_model_path)
    service: Any = SimpleNamespace(
        check_accepting=lambda: None,
        keys=read_keys(ServerConfig())[0],
        queue=QueueBounds.from_config(ServerConfig()),
        config=ServerConfig(),
        watchers=[Metrics(FakeEngine())],
        model=SimpleNamespace(tokenizer=read_tokenizer(file)),
        supervisor=SimpleNamespace(engine=SimpleNamespace(stream=Stream)),
    )
    file.close()
    call = Call(method="POST", path="/v1/completions", headers={}, request_id="r")
    request = GenerateRequest(
        request_id="r", prompt_token_ids=[1, 2], params=SamplingParams(max_tokens=1)
    )

    async def run() -> None:
        async for _ in generate(service, call, request):
            pass

    asyncio.run(run())
    (record,) = call.records
    assert record.started_s is not None
    assert record.first_token_s is not None
    assert record.arrived_s <= record.started_s < told_s[0] <= record.first_token_s
    scrape = Scrape(service.watchers[0])
    seen_s = scrape("vllm:request_prefill_time_seconds_sum")
    assert seen_s == record.first_token_s - record.started_s > 0


def test_a_real_server_counts_what_it_serves(server: Any) -> None:
    def scrape() -> dict[str, float]:
        text = httpx.get(f"{server.base_url}/metrics").text
        return {
            sample.name + str(sorted(sample.labels.items())): sample.value
            for family in parse(text)
            for sample in family.samples
        }

    def value(found: dict[str, float], name: str, part: str = "") -> float:
        return sum(n for key, n in found.items() if key.startswith(f"{name}[") and part in key)

    before = scrape()
    body = {
        "messages": [{"role": "user", "content": "Count to three."}],
        "max_tokens": 4,
        "ignore_eos": True,
    }
    answer = httpx.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200
    usage = answer.json()["usage"]
    httpx.get(f"{server.base_url}/no/such/path")
    server.wait_for(
        lambda: value(scrape(), "headrace:steps_total") > value(before, "headrace:steps_total")
    )
    after = scrape()

    def grown(name: str, part: str = "") -> float:
        return value(after, name, part) - value(before, name, part)

    assert grown("vllm:generation_tokens_total") >= 4
    assert grown("vllm:prompt_tokens_total") >= usage["prompt_tokens"]
    assert grown("vllm:request_max_num_generation_tokens_sum") >= 4
    assert grown("vllm:iteration_tokens_total_count") == grown("headrace:steps_total")
    assert grown("vllm:iteration_tokens_total_sum") > 0
    assert grown("vllm:time_to_first_token_seconds_count") >= 1
    assert grown("headrace:http_requests_total", "'other'") >= 1
    assert not any("no/such/path" in key for key in after)
    assert value(after, "headrace:kv_blocks") == 1024
    assert value(after, "headrace:engine_up") == 1
    assert value(after, "headrace:memory_ledger_bytes", "allocated") > 1 << 20
