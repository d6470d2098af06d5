"""A fit as lines for a person, within 100 columns: the ledger with its formulas, and the answers.

Writes what others computed. Knows no GPU table and no files.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from headrace.core.sizes import show_bytes
from headrace.models.layers import CompressedSpec, HeadsSpec, LatentSpec, RecurrentSpec
from headrace.models.spec import ModelSpec
from headrace.models.stages import Stage
from headrace.plan.fit import Fit
from headrace.plan.fit_changes import Change
from headrace.plan.fit_engines import EngineAnswer
from headrace.plan.fit_work import Floors

WIDTH = 100
_NAME, _SIZE = 14, 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that `headrace fit` says."""

    model: str
    source: str
    gpu: str
    gpus: int
    replicas: int
    share: float | None  # of the GPU's memory; None: the budget was given in bytes
    fit: Fit
    floors: Floors | None  # None: bandwidth or rate are not known
    rate: str  # the type whose rate the floors use
    bandwidth_bytes_s: float | None
    flops_s: float | None
    others_bytes: int  # keys and values of a sequence as engines with a pool per kind keep them
    changes: tuple[Change, ...]
    engines: tuple[EngineAnswer, ...]
    notes: tuple[str, ...]


def report_lines(report: Report, *, explain: bool) -> list[str]:
    lines = [*_wrapped(_verdict(report)), ""]
    lines += ledger_lines(report.fit, report.share)
    lines += ["", *_answers(report)]
    if report.changes:
        lines += ["", "what would fit, the smallest change first"]
        lines += _change_lines(report.changes)
    if report.engines:
        lines += ["", "what engines do with it as asked for"]
        for answer in report.engines:
            lines += _wrapped(f"{answer.engine:<11}{answer.words} [{answer.source}]", 2, 13)
    if explain:
        lines += ["", "how each number is made", *_explained(report)]
    for note in report.notes:
        lines += _wrapped(f"note: {note}", 0, 6)
    return lines


def _verdict(report: Report) -> str:
    fit = report.fit
    where = f"{report.gpus} x {report.gpu}" if report.gpus > 1 else report.gpu
    verdict = (
        f"fits, with {show_bytes(fit.spare_bytes)} to spare"
        if fit.fits
        else f"does not fit: {show_bytes(-fit.spare_bytes)} too much"
    )
    each = " on each GPU" if fit.demand.tp > 1 else ""
    if fit.demand.stage is not None:
        each = f" on each GPU of stage {fit.demand.stage.number + 1}, the fullest"
    return (
        f"{report.model} in {_precision(fit)} on {where}, {fit.concurrency:,} x "
        f"{fit.context_tokens:,} tokens: {verdict}{each}"
    )


def _precision(fit: Fit) -> str:
    return fit.demand.weights.precision


def ledger_lines(fit: Fit, share: float | None) -> list[str]:
    """Each row of the ledger with what it is made of."""
    weights = fit.demand.weights
    parameters = f"{fit.demand.spec.parameters / 1e9:,.2f} billion parameters"
    if fit.demand.tp > 1:
        parameters = f"one of {fit.demand.tp} parts of {parameters}"
    words = f"{parameters} in {_precision(fit)}"
    if fit.demand.stage is not None:
        words = f"{fit.demand.stage}; {'' if fit.demand.tp > 1 else 'of '}{words}"
    rows = [("weights", weights.bytes, words)]
    rows += [(f"  {name}", size, _part_words(fit, name, size)) for name, size in weights.parts]
    for name, size, words in fit.ledger.rows()[1:]:
        if name == "KV pool":
            words = f"{fit.concurrency:,} x {fit.context_tokens:,} tokens, {words}"
        elif name == "runtime":
            words = fit.demand.runtime_words
        rows.append((name, size, words))
    if fit.state_bytes:
        each = fit.demand.state_bytes
        words = f"{fit.concurrency:,} x {each:,} bytes of recurrent state"
        rows.append(("state", fit.state_bytes, words))
    if fit.draft_bytes:
        rows.append(("draft model", fit.draft_bytes, "its weights, keys and values"))
    rows.append(("total", fit.total_bytes, f"of {show_bytes(fit.budget_bytes)} that may be used"))
    outside = f"of {show_bytes(fit.memory_bytes)}, not to be used"
    if share is not None:
        outside += f": --gpu-memory {share:g}"
    rows.append(("head-room", fit.headroom_bytes, outside))
    lines = []
    for name, size, words in rows:
        start = f"{name:<{_NAME}}{show_bytes(size):>{_SIZE}}   "
        lines += textwrap.wrap(
            words or "", WIDTH, initial_indent=start, subsequent_indent=" " * len(start)
        ) or [start.rstrip()]
    return lines + _wrapped(f"a token's KV: {kv_formula(fit)}", 0, 2)


