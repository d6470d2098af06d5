"""Endpoints that are not what they should be: one line each, and what was measured is kept."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Mapping
from typing import Any

import pytest
from tests.doctor.fakes import MODELS, FakeEngine, Script, Values, render, serving
from tests.doctor.test_collect import SMALL

from headrace.doctor.collect import Wanted, ahead_s, observe, passive
from headrace.doctor.endpoint import CHAT, Endpoint, EndpointError, Reply
from headrace.doctor.engine_config import Told
from headrace.doctor.exposition import read_page
from headrace.doctor.mishaps import advice, unreachable
from headrace.doctor.names import VLLM
from headrace.doctor.observation import Answer, EngineId
from headrace.doctor.probe import Prober
from headrace.doctor.prometheus import readings
from headrace.doctor.report import examine, lines, no_verdict
from headrace.doctor.scrape import Reading, read


def ssl_error(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, f"[SSL: {reason}] something (_ssl.c:1006)")
    error.reason = reason
    return error


@pytest.mark.parametrize(
    ("error", "cause", "remedy"),
    [
        (ssl_error("WRONG_VERSION_NUMBER"), "speaks no TLS", "http://"),
        (ssl_error("CERTIFICATE_VERIFY_FAILED"), "TLS with h:1 failed", "certificate"),
        (http.client.BadStatusLine("\x15\x03\x01\x00\x02\x02F"), "speaks TLS", "https://"),
        (http.client.BadStatusLine("SSH-2.0-x\r\n"), "does not speak HTTP: it says 'SSH", "port"),
        (http.client.RemoteDisconnected("closed\nwithout"), "answer: closed without", "https://"),
        (ConnectionResetError(104, "reset"), "closes the connection", "https://"),
        (ConnectionRefusedError(111, "refused"), "can't be reached", "running"),
        (TimeoutError(), "can't be reached: TimeoutError", "running"),
    ],
)
def test_why_no_reply_came(error: BaseException, cause: str, remedy: str) -> None:
    said, to_try = unreachable("h:1", error)
    assert cause in said
    assert "\n" not in said
    assert remedy in to_try


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/", "/v1/chat/completions", "/v1/models?x=1"])
def test_a_url_as_people_have_it(end: str) -> None:
    endpoint = Endpoint(f"http://user:secret@h:1/proxy{end}")
    assert endpoint.url == "http://h:1/proxy"
    assert endpoint.path == "/proxy"
    assert Endpoint(f"http://h:1{end}").url == "http://h:1"


def test_https_to_a_server_without_tls() -> None:
    with serving(FakeEngine([])) as endpoint:
        secure = Endpoint(endpoint.url.replace("http://", "https://"), timeout_s=5)
        with pytest.raises(EndpointError, match="speaks no TLS"):
            secure.get("/metrics")


@pytest.mark.parametrize(
    ("script", "says", "to_try"),
    [
        (Script(whole="text/html; charset=utf-8"), "a web page", ""),
        (Script(whole="application/json"), "does not stream", ""),
        (Script(status=401), "HTTP 401", "--key-variable"),
        (Script(status=403), "HTTP 403", "--key-variable"),
        (Script(status=404), "HTTP 404", "no /v1/chat/completions"),
        (Script(status=429), "HTTP 429", "try again"),
        (Script(status=503), "HTTP 503", ""),
    ],
)
def test_probes_that_all_fail_in_one_way(script: Script, says: str, to_try: str) -> None:
    with serving(FakeEngine([], paths={"/v1/models": MODELS}, script=script)) as endpoint:
        found = examine(observe(endpoint, Wanted(plan=SMALL, seed=1)))
    (verdict,) = [line for line in lines(found) if line.startswith("No verdict")]
    whole = " ".join(list(lines(found))[list(lines(found)).index(verdict) :])
    assert says in whole
    assert to_try in whole
    assert no_verdict(found.seen) is not None
    # What is left out for one reason is one line.
    assert sum("left out" in line for line in lines(found)) == 1


def test_a_wrong_model_gets_the_right_one() -> None:
    wrong = 'HTTP 404: The model "x" does not exist.'
    assert advice(wrong, "fake-model") == "It lists fake-model: give one with --model."
    assert advice("HTTP 500: out of luck", None) == ""


def test_no_usage_is_said() -> None:
    for tells, notes in ((True, 0), (False, 1)):
        engine = FakeEngine([], script=Script(tells_usage=tells))
        with serving(engine) as endpoint:
            seen = observe(endpoint, Wanted(plan=SMALL, seed=1))
        assert sum("tells no usage" in note for note in seen.notes) == notes


class Dying(Endpoint):
    """Takes no connections any more once `is_dead`."""

    is_dead = False
    refused = 0

    def ask(
        self, body: Mapping[str, Any], *, scheduled_s: float, timeout_s: float, path: str = CHAT
    ) -> Answer:
        if not self.is_dead:
            return super().ask(body, scheduled_s=scheduled_s, timeout_s=timeout_s, path=path)
        self.refused += 1
        return Answer(scheduled_s=scheduled_s, error="ConnectionRefusedError: [Errno 111]")


@pytest.mark.parametrize("stage", ["bursts", "sizes", "prefix", "stream", "compared", "long"])
def test_one_that_dies_is_not_asked_for_the_rest(stage: str) -> None:
    with serving(FakeEngine([])) as endpoint:
        dying = Dying(endpoint.url)

        def die(name: str) -> None:
            dying.is_dead = dying.is_dead or name == stage

        found = Prober(dying, SMALL, model="m", seed=1, say=die).run()
    assert found.stopped == f"{stage}: ConnectionRefusedError: [Errno 111]"
    assert all(answer.is_good for answer in found.short)
    assert dying.refused <= 1 + SMALL.concurrency


def test_what_was_measured_before_it_died_is_reported() -> None:
    with serving(FakeEngine([])) as endpoint:
        dying = Dying(endpoint.url)
        asked = []
        ask = dying.ask

        def counted(*words: Any, **more: Any) -> Answer:
            asked.append(1)
            dying.is_dead = len(asked) > 12
            return ask(*words, **more)

        dying.ask = counted  # type: ignore[method-assign]
        found = examine(observe(dying, Wanted(plan=SMALL, seed=1)))
    text = "\n".join(lines(found))
    assert "short    TTFT" in text
    assert "the endpoint went away after" in text
    assert (no_verdict(found.seen) or "").startswith("No verdict: the endpoint went away.")


# Clocks.


def page(at_s: float, started_s: float) -> Reading:
    text = render(VLLM, Values(levels={"running": 0, "started_at_s": started_s}))
    return read(read_page(text), at_s)


def uptime(at_s: float, started_s: float, ahead: float = 0.0) -> tuple[object, tuple[str, ...]]:
    told = Told(engine=EngineId(name="vllm", label="vLLM"))
    seen = passive("x", told, [page(at_s, started_s)] * 2, Wanted(), ahead_s=ahead)
    return seen.config.get("uptime_s"), seen.notes


def test_a_clock_that_is_wrong_is_said() -> None:
    assert uptime(1000.0, 400.0) == (600.0, ())
    assert uptime(1000.0, 1001.0) == (0.0, ())  # a second is nobody's error
    found, notes = uptime(1000.0, 4000.0, ahead=3600.0)
    assert found == pytest.approx(600.0)
    assert notes == ("its clock is 3,600 s ahead of this one: only this one is used",)
    found, notes = uptime(1000.0, 90_000.0)
    assert found is None
    assert "its clock is wrong" in notes[0]


def test_the_clock_of_who_replied() -> None:
    def told(date: str) -> float:
        return ahead_s(Reply(status=200, headers={"date": date}, text=""), 784111777.0)

    assert told("Sun, 06 Nov 1994 08:49:37 GMT") == 0.0
    assert told("Sun, 06 Nov 1994 08:50:37 GMT") == 60.0
    assert told("yesterday") == told("") == 0.0


def test_prometheus_is_asked_by_its_own_clock() -> None:
    asked: list[str] = []

    class Queries(dict[str, Any]):
        def __contains__(self, path: object) -> bool:
            return str(path).startswith("/api/v1/query?")

        def __getitem__(self, path: str) -> Any:
            asked.append(path)
            if path.endswith("query=time()"):
                return {"status": "success",
                        "data": {"resultType": "scalar", "result": [1, "5000.5"]}}  # fmt: skip
            series = {"metric": {"__name__": "vllm:num_requests_running"}, "value": [1, "3"]}
            return {"status": "success", "data": {"resultType": "vector", "result": [series]}}

    engine = FakeEngine([])
    engine.paths = Queries()
    with serving(engine) as endpoint:
        found = readings(endpoint, interval_s=60)
    assert [found[0].at_s, found[-1].at_s] == [4940.5, 5000.5]
    assert asked[-1].endswith("time=5000.500")
