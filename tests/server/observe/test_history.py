"""The history's samples, and how an objective stands: values worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import profile
from tests.server.observe.test_metrics import FACTS, FakeEngine, snapshot

from headrace.core.errors import TooManyRequestsError
from headrace.core.histogram import TIME_BOUNDS_S, TIME_PARTS, Histogram, quantile
from headrace.doctor.observation import GpuNow
from headrace.hardware.profile import Ceilings
from headrace.models.known import find_known
from headrace.plan.ledger import predict
from headrace.server.link.snapshot import ledger_parts
from headrace.server.link.work import work_facts
from headrace.server.observe.device import DeviceWatch
from headrace.server.observe.exposition import Exposition
from headrace.server.observe.history import COLUMNS, WINDOWS, History
from headrace.server.observe.load_metrics import LoadMetrics
from headrace.server.observe.metrics import Metrics
from headrace.server.observe.objective import Objective
from headrace.server.observe.record import HttpRecord, RequestRecord
from headrace.workload.slo import parse_slo

WALL_S = 1_000_000.0


def record(ttft_s: float = 0.1, tpot_s: float = 0.01, reason: str | None = "stop") -> RequestRecord:
    return RequestRecord(
        request_id="r", endpoint="/v1/completions", arrived_s=10.0, prompt_tokens=3,
        first_token_s=10.0 + ttft_s, last_token_s=10.0 + ttft_s + 9 * tpot_s, output_tokens=10,
        ended_s=10.0 + ttft_s + 9 * tpot_s, finish_reason=reason,
    )  # fmt: skip


def refused(
    route: str = "/v1/completions", requests: list[RequestRecord] | None = None
) -> HttpRecord:
    return HttpRecord(
        request_id="r", method="POST", route=route, status=429, arrived_s=0.0, ended_s=1.0,
        error=TooManyRequestsError("full", retry_after_s=1.0), requests=requests or [],
    )  # fmt: skip


class Watched:
    def __init__(self, slo: str | None = None, work: dict[str, float] | None = None) -> None:
        facts = msgspec.structs.replace(FACTS, work=work or {})
        self.metrics = Metrics(FakeEngine(facts=facts))
        self.objective = None if slo is None else Objective(parse_slo(slo))
        self.history = History(self.metrics, self.objective)
        self.now_s = 0.0

    def beat(self, after_s: float = 1.0, **changes: Any) -> None:
        self.now_s += after_s
        self.metrics.on_snapshot(snapshot(**changes))
        self.history.sample(self.now_s, WALL_S + self.now_s)

    def last(self, name: str, window: str = "5m") -> float:
        return self.history.columns(window)[name][-1]


def test_counters_become_rates_and_levels_are_as_they_are() -> None:
    watched = Watched()
    watched.beat(steps=10, used_blocks=5, step_s={"compute": 1.0})
    watched.metrics.generation_tokens += 40
    watched.beat(2.0, steps=30, used_blocks=256, step_s={"compute": 2.5})
    assert watched.last("period_s") == 2
    assert watched.last("steps") == 10
    assert watched.last("generated_tokens") == 20
    assert watched.last("step_compute") == 0.75
    assert watched.last("kv_used_blocks") == 256
    assert watched.history.columns("5m")["kv_used_blocks"] == [5, 256]
    assert watched.last("at_s") == WALL_S + 3


def test_beats_of_half_a_second_make_a_sample_a_second() -> None:
    watched = Watched()
    for _ in range(20):
        watched.beat(0.5)
    times = watched.history.columns("5m")["at_s"]
    assert [b - a for a, b in pairwise(times)] == [1.0] * (len(times) - 1)


def test_percentiles_are_of_what_was_added_since() -> None:
    watched = Watched()
    for _ in range(100):
        watched.metrics.ttft.observe(0.9)
    watched.beat()
    assert 0.7 < watched.last("ttft_p50") <= 1.0
    for _ in range(100):
        watched.metrics.ttft.observe(0.0014)
    watched.beat()
    assert watched.last("ttft_p50") == pytest.approx(0.0014, rel=0.05)
    watched.beat()
    assert math.isnan(watched.last("ttft_p50")), "nothing was added: there is no percentile"


def test_a_restarted_engine_does_not_make_a_rate_negative() -> None:
    watched = Watched()
    watched.beat(pid=1, steps=100)
    watched.beat(pid=2, steps=3)
    assert watched.last("steps") == 3


def test_the_rings_are_bounded_and_the_coarser_reach_further() -> None:
    watched = Watched()
    for at in range(1, 2001):
        watched.beat(steps=at)
    for window, (period_s, size) in WINDOWS.items():
        found = watched.history.columns(window)
        assert set(found) == set(COLUMNS)
        assert {len(list_) for list_ in found.values()} == {min(size, int(2000 // period_s))}
        assert set(found["steps"]) == {1.0}
    since = watched.history.columns("5m", WALL_S + 1990)
    assert since["at_s"] == [WALL_S + 1990 + after for after in range(1, 11)]


def test_without_an_engine_levels_are_missing_not_zero() -> None:
    watched = Watched()
    assert math.isnan(watched.history.saturation)
    assert math.isnan(watched.history.pending_prefill_s)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"running_sequences": 16}, 0.25),
        ({"running_sequences": 16, "used_blocks": 512}, 0.5),
        ({"running_sequences": 1, "waiting_sequences": 1}, 1.0),
        ({}, 0.0),
    ],
)
def test_saturation(changes: dict[str, Any], wanted: float) -> None:
    watched = Watched()
    watched.beat(**changes)
    assert watched.history.saturation == wanted


def test_pending_prefill_is_the_waiting_tokens_at_the_recent_rate() -> None:
    watched = Watched()
    watched.beat()
    watched.beat(computed_prompt_tokens=1000, step_s={"compute": 0.5}, waiting_tokens=3000)
    assert watched.history.pending_prefill_s == pytest.approx(1.5)
    watched.beat(computed_prompt_tokens=1000, step_s={"compute": 0.5})
    assert watched.history.pending_prefill_s == 0


def test_who_is_within_the_objective() -> None:
    objective = Objective(parse_slo("ttft=200ms,tpot=20ms,e2e=1s"))
    for each in (
        record(),
        record(ttft_s=0.3),
        record(tpot_s=0.03),
        record(ttft_s=0.3, tpot_s=0.03),
        record(reason="error"),
        record(reason="timeout"),
        record(reason="abort"),
    ):
        objective.on_end(each)
    objective.on_http(refused())
    objective.on_http(refused("/ready"))
    objective.on_http(refused(requests=[record(reason="error")]))  # judged at its end already
    assert objective.within == 1
    assert objective.missed == {"refused": 1, "failed": 2, "ttft": 2, "tpot": 1, "e2e": 0}


def test_burn_rate_and_headroom() -> None:
    watched = Watched("ttft=200ms,share=90%")
    assert watched.objective is not None
    watched.beat()
    assert math.isnan(watched.history.burn_rate(300.0))
    for _ in range(8):
        watched.objective.on_end(record(ttft_s=0.1))
    for _ in range(2):
        watched.objective.on_end(record(ttft_s=0.38))
    watched.beat()
    # Twice as many misses as the tenth that is allowed; the 90th percentile is 1.9 times 200 ms.
    assert watched.history.burn_rate(300.0) == pytest.approx(2.0)
    assert watched.history.headroom == pytest.approx(-0.9, abs=0.06)


def test_an_objective_without_room_has_no_burn_rate() -> None:
    watched = Watched("ttft=200ms,share=100%")
    assert watched.objective is not None
    watched.beat()
    watched.objective.on_end(record(ttft_s=0.4))
    watched.beat()
    assert math.isnan(watched.history.burn_rate(300.0))


def test_metrics_have_what_is_known_and_nothing_else() -> None:
    watched = Watched("ttft=200ms,share=90%")
    load = LoadMetrics(watched.history, watched.objective, "tiny")
    page = Exposition(watched.metrics, "tiny", lambda: {}, load).write("")[0].decode()
    assert "headrace:saturation{" not in page
    assert "headrace:slo_burn_rate{" not in page
    assert 'headrace:requests_within_slo_total{model_name="tiny"} 0.0' in page
    watched.beat()
    page = Exposition(watched.metrics, "tiny", lambda: {}, load).write("")[0].decode()
    assert 'headrace:saturation{model_name="tiny"} 0.0' in page
    assert 'headrace:slo_seconds{model_name="tiny",part="ttft"} 0.2' in page


@given(st.lists(st.floats(0.0005, 400.0), min_size=1, max_size=60), st.floats(0.01, 1.0))
def test_a_quantile_is_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    histogram = Histogram(TIME_BOUNDS_S)
    for value in values:
        histogram.observe(value)
    found = quantile(TIME_BOUNDS_S, histogram.counts, share)
    true = sorted(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)]
    edges = [0.0, *TIME_BOUNDS_S, math.inf]
    low, high = next((a, b) for a, b in pairwise(edges) if a < true <= b)
    assert found is not None
    assert low - 1e-12 <= found <= min(high, TIME_BOUNDS_S[-1]) + 1e-12


@given(st.lists(st.floats(0.0, 400.0), max_size=60), st.floats(0.01, 1.0))
def test_parts_of_buckets_are_the_same_histogram_with_nearer_quantiles(
    values: list[float], share: float
) -> None:
    plain, parted = Histogram(TIME_BOUNDS_S), Histogram(TIME_BOUNDS_S, parts=TIME_PARTS)
    for value in values:
        plain.observe(value)
        parted.observe(value)
    assert parted.counts == plain.counts
    assert parted.buckets() == plain.buckets()
    assert set(TIME_BOUNDS_S) <= set(parted.edges)
    assert list(parted.edges) == sorted(set(parted.edges))
    within = [value for value in values if 0.001 <= value <= TIME_BOUNDS_S[-1]]
    if values and len(within) == len(values):
        found = quantile(parted.edges, parted.part_counts, share)
        true = sorted(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)]
        assert found == pytest.approx(true, rel=0.13)  # the widest bucket is from 120 s to 300 s


def test_a_quantile_of_nothing_is_none() -> None:
    assert quantile(TIME_BOUNDS_S, [0] * (len(TIME_BOUNDS_S) + 1), 0.5) is None


def test_products_and_bytes_are_worked_out_from_steps_and_tokens() -> None:
    work = {"token_flops": 1e6, "step_bytes": 1000.0, "block_bytes": 10.0}
    watched = Watched(work=work)
    watched.beat(steps=4, computed_prompt_tokens=30, generated_tokens=10, used_blocks=5)
    assert watched.last("model_flops") == 40e6
    assert watched.last("model_bytes") == 4 * 1000 + 4 * 5 * 10
    watched.beat(steps=4, computed_prompt_tokens=30, generated_tokens=10, used_blocks=9)
    assert watched.last("model_bytes") == 0
    assert watched.history.rate("model_flops", 10.0) == 20e6


def test_what_an_engine_does_before_the_first_sample_counts() -> None:
    """The history begins before there is an engine, and a quick request may end before a beat."""
    engine = FakeEngine()
    history = History(metrics := Metrics(engine))
    engine.facts = msgspec.structs.replace(FACTS, work={"token_flops": 1e6, "step_bytes": 1000.0})
    metrics.on_snapshot(snapshot(steps=4, generated_tokens=10))
    history.sample(1.0, WALL_S)
    assert history.columns("5m")["model_flops"] == [10e6]
    assert history.columns("5m")["model_bytes"] == [4000]
    engine.facts = None
    history.sample(2.0, WALL_S + 1)
    assert history.columns("5m")["model_flops"] == [10e6, 0]


def test_a_mixture_of_experts_has_no_bytes() -> None:
    watched = Watched(work={"token_flops": 1e6, "block_bytes": 10.0})
    watched.beat(steps=4, generated_tokens=10, used_blocks=5)
    assert watched.last("model_flops") == 10e6
    assert math.isnan(watched.last("model_bytes"))


def test_use_of_a_device_is_a_share_of_its_peaks(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    ceilings = Ceilings(read_bytes_s={"1": 1e6, "2": 2e6}, multiplies_s={"int8": 5e7, "fp32": 1e7})
    replace(profile(), ceilings=ceilings).save(path)
    device = DeviceWatch(str(path))
    assert device.peaks is not None
    assert (device.peaks.flops_s, device.peaks.bytes_s) == (1e8, 2e6)
    watched = Watched(work={"token_flops": 1e6, "step_bytes": 1e5, "block_bytes": 0.0})
    watched.beat(steps=4, generated_tokens=40)
    device.gpus = (GpuNow(name="x", used_bytes=3.0, memory_bytes=None, busy_share=0.5),)
    load = LoadMetrics(watched.history, None, "tiny", device)
    page = Exposition(watched.metrics, "tiny", lambda: {}, load).write("")[0].decode()
    assert 'headrace:mfu{model_name="tiny"} 0.4' in page
    assert 'headrace:bandwidth_use{model_name="tiny"} 0.2' in page
    assert 'headrace:gpu_utilization{gpu="0",model_name="tiny"} 0.5' in page
    assert 'headrace:gpu_memory_used_bytes{gpu="0",model_name="tiny"} 3.0' in page
    assert "headrace:gpu_memory_bytes{" not in page


def test_without_peaks_no_share_is_given() -> None:
    watched = Watched(work={"token_flops": 1e6})
    watched.beat(steps=4, generated_tokens=40)
    load = LoadMetrics(watched.history, None, "tiny", DeviceWatch())
    page = Exposition(watched.metrics, "tiny", lambda: {}, load).write("")[0].decode()
    assert 'headrace:model_flops_per_second{model_name="tiny"} 4e+07' in page
    assert "headrace:mfu{" not in page


def test_a_token_of_a_known_model_takes_twice_its_parameters() -> None:
    """Llama 3.1 8B: 8.03e9 parameters, of which an embedding of 128,256 × 4,096 is only looked up;
    norms are no products."""
    spec = find_known("llama-3.1-8b").spec
    ledger = predict(
        spec, weight_bytes=16_000_000_000, activation_bytes=0, kv_bytes_per_token=131_072,
        kv_dtype="bf16", total_blocks=10, block_tokens=16, max_batch_tokens=16,
    )  # fmt: skip
    found = work_facts(spec, ledger)
    assert found["token_flops"] == pytest.approx(2 * (8.03e9 - 128_256 * 4096), rel=0.001)
    assert found["step_bytes"] == pytest.approx(16e9 * (1 - 128_256 * 4096 / 8.03e9), rel=0.001)
    assert found["block_bytes"] == 131_072 * 16
    assert "step_bytes" not in work_facts(find_known("mixtral-8x7b").spec, ledger)
    with_graphs = ledger_parts(replace(ledger, graphs_bytes=5), None)
    assert with_graphs["predicted"]["graphs"] == 5