def _part_words(fit: Fit, name: str, size: int) -> str:
    values = fit.demand.work.part_values.get(name)
    if not values:
        return ""
    return f"{values:,.0f} values x {8 * size / values:.4g} bits"


def kv_formula(fit: Fit) -> str:
    """By kinds of layers, on one GPU."""
    held = fit.demand.held_tokens(fit.context_tokens)
    each = fit.ledger.kv.bytes_per_token
    kinds = ", ".join(_kinds(fit.demand.here))
    each_size = fit.demand.sequence_bytes(held)
    split = f", on each of {fit.demand.tp} GPUs" if fit.demand.tp > 1 else ""
    return (
        f"{kinds}; {fit.demand.kv_dtype}{split}: {each:,} bytes; a sequence of {held:,}: "
        f"{show_bytes(each_size)}"
    )


def _kinds(spec: ModelSpec) -> Iterator[str]:
    counts: dict[str, int] = {}
    for layer in spec.layer_specs:
        counts[_kind(layer.mixer)] = counts.get(_kind(layer.mixer), 0) + 1
    for kind, count in counts.items():
        if kind:
            yield f"{count} layers x {kind}"


def _kind(mixer: object) -> str:
    match mixer:
        case HeadsSpec() if not mixer.own_kv:
            return ""
        case HeadsSpec():
            window = f" (window {mixer.window:,})" if mixer.window else ""
            if mixer.key_dim == mixer.value_dim:
                return f"2 x {mixer.kv_heads} KV heads x {mixer.key_dim}{window}"
            return f"{mixer.kv_heads} KV heads x ({mixer.key_dim} + {mixer.value_dim}){window}"
        case LatentSpec():
            return f"a latent of {mixer.kv_rank} + {mixer.rope_dim}"
        case CompressedSpec():
            return f"{mixer.head_dim} of one token in {mixer.ratio or 'a window'}"
        case RecurrentSpec():
            return "recurrent state, no KV"
        case _:
            return ""


def _answers(report: Report) -> list[str]:
    fit, floors = report.fit, report.floors
    rows = [
        (
            "longest context",
            f"{fit.longest_context:,} tokens for {_count(fit.concurrency, 'sequence')} "
            f"(the model's: {fit.demand.spec.context_tokens:,})",
        ),
        ("most sequences", f"{fit.most_sequences:,} of {fit.context_tokens:,} tokens, bound by KV"),
    ]
    if floors is not None:
        rows[1] = (
            "most sequences",
            f"{fit.most_sequences:,} of {fit.context_tokens:,} tokens, bound by KV; from "
            f"{floors.ridge_sequences:,} on, products take longer than reading the weights",
        )
        together = ""
        if fit.concurrency > 1:
            per_s = fit.concurrency / floors.tpot_s
            together = f", {_time(floors.tpot_s)} for {fit.concurrency:,} ({per_s:,.0f} tokens/s)"
        bound = "bandwidth" if floors.is_bandwidth else "products"
        rows += [
            (
                "TTFT, at least",
                f"{_time(floors.ttft_s)} for a prompt of {floors.prompt_tokens:,} tokens",
            ),
            (
                "TPOT, at least",
                f"{_time(floors.one_tpot_s)} for one sequence ({1 / floors.one_tpot_s:,.1f} "
                f"tokens/s){together}; bound by {bound}",
            ),
        ]
    else:
        rows.append(("TTFT, TPOT", "not known: this machine's bandwidth and rate are not"))
    shares = fit.demand.work.shares
    rows.append(
        (
            "products",
            f"MLP {shares['mlp']:.1%}, attention {shares['attention']:.1%}, output layer "
            f"{shares['output']:.1%}",
        )
    )
    if report.others_bytes != fit.demand.sequence_bytes(fit.demand.held_tokens(fit.context_tokens)):
        rows.append(
            (
                "KV elsewhere",
                f"{show_bytes(report.others_bytes)} a sequence in engines that keep only a layer's "
                "window (vLLM, SGLang, llama.cpp)",
            )
        )
    lines = []
    for name, words in rows:
        lines += _wrapped(f"{name:<17}{words}", 0, 17)
    return lines


