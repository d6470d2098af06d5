"""How much of a GPU's peak a run used, where model and GPU are known: MFU and bandwidth use.

Operations follow from the tokens that were computed: prompts without what came from the prefix
cache, and every token of the answers at its own context. Bytes need the number of steps, which a
client does not see: it is estimated as the time in which tokens came, divided by the mean gap
between chunks, so that bandwidth use is an estimate. Peaks are the data sheet's, dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.backends.demands import Setup, demand_on_gpu
from headrace.bench.record import Record
from headrace.bench.summary import Summary
from headrace.core.errors import ConfigError
from headrace.hardware.gpus import Gpu
from headrace.models.precision import PRECISIONS
from headrace.models.spec import ModelSpec

_SMS = 108  # where the table does not have them; only buffers depend on it


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    mfu: float
    bandwidth_use: float | None  # None: no answer had two chunks
    flops: float
    steps: float | None
    source: str


def peaks_of(gpu: Gpu, precision: str | None) -> tuple[float, float]:
    """Operations and bytes a second. Also asked before a run, so that none is measured in vain."""
    if precision is not None and precision not in PRECISIONS:
        raise ConfigError(
            f"--gpu-precision is {precision!r}; expected one of {', '.join(PRECISIONS)}."
        )
    peak = gpu.flops.get("bf16") or gpu.flops.get("fp16")
    if peak is None or gpu.bandwidth_bytes_s is None:
        raise ConfigError(f"{gpu.name} has no peak rate or bandwidth in our table.", param="gpu")
    return peak, gpu.bandwidth_bytes_s


def efficiency(
    summary: Summary, spec: ModelSpec, gpu: Gpu, *, precision: str, gpus: int
) -> Efficiency:
    """`gpus` share the model by tensor parallelism."""
    peak, bandwidth = peaks_of(gpu, precision)
    demand = demand_on_gpu(
        spec, Setup(precision=precision, tp=gpus), multiprocessors=gpu.sms or _SMS
    )
    flops, kv_bytes = 0.0, 0.0
    for one in summary.good:
        cached = min(one.answer.cached_tokens or 0, one.prompt_tokens - 1)
        flops += demand.work.prompt_flops(one.prompt_tokens)
        flops -= demand.work.prompt_flops(cached) if cached > 0 else 0.0
        later = one.tokens - 1
        middle = one.prompt_tokens + max(1, later // 2)  # key_flops is linear in the context
        flops += later * (demand.work.token_flops + demand.work.key_flops(middle))
        kv_bytes += later * demand.sequence_bytes(demand.held_tokens(middle))
    wall_s = summary.wall_s
    steps = _steps(summary.good)
    use = None
    if steps is not None and wall_s:
        moved = steps * demand.work.read_bytes + kv_bytes
        use = moved / wall_s / bandwidth
    return Efficiency(
        mfu=flops / wall_s / peak if wall_s else 0.0,
        bandwidth_use=use,
        flops=flops,
        steps=steps,
        source=f"{precision} on {gpus} x {gpu.name}, bf16 peak {peak / 1e12:,.0f} TFLOP/s, "
        f"{bandwidth / 1e9:,.0f} GB/s",
    )


def _steps(records: Sequence[Record]) -> float | None:
    """The time in which any answer was coming, divided by the mean gap between chunks."""
    spans = sorted((one.first_s, one.last_s) for one in records if one.last_s > one.first_s)
    gaps = [gap for one in records for gap in one.chunk_gaps_s]
    if not spans or not sum(gaps):
        return None
    covered, until_s = 0.0, spans[0][0]
    for first_s, last_s in spans:
        covered += max(0.0, last_s - max(first_s, until_s))
        until_s = max(until_s, last_s)
    return covered / (sum(gaps) / len(gaps))
