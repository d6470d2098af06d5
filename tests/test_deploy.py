"""What lies in deploy/ and the Dockerfile agrees with the server: names, ports, paths, times."""

from __future__ import annotations

import json
import re
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from headrace.core.server_config import ServerConfig
from headrace.core.settings import OTHER_VARIABLES, all_settings
from headrace.doctor.observation import GpuNow
from headrace.server.link.snapshot import EngineSnapshot, PrefixDiskSnapshot
from headrace.server.link.supervisor import SHUT_DOWN_S, State
from headrace.server.link.wire import Ready
from headrace.server.observe.device import DeviceWatch, Peaks
from headrace.server.observe.exposition import Exposition
from headrace.server.observe.history import History
from headrace.server.observe.key_metrics import KeyMetrics
from headrace.server.observe.load_metrics import LoadMetrics
from headrace.server.observe.metrics import Metrics
from headrace.server.observe.objective import Objective
from headrace.server.observe.record import RequestRecord
from headrace.workload.slo import parse_slo

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
METRIC = re.compile(r"\b(?:headrace|vllm):(?!latest\b)[a-z0-9_]+")  # "latest": an image's tag
IMAGES = ("Dockerfile", "Dockerfile.cuda")
VARIABLE = re.compile(r"\bHEADRACE_[A-Z_]+\b")


class _Engine:
    state = State.READY
    restarts = 0
    facts = Ready(
        context_tokens=1,
        max_sequences=1,
        total_blocks=1,
        block_tokens=1,
        ledger_bytes={"predicted": {"weights": 1}, "allocated": {"weights": 1}},
        notes=[],
        pid=1,
        backend={},
        work={"token_flops": 1.0, "step_bytes": 1.0, "block_bytes": 1.0},
    )


