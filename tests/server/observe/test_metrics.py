"""What /metrics says: read back by Prometheus' own parsers, values worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families as parse
from prometheus_client.registry import Collector

from headrace.core.errors import (
    ContextLengthError,
    HeadraceError,
    TooManyRequestsError,
    UnavailableError,
)
from headrace.core.histogram import (
    ANSWER_TOKEN_BOUNDS,
    STEP_TOKEN_BOUNDS,
    TIME_BOUNDS_S,
    Histogram,
)
from headrace.server.link import wire
from headrace.server.link.snapshot import EngineSnapshot, PrefixDiskSnapshot, TenantSnapshot
from headrace.server.link.supervisor import State
from headrace.server.observe.exposition import Exposition
from headrace.server.observe.key_metrics import KeyMetrics
from headrace.server.observe.metrics import Metrics
from headrace.server.observe.record import HttpRecord, RequestRecord
from headrace.server.observe.text_format import TextWriter

# From FIELD.md, table 1, and what vLLM's own dashboard asks for.
VLLM_NAMES = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:gpu_cache_usage_perc": "gauge",
    "vllm:num_preemptions": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:time_per_output_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
    "vllm:request_prefill_kv_computed_tokens": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:prompt_tokens_cached": "counter",
    "vllm:prompt_tokens_by_source": "counter",
    "vllm:cache_config_info": "gauge",
}
OLD_NAMES = {"vllm:gpu_cache_usage_perc", "vllm:time_per_output_token_seconds"}
OWN_NAMES = {
    "headrace:prefix_cache_misses": "counter",
    "headrace:preempted_tokens": "counter",
    "headrace:computed_prompt_tokens": "counter",
    "headrace:cow_copies": "counter",
    "headrace:memory_ledger_bytes": "gauge",
    "headrace:step_seconds": "counter",
    "headrace:steps": "counter",
    "headrace:engine_restarts": "counter",
    "headrace:engine_up": "gauge",
    "headrace:rejected_requests": "counter",
    "headrace:http_requests": "counter",
    "headrace:connections": "gauge",
    "headrace:connections_dropped": "counter",
    "headrace:body_bytes": "gauge",
    "headrace:kv_blocks": "gauge",
    "headrace:sequences": "gauge",
    "headrace:build_info": "gauge",
    "headrace:sequences_gave_way": "counter",
}


@dataclass
class FakeEngine:
    """What metrics ask of a supervisor."""

    state: State = State.READY
    restarts: int = 0
    facts: wire.Ready | None = None


FACTS = wire.Ready(
    context_tokens=8192,
    max_sequences=64,
    total_blocks=1024,
    block_tokens=16,
    ledger_bytes={"predicted": {"weights": 100, "runtime": 7}, "allocated": {"weights": 101}},
    notes=[],
    pid=1,
    backend={},
)


class Scrape:
    """A scrape read back: a sample's value by its name and labels."""

    def __init__(self, metrics: Metrics, *others: KeyMetrics) -> None:
        text, self.content_type = Exposition(
            metrics, "tiny", lambda: {"version": "1"}, *others
        ).write("")
        self.families = {family.name: family for family in parse(text.decode())}

    def __call__(self, name: str, **labels: str) -> float:
        wanted = {"model_name": "tiny", **labels}
        found = [
            sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name and sample.labels == wanted
        ]
        assert len(found) == 1, f"{name}{wanted}: {found}"
        return found[0]


def snapshot(pid: int = 1, **changes: object) -> EngineSnapshot:
    fields: dict[str, object] = {
        name: 0 for name in EngineSnapshot.__struct_fields__ if name not in ("step_s",)
    }
    fields |= {"engine_pid": pid, "prefix_misses": {}, "step_s": {}, "step_tokens": []}
    fields["grammar_outcomes"] = {}
    fields |= {"tenants": {}, "accepted_at": [], "prefix_disk": None, "handovers": {}}
    return EngineSnapshot(**{**fields, **changes})  # type: ignore[arg-type]


def http(route: str, status: int, error: HeadraceError | None = None) -> HttpRecord:
    return HttpRecord(
        request_id="r",
        method="POST",
        route=route,
        status=status,
        arrived_s=0.0,
        ended_s=1.0,
        error=error,
    )