def _change_lines(changes: Iterable[Change]) -> list[str]:
    width = max(len(change.flags) for change in changes) + 2
    lines = []
    for change in changes:
        words = f"{change.words}; {show_bytes(change.spare_bytes)} to spare"
        lines += _wrapped(f"{change.flags:<{width}}{words}", 2, 2 + width)
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _explained(report: Report) -> list[str]:
    lines: list[str] = []
    for formula in formulas(report):
        lines += _wrapped(formula, 2, 4)
    return lines


def formulas(report: Report) -> list[str]:
    """Every number of the answers, with the numbers that it is made of."""
    fit, floors, work = report.fit, report.floors, report.fit.demand.work
    held = fit.demand.held_tokens(fit.context_tokens)
    ledger = fit.ledger
    found = [
        "weights = "
        + " + ".join(f"{name} {size:,}" for name, size in fit.demand.weights.parts)
        + f" = {fit.demand.weights.bytes:,} bytes",
        f"KV pool = {_count(fit.concurrency, 'sequence')} x {held:,} tokens "
        f"({held // ledger.block_tokens:,} blocks of {ledger.block_tokens}) x "
        f"{ledger.kv.bytes_per_token:,} bytes = {ledger.kv_pool_bytes:,} bytes",
        f"activations = buffers, workspaces and tables of a step of {ledger.max_batch_tokens:,} "
        f"tokens and {fit.demand.max_sequences:,} sequences = {ledger.activations_bytes:,} bytes",
        f"total = weights {ledger.weights_bytes:,} + KV {ledger.kv_pool_bytes:,} + activations "
        f"{ledger.activations_bytes:,} + graphs {ledger.graphs_bytes:,} + runtime "
        f"{ledger.runtime_bytes:,} + state {fit.state_bytes:,} + draft {fit.draft_bytes:,} = "
        f"{fit.total_bytes:,} bytes",
        f"budget = {fit.memory_bytes:,} - head-room {fit.headroom_bytes:,} = "
        f"{fit.budget_bytes:,} bytes",
        f"most sequences = (budget {fit.budget_bytes:,} - all but sequences "
        f"{fit.demand.fixed_bytes(fit.context_tokens):,}) / "
        f"{fit.demand.each_bytes(fit.context_tokens):,} bytes each = {fit.most_sequences:,}",
    ]
    if floors is None or not report.bandwidth_bytes_s or not report.flops_s:
        return found
    bandwidth, rate = report.bandwidth_bytes_s, report.flops_s
    prompt = work.prompt_flops(floors.prompt_tokens)
    times = f" x {fit.demand.stages} stages" if fit.demand.stages > 1 else ""
    stages = f" / {fit.demand.stages} stages" if fit.demand.stages > 1 else ""
    one_bytes = sum(
        rank.sequence_bytes(held) + rank.state_bytes for rank in fit.ranks or (fit.demand,)
    )
    return [
        *found,
        f"TTFT >= {prompt:.4g} operations / {rate:.4g} ({report.rate}){stages} = "
        f"{prompt / rate / fit.demand.stages:.4g} s, "
        f"or the weights' {work.read_bytes:.4g} bytes / {bandwidth:.4g} = "
        f"{work.read_bytes / bandwidth:.4g} s",
        f"TPOT of one >= ({work.token_read_bytes:.4g} bytes of weights + KV and state "
        f"{one_bytes:.4g}) / {bandwidth:.4g} bytes/s = "
        f"{floors.one_tpot_s:.4g} s",
        f"bound by products from ({work.read_bytes:.4g} bytes / {bandwidth:.4g}) x {rate:.4g} / "
        f"{work.token_flops:.4g} operations a token{times} = {floors.ridge_sequences:,} sequences "
        "on",
    ]


