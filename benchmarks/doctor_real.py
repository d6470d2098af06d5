"""The doctor on real servers that were made ill on purpose, and on healthy ones.

    python benchmarks/doctor_real.py [--only NAME ...] [--keep FOLDER] [--profile FILE] [--list]

Each case starts a server with one bad setting, runs `headrace doctor URL --save` as a user would,
puts the fix into the command exactly as the finding says it, and measures again: by `headrace
doctor verify` where probes show it, by the same users in a closed loop where the traffic does. The
table has the predicted gain beside the measured one. Healthy servers, idle, busy and saturated on
purpose, must have no fault. Needs a machine that does nothing else; doctor_servers.py says where
servers are from.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from doctor_load import Served, Traffic, Users
from doctor_servers import ENGINES, Engine, fixed, start
from headrace.doctor.endpoint import Endpoint

MEASURED_S = 8.0
WARM_UP_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    engine: str
    rule: int | None  # that must be found; None: no fault may be
    flags: tuple[str, ...] = ()
    traffic: Traffic | None = None  # None: the server is idle but for the doctor's probes
    after: Traffic | None = None  # where the fix is the clients' own,
    schema: str = ""  # for the probes,
    simpler: str = ""  # and what the clients send instead
    shows: str = "tokens/s"  # what of the traffic: or "TTFT"
    profiled: bool = False  # with --profile
    probes: bool = True


CHAT = Traffic(users=12)
SHARED = Traffic(users=2, shared_words=300, prompt_words=10, answer_tokens=16)
SCHEMAS = Traffic(users=2, answer_tokens=24)
# Strings that must have certain letters at certain distances: each mask takes milliseconds.
_PATTERN = "^([a-z ]*[aeiou][a-z ]{8}[bcd][a-z ]*){3}$"
PATTERNS, PLAIN = (
    json.dumps({"type": "object", "properties": {"text": {"type": "string", **more}},
                "required": ["text"], "additionalProperties": False})
    for more in ({"pattern": _PATTERN}, {})
)  # fmt: skip
LONG = Traffic(users=8, prompt_words=40, answer_tokens=96)
LLAMA = ("-c", "16384")
CASES = (
    Case(name="one place", engine="headrace", rule=4, flags=("--max-sequences", "1")),
    Case(name="starved KV pool", engine="headrace", rule=3, flags=("--kv-tokens", "256")),
    Case(name="prefix cache off", engine="headrace", rule=19, flags=("--no-prefix-cache",)),
    Case(name="slow grammar: a schema with patterns", engine="headrace", rule=34, schema=PATTERNS,
         simpler=PLAIN),
    Case(name="two places, 12 users, with a profile", engine="headrace", rule=4,
         flags=("--max-sequences", "2"), traffic=CHAT, profiled=True, probes=False),
    Case(name="two places, 12 users", engine="headrace", rule=4, flags=("--max-sequences", "2"),
         traffic=CHAT, probes=False),
    Case(name="healthy, idle", engine="headrace", rule=None),
    Case(name="healthy, busy (4 users)", engine="headrace", rule=None,
         traffic=replace(CHAT, users=4)),
    Case(name="healthy, saturated (96 users)", engine="headrace", rule=None,
         traffic=replace(CHAT, users=96), probes=False),
    Case(name="starved KV pool, 8 users", engine="headrace", rule=3, flags=("--kv-tokens", "384"),
         traffic=LONG, probes=False),
    Case(name="prefix cache off, 2 users, one prefix", engine="headrace", rule=19,
         flags=("--no-prefix-cache",), traffic=SHARED, shows="TTFT"),
    Case(name="two places, with a profile", engine="headrace", rule=4,
         flags=("--max-sequences", "2"), profiled=True),
    Case(name="two places", engine="headrace", rule=4, flags=("--max-sequences", "2")),
    Case(name="slow grammar, 2 users", engine="headrace", rule=34,
         traffic=replace(SCHEMAS, schema=PATTERNS), after=replace(SCHEMAS, schema=PLAIN),
         probes=False),
    Case(name="one slot", engine="llama.cpp", rule=4, flags=(*LLAMA, "-np", "1")),
    Case(name="one slot, 12 users", engine="llama.cpp", rule=4, flags=(*LLAMA, "-np", "1"),
         traffic=CHAT, probes=False),
    Case(name="healthy, idle", engine="llama.cpp", rule=None, flags=(*LLAMA, "-np", "8")),
    Case(name="healthy, busy (4 users)", engine="llama.cpp", rule=None,
         flags=(*LLAMA, "-np", "8"), traffic=replace(CHAT, users=4)),
    Case(name="healthy, saturated (24 users)", engine="llama.cpp", rule=None,
         flags=(*LLAMA, "-np", "16"), traffic=replace(CHAT, users=24), probes=False),
    Case(name="one place", engine="vllm", rule=4, flags=("--max-num-seqs", "1")),
    Case(name="prefix cache off", engine="vllm", rule=19,
         flags=("--max-num-seqs", "16", "--no-enable-prefix-caching")),
    Case(name="healthy, idle", engine="vllm", rule=None, flags=("--max-num-seqs", "16")),
    Case(name="healthy, saturated (32 users)", engine="vllm", rule=None,
         flags=("--max-num-seqs", "16"), traffic=replace(CHAT, users=32), probes=False),
)  # fmt: skip


@dataclass(kw_only=True)
class Result:
    case: Case
    version: str = ""
    found: list[str] = field(default_factory=list)  # "4 fault", in order
    cause: str = ""
    fix: str = ""
    predicted: tuple[float, float] | None = None
    measured: tuple[float, float] | None = None  # an interval; of traffic both ends are the same
    note: str = ""

    @property
    def error(self) -> float | None:
        """The middle of the predicted band against the middle of what was measured."""
        if self.predicted is None or self.measured is None:
            return None
        low, high = self.predicted
        return math.sqrt(low * high) / math.sqrt(self.measured[0] * self.measured[1]) - 1


def run_case(case: Case, engine: Engine, keep: Path, profile: Path | None) -> Result:
    stem = "".join(c if c.isalnum() else "-" for c in f"{case.engine} {case.name}")
    report = keep / f"{stem}.json"
    result = Result(case=case)
    flags = list(case.flags)
    server = start(engine, flags, keep / f"{stem}.log")
    try:
        before = _doctor(server.port, case, report, profile)
    finally:
        server.stop()
    _read(result, report)
    if case.rule is None or not result.fix:
        return result
    wanted = case.after or case.traffic
    is_theirs = case.after is not None or case.simpler
    after = flags if is_theirs else fixed(flags, result.fix)
    result.note = " ".join(after) if after != flags else "by the clients"
    server = start(engine, after, keep / f"{stem}-fixed.log")
    try:
        if wanted is None:
            _verify(result, server.port, report, keep / f"{stem}-verify.json")
        elif before is not None:
            later = _load(server.port, wanted)
            result.measured = _ratio(case, before, later)
    finally:
        server.stop()
    return result


def _doctor(port: int, case: Case, report: Path, profile: Path | None) -> Served | None:
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-P", "-m", "headrace", "doctor", url, "--save", str(report)]
    if not case.probes:
        command.append("--no-probe")
    if case.profiled and profile is not None:
        command += ["--profile", str(profile)]
    if case.schema:
        command += ["--schema", str(_file(report, case.schema))]
    if case.traffic is None:
        _call(command, report)
        return None
    served = None
    if case.rule is not None:
        served = _load(port, case.traffic)
    endpoint = Endpoint(url)
    with Users(endpoint, _model(endpoint), case.traffic) as users:
        users.measure(WARM_UP_S)
        _call(command, report)
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


def _load(port: int, traffic: Traffic) -> Served:
    """All users, against one of them alone just before: the machine's own speed falls out."""
    endpoint = Endpoint(f"http://127.0.0.1:{port}")
    model = _model(endpoint)
    with Users(endpoint, model, replace(traffic, users=1)) as user:
        user.measure(WARM_UP_S)
        alone = user.measure(MEASURED_S / 2)
    with Users(endpoint, model, traffic) as users:
        users.measure(WARM_UP_S)
        served = users.measure(MEASURED_S)
    if served.failed:
        print(f"  {served.failed} requests failed: {served.why}", flush=True)
    return replace(served, alone_tokens_s=alone.tokens_s)


