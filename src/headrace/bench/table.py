"""A run for a person: what was asked, what came, how sure that is, and whether to believe it."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import shorten

from headrace.bench.interval import LEAST_GROUPS, least_count
from headrace.bench.record import CountedBy
from headrace.bench.summary import SHARES, Spread, Summary

_WIDTH = 100
ROWS = (
    ("ttft", "TTFT"),
    ("visible", "first visible text"),
    ("tpot", "TPOT"),
    ("itl", "gap of a token"),
    ("e2el", "whole answer"),
    ("service_ttft", "TTFT, from sending"),
    ("service_e2el", "answer, from sending"),
)


def lines(summary: Summary) -> Iterator[str]:
    """Within 100 columns."""
    good, every = len(summary.good), len(summary.records)
    if not summary.health.is_valid:
        yield "INVALID      the client was not fit to measure:"
        for wrong in summary.health.wrong:
            yield f"             {wrong}"
    yield f"requests     {good} of {every} whole, {summary.wall_s:.1f} s, " + (
        f"at most {summary.most_at_once} at once"
    )
    if summary.failures:
        shown = ", ".join(f"{count} {cause}" for cause, count in summary.failures.items())
        yield f"failed       {shown}"
        for cause, said in summary.failures_said.items():
            yield f"             {shorten(f'{cause}: {said}', _WIDTH - 13, placeholder='…')}"
    if good:
        yield f"throughput   {_rate(summary)}"
        yield (
            f"             {summary.requests_s:.3g} requests/s, {summary.total_tokens_s:,.1f} "
            "tokens/s with prompts"
        )
        yield f"tokens       {_lengths(summary)}"
        yield ""
        yield from _times(summary)
        yield ""
    if summary.slo is not None and summary.records:
        word = "met" if summary.is_met else "not met"
        yield f"objective    {summary.slo}: {word}"
        yield f"within it    {summary.met_share:.1%}, goodput {summary.goodput_s:.3g} requests/s"
    health = summary.health
    yield (
        f"client       {'fit' if health.is_valid else 'NOT FIT'}: event loop late by "
        f"{health.lag_p99_s * 1e3:.2f} ms, requests by {health.late_p99_s * 1e3:.2f} ms (P99), "
        f"{health.cpu_share:.0%} of a core"
    )
    for note in summary.notes:
        yield f"note         {note}"


def _rate(summary: Summary) -> str:
    found = summary.output_rate
    interval = "" if found is None else f" (95%: {found.low:,.1f} to {found.high:,.1f})"
    return f"{summary.output_tokens_s:,.1f} output tokens/s{interval}"


def _lengths(summary: Summary) -> str:
    good = len(summary.good)
    prompt, answer = summary.input_tokens / good, summary.output_tokens / good
    text = f"{prompt:,.0f} a prompt, {answer:,.0f} an answer"
    by = summary.counted_by
    if set(by) == {CountedBy.USAGE}:
        text += ", by the endpoint's usage"
    elif CountedBy.CHUNKS in by:
        text += f"; {by[CountedBy.CHUNKS]} answers without usage: chunks are counted as tokens"
    else:
        text += ", by the tokenizer"
    if (cached := summary.cached_share) is not None:
        text += f"; {cached:.0%} of prompts from its cache"
    if (disagreed := summary.disagreed) is not None and disagreed[0]:
        text += f"; usage and tokenizer disagree on {disagreed[0]} of {disagreed[1]}"
    return text


def _times(summary: Summary) -> Iterator[str]:
    heads = "".join(f"{f'p{share * 100:g} (95%)':>17}" for share in SHARES)
    yield f"{'ms':<21}{'mean':>9}{heads}"
    needed: dict[float, int] = {}  # answers, for what is refused
    for name, title in ROWS:
        spread = summary.spreads[name]
        if spread is None or (name == "visible" and not has_hidden_start(summary)):
            continue
        cells = "".join(f"{_cell(spread, share):>17}" for share in SHARES)
        for share, found in spread.percentiles.items():
            if found is None:
                least = least_count(share) if spread.groups is None else LEAST_GROUPS
                needed[share] = max(needed.get(share, 0), least)
        yield f"{title:<21}{shown_ms(spread.mean):>9}{cells}"
    if needed:
        shown = ", ".join(f"P{share * 100:g} {count}" for share, count in sorted(needed.items()))
        yield f"{'':<21}-: too few requests for it (needed: {shown})"


def has_hidden_start(summary: Summary) -> bool:
    """First visible text is a row of its own only where something came before it."""
    return any(one.visible_s != one.ttft_s for one in summary.good)


def _cell(spread: Spread, share: float) -> str:
    found = spread.percentiles[share]
    if found is None:
        return "-"
    return f"{shown_ms(found.value)} {shown_ms(found.low)}-{shown_ms(found.high)}"


def shown_ms(seconds: float) -> str:
    """Milliseconds with about three digits."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
