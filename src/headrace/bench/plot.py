"""Pictures for a terminal: one line of blocks each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.bench.series import at_once, binned, first_tokens, time_means, token_rates
from headrace.bench.summary import Summary

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 60


def bars(values: Sequence[float | None]) -> str:
    """From 0 to the largest value; empty where there is none."""
    most = _most(values) or 1.0
    last = len(_BLOCKS) - 1
    return "".join(
        " " if value is None else _BLOCKS[min(last, round(value / most * last))] for value in values
    )


def _most(values: Sequence[float | None]) -> float:
    return max((value for value in values if value is not None), default=0.0)


def lines(summary: Summary) -> Iterator[str]:
    if not summary.good:
        return
    rows: tuple[tuple[str, Sequence[float | None], str], ...] = (
        ("tokens/s", [y for _, y in token_rates(summary, _WIDTH)], "{:,.0f}"),
        ("at once", [y for _, y in time_means(at_once(summary), _WIDTH)], "{:.0f}"),
        ("TTFT", binned(first_tokens(summary), _WIDTH), "{:.3g} s"),
    )
    for name, values, shown in rows:
        if values:
            yield f"{name:<13}{bars(values)}  up to {shown.format(_most(values))}"