def live(metrics: Metrics, record: RequestRecord, gaps_s: list[float], end: str) -> None:
    """A request's life: taken up at once, tokens at these distances, then its end."""
    metrics.on_arrival(record)
    record.started_s, record.waited_s = record.arrived_s + 0.2, 0.15
    metrics.on_start(record)
    at = record.started_s
    for i, gap_s in enumerate(gaps_s):
        at += gap_s
        if i == 0:
            record.first_token_s = at
        record.last_token_s = at
        record.output_tokens += record.n
        if record.n > 1:
            record.continuation_tokens = dict.fromkeys(range(record.n), i + 1)
        metrics.on_tokens(record, record.n, gap_s if i else None)
    record.ended_s, record.finish_reason = at + 0.01, end
    metrics.on_end(record)


def test_every_name_is_there_with_its_type_and_its_twin() -> None:
    metrics = Metrics(FakeEngine(facts=FACTS))
    metrics.on_snapshot(snapshot())
    families = Scrape(metrics).families
    for name, kind in {**VLLM_NAMES, **OWN_NAMES}.items():
        assert name in families, name
        assert families[name].type == kind
    for name in VLLM_NAMES.keys() - OLD_NAMES:
        twin = families[name.replace("vllm:", "headrace:")]
        own = [(s.name.removeprefix("headrace:"), s.labels, s.value) for s in twin.samples]
        theirs = [(s.name.removeprefix("vllm:"), s.labels, s.value) for s in families[name].samples]
        assert own == theirs
        assert own


def record_of(**fields: object) -> RequestRecord:
    defaults: dict[str, object] = {
        "request_id": "r",
        "endpoint": "/v1/completions",
        "arrived_s": 10.0,
        "prompt_tokens": 5,
    }
    return RequestRecord(**{**defaults, **fields})  # type: ignore[arg-type]


@given(
    st.lists(
        st.tuples(st.text(), st.dictionaries(st.sampled_from(["a", "b"]), st.text()), st.floats()),
        max_size=5,
    )
)
def test_our_text_is_what_prometheus_own_writer_writes(
    rows: list[tuple[str, dict[str, str], float]],
) -> None:
    for kind in ("counter", "gauge"):
        registry = CollectorRegistry()
        family = Metric("headrace:x", rows[0][0] if rows else "words", kind)
        for _, labels, value in rows:
            family.add_sample(
                "headrace:x_total" if kind == "counter" else "headrace:x", labels, value
            )
        registry.register(_Fixed([family]))
        assert TextWriter().write([family]) == generate_latest(registry)


