"""`headrace plan --explain`: every formula of the winner, with its numbers."""

from __future__ import annotations

import math
from textwrap import wrap

from headrace.cli.plan_text import WIDTH
from headrace.core.sizes import show_bytes
from headrace.hardware.this_machine import NAME
from headrace.search.answer import Row
from headrace.search.candidate import Candidate
from headrace.search.cost import HOURS_A_MONTH
from headrace.search.machine import Machines
from headrace.search.models import PlannedModel
from headrace.search.question import Question
from headrace.search.replica import Builder
from headrace.search.steady import Batch, Limits, most_requests


def work_lines(model: PlannedModel, question: Question) -> list[str]:
    """The work that no plan gets around: two operations for each parameter and token."""
    lengths, used = question.lengths, model.spec.active_parameters
    tokens = lengths.prompt_tokens + lengths.output_tokens
    flops = question.rate * tokens * 2 * used
    each = f"({lengths.prompt_tokens:,.0f} + {lengths.output_tokens:,.0f} tokens)"
    active = "active parameters" if used < model.spec.parameters else "parameters"
    return wrap(
        f"Work: {question.rate:g}/s x {each} x 2 x {used / 1e9:,.2f}B {active} = "
        + _show_flops(flops),
        WIDTH,
    )


def _show_flops(flops_s: float) -> str:
    if flops_s >= 1e15:
        return f"{flops_s / 1e15:,.3g} PFLOP/s"
    return f"{flops_s / 1e12:,.3g} TFLOP/s"


def explained(row: Row, builder: Builder, machines: Machines, question: Question) -> list[str]:
    one, lengths = row.candidate, question.lengths
    band = builder.band(one)
    built = builder.build(one, band.slow)
    demand = lengths.demand(prefix_cache=one.prefix_cache)
    limits = Limits(
        sequences=one.max_sequences,
        batch_tokens=one.batch_tokens,
        kv_tokens=built.kv_tokens,
        tpot_s=question.slo.tpot_s,
    )
    most = most_requests(demand, limits, built.step_s)
    alone = Batch(decodes=1.0, decode_context_tokens=lengths.decode_context_tokens)
    slow = row.trials[0]
    lines = [
        f"The first row, {row.label}, step by step:",
        *(_rented(one, machines, question) if one.gpu != NAME else []),
        f"KV for {built.kv_tokens:,} tokens",
        f"step times: x {band.slow:.2f} at the slow end ({band.source}); alone there: TPOT "
        f"{built.step_s(alone) * 1e3:.3g} ms, TTFT "
        f"{built.alone_ttft_s * band.first_slow * 1e3:.3g} ms",
    ]
    if most is not None:
        lines.append(
            f"bound of the steady state: {most.decodes:.0f} sequences in steps of "
            f"{most.step_s * 1e3:.3g} ms (limited by {most.limit}) are at most "
            f"{most.requests_s:.3g} requests/s a replica; "
            f"{question.rate:g} / {most.requests_s:.3g} = at least "
            f"{math.ceil(question.rate / most.requests_s - 1e-9)} replicas"
        )
    lines.append(
        f"simulated: {row.replicas} replicas with {slow.rate:.3g} requests/s each, "
        f"{slow.requests:,} requests from seed {slow.seed}: {slow.met_share:.1%} within the "
        f"objective, {slow.verdict}"
    )
    if row.usd_per_gpu_hour is not None and row.usd_month is not None:
        tokens = row.requests_s * row.tokens_per_request
        lines.append(
            f"cost: {row.gpus} GPUs x {HOURS_A_MONTH:g} hours x ${row.usd_per_gpu_hour:g} = "
            f"${row.usd_month:,.0f} a month; / ({tokens:,.0f} tokens/s x {HOURS_A_MONTH:g} x 3600) "
            f"x 1e6 = ${row.usd_million:.4f} a million"
        )
    return [piece for line in lines for piece in wrap(line, WIDTH, subsequent_indent="  ")]


def _rented(one: Candidate, machines: Machines, question: Question) -> list[str]:
    """What a data sheet and the ledger say about it."""
    part, lengths = machines.part(one), question.lengths
    sizes, floors = part.sizes, part.floors
    return [
        f"memory: {show_bytes(part.budget_bytes)} of a GPU may be used; weights "
        f"{show_bytes(sizes.demand.weights.bytes)}, with buffers {show_bytes(sizes.fixed_bytes)}; "
        f"a request of {lengths.longest_tokens:,} tokens {show_bytes(sizes.each_bytes)}",
        f"floors at the peak: TTFT {floors.ttft_s * 1e3:.3g} ms for {floors.prompt_tokens:,} "
        f"tokens, TPOT {floors.one_tpot_s * 1e3:.3g} ms alone",
    ]