def report_facts(report: Report) -> dict[str, object]:
    """As JSON values; docs/fit.md describes each."""
    fit, floors = report.fit, report.floors
    return {
        "model": report.model,
        "source": report.source,
        "parameters": fit.demand.spec.parameters,
        "active_parameters": fit.demand.spec.active_parameters,
        "precision": fit.demand.weights.precision,
        "kv_dtype": fit.demand.kv_dtype,
        "gpu": report.gpu,
        "gpus": report.gpus,
        "tp": fit.demand.tp,
        "pp": fit.demand.stages,
        "stage": _stage_facts(fit.demand.stage),
        "replicas": report.replicas,
        "context_tokens": fit.context_tokens,
        "concurrency": fit.concurrency,
        "fits": fit.fits,
        "spare_bytes": fit.spare_bytes,
        "memory_bytes": fit.memory_bytes,
        "budget_bytes": fit.budget_bytes,
        "headroom_bytes": fit.headroom_bytes,
        "total_bytes": fit.total_bytes,
        "ledger": {
            "weights_bytes": fit.ledger.weights_bytes,
            "weights": dict(fit.demand.weights.parts),
            "weights_are_exact": fit.demand.weights.is_exact,
            "kv_pool_bytes": fit.ledger.kv_pool_bytes,
            "kv_bytes_per_token": fit.ledger.kv.bytes_per_token,
            "kv_sequence_bytes_elsewhere": report.others_bytes,
            "state_bytes": fit.state_bytes,
            "activations_bytes": fit.ledger.activations_bytes,
            "graphs_bytes": fit.ledger.graphs_bytes,
            "runtime_bytes": fit.ledger.runtime_bytes,
            "draft_bytes": fit.draft_bytes,
            "block_tokens": fit.ledger.block_tokens,
            "max_batch_tokens": fit.ledger.max_batch_tokens,
            "max_sequences": fit.demand.max_sequences,
        },
        "longest_context_tokens": fit.longest_context,
        "most_sequences": fit.most_sequences,
        "floors": None
        if floors is None
        else {
            "ttft_s": floors.ttft_s,
            "prompt_tokens": floors.prompt_tokens,
            "tpot_s": floors.tpot_s,
            "tpot_one_s": floors.one_tpot_s,
            "tpot_bound": "bandwidth" if floors.is_bandwidth else "products",
            "ridge_sequences": floors.ridge_sequences,
            "rate": report.rate,
        },
        "shares": fit.demand.work.shares,
        "changes": [
            {"flags": c.flags, "words": c.words, "spare_bytes": c.spare_bytes}
            for c in report.changes
        ],
        "engines": [
            {
                "engine": a.engine,
                "does": a.does,
                "words": a.words,
                "source": a.source,
                "layers_on_gpu": a.layers_on_gpu,
                "tokens_per_s": a.tokens_per_s,
            }
            for a in report.engines
        ],
        "formulas": formulas(report),
        "notes": list(report.notes),
    }


def _stage_facts(stage: Stage | None) -> dict[str, int] | None:
    """Of the fullest; layers from 0."""
    if stage is None:
        return None
    return {"number": stage.number, "first_layer": stage.first, "layers": stage.layers}


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:,.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.0f} µs"


def _wrapped(text: str, first: int = 0, then: int = 2) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=" " * first, subsequent_indent=" " * then,
        break_long_words=True, break_on_hyphens=False, drop_whitespace=True,
    )  # fmt: skip


def too_wide(lines: Iterable[str]) -> list[str]:
    return [line for line in lines if len(line) > WIDTH]
