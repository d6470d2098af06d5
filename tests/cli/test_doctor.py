"""`headrace doctor` at the command line, against fake engines and a real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.doctor.fakes import MODELS, FakeEngine, Script, Values, render, serving
from typer.testing import CliRunner, Result

from headrace.cli.commands import app
from headrace.doctor import collect
from headrace.doctor.exposition import read_page
from headrace.doctor.names import VLLM
from headrace.doctor.scrape import read

QUEUED = Values(
    levels={"running": 4, "waiting": 12, "kv_usage": 0.1},
    counters={"generation_tokens": 100},
)
IDLE = Values(levels={"running": 0, "waiting": 0, "kv_usage": 0.0})
FAST = ("--interval", "0.2", "--concurrency", "2")


def doctor(*words: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *words])


def vllm(values: Values = IDLE, script: Script | None = None) -> FakeEngine:
    return FakeEngine([render(VLLM, values)], paths={"/v1/models": MODELS}, script=script)


def test_a_finding_as_text_and_as_json() -> None:
    with serving(vllm(QUEUED)) as endpoint:
        text = doctor(endpoint.url, "--no-probe", *FAST)
        found = doctor(endpoint.url, "--no-probe", "--json", *FAST)
    assert text.exit_code == found.exit_code == 1
    assert "--max-num-seqs 16" in text.output
    assert "(rule 4)" in text.output
    body = json.loads(found.stdout)
    assert body["schema"] == "headrace-doctor/1"
    assert [f["rule"] for f in body["findings"]] == [4]
    assert body["probe"] is None
    assert body["unknown"]["ttft"]


def test_explain_lists_what_is_unknown() -> None:
    with serving(vllm()) as endpoint:
        done = doctor(endpoint.url, "--no-probe", "--explain", *FAST)
    assert done.exit_code == 0
    assert "Unknown, and why" in done.output
    assert "queue_time: vllm:request_queue_time_seconds is not on this page" in done.output


def test_probes_are_announced_and_kept() -> None:
    engine = vllm()
    with serving(engine) as endpoint:
        done = doctor(endpoint.url, "--json", *FAST)
    body = json.loads(done.stdout)
    assert "Probing http://127.0.0.1" in done.stderr
    assert "at most 60 s and 20,000 tokens" in done.stderr
    assert 0 < body["probe"]["spent_tokens"] <= 20_000
    assert body["probe"]["errors"] == []
    # The fake's counters stand still while it answers: that is a finding by itself.
    assert engine.generated > 0


def test_probes_that_all_fail_are_not_health() -> None:
    with serving(vllm(script=Script(status=404))) as endpoint:
        done = doctor(endpoint.url, *FAST)
    assert done.exit_code == 1
    assert "No verdict: every probe failed (HTTP 404: no luck)." in done.output


def test_verify_and_preflight_say_nothing_of_what_never_answered(tmp_path: Path) -> None:
    """A finding that is not there is not gone, where nothing was measured."""
    saved = tmp_path / "before.json"
    with serving(vllm(script=Script(token_s=0.0005))) as endpoint:
        doctor(endpoint.url, "--save", str(saved), *FAST)
    with serving(vllm(script=Script(status=401))) as endpoint:
        again = doctor("verify", str(saved), endpoint.url, *FAST)
        asked = doctor("preflight", endpoint.url, *FAST)
    for done in (again, asked):
        assert done.exit_code == 1
        assert "every probe failed (HTTP 401: no luck)" in done.stderr
        assert "--key-variable" in done.stderr
        assert done.stdout == ""


def test_a_part_that_the_engine_does_not_tell() -> None:
    with serving(vllm()) as endpoint:
        done = doctor(endpoint.url, "--no-probe", "--about", "tokenizer", *FAST)
    assert "does not tell what tokenizer takes" in done.output


def test_another_machine_is_not_probed_unasked() -> None:
    done = doctor("http://192.0.2.7:8000")
    assert done.exit_code == 2
    assert "--yes" in done.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("http://127.0.0.1:9",), "can't be reached"),
        (("ftp://x",), "is not a URL"),
        ((":8000", "--gpu", "nonesuch"), "nonesuch"),
        ((":8000", "--slo", "ttft=5"), "ttft"),
        ((":8000", "--key-variable", "NO_SUCH_KEY"), "NO_SUCH_KEY is not set"),
        (("verify", "no-such-file.json"), "not a report"),
        ((":8000", "--save", "/no/such/folder/x.json"), "can't be written"),
        ((":8000", "--save", "/"), "can't be written"),
        ((":8000", "--before", "no-such-file.json"), "not a report"),
    ],
)
def test_bad_input_is_one_line(words: tuple[str, ...], says: str) -> None:
    done = doctor(*words)
    assert done.exit_code == 2
    assert says in done.output


def test_help_without_words() -> None:
    done = doctor("--help")
    assert done.exit_code == 0
    assert "verify" in done.output
    assert "preflight" in done.output


def test_verify_and_preflight(tmp_path: Path) -> None:
    saved = tmp_path / "before.json"
    with serving(vllm(script=Script(token_s=0.0005))) as endpoint:
        doctor(endpoint.url, "--save", str(saved), *FAST)
        again = doctor("verify", str(saved), "--json", *FAST)
        asked = doctor("preflight", endpoint.url, "--json", *FAST)
    found: dict[str, Any] = json.loads(again.stdout)
    assert found["schema"] == "headrace-doctor-verify/1"
    assert found["verdict"] in ("better", "worse", "inconclusive")
    assert again.exit_code == (0 if found["verdict"] == "better" else 1)
    assert "burst tokens/s" in [row["name"] for row in found["compared"]]
    checks = json.loads(asked.stdout)["checks"]
    assert [check["number"] for check in checks] == list(range(1, 11))
    assert asked.exit_code == (1 if any(c["answer"] == "fail" for c in checks) else 0)


def test_metrics_from_prometheus() -> None:
    series = [
        {"metric": {"__name__": f"vllm:num_requests_{what}", "instance": at}, "value": [1, value]}
        for at, running, waiting in (("a", "20", "30"), ("b", "2", "0"))
        for what, value in (("running", running), ("waiting", waiting))
    ]

    class Queries(dict[str, Any]):
        def __contains__(self, path: object) -> bool:
            return str(path).startswith("/api/v1/query?")

        def __getitem__(self, path: str) -> Any:
            return {"status": "success", "data": {"result": series}}

    prometheus = FakeEngine([])
    prometheus.paths = Queries()
    with serving(prometheus) as server, serving(vllm()) as endpoint:
        words = ("--no-probe", "--json", "--from-prometheus", server.url)
        done = doctor(endpoint.url, *words)
    assert done.exit_code == 1
    assert 23 in [finding["rule"] for finding in json.loads(done.stdout)["findings"]]


def test_watch_says_what_comes_and_what_goes() -> None:
    """Five readings each time: a queue, then none."""
    shown = _watched([render(VLLM, QUEUED)] * 5 + [render(VLLM, IDLE)] * 5)
    assert "(rule 4)" in shown
    assert "gone: requests wait while the KV pool is free" in shown
    assert shown.rstrip().endswith("0 findings")


def test_watch_as_json_is_a_line_for_every_look(tmp_path: Path) -> None:
    last = tmp_path / "last.json"
    pages = [render(VLLM, QUEUED)] * 5 + [render(VLLM, IDLE)] * 5
    looks = [json.loads(line) for line in _watched(pages, "--json", "--save", str(last)).split("\n")
             if line.startswith("{")]  # fmt: skip
    assert [[f["rule"] for f in look["findings"]] for look in looks] == [[4], []]
    assert json.loads(last.read_text())["findings"] == []


def test_watch_from_prometheus() -> None:
    """Two looks, then nobody is there: that is one line, and it goes on until it is stopped."""
    looks: list[str] = []

    class Queries(dict[str, Any]):
        def __contains__(self, path: object) -> bool:
            return str(path).startswith("/api/v1/query?")

        def __getitem__(self, path: str) -> Any:
            series = [{"metric": {"__name__": f"vllm:num_requests_{what}"}, "value": [1, value]}
                      for what, value in (("running", "4"), ("waiting", "12"))]  # fmt: skip
            return {"status": "success", "data": {"result": series}}

    def stop_third(*_: Any) -> str:
        looks.append("")
        if len(looks) > 2:
            raise KeyboardInterrupt
        return "12:00:00"

    prometheus = FakeEngine([])
    prometheus.paths = Queries()
    with (
        pytest.MonkeyPatch.context() as patch, serving(prometheus) as server,
        serving(vllm()) as endpoint,
    ):  # fmt: skip
        patch.setattr("headrace.cli.doctor.time.strftime", stop_third)
        words = ("--watch", "--interval", "0.2", "--from-prometheus", server.url)
        done = doctor(endpoint.url, *words)
    assert done.exit_code == 130
    assert "(rule 4)" in done.output
    assert done.output.count("; 1 finding") == 2


def _watched(texts: list[str], *words: str) -> str:
    """The command in this process, stopped by an interrupt after the last page."""
    left = list(texts)

    class Pages(collect.Scraper):
        def __call__(self) -> Any:
            if not left:
                raise KeyboardInterrupt
            return read(read_page(left.pop(0)), float(100 - len(left)))

    with pytest.MonkeyPatch.context() as patch, serving(vllm()) as endpoint:
        patch.setattr(collect, "Scraper", Pages)
        done = doctor(endpoint.url, "--watch", "--interval", "0.2", *words)
    assert done.exit_code == 130
    return done.output
