"""How long a step takes on GPUs: from what it must move and compute, and how well an engine does.

A part of a step (the products of attention, of MLPs, of experts, of the output layer, reading keys
and values) can take no less than its bytes at the memory's bandwidth and its operations at the
peak rate. Each is divided by an efficiency below 1, and the two are joined so that the larger
counts fully and the smaller a little where they are close: (a^3 + b^3)^(1/3), never below the
larger. A step with prompts and decoding sequences in it reads its weights once. Added: gaps
between kernels, exchanges between GPUs, the host.

Efficiencies come from engines.toml (engines.py) or from calibration. Knows no queue and no
scheduler: a plan goes in, seconds come out. Everything that does not depend on the plan is
multiplied out beforehand, so that a call takes some microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.errors import ConfigError
from headrace.core.step import StepPlan
from headrace.hardware.gpus import Gpu
from headrace.simulate.cost import Cost
from headrace.simulate.step_work import StepWork

_SHARPNESS = 3
_ROOT = 1 / _SHARPNESS
_NO_LIMIT = float("inf")
# Scans over a recurrent state are short and sequential: they reach a tenth of the products' rate.
_STATE_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiencies:
    """Shares of a peak (at most 1), and times that no peak explains."""

    memory: float = 1.0  # reading dense weights
    expert_memory: float = 1.0  # reading experts
    kv_memory: float = 1.0  # reading keys and values
    compute: float = 1.0  # dense products
    expert_compute: float = 1.0  # grouped products
    attention_compute: float = 1.0  # queries x keys
    link: float = 1.0
    spread: float = 1.0  # how evenly tokens choose experts: 1 is evenly, all tokens apart
    kernel_s: float = 0.0  # between two kernels
    expert_kernel_s: float = 0.0  # between two kernels around experts
    exchange_s: float = 0.0  # a round of an exchange
    host_s: float = 0.0  # a step
    row_s: float = 0.0  # a sequence in a step


IDEAL = Efficiencies()  # the floor: nothing is faster


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """What the GPU can do at best, for the types that a model is kept in."""

    memory_bytes_s: float
    attention_flops_s: float
    mlp_flops_s: float
    expert_flops_s: float
    plain_flops_s: float  # 16 bits: output layer, queries x keys
    link_bytes_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds for each unit of a step's load."""

    attention_s: float  # a step, at least
    attention_token_s: float
    mlp_s: float
    mlp_token_s: float
    expert_s: float  # all experts of this GPU, each read once
    expert_token_s: float
    chosen: float  # share of the experts that one token chooses
    spread: float
    output_s: float
    output_row_s: float
    span_limits: tuple[float, ...]
    read_s: tuple[float, ...]  # a context token, by span
    decode_s: tuple[float, ...]
    pair_s: tuple[float, ...]
    state_s: float  # a sequence
    fixed_s: float  # a step: kernels, exchanges, hops, host
    token_s: float  # a token: exchanges, hops, states
    row_s: float
    copies: int

    def step_s(
        self,
        tokens: float,
        rows: float,
        *,
        decoding: Sequence[float],
        reading: Sequence[float],
        pairs: Sequence[float],
    ) -> float:
        """Seconds of a step of `tokens` of all copies and `rows` sequences. By span: context tokens
        of sequences that compute one token, those of longer chunks, and pairs of a query and a
        key in such chunks."""
        copies = self.copies
        here = tokens / copies
        seconds = (
            self.fixed_s
            + self.token_s * tokens
            + self.row_s * rows
            + _joined(self.attention_s, self.attention_token_s * here)
            + _joined(self.mlp_s, self.mlp_token_s * tokens)
            + _joined(self.output_s, self.output_row_s * rows)
            + _joined(
                self.expert_s * (1 - (1 - self.chosen) ** (tokens * self.spread)),
                self.expert_token_s * tokens,
            )
        )
        read, decode, paired = self.state_s * rows, 0.0, 0.0
        for at, read_s in enumerate(self.read_s):
            read = read + read_s * (decoding[at] + reading[at])
            decode = decode + self.decode_s[at] * decoding[at]
            paired = paired + self.pair_s[at] * pairs[at]
        return seconds + (_joined(read, decode) + paired) / copies


def _joined(bytes_s: float, flops_s: float) -> float:
    total: float = (bytes_s**_SHARPNESS + flops_s**_SHARPNESS) ** _ROOT
    return total


def peaks_of(gpu: Gpu, work: StepWork) -> Peaks:
    """Refuses a GPU whose bandwidth or rates are not known: there is nothing to divide by."""
    plain = gpu.flops.get("bf16") or gpu.flops.get("fp16") or gpu.flops.get("fp32")
    if gpu.bandwidth_bytes_s is None or plain is None:
        raise ConfigError(
            f"Bandwidth or 16-bit rate of {gpu.label} is not known, so that a step can't be timed.",
            "Use a GPU that `headrace gpus` shows with both, or measure with `headrace calibrate`.",
            param="gpu",
        )
    link = gpu.link_bytes_s or gpu.pcie_bytes_s
    if work.width * (work.hops + 1) > 1 and link is None:
        raise ConfigError(
            f"How fast several {gpu.label} exchange data is not known.",
            "Plan with one of them.",
            param="gpu",
        )

    def rate(computes: str) -> float:
        # A type without an own rate is widened to 16 bits before it is multiplied.
        return gpu.flops.get(computes, plain)

    return Peaks(
        memory_bytes_s=gpu.bandwidth_bytes_s,
        attention_flops_s=rate(work.attention_computes),
        mlp_flops_s=rate(work.mlp_computes),
        expert_flops_s=rate(work.expert_computes),
        plain_flops_s=plain,
        link_bytes_s=link or 1.0,
    )


