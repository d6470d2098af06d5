"""What attacks.py measured, as a table for people: one run, or two beside each other."""

from __future__ import annotations

from typing import Any

Report = dict[str, Any]

_NAMES = ("before", "after")
_COUNTED = ("same", "different", "p50_ms", "p99_ms", "max_ms")


def table(runs: list[Report]) -> str:
    """Of one run, or of two: attacks in their order, those of the first run."""
    names = [""] if len(runs) == 1 else [f"{name}: " for name in _NAMES]
    told = "`/health` p50 / p99 / most, ms | memory before, peak, after, MB | others |"
    head = "".join(f" {name}attacker | {told}" for name in names)
    lines = [f"| row | attack |{head}", "|" + "---|" * (2 + 4 * len(names))]
    later = [{each["name"]: each for each in run["attacks"]} for run in runs[1:]]
    for found in sorted(runs[0]["attacks"], key=_order):
        lines.append(line([found, *(run.get(found["name"], {}) for run in later)]))
    return "\n".join(lines)


def line(runs: list[Report]) -> str:
    """One attack, in one run or several."""
    cells = "".join(_cells(found) for found in runs)
    return f"| {runs[0]['row']} | {runs[0]['what']} |{cells}"


def _order(found: Report) -> tuple[int, str]:
    row = found["row"]
    return (int(row) if row.isdigit() else 99, found["name"])


def _cells(found: Report) -> str:
    if not found:
        return " - | - | - | - |"
    statuses = ", ".join(f"{count}x {name}" for name, count in found["statuses"].items())
    got = "; ".join(filter(None, (statuses, found["note"])))
    if "mb" not in found:
        return f" {got}; the server did not start (load {found['load'][0]:.0f}) | - | - | - |"
    health, mb = found["health"], found["mb"]
    times = " / ".join(f"{health[name]:.0f}" for name in _COUNTED[2:] if name in health)
    failed = f"; {health['failed']} of {health['asked']} failed" if health["failed"] else ""
    return (
        f" {got} in {found['attack_s']:.0f} s (load {found['load'][0]:.0f}) | {times}{failed} | "
        f"{mb['before']['all']}, {mb['peak']['all']}, {mb['after']['all']} | {_others(found)} |"
    )


def _others(found: Report) -> str:
    """What honest clients got, and what became of the server."""
    honest = found["honest"]
    said = [f"{honest.get('same', 0)} same"]
    if honest.get("different"):
        said.append(f"**{honest['different']} different**")
    said += [
        f"{count}x {what}"
        for what, count in honest.items()
        if what not in _COUNTED and not what.isdigit()
    ]
    if "max_ms" in honest:
        quiet = found["honest_quiet"].get("max_ms", 0)
        said.append(f"most {honest['max_ms'] / 1000:.1f} s (quiet {quiet / 1000:.1f})")
    if found["restarts"]:
        said.append(f"**{found['restarts']} restarts**")
    if not found["alive"]:
        said.append("**the server is down**")
    if found["blocks"]:
        said.append(f"{found['blocks']} blocks in use")
    return ", ".join(said)
