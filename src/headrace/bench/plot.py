"""Pictures for a terminal: one line of blocks each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.bench.series import at_once, binned, first_tokens, token_rates
from headrace.bench.summary import Summary

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 60


def bars(values: Sequence[float]) -> str:
    """From 0 to the largest value."""
    most = max(values, default=0.0)
    if most <= 0:
        return _BLOCKS[0] * len(values)
    last = len(_BLOCKS) - 1
    return "".join(_BLOCKS[min(last, round(value / most * last))] for value in values)


def lines(summary: Summary) -> Iterator[str]:
    if not summary.good:
        return
    rows = (
        ("tokens/s", [y for _, y in token_rates(summary, _WIDTH)], "{:,.0f}"),
        ("at once", binned(at_once(summary), _WIDTH), "{:.0f}"),
        ("TTFT", binned(first_tokens(summary), _WIDTH), "{:.3g} s"),
    )
    for name, values, shown in rows:
        if values:
            yield f"{name:<13}{bars(values)}  up to {shown.format(max(values))}"