def _verify(result: Result, port: int, report: Path, to: Path) -> None:
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-P", "-m", "headrace", "doctor", "verify", str(report), url,
               "--json", "--save", str(to)]  # fmt: skip
    if result.case.simpler:
        command += ["--schema", str(_file(to, result.case.simpler))]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        shown = json.loads(done.stdout)
    except ValueError:
        raise SystemExit(f"verify failed: {done.stderr[-500:]}") from None
    to.with_suffix(".shown.json").write_text(done.stdout)
    for kept in shown["predicted"]:
        if kept["rule"] == result.case.rule and kept["measured"]:
            result.measured = (kept["measured"]["low"], kept["measured"]["high"])
            result.note += "; gone" if kept["is_gone"] else "; still there"


def _ratio(case: Case, before: Served, after: Served) -> tuple[float, float]:
    if case.shows == "TTFT":
        return (before.ttft_s / after.ttft_s,) * 2
    gain = after.tokens_s / before.tokens_s * before.alone_tokens_s / after.alone_tokens_s
    return (gain, gain)


def _model(endpoint: Endpoint) -> str | None:
    data = (endpoint.found("/v1/models") or {}).get("data") or [{}]
    found = data[0].get("id")
    return found if isinstance(found, str) else None


def _read(result: Result, report: Path) -> None:
    told: dict[str, Any] = json.loads(report.read_text())
    result.version = f"{told['engine']['label']} {told['engine']['version'] or ''}".strip()
    result.found = [f"{each['rule']} {each['kind']}" for each in told["findings"]]
    for each in told["findings"]:
        if each["rule"] == result.case.rule:
            result.cause, result.fix = each["cause"], each["fix"][0]
            gain = each["gain"]
            if gain["low"] is not None and gain["high"] is not None:
                result.predicted = (gain["low"], gain["high"])