class _Fixed(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self.families = families

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> list[Metric]:
        return self.families


def test_a_whole_scrape_is_what_prometheus_own_writer_writes() -> None:
    metrics = Metrics(FakeEngine(facts=FACTS))
    live(metrics, record_of(prompt_tokens=5), [0.1, 0.2], "stop")
    families = [
        family
        for family in Exposition(
            metrics, 'a "quoted"\nname', lambda: {"version": "1"}
        )._registry.collect()
        if not family.name.startswith("process_")  # those change as one looks
    ]
    registry = CollectorRegistry()
    registry.register(_Fixed(families))
    writer = TextWriter()
    assert writer.write(families) == writer.write(families) == generate_latest(registry)


def test_values_of_a_scripted_set_of_requests() -> None:
    metrics = Metrics(FakeEngine())
    live(metrics, record_of(prompt_tokens=5), [0.1, 0.02, 0.04], "stop")
    live(metrics, record_of(prompt_tokens=100, n=2), [0.3, 0.5], "length")
    live(metrics, record_of(prompt_tokens=7), [0.4], "abort")  # one token: no time a token
    scrape = Scrape(metrics)
    assert scrape("vllm:prompt_tokens_total") == 112
    assert scrape("headrace:generation_tokens_total") == 3 + 4 + 1
    for reason, count in {"stop": 1, "length": 1, "abort": 1, "error": 0}.items():
        assert scrape("vllm:request_success_total", finished_reason=reason) == count
    # From arrival: 0.2 s until it was taken up, then the first gap.
    assert scrape("vllm:time_to_first_token_seconds_sum") == pytest.approx(0.3 + 0.5 + 0.6)
    assert scrape("vllm:time_to_first_token_seconds_bucket", le="0.3") == 1
    assert scrape("vllm:time_to_first_token_seconds_bucket", le="+Inf") == 3
    assert scrape("vllm:request_queue_time_seconds_sum") == pytest.approx(3 * 0.15)
    assert scrape("vllm:request_prefill_time_seconds_sum") == pytest.approx(0.1 + 0.3 + 0.4)
    assert scrape("vllm:request_decode_time_seconds_sum") == pytest.approx(0.06 + 0.5)
    # (last - first) / (n - 1); two continuations side by side are not twice as fast.
    assert scrape("vllm:request_time_per_output_token_seconds_count") == 2
    assert scrape("vllm:request_time_per_output_token_seconds_sum") == pytest.approx(0.03 + 0.5)
    for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
        assert scrape(f"vllm:{name}_count") == 3
        assert scrape(f"vllm:{name}_sum") == pytest.approx(0.02 + 0.04 + 0.5)
    assert scrape("vllm:e2e_request_latency_seconds_count") == 3
    assert scrape("vllm:request_prompt_tokens_bucket", le="8.0") == 2
    assert scrape("vllm:request_generation_tokens_sum") == 8
    assert scrape("vllm:request_params_n_sum") == 4
    # Of two continuations side by side the longer one; both have 2.
    assert scrape("vllm:request_max_num_generation_tokens_sum") == 3 + 2 + 1
    assert scrape("vllm:request_max_num_generation_tokens_bucket", le="2.0") == 2
    assert scrape("vllm:request_inference_time_seconds_sum") == pytest.approx(0.16 + 0.8 + 0.4)


def test_prompts_by_where_their_tokens_came_from() -> None:
    metrics = Metrics(FakeEngine())
    live(metrics, record_of(prompt_tokens=100, cached_tokens=64), [0.1], "stop")
    live(metrics, record_of(prompt_tokens=7), [0.1], "stop")
    metrics.on_arrival(waiting := record_of(prompt_tokens=1000))
    waiting.ended_s, waiting.finish_reason = 11.0, "abort"
    metrics.on_end(waiting)  # it never began: nothing of it was computed or found
    scrape = Scrape(metrics)
    assert scrape("vllm:prompt_tokens_total") == 107
    assert scrape("vllm:prompt_tokens_cached_total") == 64
    assert scrape("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 64
    assert scrape("vllm:prompt_tokens_by_source_total", source="local_compute") == 43
    assert scrape("vllm:request_prefill_kv_computed_tokens_sum") == 43
    assert scrape("vllm:request_prefill_kv_computed_tokens_count") == 2


def test_tokens_of_steps_go_on_where_an_engine_ended() -> None:
    metrics = Metrics(FakeEngine())
    assert Scrape(metrics)("vllm:iteration_tokens_total_count") == 0
    counts = [0.0] * (len(STEP_TOKEN_BOUNDS) + 1)
    counts[0], counts[2], counts[-1] = 5, 1, 1  # 1; 9 to 16; beyond all
    metrics.on_snapshot(snapshot(pid=7, step_tokens=counts, step_tokens_sum=20_017))
    counts[0] = 2
    metrics.on_snapshot(snapshot(pid=8, step_tokens=counts, step_tokens_sum=20_014))
    scrape = Scrape(metrics)
    assert scrape("vllm:iteration_tokens_total_count") == 7 + 4
    assert scrape("vllm:iteration_tokens_total_sum") == 40_031
    assert scrape("vllm:iteration_tokens_total_bucket", le="8.0") == 7
    assert scrape("vllm:iteration_tokens_total_bucket", le="16384.0") == 9
    # vLLM's own, from its loggers.py.
    own = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
    assert list(STEP_TOKEN_BOUNDS) == own
    answers = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000]
    assert list(ANSWER_TOKEN_BOUNDS[:12]) == answers


def test_running_and_waiting_are_those_of_now() -> None:
    metrics = Metrics(FakeEngine())
    waiting, running, silent = record_of(), record_of(), record_of()
    for record in (waiting, running, silent):
        metrics.on_arrival(record)
    running.started_s = 10.5
    metrics.on_start(running)
    silent.first_token_s = silent.last_token_s = 11.0  # nobody said that it started
    metrics.on_tokens(silent, 1, None)
    scrape = Scrape(metrics)
    assert scrape("vllm:num_requests_waiting") == 1
    assert scrape("vllm:num_requests_running") == 2
    for record in (waiting, running, silent):
        metrics.on_end(record)
    scrape = Scrape(metrics)
    assert scrape("vllm:num_requests_waiting") == scrape("vllm:num_requests_running") == 0
    assert scrape("vllm:prompt_tokens_total") == 10  # the one that never started is not counted


def test_each_key_has_its_own_counts() -> None:
    engine = FakeEngine()
    metrics = Metrics(engine)
    keys = KeyMetrics(metrics, "tiny", {"a b": 2, "idle": 1})
    waiting, running, stranger = (record_of(prompt_tokens=10) for _ in range(3))
    waiting.key_name = running.key_name = "a b"
    stranger.key_name = "not configured"  # can't be: a label is never a client's to make
    for each in (waiting, running, stranger):
        keys.on_arrival(each)
    keys.on_start(running)
    keys.on_tokens(running, 3, None)
    keys.on_tokens(stranger, 3, None)
    refused = http("/v1/completions", 429, TooManyRequestsError("full", retry_after_s=1.0))
    refused.key_name = "a b"
    keys.on_http(refused)
    keys.on_http(http("/v1/completions", 200))
    tenants = {"a b": TenantSnapshot(running=2, waiting=5, computed_tokens=40, gave_way=1)}
    metrics.on_snapshot(snapshot(pid=7, tenants=tenants))
    metrics.on_snapshot(snapshot(pid=8, tenants=tenants))  # another engine
    scrape = Scrape(metrics, keys)
    assert scrape("headrace:key_weight", key="a b") == 2
    for state in ("running", "waiting"):
        assert scrape("headrace:key_requests", key="a b", state=state) == 1
        assert scrape("headrace:key_requests", key="idle", state=state) == 0
    assert scrape("headrace:key_sequences", key="a b", state="waiting") == 5
    assert scrape("headrace:key_tokens_total", key="a b", kind="prompt") == 10
    assert scrape("headrace:key_tokens_total", key="a b", kind="generated") == 3
    assert scrape("headrace:key_computed_tokens_total", key="a b") == 80
    assert scrape("headrace:key_computed_tokens_total", key="idle") == 0
    assert scrape("headrace:key_gave_way_total", key="a b") == 2
    assert scrape("headrace:sequences_gave_way_total") == 2
    assert scrape("headrace:key_rejected_requests_total", key="a b") == 1
    labels = {s.labels.get("key") for f in scrape.families.values() for s in f.samples}
    assert labels == {None, "a b", "idle"}
    for each in (waiting, running):
        keys.on_end(each)
    assert Scrape(metrics, keys)("headrace:key_requests", key="a b", state="running") == 0


def test_without_keys_there_is_nothing_of_keys() -> None:
    metrics = Metrics(FakeEngine())
    found = Scrape(metrics, KeyMetrics(metrics, "tiny", {})).families
    assert not [name for name in found if name.startswith("headrace:key")]


def test_the_prefix_cache_on_disk_is_shown_where_there_is_one() -> None:
    metrics = Metrics(FakeEngine())
    metrics.on_snapshot(snapshot(pid=7))
    assert not [name for name in Scrape(metrics).families if "prefix_disk" in name]
    for pid in (7, 8):
        disk = PrefixDiskSnapshot(
            stored_bytes=5000,
            hits_tokens=32,
            loaded_bytes=100,
            written_bytes=200,
            blocks={"loaded": 2, "written": 4, "dropped": 1, "evicted": 0},
            failures={"read": 0, "write": 3, "corrupt": 1, "late": 0},
        )
        metrics.on_snapshot(snapshot(pid=pid, prefix_disk=disk))
    scrape = Scrape(metrics)
    assert scrape("headrace:prefix_disk_hits_total") == 64
    assert scrape("headrace:prefix_disk_stored_bytes") == 5000
    assert scrape("headrace:prefix_disk_bytes_total", direction="read") == 200
    assert scrape("headrace:prefix_disk_bytes_total", direction="written") == 400
    assert scrape("headrace:prefix_disk_blocks_total", outcome="dropped") == 2
    assert scrape("headrace:prefix_disk_failures_total", kind="write") == 6


def test_counters_go_on_where_an_engine_ended() -> None:
    engine = FakeEngine()
    metrics = Metrics(engine)
    misses = {"evicted": 3, "never_seen": 1}
    metrics.on_snapshot(snapshot(pid=7, steps=100, prefix_misses=misses, step_s={"compute": 2.5}))
    metrics.on_snapshot(snapshot(pid=7, steps=120, prefix_misses=misses, step_s={"compute": 3.0}))
    assert Scrape(metrics)("headrace:steps_total") == 120
    engine.restarts = 1
    # More than the one before counted, and yet a new count.
    metrics.on_snapshot(snapshot(pid=8, steps=500, prefix_misses={"evicted": 1}))
    scrape = Scrape(metrics)
    assert scrape("headrace:steps_total") == 620
    assert scrape("headrace:prefix_cache_misses_total", reason="evicted") == 4
    assert scrape("headrace:prefix_cache_misses_total", reason="never_seen") == 1
    assert scrape("headrace:step_seconds_total", part="compute") == 3.0
    assert scrape("headrace:engine_restarts_total") == 1
    metrics.on_snapshot(snapshot(pid=9, steps=1))
    assert Scrape(metrics)("headrace:steps_total") == 621


def test_an_engine_that_is_gone_holds_no_blocks() -> None:
    engine = FakeEngine()
    metrics = Metrics(engine)
    metrics.on_snapshot(snapshot(used_blocks=30, free_blocks=50, cached_blocks=20, steps=5))
    scrape = Scrape(metrics)
    assert scrape("vllm:kv_cache_usage_perc") == scrape("vllm:gpu_cache_usage_perc") == 0.3
    assert scrape("headrace:kv_blocks", state="cached") == 20
    engine.state = State.WAITING
    scrape = Scrape(metrics)
    assert scrape("headrace:engine_up") == 0
    assert scrape("vllm:kv_cache_usage_perc") == 0
    assert scrape("headrace:kv_blocks", state="free") == 0
    assert scrape("headrace:steps_total") == 5


def test_answers_and_refusals() -> None:
    metrics = Metrics(FakeEngine())
    metrics.on_http(http("/v1/completions", 200))
    metrics.on_http(http("/v1/completions", 429, TooManyRequestsError("full", retry_after_s=1)))
    metrics.on_http(http("/v1/completions", 400, ContextLengthError("long")))
    metrics.on_http(http("/v1/completions", 500, HeadraceError("a fault")))
    # Its status went out before the engine died: it broke off, nobody turned it away.
    metrics.on_http(http("/v1/completions", 200, UnavailableError("died", retry_after_s=1)))
    scrape = Scrape(metrics)
    assert scrape("headrace:http_requests_total", route="/v1/completions", status="200") == 2
    assert scrape("headrace:rejected_requests_total", reason="too_many_requests") == 1
    assert scrape("headrace:rejected_requests_total", reason="context_length") == 1
    assert scrape("headrace:rejected_requests_total", reason="unavailable") == 0
    samples = scrape.families["headrace:rejected_requests"].samples
    assert sum(sample.value for sample in samples) == 2


def test_ledger_and_pool() -> None:
    scrape = Scrape(Metrics(FakeEngine(facts=FACTS)))
    assert scrape("headrace:memory_ledger_bytes", part="weights", kind="allocated") == 101
    assert scrape("headrace:memory_ledger_bytes", part="runtime", kind="predicted") == 7
    pool = scrape.families["vllm:cache_config_info"].samples[0].labels
    assert (pool["block_size"], pool["num_gpu_blocks"]) == ("16", "1024")


def test_bounds_suit_what_is_measured() -> None:
    assert list(TIME_BOUNDS_S) == sorted(set(TIME_BOUNDS_S))
    assert TIME_BOUNDS_S[0] == 0.001
    assert {0.05, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0} <= set(TIME_BOUNDS_S)
    histogram = Histogram((1.0, 2.0))
    for value in (1.0, 1.5, 2.0, 99.0):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 1), ("2.0", 3), ("+Inf", 4)]


def test_guesses_are_counted_under_vllms_names_too() -> None:
    metrics = Metrics(FakeEngine())
    metrics.on_snapshot(snapshot(drafts=3, draft_tokens=9, accepted_tokens=4, accepted_at=[3, 1]))
    metrics.on_snapshot(
        snapshot(2, drafts=1, draft_tokens=2, accepted_tokens=2, accepted_at=[1, 1])
    )
    scrape = Scrape(metrics)
    for prefix in ("headrace:", "vllm:"):
        name = f"{prefix}spec_decode_num"
        assert scrape(f"{name}_drafts_total") == 4
        assert scrape(f"{name}_draft_tokens_total") == 11
        assert scrape(f"{name}_accepted_tokens_total") == 6
        assert scrape(f"{name}_accepted_tokens_per_pos_total", position="0") == 4
        assert scrape(f"{name}_accepted_tokens_per_pos_total", position="1") == 2
