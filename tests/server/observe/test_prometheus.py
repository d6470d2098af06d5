"""A real Prometheus reads a real server, by its default protocols: every metric that the shipped
rules and dashboards name is there under that name, and the rules can be evaluated.

Needs `prometheus` and `promtool` (Debian: apt-get install prometheus); skipped where they are not.
tests/server/observe/test_text_format.py reads the same names without them.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.server.conftest import RunningServer

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None,
    reason="needs prometheus and promtool on the PATH: apt-get install prometheus",
)
DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
ALERTS = DEPLOY / "prometheus/alerts.yaml"
LIMIT_S = 60.0  # generous: machines are shared; nothing is asserted about it
METRIC = re.compile(r"\b(?:headrace|vllm):[a-z0-9_]+")
# What the dashboards that vLLM ships ask for: examples/observability of its repository, 2026-08.
VLLM_DASHBOARDS = (
    "vllm:cache_config_info",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:inter_token_latency_seconds_count",
    "vllm:inter_token_latency_seconds_sum",
    "vllm:iteration_tokens_total_bucket",
    "vllm:iteration_tokens_total_count",
    "vllm:iteration_tokens_total_sum",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prompt_tokens_total",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_max_num_generation_tokens_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_to_first_token_seconds_count",
    "vllm:time_to_first_token_seconds_sum",
)


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def dashboard_expressions() -> list[str]:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert found
    return found


class Prometheus:
    """One that scrapes a server every second."""

    def __init__(self, target: int, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._root = f"http://127.0.0.1:{port}"
        shipped = yaml.safe_load((DEPLOY / "prometheus/scrape.yaml").read_text())
        (job,) = shipped["scrape_configs"]
        job |= {"scrape_interval": "1s", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
        config = {
            "global": {"evaluation_interval": "1s"},
            "scrape_configs": [job],
            "rule_files": [str(ALERTS)],
        }
        path = folder / "prometheus.yml"
        path.write_text(yaml.safe_dump(config))
        self._log_path = folder / "prometheus.log"
        assert PROMETHEUS is not None
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    PROMETHEUS,
                    f"--config.file={path}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def get(self, path: str, **query: str) -> Any:
        answer = httpx.get(f"{self._root}/api/v1/{path}", params=query, timeout=30)
        assert answer.status_code == 200, f"{query}: {answer.text}"
        return answer.json()["data"]

    def is_ready(self) -> bool:
        return httpx.get(f"{self._root}/-/ready").status_code == 200

    def query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def wait_for(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if condition():
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"not within {LIMIT_S:g} s:\n{self._log_path.read_text()}")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def prometheus(
    server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    body = {"messages": [{"role": "user", "content": "Count to three."}], "max_tokens": 4}
    url = f"{server.base_url}/v1/chat/completions"
    assert httpx.post(url, json=body, timeout=60).status_code == 200
    running = Prometheus(server.port, tmp_path_factory.mktemp("prometheus"))
    try:
        running.wait_for(running.is_ready)
        # Two scrapes: a rate needs them.
        up = 'count_over_time(up{job="headrace"}[1h]) >= 2 and up{job="headrace"} == 1'
        running.wait_for(lambda: running.query(up))
        yield running
    finally:
        running.stop()


@needs_prometheus
def test_every_metric_that_is_shipped_is_found_under_its_name(prometheus: Prometheus) -> None:
    (target,) = prometheus.get("targets")["activeTargets"]
    assert target["lastError"] == ""
    files = [ALERTS, DEPLOY / "grafana.json", DEPLOY / "kubernetes/autoscaler.yaml"]
    shipped = {name for path in files for name in METRIC.findall(path.read_text())}
    shipped.update(VLLM_DASHBOARDS)
    assert len(shipped) > 40
    known = set(prometheus.get("label/__name__/values"))
    assert not shipped - known
    for name in sorted(shipped):
        assert prometheus.query(f"count({name})"), name


@needs_prometheus
def test_the_dashboards_expressions_are_understood(prometheus: Prometheus) -> None:
    replaced = {"$__rate_interval": "1h", "$model_name": ".*", "$instance": ".*"}
    found = 0
    for expression in dashboard_expressions():
        for name, value in replaced.items():
            expression = expression.replace(name, value)
        assert "$" not in expression
        found += bool(prometheus.query(expression))
    assert found > 10  # others divide by what nobody did yet


@needs_prometheus
def test_the_alerts_are_evaluated(prometheus: Prometheus) -> None:
    def health() -> dict[str, tuple[str, str]]:
        (group,) = prometheus.get("rules")["groups"]
        return {r["name"]: (r["health"], r.get("lastError", "")) for r in group["rules"]}

    prometheus.wait_for(lambda: all(word != "unknown" for word, _ in health().values()))
    assert health() == {rule["alert"]: ("ok", "") for rule in rules()}
    # Not ok for want of anything to look at: each finds the series that its rule is about.
    for rule in rules():
        for name in METRIC.findall(rule["expr"]):
            assert prometheus.query(f"count({name})"), f"{rule['alert']}: {name}"


# What makes each alert fire, as promtool writes series: start + step x times, one a minute.
FIRES = {
    "HeadraceEngineDown": {"headrace:engine_up{instance='a'}": "1 1 0x20"},
    "HeadraceEngineRestarts": {"headrace:engine_restarts_total{instance='a'}": "0+1x20"},
    "HeadraceServerErrors": {
        "headrace:http_requests_total{instance='a',route='/v1/x',status='500'}": "0+1x20",
        "headrace:http_requests_total{instance='a',route='/v1/x',status='200'}": "0+30x20",
    },
    "HeadraceRejecting": {
        "headrace:rejected_requests_total{instance='a',reason='queue_timeout'}": "0+12x20",
    },
    "HeadraceQueueing": {
        "headrace:request_queue_time_seconds_bucket{instance='a',le='5.0'}": "0+1x20",
        "headrace:request_queue_time_seconds_bucket{instance='a',le='+Inf'}": "0+10x20",
        "headrace:request_queue_time_seconds_bucket{instance='a',le='7.0'}": "0+10x20",
    },
    "HeadraceSlowFirstToken": {
        "headrace:time_to_first_token_seconds_bucket{instance='a',le='10.0'}": "0+1x20",
        "headrace:time_to_first_token_seconds_bucket{instance='a',le='15.0'}": "0+10x20",
        "headrace:time_to_first_token_seconds_bucket{instance='a',le='+Inf'}": "0+10x20",
    },
    "HeadracePreempting": {
        "headrace:preempted_tokens_total{instance='a'}": "0+20x20",
        "headrace:computed_prompt_tokens_total{instance='a'}": "0+50x20",
        "headrace:generation_tokens_total{instance='a'}": "0+50x20",
    },
    "HeadraceMemoryNotAsPredicted": {
        "headrace:memory_ledger_bytes{instance='a',part='weights',kind='allocated'}": "120x20",
        "headrace:memory_ledger_bytes{instance='a',part='weights',kind='predicted'}": "100x20",
    },
}
FIRED_BY = "19m"


@needs_prometheus
def test_each_alert_fires_for_what_it_is_about_and_for_nothing_else(tmp_path: Path) -> None:
    assert FIRES.keys() == {rule["alert"] for rule in rules()}
    assert PROMTOOL is not None
    subprocess.run([PROMTOOL, "check", "rules", str(ALERTS)], check=True, capture_output=True)
    tests = []
    for name, series in FIRES.items():
        tests.append(
            {
                "interval": "1m",
                "input_series": [{"series": s, "values": v} for s, v in series.items()],
                # The only one that fires: `ALERTS` has all of them.
                "promql_expr_test": [
                    {
                        "expr": "count by (alertname) (ALERTS{alertstate='firing'})",
                        "eval_time": at,
                        "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1}] * fires,
                    }
                    for at, fires in (("0m", 0), (FIRED_BY, 1))
                ],
            }
        )
    path = tmp_path / "alerts_test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": tests}))
    done = subprocess.run([PROMTOOL, "test", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
