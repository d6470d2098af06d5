"""Grammars compiled beside the loop: results, failures, callers that leave."""

from __future__ import annotations

import select
import threading
from typing import cast

from headrace.core.constraint import Constraint, GrammarKind, GrammarSpec
from headrace.core.errors import InvalidRequestError
from headrace.core.request import GenerateRequest, SamplingParams
from headrace.server.compiling import THREADS, Compiled, Compiling


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
    for number in range(THREADS):
        compiling.submit(request(f"running{number}", "slow"))
    compiling.submit(request("waiting", "x"))
    compiling.submit(request("kept", "y"))
    for number in range(THREADS):
        compiling.forget(f"running{number}")
    compiling.forget("waiting")
    compiler.may_go_on.set()
    assert finished(compiling, 1) == {"kept": "y"}
    assert compiling.is_idle
    compiling.close()