@pytest.fixture(scope="module")
def metric_labels() -> dict[str, set[str]]:
    """The labels of every sample that a scrape can have, by its name."""
    metrics = Metrics(_Engine())
    numbers: dict[str, Any] = dict.fromkeys(EngineSnapshot.__struct_fields__, 0)
    numbers["grammar_outcomes"] = {}
    numbers |= {"prefix_misses": {"evicted": 1}, "step_s": {}, "step_tokens": []}
    numbers |= {"tenants": {}, "accepted_at": [1], "handovers": {"whole": 1}}
    numbers["prefix_disk"] = PrefixDiskSnapshot(
        stored_bytes=1,
        hits_tokens=1,
        loaded_bytes=1,
        written_bytes=1,
        blocks={"loaded": 1},
        failures={"read": 1},
    )
    metrics.on_snapshot(EngineSnapshot(**numbers))
    metrics.answered["/v1/models", 200] += 1
    build = {"version": "1", "fingerprint": "hr-1", "python_version": "3"}
    objective = Objective(parse_slo("ttft=1s"))
    device = DeviceWatch()
    device.peaks = Peaks(flops_s=1.0, bytes_s=1.0, source="")
    device.gpus = (GpuNow(name="", used_bytes=1.0, memory_bytes=1.0, busy_share=1.0),)
    history = History(metrics, objective, 0.0, device)
    objective.on_end(
        RequestRecord(
            request_id="", endpoint="", arrived_s=0.0, prompt_tokens=1, finish_reason="stop"
        )
    )
    history.sample(1.0, 1.0)
    text, _ = Exposition(
        metrics,
        "tiny",
        lambda: build,
        KeyMetrics(metrics, "tiny", {"a": 1}),
        LoadMetrics(history, objective, "tiny", device),
    ).write("")
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def manifests() -> list[tuple[str, Any]]:
    return [
        (path.name, document)
        for path in sorted(DEPLOY.glob("**/*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
    ]


# -- metrics ---------------------------------------------------------------------------------------


def test_every_metric_that_is_named_exists(metric_labels: dict[str, set[str]]) -> None:
    files = [*DEPLOY.glob("**/*.yaml"), DEPLOY / "grafana.json", ROOT / "docs/observability.md"]
    for path in files:
        for name in METRIC.findall(path.read_text()):
            known = {name, f"{name}_total", f"{name}_bucket"} & metric_labels.keys()
            # In an expression a name is whole; prose may leave out what all of a kind end in.
            whole = name in metric_labels
            assert whole if path.suffix == ".json" else known, f"{path.name}: {name}"


def test_the_documented_names_are_those_that_there_are(metric_labels: dict[str, set[str]]) -> None:
    text = (ROOT / "docs/observability.md").read_text()
    table = text[text.index("| `headrace:` |") : text.index("Histograms of times")]
    rows = [row.split("|") for row in table.splitlines()[2:] if row.startswith("|")]
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    suffix = re.compile(r"_(bucket|count|sum)$")
    existing = {suffix.sub("", name) for name in metric_labels}
    own = {name.removeprefix("headrace:") for name in existing if name.startswith("headrace:")}
    assert documented == own
    twins = {name for row in rows for name in re.findall(r"`(\w+)` ●", row[1])}
    old = {"gpu_cache_usage_perc", "time_per_output_token_seconds"}
    assert twins | old == {name[len("vllm:") :] for name in existing if name.startswith("vllm:")}
    for row in rows:
        for name in re.findall(r"`(\w+)`", row[1]):
            key = next(n for n in metric_labels if suffix.sub("", n) == f"headrace:{name}")
            labels = set(re.findall(r"`(\w+)`", row[4]))
            assert labels <= metric_labels[key], f"{name}: {labels}"


def test_the_dashboard_shows_what_there_is(metric_labels: dict[str, set[str]]) -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    shown = set()
    for panel in panels:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["description"]
        for target in panel["targets"]:
            expression = target["expr"]
            names = METRIC.findall(expression)
            assert names, expression
            shown.update(names)
            known = set.union(*(metric_labels[name] for name in names)) | {"instance"}
            used = set(re.findall(r"(\w+)\s*(?:=~|=)\s*\"", expression))
            grouped = re.findall(r"by \(([^)]*)\)", expression)
            used |= {label.strip() for group in grouped for label in group.split(",")}
            used |= set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert used <= known, f"{panel['title']}: {used - known}"
            assert expression.count("(") == expression.count(")")
    wanted = {
        "num_requests_waiting",
        "kv_blocks",
        "generation_tokens_total",
        "prefix_cache_hits_total",
        "prefix_cache_misses_total",
        "num_preemptions_total",
        "step_seconds_total",
        "engine_restarts_total",
        "rejected_requests_total",
        "time_to_first_token_seconds_bucket",
        "request_queue_time_seconds_bucket",
    }
    assert {f"headrace:{name}" for name in wanted} <= shown
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert variables == {"datasource", "model_name", "instance"}


def test_panels_do_not_lie_on_each_other() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in json.loads((DEPLOY / "grafana.json").read_text())["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in taken, f"{panel['title']} on {taken[x, y]}"
                taken[x, y] = panel["title"]


def test_alerts_name_labels_that_there_are(metric_labels: dict[str, set[str]]) -> None:
    (rules,) = [d for name, d in manifests() if name == "alerts.yaml"]
    alerts = rules["groups"][0]["rules"]
    assert len({alert["alert"] for alert in alerts}) == len(alerts) >= 6
    for alert in alerts:
        names = METRIC.findall(alert["expr"])
        known = set.union(*(metric_labels[name] for name in names)) | {"instance", "job"}
        used = re.findall(r"\$labels\.(\w+)", json.dumps(alert["annotations"]))
        used += re.findall(r"[{,\s](\w+)\s*(?:=~|=)\s*\"", alert["expr"])
        assert set(used) <= known, alert["alert"]
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        text = (ROOT / "docs/observability.md").read_text()
        assert alert["alert"] in text, f"{alert['alert']} is not explained"


# -- settings, Docker, systemd ---------------------------------------------------------------------


def test_variables_are_settings() -> None:
    known = {setting.variable for setting in all_settings()} | OTHER_VARIABLES
    texts = [*IMAGES, "deploy/headrace.service", "docs/deploy.md", "docs/kubernetes.md"]
    for path in [*(ROOT / name for name in texts), *DEPLOY.glob("**/*.yaml")]:
        found = set(VARIABLE.findall(path.read_text())) - {"HEADRACE_"}
        assert found <= known, f"{path.name}: {found - known}"


def docker_lines(name: str) -> list[str]:
    text = (ROOT / name).read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("name", IMAGES)
def test_the_image_copies_what_there_is_and_runs_as_nobody_special(name: str) -> None:
    lines = docker_lines(name)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in lines:
        words = line.split()
        if words[0] != "COPY" or words[1].startswith("--from"):
            continue
        for source in words[1:-1]:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in ignored, f"{source} does not reach the builder"
    last = lines[max(i for i, line in enumerate(lines) if line.startswith("FROM")) :]
    assert not any("g++" in line or line.startswith("COPY src") for line in last)
    (user,) = [line for line in last if line.startswith("USER")]
    assert user.split()[1].split(":")[0] not in ("0", "root")
    assert f"EXPOSE {ServerConfig().port}" in last
    assert sum(line.startswith("HEALTHCHECK") for line in last) == 1
    assert "/health" in next(line for line in last if line.startswith("HEALTHCHECK"))


def test_a_service_has_time_to_drain() -> None:
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "headrace.service")
    service = unit["Service"]
    assert float(service["TimeoutStopSec"]) > ServerConfig().drain_timeout_s + SHUT_DOWN_S
    assert service["KillMode"] == "mixed"
    assert service["DynamicUser"] == "yes"
    assert service["StateDirectory"] == "headrace"
    assert service["NoNewPrivileges"] == "yes"
