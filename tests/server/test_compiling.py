"""Grammars compiled beside the loop: results, failures, callers that leave, threads that stick."""

from __future__ import annotations

import select
import threading
from typing import cast

import pytest

from headrace.core.constraint import Constraint, GrammarKind, GrammarSpec
from headrace.core.errors import InvalidRequestError
from headrace.core.request import GenerateRequest, SamplingParams
from headrace.server import compiling as compiling_module
from headrace.server.compiling import Compiled, Compiling


def request(name: str, source: str = "a") -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=[1],
        params=SamplingParams(),
        grammar=GrammarSpec(kind=GrammarKind.REGEX, source=source),
    )


class Compiler:
    """Compiles a source to itself, in its own time."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()

    def __call__(self, spec: GrammarSpec) -> Constraint:
        if spec.source == "bad":
            raise InvalidRequestError("bad grammar", "mend it")
        if spec.source == "crash":
            raise ZeroDivisionError("oops")
        if spec.source == "slow":
            assert self.may_go_on.wait(60)
        return cast("Constraint", spec.source)


def finished(compiling: Compiling, count: int) -> dict[str, object]:
    found: list[Compiled] = []
    while len(found) < count:
        readable, _, _ = select.select([compiling.fileno()], [], [], 60)
        assert readable, "nothing finished"
        found += compiling.take()
    return {each.request.request_id: each.result for each in found}


def test_each_request_gets_its_own_result_or_its_own_error() -> None:
    compiling = Compiling(Compiler())
    for name, source in (("a", "x"), ("b", "bad"), ("c", "crash"), ("d", "y")):
        compiling.submit(request(name, source))
    found = finished(compiling, 4)
    assert (found["a"], found["d"]) == ("x", "y")
    assert isinstance(found["b"], InvalidRequestError)
    assert isinstance(found["c"], InvalidRequestError)
    assert "oops" in str(found["c"])
    assert compiling.is_idle
    compiling.close()


def test_what_a_caller_left_is_not_given_out_whether_it_waits_runs_or_is_done() -> None:
    compiler = Compiler()
    compiling = Compiling(compiler)
    compiling.submit(request("running", "slow"))
    compiling.submit(request("waiting", "x"))
    compiling.submit(request("kept", "y"))
    compiling.forget("running")
    compiling.forget("waiting")
    compiler.may_go_on.set()
    assert finished(compiling, 1) == {"kept": "y"}
    assert compiling.is_idle
    compiling.close()


def test_a_grammar_that_takes_too_long_is_refused_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiling_module, "TIME_LIMIT_S", 0.0)
    compiler = Compiler()
    compiling = Compiling(compiler)
    compiling.submit(request("stuck", "slow"))
    found: list[Compiled] = []
    while not found:
        found = compiling.take()
    assert "not compiled within" in str(found[0].result)
    monkeypatch.setattr(compiling_module, "TIME_LIMIT_S", 60.0)
    compiling.submit(request("next", "x"))
    assert finished(compiling, 1) == {"next": "x"}
    compiler.may_go_on.set()  # the stuck thread ends, and says nothing
    assert compiling.take() == []
    compiling.close()


def test_too_many_stuck_threads_and_no_more_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling_module, "TIME_LIMIT_S", 0.0)
    compiler = Compiler()
    compiling = Compiling(compiler)
    for number in range(compiling_module.MOST_STUCK + 1):
        compiling.submit(request(f"stuck{number}", "slow"))
        while not compiling.take():
            pass
    compiling.submit(request("next", "x"))
    (refused,) = compiling.take()
    assert "Earlier grammars" in str(refused.result)
    monkeypatch.setattr(compiling_module, "TIME_LIMIT_S", 60.0)
    compiler.may_go_on.set()  # they end after all: grammars are taken again
    taken: dict[str, object] = {}
    while taken.get("again") != "x":
        compiling.submit(request("again", "x"))
        taken = finished(compiling, 1)
    compiling.close()
