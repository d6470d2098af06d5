"""For every rule, an observation in which it fires and one, as near as possible, in which it must
not. All are changes of one healthy endpoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headrace.doctor.buckets import Buckets
from headrace.doctor.observation import (
    Answer,
    ClientHealth,
    Earlier,
    EngineId,
    Floor,
    GpuNow,
    Observation,
    Probe,
    Replica,
)

TIMES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, math.inf)
LENGTHS = (10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10_000.0, 100_000.0, math.inf)


def answer(ttft: float, tpot: float = 0.01, n: int = 24, prompt: int = 50, **more: Any) -> Answer:
    arrivals = tuple(ttft + i * tpot for i in range(n))
    fields: dict[str, Any] = {
        "scheduled_s": 0.0, "sent_s": 0.001, "connect_s": 0.0005, "ttft_s": ttft,
        "end_s": arrivals[-1], "tokens": n, "is_counted": True, "prompt_tokens": prompt,
        "arrivals_s": arrivals, "finish_reason": "length",
    }  # fmt: skip
    return Answer(**(fields | more))


def burst(ttfts: list[float], tpot: float, n: int = 40) -> tuple[Answer, ...]:
    return tuple(answer(ttft, tpot, n) for ttft in ttfts)


def together(tpot: float = 0.015, count: int = 8) -> tuple[tuple[Answer, ...], ...]:
    return tuple(burst([0.06] * count, tpot) for _ in range(3))


def serial(tpot: float = 0.01, count: int = 8) -> tuple[tuple[Answer, ...], ...]:
    each = 40 * tpot
    return tuple(burst([0.05 + i * each for i in range(count)], tpot) for _ in range(3))


def waves() -> tuple[tuple[Answer, ...], ...]:
    """Five of eight at first, three after them."""
    return tuple(burst([0.06] * 5 + [0.7] * 3, 0.015) for _ in range(3))


def counted(bounds: tuple[float, ...], values: list[float]) -> Buckets:
    counts = [0.0] * len(bounds)
    for value in values:
        counts[next(i for i, bound in enumerate(bounds) if value <= bound)] += 1
    return Buckets(bounds=bounds, counts=tuple(counts), total=sum(values))


def times(*values: float, of: int = 1) -> Buckets:
    return counted(TIMES, list(values) * of)


def lengths(*values: float, of: int = 1) -> Buckets:
    return counted(LENGTHS, list(values) * of)


def stream(gaps: list[float]) -> Answer:
    at, arrivals = 0.05, [0.05]
    for gap in gaps:
        at += gap
        arrivals.append(at)
    return answer(0.05, n=len(arrivals), arrivals_s=tuple(arrivals), end_s=at)


PROBE = Probe(
    short=tuple(answer(0.05) for _ in range(5)),
    medium=(answer(0.30, n=4, prompt=500), answer(0.30, n=4, prompt=500)),
    long=(answer(1.05, n=4, prompt=2000), answer(1.05, n=4, prompt=2000)),
    cold=tuple(answer(0.55, n=4, prompt=1000) for _ in range(3)),
    warm=tuple(answer(0.07, n=4, prompt=1000, cached_tokens=990) for _ in range(3)),
    bursts=together(),
    references=tuple(answer(0.05) for _ in range(3)),
    stream=stream([0.01] * 90),
    intruder=answer(0.5, n=4, prompt=2000),
    intruder_at_s=0.5,
    plain=tuple(answer(0.05) for _ in range(3)),
    grammar=tuple(answer(0.06, 0.011) for _ in range(3)),
    penalty=tuple(answer(0.05, 0.0105) for _ in range(3)),
    deltas={"generation_tokens": 1e6},
    warm_deltas={"prefix_hits": 2970.0},
    burst_levels={"running": (0.0, 8.0, 8.0), "waiting": (0.0, 0.0, 0.0),
                  "kv_usage": (0.0, 0.1, 0.1)},
    client=ClientHealth(lag_p99_s=0.001, dispatch_p99_s=0.001, cpu_share=0.1, dns_s=0.0001,
                        connect_s=0.0005),
    spent_tokens=15_000,
    spent_s=20.0,
)  # fmt: skip
GPU = GpuNow(name="NVIDIA H100 80GB HBM3", used_bytes=78e9, memory_bytes=80e9, busy_share=0.85)
HEALTHY = Observation(
    url="http://127.0.0.1:8000",
    engine=EngineId(name="vllm", label="vLLM", version="0.32.0"),
    model="meta-llama/Llama-3.1-8B-Instruct",
    levels={"running": (12.0, 14.0, 13.0), "waiting": (0.0, 0.0, 0.0),
            "kv_usage": (0.4, 0.42, 0.41), "started_at_s": (1.7e9,)},
    deltas={"generation_tokens": 5000.0, "prompt_tokens": 20_000.0, "prefix_queries": 20_000.0,
            "prefix_hits": 12_000.0, "preemptions": 0.0, "finished": 50.0, "process_cpu_s": 2.0},
    groups={"finished": {"stop": 48.0, "length": 2.0}},
    histograms={
        "ttft": times(0.08, 0.09, 0.12, 0.2, of=20), "itl": times(0.012, of=300),
        "tpot": times(0.012, of=80), "queue_time": times(0.001, of=80),
        "prefill_time": times(0.08, of=80), "decode_time": times(1.2, of=80),
        "e2e": times(1.3, of=80), "prompt_length": lengths(200, 350, 500, 800, of=20),
        "generation_length": lengths(60, 90, 120, 200, of=20),
    },
    period_s=5.0,
    config={"max_sequences": 256, "max_batch_tokens": 8192, "context_tokens": 8192,
            "kv_tokens": 400_000, "prefix_cache": True, "gpu_memory": 0.9, "block_tokens": 16,
            "kv_dtype": "fp8", "uptime_s": 5000.0},
    gpus=(GPU,),
    probe=PROBE,
    floor=Floor(tpot_s=0.0075, weight_bytes=16_000_000_000, memory_bytes=80_000_000_000,
                source="Llama-3.1-8B in bf16 on h100", narrower_ratio=1.9, long_ratio=1.1),
)  # fmt: skip
IDLE = replace(
    HEALTHY,
    levels={"running": (0.0,) * 3, "waiting": (0.0,) * 3, "kv_usage": (0.0,) * 3},
    deltas=dict.fromkeys(HEALTHY.deltas, 0.0),
    groups={"finished": {"stop": 0.0, "length": 0.0}},
    histograms={n: replace(h, counts=(0.0,) * len(h.bounds), total=0.0)
                for n, h in HEALTHY.histograms.items()},
    gpus=(replace(GPU, busy_share=0.0),),
    probe=replace(PROBE, gpus=(GPU,)),
)  # fmt: skip


def but(base: Observation = HEALTHY, **changes: Any) -> Observation:
    """A copy; mappings are merged, and `probe_x` changes the probe's x."""
    fields: dict[str, Any] = {}
    probe: dict[str, Any] = {}
    for name, value in changes.items():
        if name.startswith("probe_"):
            probe[name.removeprefix("probe_")] = value
        elif isinstance(value, dict) and name not in ("groups",):
            fields[name] = {**getattr(base, name), **value}
        else:
            fields[name] = value
    if probe and base.probe is not None:
        fields["probe"] = replace(base.probe, **probe)
    return replace(base, **fields)


