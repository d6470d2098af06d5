"""`headrace profile URL`: a running server's steps, from the history that it keeps.

What a step takes, by part, over time: schedule, compute, sample, commit, publish. Single operations
are not timed in a server that serves. Reads /history; loads nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from headrace.cli.tables import show_table
from headrace.core.errors import ConfigError

SCHEMA = "headrace-profile-server/1"
PARTS = ("schedule", "compute", "sample", "commit", "publish")
WINDOWS = ("5m", "1h", "24h")


def profile_server(
    url: str,
    window: str,
    key_variable: str | None,
    *,
    trace: Path | None,
    explain: bool,
    as_json: bool,
) -> None:
    from headrace.doctor.endpoint import Endpoint, EndpointError, key_from

    if window not in WINDOWS:
        raise ConfigError(f"--window is {window!r}; expected 5m, 1h or 24h.", "Give one of them.")
    text = f"127.0.0.1{url}" if url.startswith(":") else url
    endpoint = Endpoint(text, key=key_from(key_variable))
    reply = endpoint.get(f"/history?window={window}")
    if reply.status in (401, 403):
        raise EndpointError(
            f"{endpoint.url}/history is for operators (HTTP {reply.status}).",
            "Name the variable that holds the operator's key with --key-variable.",
        )
    if reply.status != 200:
        raise EndpointError(
            f"{endpoint.url}/history answers HTTP {reply.status}: no Headrace that keeps one.",
            "Ask `headrace doctor` about other engines, or profile a model by its name.",
        )
    history = reply.json()
    facts = facts_of(history)
    if trace is not None:
        trace.write_text(json.dumps(trace_of(history)) + "\n")
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    _show(facts, explain=explain)
    if trace is not None:
        typer.echo(f"trace written to {trace}")


def facts_of(history: dict[str, Any]) -> dict[str, Any]:
    """Sums over the window; None where there was no step."""
    columns = history["columns"]
    periods = columns["period_s"]

    def added(name: str) -> float:
        pairs = zip(columns[name], periods, strict=True)
        return float(sum((rate or 0.0) * period_s for rate, period_s in pairs))

    steps, whole_s = added("steps"), sum(periods)
    parts = {part: added(f"step_{part}") for part in PARTS}
    busy_s = sum(parts.values())
    peaks = history["peaks"]
    flops, read = added("model_flops"), added("model_bytes")

    def share(amount: float, peak: str) -> float | None:
        compute_s = parts["compute"]
        return None if peaks is None or not compute_s else amount / compute_s / peaks[peak]

    return {
        "schema": SCHEMA,
        "model": history["model"],
        "window_s": whole_s,
        "steps": steps,
        "tokens_per_step": added("step_tokens") / steps if steps else None,
        "step_s": busy_s / steps if steps else None,
        "parts_s": {part: seconds / steps for part, seconds in parts.items()} if steps else None,
        "busy_share": busy_s / whole_s if whole_s else None,
        "guesses": _guesses(added, steps) if steps else None,
        "flops_s": flops / parts["compute"] if parts["compute"] else None,
        "bytes_s": read / parts["compute"] if parts["compute"] and read else None,
        "mfu": share(flops, "flops_s"),
        "bandwidth_use": share(read, "bytes_s") if read else None,
        "peaks": peaks,
    }


def _guesses(added: Callable[[str], float], steps: float) -> dict[str, float | None]:
    """Tokens that were guessed ahead (docs/speculation.md)."""
    guessed, right = added("draft_tokens"), added("accepted_tokens")
    return {
        "rows_per_step": guessed / steps,
        "right_per_step": right / steps,
        "right_share": right / guessed if guessed else None,
        "drafting_s": added("drafting") / steps,
    }


def _show(facts: dict[str, Any], *, explain: bool) -> None:
    typer.echo(f"{facts['model']}, the last {facts['window_s']:,.0f} s")
    if not facts["steps"]:
        typer.echo("no steps in this time: send requests, and ask again")
        return
    typer.echo(
        f"{facts['steps']:,.0f} steps of {facts['tokens_per_step']:,.1f} tokens, "
        f"{facts['step_s'] * 1e3:,.2f} ms each; steps took {facts['busy_share']:.0%} of the time"
    )
    rows = [
        (part, f"{seconds * 1e3:,.3f}", f"{seconds / facts['step_s']:.1%}")
        for part, seconds in facts["parts_s"].items()
    ]
    show_table(("PART", "MS A STEP", "SHARE"), rows)
    guesses = facts["guesses"]
    if guesses["rows_per_step"]:
        typer.echo(
            f"{guesses['rows_per_step']:,.1f} rows a step were guesses, "
            f"{guesses['right_share']:.0%} of them right: {guesses['right_per_step']:,.1f} more "
            f"tokens a step; guessing took {guesses['drafting_s'] * 1e3:,.3f} ms of schedule"
        )
    achieved = [("products", facts["flops_s"], "GFLOP/s", facts["mfu"]),
                ("reading", facts["bytes_s"], "GB/s", facts["bandwidth_use"])]  # fmt: skip
    for name, rate, unit, share in achieved:
        if rate is not None:
            known = None if share is None else f"{share:.0%} of peak"
            of_peak = known or "no peaks are known: serve --profile"
            typer.echo(f"{name} while computing: {rate / 1e9:,.1f} {unit} ({of_peak})")
    if explain:
        typer.echo("")
        typer.echo("ms a step   that part's seconds in the window / steps in the window")
        typer.echo("products    2 × values of the model's matrices × tokens / seconds of compute")
        typer.echo("reading     (weights + KV blocks in use) × steps / seconds of compute")


def trace_of(history: dict[str, Any]) -> dict[str, Any]:
    """Samples as counters, in the Chrome trace format."""
    columns = history["columns"]
    groups = {
        "share of the time": [f"step_{part}" for part in PARTS],
        "tokens/s": ["generated_tokens", "computed_prompt_tokens", "cached_prompt_tokens"],
        "requests": ["running", "waiting"],
        "KV blocks": ["kv_used_blocks", "kv_cached_blocks", "kv_free_blocks"],
    }
    events: list[dict[str, Any]] = []
    for at, at_s in enumerate(columns["at_s"]):
        for name, members in groups.items():
            values = {each: columns[each][at] for each in members if columns[each][at] is not None}
            events.append({"name": name, "ph": "C", "pid": 1, "ts": at_s * 1e6, "args": values})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