def _row(result: Result) -> str:
    case = result.case
    error = result.error
    if case.rule is None:
        faults = [each for each in result.found if not each.endswith(("limit", "expected"))]
        said = ", ".join(result.found) or "nothing"
        verdict = f"**{', '.join(faults)}**" if faults else f"no fault ({said})"
        return f"| {result.version} | {case.name} | {verdict} | | | | |"
    cause = f"{result.cause} (rule {case.rule})" if result.cause else (
        f"**not found** ({', '.join(result.found) or 'nothing'})"
    )  # fmt: skip
    cells = [result.version, case.name, cause, f"`{result.note}`",
             _band(result.predicted), _band(result.measured),
             "-" if error is None else f"{error:+.0%}"]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _band(found: tuple[float, float] | None) -> str:
    if found is None:
        return "-"
    low, high = (f"{end:.3g}" for end in found)
    middle = f"× {math.sqrt(found[0] * found[1]):.3g}"
    return middle if low == high else f"{middle} ({low} to {high})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="words of ENGINE: NAME")
    parser.add_argument("--keep", type=Path, help="folder for reports and logs")
    parser.add_argument("--profile", type=Path, help="of headrace calibrate on this machine")
    parser.add_argument("--list", action="store_true")
    asked = parser.parse_args()
    chosen = [
        case for case in CASES
        if not asked.only or any(word in f"{case.engine}: {case.name}" for word in asked.only)
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
        row = _row(run_case(case, engines[case.engine], keep, asked.profile))
        print(f"  {row}", flush=True)
        rows.append(row)
    print("\n" + "\n".join(rows))
    (keep / "table.md").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
