"""A run as one HTML file: tables and charts, nothing loaded from anywhere, dark and light."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from headrace.bench import series
from headrace.bench.charts import Band, Series, chart
from headrace.bench.interval import Estimate
from headrace.bench.summary import SHARES, Summary
from headrace.bench.sweep import Bracket
from headrace.bench.table import ROWS, has_hidden_start, shown_ms
from headrace.core.version import headrace_version

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --soft: #5d6b7a; --line: #d9e0e7;
  --page: #ffffff; --card: #f6f8fa; --bad: #b3261e; --good: #1b7a43;
  --t0: #1f6feb; --t1: #c2571a; --t2: #1b7a43; --t3: #8250df; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4eaf0; --soft: #9aa8b6; --line: #33404d;
  --page: #10161d; --card: #18212b; --bad: #ff8a80; --good: #5fd08f;
  --t0: #6cb0ff; --t1: #f0a35e; --t2: #5fd08f; --t3: #c79bff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 24px 18px 48px; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 4px; } h2 { font-size: 1.1rem; margin: 32px 0 8px; }
p { margin: 4px 0; } .soft { color: var(--soft); }
.note { border-left: 4px solid var(--bad); padding: 8px 12px; background: var(--card); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px;
  margin: 18px 0; padding: 0; }
.figures div { background: var(--card); border-radius: 8px; padding: 10px 12px; }
.figures dd { overflow-wrap: anywhere; }
.figures dt { color: var(--soft); font-size: .85rem; } .figures dd { margin: 0; font-size: 1.3rem; }
.figures dd small { display: block; color: var(--soft); font-size: .75rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: right; padding: 5px 7px; border-bottom: 1px solid var(--line);
  white-space: nowrap; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; } td small { color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr));
  gap: 16px; } figure { margin: 0; background: var(--card); border-radius: 8px; padding: 12px; }
figcaption { font-weight: 600; } figure ul { display: flex; gap: 16px; list-style: none;
  margin: 2px 0; padding: 0; font-size: .85rem; } figure li::before { content: "";
  display: inline-block; width: 10px; height: 10px; border-radius: 5px; margin-right: 5px;
  background: currentColor; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font-size: 11px; } svg .grid { stroke: var(--line); }
svg .line { fill: none; stroke: currentColor; stroke-width: 1.8; } svg .area { fill: currentColor;
  opacity: .15; } svg .dots { fill: currentColor; opacity: .65; } svg .band { fill: var(--t1);
  opacity: .2; }
.tone0 { color: var(--t0); } .tone1 { color: var(--t1); } .tone2 { color: var(--t2); }
.tone3 { color: var(--t3); }
"""


def page(
    summary: Summary,
    about: Mapping[str, object],
    *,
    title: str,
    date: str,
    bracket: Bracket | None = None,
) -> str:
    """`about`: what was asked for, by name."""
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(date)} · headrace {escape(headrace_version())}</p>',
        _warnings(summary),
        _figures(summary),
        "<h2>Latency</h2>",
        _times(summary),
        _sweep(bracket) if bracket is not None else "",
        "<h2>Over time</h2>",
        f'<div class="charts">{"".join(_charts(summary))}</div>',
        _failures(summary),
        "<h2>What was asked</h2>",
        _table(["", ""], [[name, str(value)] for name, value in about.items()]),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _warnings(summary: Summary) -> str:
    found = [f"Invalid: the client was not fit to measure: {w}." for w in summary.health.wrong]
    found += [f"{note[0].upper()}{note[1:]}." for note in summary.notes]
    return "".join(f'<p class="note" role="alert">{escape(line)}</p>' for line in found)


def _figures(summary: Summary) -> str:
    rate, health = summary.output_rate, summary.health
    cells = [
        ("Output", f"{summary.output_tokens_s:,.1f} tokens/s", _between(rate, 1.0)),
        ("Requests", f"{summary.requests_s:.3g} /s",
         f"{len(summary.good)} of {len(summary.records)} whole, {summary.wall_s:.1f} s"),
        ("At most at once", f"{summary.most_at_once}", ""),
        ("Client", "fit" if health.is_valid else "not fit",
         f"late by {health.late_p99_s * 1e3:.2f} ms (P99), {health.cpu_share:.0%} of a core"),
    ]  # fmt: skip
    if summary.slo is not None and summary.records:
        word = "met" if summary.is_met else "not met"
        cells.append(
            (f"Objective {word}", f"{summary.met_share:.1%}", str(summary.slo).replace(",", ", "))
        )
        cells.append(("Goodput", f"{summary.goodput_s:.3g} /s", ""))
    body = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for name, value, more in cells
    )
    return f'<dl class="figures">{body}</dl>'