def queued(running: float, waiting: float, kv: float, **more: Any) -> Observation:
    levels = {"running": (running,) * 3, "waiting": (waiting,) * 3, "kv_usage": (kv,) * 3}
    return but(levels=levels, **more)


def _engine(name: str, label: str) -> EngineId:
    return EngineId(name=name, label=label)


SPILL: dict[str, Any] = {
    "engine": _engine("ollama", "Ollama"),
    "config": {"spilled_share": 0.4, "model_bytes": 10_000_000_000, "gpu_bytes": 6_000_000_000},
}
SLOW = tuple(answer(0.2, 0.4) for _ in range(5))
FULL_GPU = (replace(GPU, busy_share=0.2),)
STALLED = stream([0.01] * 50 + [0.4] + [0.01] * 40)
GROWING = stream([0.010] * 15 + [0.012] * 15 + [0.014] * 15 + [0.01] * 5)
LONG_OUT: dict[str, Any] = {
    "histograms": {"generation_length": lengths(500, 700, 4000, 6000, of=20),
                   "e2e": times(30.0, of=80), "decode_time": times(28.0, of=80)},
    "groups": {"finished": {"stop": 30.0, "length": 20.0}},
}  # fmt: skip
PREFIX_OFF = tuple(answer(0.54, n=4, prompt=1000, cached_tokens=0) for _ in range(3))
PREFIX_UNKNOWN = tuple(answer(0.54, n=4, prompt=1000) for _ in range(3))
WARM_UNTOLD = tuple(answer(0.07, n=4, prompt=1000) for _ in range(3))
RESTART = Earlier(uptime_s=100.0, rate=120.0, config={"max_sequences": 256}, when="Monday")
TP = {"tensor_parallel": 4}
HOT = (Replica(name="a", running=20, waiting=30), Replica(name="b", running=2, waiting=0))

