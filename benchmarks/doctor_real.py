"""The doctor on real servers that were made ill on purpose, and on healthy ones.

    python benchmarks/doctor_real.py [--only NAME ...] [--rounds N] [--keep FOLDER]
                                     [--profile FILE] [--list]

Each case starts a server with one bad setting, runs `headrace doctor URL --save` as a user would,
and puts the fix into the command of a second server exactly as the finding says it. Then the two
take turns, so that a machine that becomes faster or slower does so for both: by `headrace doctor
verify` where probes show the gain, by the same users in a closed loop where the traffic does. The
table has medians over the rounds, and from where to where they went. Healthy servers, idle, busy
and saturated on purpose, must have no fault in any round. Needs a machine that does nothing else;
doctor_servers.py says where servers are from.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from doctor_cases import CASES, Case
from doctor_load import Served, Users
from doctor_servers import ENGINES, Engine, fixed, start
from headrace.doctor.endpoint import Endpoint
from peers.adapter import HttpServer

MEASURED_S = 10.0
WARM_UP_S = 2.0
SEEDS = itertools.count(1)  # nobody asks the same twice: prompts would be found in the cache


@dataclass(frozen=True, kw_only=True)
class Round:
    """One turn of the ill server, and one of the other. Gains by their middle."""

    predicted: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        both = self.predicted is not None and self.measured is not None
        return self.predicted / self.measured - 1 if both else None  # type: ignore[operator]


@dataclass(kw_only=True)
class Result:
    case: Case
    version: str = ""
    found: list[tuple[str, ...]] = field(default_factory=list)  # by round, "4 fault", in order
    cause: str = ""
    fix: str = ""
    rounds: list[Round] = field(default_factory=list)
    note: str = ""
    is_gone: list[bool] = field(default_factory=list)  # in the reports after the fix


class Pair:
    """The ill server and, once its fix is known, the other one: both stay up, one works."""

    def __init__(self, case: Case, engine: Engine, keep: Path, profile: Path | None) -> None:
        self.case = case
        self._engine = engine
        self._profile = profile
        stem = "".join(c if c.isalnum() else "-" for c in f"{case.engine} {case.name}")
        self._stem = keep / stem
        self._servers = ExitStack()
        self._fixed: HttpServer | None = None

    def __enter__(self) -> Pair:
        self._ill = self._start(list(self.case.flags), "")
        return self

    def __exit__(self, *exc: object) -> None:
        self._servers.close()

    def _start(self, flags: list[str], which: str) -> HttpServer:
        log = self._stem.with_name(f"{self._stem.name}{which}.log")
        server = start(self._engine, flags, log)
        self._servers.callback(server.stop)
        return server

    def run(self, rounds: int) -> Result:
        result, case = Result(case=self.case), self.case
        for number in range(1, rounds + 1):
            report, before = self._look(number)
            predicted = _read(result, report)
            if case.rule is None:
                continue
            if not result.fix:
                return result
            if self._fixed is None:
                self._fix(result)
            measured = self._verify(result, report) if before is None else self._traffic(before)
            result.rounds.append(Round(predicted=predicted, measured=measured))
        return result

    def _fix(self, result: Result) -> None:
        case, flags = self.case, list(self.case.flags)
        is_theirs = case.after is not None or case.simpler
        after = flags if is_theirs else fixed(flags, result.fix)
        result.note = " ".join(after) if after != flags else "by the clients"
        self._fixed = self._start(after, "-fixed")

    def _look(self, number: int) -> tuple[Path, Served | None]:
        """The doctor's report of the ill server, and what its users got meanwhile."""
        case, url = self.case, f"http://127.0.0.1:{self._ill.port}"
        report = self._stem.with_name(f"{self._stem.name}-{number}.json")
        command = [sys.executable, "-P", "-m", "headrace", "doctor", url, "--save", str(report)]
        if not case.probes:
            command.append("--no-probe")
        if case.profiled and self._profile is not None:
            command += ["--profile", str(self._profile)]
        if case.schema:
            command += ["--schema", str(_file(report, case.schema))]
        if case.traffic is None:
            _call(command, report)
            return report, None
        endpoint = Endpoint(url)
        with Users(endpoint, _model(endpoint), case.traffic, seed=next(SEEDS)) as users:
            time_s = WARM_UP_S * (5 if number == 1 else 1)  # until no user is in step with others
            users.measure(time_s)
            _call(command, report)
            users.measure(MEASURED_S if case.rule is not None else 0.0)
        return report, users.served() if case.rule is not None else None

    def _traffic(self, before: Served) -> float:
        """The same users at the fixed server, then at the ill one again."""
        assert self._fixed is not None
        after = _load(self._fixed, self.case, self.case.after or self.case.traffic)
        again = _load(self._ill, self.case, self.case.traffic)
        if self.case.shows == "TTFT":
            return math.sqrt(before.ttft_s * again.ttft_s) / after.ttft_s
        return after.tokens_s / math.sqrt(before.tokens_s * again.tokens_s)

    def _verify(self, result: Result, report: Path) -> float | None:
        assert self._fixed is not None
        url, to = f"http://127.0.0.1:{self._fixed.port}", report.with_suffix(".verify.json")
        command = [sys.executable, "-P", "-m", "headrace", "doctor", "verify", str(report), url,
                   "--json", "--save", str(to)]  # fmt: skip
        if self.case.simpler:
            command += ["--schema", str(_file(to, self.case.simpler))]
        done = subprocess.run(command, capture_output=True, text=True)
        try:
            shown = json.loads(done.stdout)
        except ValueError:
            raise SystemExit(f"verify failed: {done.stderr[-500:]}") from None
        to.with_suffix(".shown.json").write_text(done.stdout)
        for kept in shown["predicted"]:
            if kept["rule"] == self.case.rule:
                result.is_gone.append(kept["is_gone"])
                if kept["measured"]:
                    return math.sqrt(kept["measured"]["low"] * kept["measured"]["high"])
        if self.case.shows == "the longest gap":  # one of each report: rounds give the spread
            before, after = (json.loads(each.read_text())["probe"] for each in (report, to))
            return float(before["longest_gap_s"]) / float(after["longest_gap_s"])
        return None