def step_times(work: StepWork, peaks: Peaks, share: Efficiencies) -> StepTimes:
    """Work divided by what the GPU does of it in a second."""
    memory = peaks.memory_bytes_s * share.memory
    kv_memory = peaks.memory_bytes_s * share.kv_memory
    keys = peaks.plain_flops_s * share.attention_compute
    link = peaks.link_bytes_s * share.link
    groups = work.expert_groups
    return StepTimes(
        attention_s=work.attention_bytes / memory,
        attention_token_s=work.attention_flops / (peaks.attention_flops_s * share.compute),
        mlp_s=work.mlp_bytes / memory,
        mlp_token_s=work.mlp_flops / (peaks.mlp_flops_s * share.compute),
        expert_s=work.expert_bytes
        * (work.experts / groups)
        / (peaks.memory_bytes_s * share.expert_memory),
        expert_token_s=work.expert_flops
        * (work.experts_active / groups)
        / (peaks.expert_flops_s * share.expert_compute),
        chosen=work.experts_active / work.experts,
        spread=share.spread,
        output_s=work.output_bytes / memory,
        output_row_s=work.output_flops / (peaks.plain_flops_s * share.compute),
        span_limits=tuple(span.limit for span in work.spans),
        read_s=tuple(span.read_bytes / kv_memory for span in work.spans),
        decode_s=tuple(span.decode_flops / keys for span in work.spans),
        pair_s=tuple(span.pair_flops / keys for span in work.spans),
        state_s=work.state_bytes / kv_memory,
        fixed_s=share.host_s
        + share.kernel_s * work.kernels
        + share.expert_kernel_s * work.expert_kernels
        + share.exchange_s * (work.exchange_rounds + work.hops),
        token_s=(work.exchanges * work.exchange_bytes + work.hops * work.hop_bytes / work.copies)
        / link
        + work.state_flops / (peaks.plain_flops_s * share.compute * _STATE_SHARE * work.copies),
        row_s=share.row_s,
        copies=work.copies,
    )


def roofline_cost(times: StepTimes) -> Cost:
    """The cost of a plan. Rows of several tokens are chunks of prompts; the others decode.

    The same sum as `StepTimes.step_s`, written out for plain decoding steps, of which a simulation
    prices millions."""
    limits = times.span_limits
    if limits != (_NO_LIMIT,):
        return lambda plan: _mixed_s(times, plan)
    copies = times.copies
    attention, attention_token_s = times.attention_s**_SHARPNESS, times.attention_token_s / copies
    mlp, mlp_token_s = times.mlp_s**_SHARPNESS, times.mlp_token_s
    output, output_row_s = times.output_s**_SHARPNESS, times.output_row_s
    expert_s, expert_token_s = times.expert_s, times.expert_token_s
    missed = (1 - times.chosen) ** times.spread
    read_s, decode_s = times.read_s[0] / copies, times.decode_s[0] / copies
    state_s = times.state_s / copies
    fixed_s, one_s = times.fixed_s, times.token_s + times.row_s

    def cost(plan: StepPlan) -> float:
        starts = plan.starts
        rows = len(starts)
        if sum(plan.counts) != rows:
            return _mixed_s(times, plan)
        context = sum(starts) + rows  # every row sees its start and itself
        seconds: float = (
            fixed_s
            + one_s * rows
            + (attention + (attention_token_s * rows) ** _SHARPNESS) ** _ROOT
            + (mlp + (mlp_token_s * rows) ** _SHARPNESS) ** _ROOT
            + (output + (output_row_s * rows) ** _SHARPNESS) ** _ROOT
            + (
                (read_s * context + state_s * rows) ** _SHARPNESS
                + (decode_s * context) ** _SHARPNESS
            )
            ** _ROOT
        )
        if expert_s:
            seconds += _joined(expert_s * (1 - missed**rows), expert_token_s * rows)
        return seconds

    return cost


def _mixed_s(times: StepTimes, plan: StepPlan) -> float:
    counts, starts = plan.counts, plan.starts
    chunks = [(start, count) for start, count in zip(starts, counts, strict=True) if count != 1]
    contexts = starts
    if chunks:
        contexts = [start for start, count in zip(starts, counts, strict=True) if count == 1]
    decoding, reading, pairs = [], [], []
    for limit in times.span_limits:
        if limit == _NO_LIMIT:
            decoding.append(float(sum(contexts) + len(contexts)))
        else:
            last = limit - 1
            decoding.append(sum([start + 1 if start < last else limit for start in contexts]))
        reading.append(sum([min(start, limit) + count for start, count in chunks]))
        pairs.append(sum([_pairs(start, count, limit) for start, count in chunks]))
    return times.step_s(sum(counts), len(counts), decoding=decoding, reading=reading, pairs=pairs)


def _pairs(start: int, tokens: int, limit: float) -> float:
    """Token i of a chunk sees start + i + 1 keys, or `limit` of them."""
    last = start + tokens
    if last <= limit:
        return tokens * (start + 1 + last) / 2
    growing = max(0.0, limit - start - 1)  # tokens that see fewer
    return growing * (start + limit) / 2 + (tokens - growing) * limit