def _between(found: Estimate | None, scale: float) -> str:
    if found is None:
        return ""
    return f"95%: {found.low * scale:,.1f} to {found.high * scale:,.1f}"


def _times(summary: Summary) -> str:
    rows = []
    for name, title in ROWS:
        spread = summary.spreads[name]
        if spread is None or (name == "visible" and not has_hidden_start(summary)):
            continue
        cells = [title, shown_ms(spread.mean)]
        for share in SHARES:
            found = spread.percentiles[share]
            cells.append("refused" if found is None else _cell(found))
        rows.append(cells)
    heads = ["ms", "mean", *(f"p{share * 100:g} (95%)" for share in SHARES)]
    return _table(heads, rows)


def _cell(found: Estimate) -> str:
    return f"{shown_ms(found.value)} ({shown_ms(found.low)} to {shown_ms(found.high)})"


def _charts(summary: Summary) -> list[str]:
    good = summary.good
    failed = [(one.scheduled_s, 0.0) for one in summary.records if not one.is_good]
    gaps = sorted(gap for one in good for gap in one.gaps_s)
    shown_gaps = gaps[: max(1, int(0.995 * len(gaps)))]
    return [
        chart("Output", "seconds", "tokens/s",
              [Series(name="tokens/s", points=series.token_rates(summary), style="area")]),
        chart("Requests at once", "seconds", "requests",
              [Series(name="at once", style="steps", tone=2,
                      points=series.slice_means(series.at_once(summary)))]),
        chart("Time to first token, by when it was to be sent", "seconds", "seconds",
              [Series(name="TTFT", points=series.first_tokens(summary), style="dots"),
               Series(name="failed", points=failed, style="dots", tone=1)]),
        chart("TTFT and whole answer", "seconds", "share of requests",
              [Series(name="TTFT", points=series.cumulative([one.ttft_s for one in good])),
               Series(name="whole answer", tone=1,
                      points=series.cumulative([one.e2e_s for one in good]))]),
        chart("TPOT", "milliseconds", "share of requests",
              [Series(name="TPOT", tone=3, points=series.cumulative(
                  [1e3 * v for one in good if (v := one.tpot_s) is not None]))]),
        chart("Gaps of tokens, up to P99.5", "milliseconds", "share of tokens",
              [Series(name="gap", tone=3,
                      points=series.cumulative([1e3 * gap for gap in shown_gaps]))]),
    ]  # fmt: skip


def _sweep(found: Bracket) -> str:
    points = sorted(found.points, key=lambda point: point.rate_s)
    rows = []
    for point in points:
        summary = point.summary
        spread = summary.spreads["ttft"]
        median = "-" if spread is None else f"{spread.median * 1e3:,.0f}"
        word = "saturated" if point.is_saturated else "kept" if point.is_kept else "not met"
        rows.append([f"{point.rate_s:.3g}", f"{summary.output_tokens_s:,.1f}", median, word])
    rates = [(p.rate_s, p.summary.output_tokens_s) for p in points]
    ttfts = [(p.rate_s, spread.median) for p in points if (spread := p.summary.spreads["ttft"])]
    low, high = found.low_s, found.high_s
    bands = [Band(low=low, high=high, name=str(found))] if low and high else []
    charts = [
        chart("Throughput by rate", "requests/s", "tokens/s",
              [Series(name="tokens/s", points=rates)], bands),
        chart("Median TTFT by rate", "requests/s", "seconds",
              [Series(name="TTFT", points=ttfts, tone=1)], bands),
    ]  # fmt: skip
    table = _table(["requests/s", "tokens/s", "median TTFT, ms", ""], rows)
    return (
        f"<h2>Rates: the edge is {escape(str(found))}</h2>"
        f'<div class="charts">{"".join(charts)}</div>{table}'
    )


def _failures(summary: Summary) -> str:
    if not summary.failures:
        return ""
    said = summary.failures_said
    rows = [[cause, said.get(cause, ""), str(n)] for cause, n in summary.failures.items()]
    return "<h2>Failures</h2>" + _table(["cause", "said most often", "requests"], rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{table}</div>'