def _load(server: HttpServer, case: Case, traffic: Any) -> Served:
    endpoint = Endpoint(f"http://127.0.0.1:{server.port}")
    with Users(endpoint, _model(endpoint), traffic, seed=next(SEEDS)) as users:
        users.measure(WARM_UP_S)
        users.measure(MEASURED_S)
    served = users.served()
    if served.failed:
        print(f"  {served.failed} requests failed: {served.why}", flush=True)
    return served


def _call(command: list[str], report: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    report.with_suffix(".txt").write_text(done.stdout + done.stderr)
    if not report.exists():
        raise SystemExit(f"the doctor failed: {done.stderr[-500:]}")


def _file(report: Path, schema: str) -> Path:
    path = report.with_suffix(".schema.json")
    path.write_text(schema)
    return path


def _model(endpoint: Endpoint) -> str | None:
    data = (endpoint.found("/v1/models") or {}).get("data") or [{}]
    found = data[0].get("id")
    return found if isinstance(found, str) else None


def _read(result: Result, report: Path) -> float | None:
    """What this report names; the middle of its predicted gain."""
    told: dict[str, Any] = json.loads(report.read_text())
    result.version = f"{told['engine']['label']} {told['engine']['version'] or ''}".strip()
    result.found.append(tuple(f"{each['rule']} {each['kind']}" for each in told["findings"]))
    for each in told["findings"]:
        if each["rule"] == result.case.rule:
            result.cause, result.fix = each["cause"], result.fix or each["fix"][0]
            gain = each["gain"]
            if gain["low"] is not None and gain["high"] is not None:
                return math.sqrt(gain["low"] * gain["high"])
    return None


def _row(result: Result) -> str:
    case = result.case
    if case.rule is None:
        return f"| {result.version} | {case.name} | {_healthy(result)} | | | | |"
    named = sum(any(each.startswith(f"{case.rule} ") for each in found) for found in result.found)
    cause = f"{result.cause} (rule {case.rule}, {named} of {len(result.found)} times)"
    if not result.cause:
        cause = f"**not found** ({', '.join(result.found[0]) or 'nothing'})"
    note = result.note + (f"; gone {sum(result.is_gone)} of {len(result.is_gone)} times"
                          if result.is_gone else "")  # fmt: skip
    rounds = result.rounds
    cells = [result.version, case.name, cause, f"`{note}`",
             _spread([r.predicted for r in rounds], "× {:.3g}"),
             _spread([r.measured for r in rounds], "× {:.3g}"),
             _spread([r.error for r in rounds], "{:+.0%}")]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _healthy(result: Result) -> str:
    said = [", ".join(found) or "nothing" for found in result.found]
    faults = any(
        not each.endswith(("limit", "expected")) for found in result.found for each in found
    )
    shown = "; ".join(said) if len(set(said)) > 1 else f"{said[0]}, {len(said)} times"
    return f"**{shown}**" if faults else f"no fault ({shown})"


def _spread(found: list[float | None], form: str) -> str:
    """The median, and from where to where."""
    values = [each for each in found if each is not None]
    if not values:
        return "-"
    middle = form.format(statistics.median(values))
    low, high = (form.replace("× ", "").format(end(values)) for end in (min, max))
    return middle if len(values) == 1 else f"{middle} ({low} to {high})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="*", default=[], help="names as --list has them, or words of them"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="folder for reports and logs")
    parser.add_argument("--profile", type=Path, help="of headrace calibrate on this machine")
    parser.add_argument("--list", action="store_true")
    asked = parser.parse_args()
    named = {f"{case.engine}: {case.name}": case for case in CASES}
    chosen = [
        case for name, case in named.items()
        if not asked.only
        or any(word == name or (word not in named and word in name) for word in asked.only)
    ]  # fmt: skip
    if asked.list:
        print("\n".join(f"{case.engine}: {case.name}" for case in chosen))
        return
    keep = asked.keep or Path(tempfile.mkdtemp(prefix="doctor-real-"))
    keep.mkdir(parents=True, exist_ok=True)
    engines = {name: ENGINES[name]() for name in dict.fromkeys(case.engine for case in chosen)}
    heading = ("server", "pathology", "cause named", "flags after the fix", "predicted", "measured")
    rows = [f"| {' | '.join(heading)} | error |", f"|{'---|' * 7}"]
    for case in chosen:
        if case.profiled and asked.profile is None:
            continue
        print(f"{case.engine}: {case.name}", flush=True)
        with Pair(case, engines[case.engine], keep, asked.profile) as pair:
            row = _row(pair.run(asked.rounds))
        print(f"  {row}", flush=True)
        rows.append(row)
    print("\n" + "\n".join(rows))
    (keep / "table.md").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