Make = Callable[[], Observation]
CASES: dict[int, tuple[Make, Make]] = {
    0: (lambda: but(probe_client=ClientHealth(lag_mean_s=0.02, cpu_share=0.99)),
        lambda: but(probe_client=ClientHealth(lag_mean_s=0.008, cpu_share=0.99))),
    1: (lambda: but(**SPILL), lambda: but(engine=SPILL["engine"], config={"spilled_share": 0.0})),
    2: (lambda: but(probe_bursts=serial()), lambda: HEALTHY),
    3: (lambda: queued(10, 6, 0.99), lambda: queued(10, 0, 0.99)),
    4: (lambda: queued(4, 12, 0.1, config={"max_sequences": 4}),
        lambda: queued(4, 0, 0.1, config={"max_sequences": 4}, probe_bursts=together(count=4))),
    5: (lambda: but(probe_long=(answer(3.0, n=4, prompt=2000),) * 2), lambda: HEALTHY),
    6: (lambda: but(config={"dtype": "bfloat16"}, histograms={"tpot": times(0.2, of=80)}),
        lambda: but(config={"dtype": "bfloat16"})),
    7: (lambda: but(levels={"startup_s": (900.0,)}), lambda: but(levels={"startup_s": (50.0,)})),
    8: (lambda: but(probe_short=tuple(answer(0.05, 0.03) for _ in range(5))), lambda: HEALTHY),
    9: (lambda: but(config={"gpu_memory": 0.97},
                    groups={"finished": {"stop": 40.0, "error": 4.0}}),
        lambda: but(config={"gpu_memory": 0.97})),
    10: (lambda: but(probe_client=ClientHealth(lag_p99_s=0.001, connect_s=0.06, tls_s=0.12)),
         lambda: but(probe_client=ClientHealth(lag_p99_s=0.001, connect_s=0.005, tls_s=0.01))),
    11: (lambda: but(histograms={"ttft": times(2.5, of=80), "queue_time": times(2.2, of=80)}),
         lambda: but(histograms={"ttft": times(2.5, of=80), "queue_time": times(0.4, of=80)})),
    12: (lambda: but(histograms={"ttft": times(2.5, of=80), "queue_time": times(0.02, of=80)}),
         lambda: but(histograms={"ttft": times(0.4, of=80), "queue_time": times(0.02, of=80)})),
    13: (lambda: but(histograms={"tpot": times(0.2, of=80)}),
         lambda: but(histograms={"tpot": times(0.02, of=80)})),
    14: (lambda: but(histograms={"prompt_length": lengths(*[50.0] * 9, 20_000, of=10),
                                 "ttft": times(*[0.05] * 9, 5.0, of=10)}),
         lambda: but(histograms={"prompt_length": lengths(*[50.0] * 9, 20_000, of=10)})),
    15: (lambda: but(deltas={"preemptions": 5.0}), lambda: but(deltas={"preemptions": 0.0})),
    16: (lambda: but(**LONG_OUT),
         lambda: but(histograms=LONG_OUT["histograms"],
                     groups={"finished": {"stop": 50.0, "length": 0.0}})),
    17: (lambda: queued(8, 60, 0.2, config={"max_sequences": 8}),
         lambda: queued(8, 4, 0.2, config={"max_sequences": 8})),
    18: (lambda: but(probe_stream=STALLED), lambda: HEALTHY),
    19: (lambda: but(probe_warm=PREFIX_OFF, config={"prefix_cache": False}), lambda: HEALTHY),
    20: (lambda: but(deltas={"preemptions": 80.0}), lambda: but(deltas={"preemptions": 5.0})),
    21: (lambda: but(config=TP, gpus=FULL_GPU), lambda: but(config={"tensor_parallel": 1})),
    22: (lambda: but(config=TP, links="pcie"), lambda: but(config=TP, links="nvlink")),
    23: (lambda: but(replicas=HOT),
         lambda: but(replicas=(HOT[0], Replica(name="b", running=19, waiting=25)))),
    24: (lambda: but(groups={"finished": {"stop": 40.0, "abort": 10.0}}), lambda: HEALTHY),
    25: (lambda: but(earlier=RESTART),
         lambda: but(earlier=replace(RESTART, uptime_s=9000.0))),
    26: (lambda: but(config={"eager": True}), lambda: but(config={"eager": False})),
    27: (lambda: but(deltas={"draft_tokens": 1000.0, "accepted_tokens": 150.0, "drafts": 200.0}),
         lambda: but(deltas={"draft_tokens": 1000.0, "accepted_tokens": 800.0, "drafts": 200.0})),
    28: (lambda: but(about="queue"), lambda: but(about="decode")),
    29: (lambda: but(config={"context_tokens": 131_072, "reserves_context": True},
                     engine=_engine("llama.cpp", "llama.cpp")),
         lambda: but(config={"context_tokens": 131_072})),
    30: (lambda: but(levels={"waiting": (60.0, 80.0, 100.0)}),
         lambda: but(levels={"waiting": (60.0, 80.0, 100.0)}, deltas={"rejected": 5.0})),
    31: (lambda: but(probe_short=tuple(answer(0.15) for _ in range(5))), lambda: HEALTHY),
    32: (lambda: queued(10, 6, 0.99, config={"kv_dtype": "bfloat16"}),
         lambda: queued(10, 0, 0.5, config={"kv_dtype": "bfloat16"})),
    33: (lambda: but(deltas={"process_cpu_s": 4.95}, gpus=(replace(GPU, busy_share=0.5),)),
         lambda: but(deltas={"process_cpu_s": 4.95})),
    34: (lambda: but(IDLE, probe_grammar=tuple(answer(0.06, 0.05) for _ in range(3))),
         lambda: HEALTHY),
    35: (lambda: but(config={"adapters": True}),
         lambda: but(config={"adapters": True}, levels={"adapters_pool": (0.5,)})),
    36: (lambda: but(probe_warm=PREFIX_OFF, config={"block_tokens": 528}),
         lambda: but(config={"block_tokens": 528})),
    37: (lambda: but(probe_warm=WARM_UNTOLD, probe_warm_deltas={"prefix_hits": 0.0}),
         lambda: HEALTHY),
    38: (lambda: but(config={"kv_tokens": 4096, "context_tokens": 8192}), lambda: HEALTHY),
    39: (lambda: but(probe_bursts=together(0.04), direct=PROBE), lambda: but(direct=PROBE)),
    40: (lambda: but(probe_stream=GROWING, probe_intruder=None, probe_intruder_at_s=None),
         lambda: HEALTHY),
    41: (lambda: but(probe_deltas={"generation_tokens": 10.0}), lambda: HEALTHY),
}  # fmt: skip
# More ways in which a rule fires or must not.
MORE: list[tuple[int, bool, Make]] = [
    (1, True, lambda: but(probe_short=SLOW, gpus=FULL_GPU, floor=None)),
    # Sends of a burst are timed in that burst, whose first tokens take 60 ms.
    (0, True, lambda: but(probe_client=ClientHealth(dispatch_p99_s=0.02))),
    (0, False, lambda: but(probe_client=ClientHealth(dispatch_p99_s=0.014))),
    # Medians do not move by what is late once in a hundred times, unless that is all of it.
    (0, False, lambda: but(probe_client=ClientHealth(lag_mean_s=0.0003, lag_p99_s=0.03))),
    (0, True, lambda: but(probe_client=ClientHealth(lag_mean_s=0.0003, lag_p99_s=0.09))),
    (1, False, lambda: but(gpus=FULL_GPU)),  # full VRAM on an engine that reserves it
    (3, False, lambda: queued(10, 6, 0.5)),
    (3, True, lambda: but(config={"kv_tokens": 512}, probe_bursts=waves())),
    (3, False, lambda: but(config={"kv_tokens": 4096}, probe_bursts=waves())),
    (4, True, lambda: but(engine=_engine("llama.cpp", "llama.cpp"), config={"max_sequences": 1},
                          levels={"kv_usage": ()}, probe_bursts=serial())),
    (4, False, lambda: queued(4, 12, 0.97, config={"max_sequences": 4})),
    # A sample between two steps has none that run.
    (4, True, lambda: but(levels={"running": (2.0, 0.0, 2.0), "waiting": (10.0, 12.0, 10.0),
                                  "kv_usage": (0.1,) * 3}, config={"max_sequences": 2})),
    # One waited for a moment, until the next step.
    (4, False, lambda: but(levels={"running": (4.0, 4.0, 3.0), "waiting": (0.0, 0.0, 1.0),
                                   "kv_usage": (0.1,) * 3})),
    (9, True, lambda: but(probe_short=(answer(0.1, error="HTTP 500: CUDA out of memory"),))),
    (17, True, lambda: queued(240, 0, 0.6, histograms={"tpot": times(0.2, of=80)})),
    (18, True, lambda: but(probe_stream=None, histograms={
        "itl": times(*[0.012] * 95, *[0.9] * 5, of=4)})),
    (19, True, lambda: but(groups={"prefix_misses": {"evicted": 30.0, "never_seen": 20.0}})),
    (19, False, lambda: but(probe_warm=tuple(replace(a, cached_tokens=990) for a in PREFIX_OFF))),
    (19, True, lambda: but(probe_warm=PREFIX_UNKNOWN, probe_warm_deltas={})),
    (20, False, lambda: but(deltas={"preemptions": 1.0, "finished": 1.0})),
    (21, False, lambda: but(config=TP, floor=replace(HEALTHY.floor, weight_bytes=141_000_000_000)
                            if HEALTHY.floor else None)),
    (24, True, lambda: but(probe_short=(*PROBE.short, *[answer(
        0.1, error="the stream ended without a finish_reason")] * 2))),
    # The endpoint died: nobody's timeout cut these.
    (24, False, lambda: but(probe_stopped="bursts: ConnectionRefusedError", probe_short=(
        *PROBE.short, *[answer(0.1, error="the stream ended without a finish_reason")] * 2))),
    (25, False, lambda: but(earlier=replace(RESTART, config={"max_sequences": 4}))),
    (25, False, lambda: but(earlier=replace(RESTART, rate=101.0))),
    (29, True, lambda: queued(10, 6, 0.99, config={"context_tokens": 131_072})),
    (31, True, lambda: but(IDLE, histograms={"queue_time": times(0.05, of=10)})),
    (31, False, lambda: but(IDLE, histograms={"queue_time": times(*[0.001] * 8, 0.2, 0.3)})),
    (6, True, lambda: but(config={"dtype": "bfloat16"}, probe_short=SLOW,
                          histograms={"tpot": times(0.2, of=80), "itl": times(0.2, of=80)})),
    (13, True, lambda: but(probe_short=SLOW, histograms={"tpot": times(0.2, of=80),
                                                         "itl": times(0.2, of=80)})),
    (25, True, lambda: but(earlier=replace(RESTART, uptime_s=None, config={}))),
    (27, True, lambda: but(levels={"acceptance": (0.1,) * 3})),
    (29, True, lambda: but(levels={"longest_tokens": (500.0,)},
                           config={"context_tokens": 131_072, "reserves_context": True})),
    # Beside others' requests plain answers may have met fewer of them.
    (34, False, lambda: but(probe_penalty=tuple(answer(0.05, 0.04) for _ in range(3)))),
    (34, False, lambda: but(IDLE, probe_grammar=tuple(answer(0.06, t)
                                                      for t in (0.05, 0.05, 0.01)))),
    # One late token while a long prompt is computed in pieces.
    (18, False, lambda: but(probe_stream=stream([0.01] * 50 + [0.16] + [0.01] * 40))),
    # The machine was slow in one of the long prompts; or fast in one of the medium ones.
    (5, False, lambda: but(probe_long=(answer(5.0, n=4, prompt=2000),
                                       answer(1.1, n=4, prompt=2000)))),
    (5, False, lambda: but(probe_long=(answer(4.0, n=4, prompt=2000),) * 2,
                           probe_medium=tuple(answer(t, n=4, prompt=500) for t in (0.3, 0.6)))),
    # Saturated: requests wait, and those that run are slow.
    (11, True, lambda: but(histograms={"ttft": times(14.0, of=80), "queue_time": times(13.0, of=80),
                                       "tpot": times(0.137, of=80)})),
    # The same twelve, counted between two steps.
    (30, False, lambda: but(levels={"running": (2.0, 2.0, 0.0), "waiting": (10.0, 10.0, 12.0)})),
    # What is reserved and not used is no loss where there is memory enough.
    (29, False, lambda: but(config={"context_tokens": 131_072, "reserves_context": True}, gpus=())),
    # The engine's own count says that it is the masks, though single answers vary.
    (34, True, lambda: but(IDLE, probe_deltas={"grammar_s": 0.4, "generation_tokens": 1e6},
                           probe_grammar=tuple(answer(0.06, t) for t in (0.0098, 0.013, 0.014)))),
    (34, False, lambda: but(IDLE, probe_grammar=tuple(answer(0.06, t)
                                                      for t in (0.0098, 0.013, 0.014)))),
    (34, True, lambda: but(probe_skipped={"grammar": "refused"}, probe_grammar=(),
                           probe_grammar_small=PROBE.grammar)),
    (34, False, lambda: but(probe_skipped={"grammar": "refused"}, probe_grammar=())),
    (34, True, lambda: but(deltas={"grammar_s": 30.0})),
    (34, False, lambda: but(deltas={"grammar_s": 5.0})),
    (34, True, lambda: but(IDLE, probe_penalty=tuple(answer(0.05, 0.04) for _ in range(3)))),
    (34, True, lambda: but(IDLE, probe_grammar=tuple(answer(1.5, 0.011) for _ in range(3)))),
    (40, False, lambda: but(probe_stream=stream([0.01] * 30 + [0.02] * 15), probe_intruder=None,
                            probe_intruder_at_s=None)),
    (38, True, lambda: queued(0, 3, 0.0)),
    (38, False, lambda: but(engine=_engine("headrace", "Headrace"),
                            config={"kv_tokens": 4096, "context_tokens": 8192})),
]  # fmt: skip
