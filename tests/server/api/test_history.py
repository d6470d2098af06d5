"""/history and /diagnosis of a real server."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from tests.server.conftest import RunningServer, StartServer

from headrace.server.observe.history import COLUMNS

PATIENCE_S = 120.0
PROMPT = {"model": "smollm2", "prompt": "A secretive zebra", "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def promised(start_server: StartServer) -> RunningServer:
    return start_server(server={"slo": "ttft=60s,share=90%"})


def test_what_was_generated_is_in_the_history(promised: RunningServer) -> None:
    with httpx.Client(base_url=promised.base_url) as client:
        assert client.post("/v1/completions", json=PROMPT).status_code == 200
        promised.wait_for(lambda: any(client.get("/history").json()["columns"]["generated_tokens"]))
        found = client.get("/history").json()
        columns = found["columns"]
        assert set(columns) == set(COLUMNS)
        # Rates times periods give the tokens back.
        pairs = zip(columns["generated_tokens"], columns["period_s"], strict=True)
        assert sum(rate * period_s for rate, period_s in pairs) == pytest.approx(8, rel=0.01)
        assert found["totals"]["generated_tokens"] == 8
        assert found["objective"]["within"] == 1
        assert found["objective"]["text"] == "ttft=60s,share=90%"
        assert "zebra" not in client.get("/history").text
        last_s = columns["at_s"][-1]
        later = client.get("/history", params={"since": last_s}).json()["columns"]["at_s"]
        assert all(time_s > last_s for time_s in later)
        page = client.get("/metrics").text
        assert "headrace:requests_within_slo_total" in page


@pytest.mark.parametrize(
    "query", ["window=2h", "since=-1", "since=x", "since=1&since=2", "window="]
)
def test_a_bad_query_is_refused(server: RunningServer, query: str) -> None:
    reply = httpx.get(f"{server.base_url}/history?{query}")
    assert reply.status_code == 400
    assert "window, since" in reply.json()["error"]["remedy"]


def test_the_doctor_reads_the_server_itself(server: RunningServer) -> None:
    url = f"{server.base_url}/diagnosis"
    found = httpx.get(url).json()
    assert found["schema"] == "headrace-diagnosis/1"
    server.wait_for(lambda: httpx.get(url).json()["period_s"] > 0)
    kinds = {finding["kind"] for finding in httpx.get(url).json()["findings"]}
    assert "fault" not in kinds


def test_a_bad_objective_is_refused_before_anything_starts(start_server: StartServer) -> None:
    running = start_server(server={"slo": "ttft=500"}, ready=False)
    assert running.process.wait(60) == 2
    assert "without a unit" in running.log


def test_the_doctor_sees_a_queue_that_its_own_server_has(strict: RunningServer) -> None:
    """One place, three requests: the second and the third wait while the KV pool is free."""

    async def rules() -> set[int]:
        async with httpx.AsyncClient(base_url=strict.base_url, timeout=PATIENCE_S) as client:
            long = {**PROMPT, "max_tokens": 2000}
            asked = [
                asyncio.create_task(client.post("/v1/completions", json=long)) for _ in range(3)
            ]
            try:
                found: set[int] = set()
                while 4 not in found and not all(each.done() for each in asked):
                    findings = (await client.get("/diagnosis")).json()["findings"]
                    found = {finding["rule"] for finding in findings}
                    await asyncio.sleep(0.5)
                return found
            finally:
                for each in asked:
                    each.cancel()
                await asyncio.gather(*asked, return_exceptions=True)

    assert 4 in asyncio.run(rules())
