"""Who may have a grammar compiled, and when. Processes are stand-ins here, and time is ours."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.core.constraint import GrammarKind, GrammarSpec
from headrace.core.errors import (
    HeadraceError,
    InvalidRequestError,
    QueueTimeoutError,
    UnavailableError,
)
from headrace.core.request import GenerateRequest, SamplingParams
from headrace.server.grammars import messages
from headrace.server.grammars import places as grammars_module
from headrace.server.grammars.places import (
    IDLE_S,
    MAX_COMPILING,
    MAX_IDLE,
    MAX_WAITING,
    WAIT_S,
    Grammars,
)

MIB = 1 << 20


class FakeWalk:
    def __init__(self, host: FakeHost) -> None:
        self.host = host
        host.walks += 1

    def close(self) -> None:
        self.host.walks -= 1


class FakeHost:
    """Compiles when the test says so."""

    def __init__(self, spec: GrammarSpec) -> None:
        self.spec = spec
        self.compiled: messages.Compiled | None = None
        self.failed: messages.Failed | None = None
        self.is_gone = False
        self.is_closed = False
        self.grown_bytes = 0
        self.seconds = 0.5
        self.walks = 0

    @property
    def is_idle(self) -> bool:
        return not self.walks

    def fileno(self) -> int:
        return -1 if self.is_gone else 7  # as a closed socket says

    def pump(self) -> None:
        pass

    def open(self) -> FakeWalk:
        return FakeWalk(self)

    def close(self) -> None:
        self.is_gone = self.is_closed = True

    def succeed(self, grown_bytes: int = MIB) -> None:
        self.grown_bytes = grown_bytes
        self.compiled = messages.Compiled(b"\x01", grown_bytes, 0.0, 1)


class FakeStarter:
    def __init__(self) -> None:
        self.hosts: list[FakeHost] = []
        self.error: OSError | None = None

    def start(self, spec: GrammarSpec) -> Any:
        if self.error is not None:
            raise self.error
        self.hosts.append(FakeHost(spec))
        return self.hosts[-1]

    def close(self) -> None:
        pass

    @property
    def sources(self) -> list[str]:
        return [host.spec.source for host in self.hosts]


class Stand:
    """Grammars over stand-ins, and a clock."""

    def __init__(self, most_bytes: int = 1024 * MIB) -> None:
        self.now_s = 100.0
        self.starter = FakeStarter()
        self.grammars = Grammars(self.starter, most_bytes=most_bytes, clock=lambda: self.now_s)

    def submit(
        self,
        name: str,
        source: str,
        *,
        tenant: str = "",
        timeout_s: float | None = None,
        param: str = "response_format",
    ) -> None:
        spec = GrammarSpec(kind=GrammarKind.REGEX, source=source, param=param)
        self.grammars.submit(
            GenerateRequest(
                request_id=name,
                prompt_token_ids=[1],
                params=SamplingParams(),
                tenant=tenant,
                timeout_s=timeout_s,
                grammar=spec,
            )
        )

    def take(self) -> dict[str, Any]:
        """Of each request that is done: "compiled", or its error."""
        found: dict[str, Any] = {}
        for compiled in self.grammars.take():
            is_error = isinstance(compiled.result, HeadraceError)
            found[compiled.request.request_id] = compiled.result if is_error else "compiled"
            self.requests[compiled.request.request_id] = compiled.request
            self.walks[compiled.request.request_id] = compiled.result
        return found

    requests: dict[str, GenerateRequest]
    walks: dict[str, Any]


@pytest.fixture
def stand() -> Stand:
    made = Stand()
    made.requests, made.walks = {}, {}
    return made


def test_the_same_grammar_of_a_tenant_is_compiled_once_and_another_tenants_by_itself(
    stand: Stand,
) -> None:
    stand.submit("a", "x", tenant="one")
    stand.submit("b", "x", tenant="one")
    stand.submit("c", "x", tenant="two")
    assert stand.take() == {}
    assert len(stand.starter.hosts) == 2
    for host in stand.starter.hosts:
        host.succeed()
    assert stand.take() == {"a": "compiled", "b": "compiled", "c": "compiled"}
    stand.submit("d", "x", tenant="one")
    assert stand.take() == {"d": "compiled"}
    assert len(stand.starter.hosts) == 2
    assert stand.grammars.stats.outcomes == {"compiled": 2, "reused": 2}
    assert stand.grammars.is_idle


def test_what_is_refused_is_refused_at_once_the_second_time_in_its_own_words(stand: Stand) -> None:
    stand.submit("a", "(", param="response_format")
    stand.take()
    stand.starter.hosts[0].failed = messages.Failed("It is not closed.", "Close it.")
    first = stand.take()["a"]
    stand.submit("b", "(", param="guided_regex")
    second = stand.take()["b"]
    assert len(stand.starter.hosts) == 1
    for error, param in ((first, "response_format"), (second, "guided_regex")):
        assert isinstance(error, InvalidRequestError)
        assert (error.cause, error.remedy, error.param) == ("It is not closed.", "Close it.", param)


def test_a_process_that_ended_as_soon_as_it_was_started_has_no_descriptor(stand: Stand) -> None:
    """It has refused its grammar before anyone looked; polling -1 would end the engine."""
    stand.submit("quick", "(")
    stand.submit("slow", "x")
    assert stand.take() == {}
    quick, _ = stand.starter.hosts
    quick.failed = messages.Failed("The regex is not valid.", "Mend it.")
    quick.is_gone = True
    assert stand.grammars.filenos() == [7]
    assert isinstance(stand.take()["quick"], InvalidRequestError)


def test_one_whose_process_was_killed_takes_too_much_and_is_remembered(stand: Stand) -> None:
    stand.submit("a", "bomb")
    stand.take()
    stand.starter.hosts[0].is_gone = True
    error = stand.take()["a"]
    assert isinstance(error, InvalidRequestError)
    assert "128 MiB" in error.cause
    stand.submit("b", "bomb")
    assert isinstance(stand.take()["b"], InvalidRequestError)
    assert len(stand.starter.hosts) == 1
    # To another tenant that is news: it is not told who asked before.
    stand.submit("c", "bomb", tenant="other")
    stand.take()
    assert len(stand.starter.hosts) == 2


def test_slow_grammars_of_one_tenant_leave_a_place_to_another(stand: Stand) -> None:
    for number in range(10):
        stand.submit(f"slow{number}", f"slow{number}", tenant="greedy")
    stand.take()
    assert len(stand.starter.hosts) == MAX_COMPILING
    stand.submit("honest", "yes", tenant="honest")
    stand.take()
    assert len(stand.starter.hosts) == MAX_COMPILING
    stand.starter.hosts[0].is_gone = True  # its time is over
    stand.take()
    assert stand.starter.sources[-1] == "yes", "nine others came before it"
    stand.starter.hosts[-1].succeed()
    assert stand.take() == {"honest": "compiled"}


def test_who_waits_too_long_or_behind_too_many_is_told_to_come_back(stand: Stand) -> None:
    for number in range(MAX_COMPILING + MAX_WAITING):
        stand.submit(f"r{number}", f"s{number}")
        if number < MAX_COMPILING:
            stand.take()
    stand.submit("one more", "s")
    error = stand.take()["one more"]
    assert isinstance(error, UnavailableError)
    assert (error.status, error.retry_after_s > 0) == (503, True)
    stand.now_s += WAIT_S + 0.1
    late = stand.take()
    assert len(late) == MAX_WAITING
    assert all(isinstance(error, UnavailableError) for error in late.values())
    # Being busy is no fault of the grammar's: it is tried again.
    for host in stand.starter.hosts:
        host.is_gone = True
    stand.take()
    stand.submit("again", "s")
    stand.take()
    assert stand.starter.sources[-1] == "s"


def test_a_process_that_gets_no_time_to_compile_is_given_up_without_blame(stand: Stand) -> None:
    stand.submit("a", "x")
    stand.take()
    stand.now_s += grammars_module.COMPILE_WALL_S + 0.1
    assert isinstance(stand.take()["a"], UnavailableError)
    assert stand.starter.hosts[0].is_closed
    stand.submit("b", "x")
    stand.take()
    assert len(stand.starter.hosts) == 2


def test_time_spent_compiling_is_the_requests_own(stand: Stand) -> None:
    stand.submit("short", "x", timeout_s=2.0)
    stand.submit("long", "x", timeout_s=60.0)
    stand.submit("endless", "x")
    stand.take()
    stand.now_s += 3.0
    error = stand.take()["short"]
    assert isinstance(error, QueueTimeoutError)
    stand.starter.hosts[0].succeed()
    assert stand.take() == {"long": "compiled", "endless": "compiled"}
    assert stand.requests["long"].timeout_s == pytest.approx(57.0)
    assert stand.requests["endless"].timeout_s is None


def test_what_nobody_waits_for_is_not_compiled_to_its_end(stand: Stand) -> None:
    stand.submit("a", "x")
    stand.submit("b", "x")
    stand.take()
    stand.grammars.forget("a")
    assert not stand.starter.hosts[0].is_closed
    stand.grammars.forget("b")
    assert stand.starter.hosts[0].is_closed
    assert stand.grammars.is_idle
    # One that is done and not yet taken gives its walk back.
    stand.submit("c", "y")
    stand.take()
    stand.starter.hosts[1].succeed()
    for wanted in list(stand.grammars._compiling.values()):
        stand.grammars._look(wanted)
    assert stand.starter.hosts[1].walks == 1
    stand.grammars.forget("c")
    assert stand.starter.hosts[1].walks == 0
    assert stand.take() == {}


def test_few_processes_are_kept_for_later(stand: Stand) -> None:
    for number in range(MAX_IDLE + 5):
        stand.submit(f"r{number}", f"s{number}")
        stand.take()
        stand.starter.hosts[-1].succeed()
        stand.take()
        if number:  # the first one stays in use
            stand.walks[f"r{number}"].close()
    stand.grammars.tidy()
    assert [h.is_closed for h in stand.starter.hosts] == [False] + [True] * 4 + [False] * MAX_IDLE
    assert stand.grammars.stats.processes == MAX_IDLE + 1
    assert stand.grammars.stats.seconds == pytest.approx(0.5 * (MAX_IDLE + 5))


def test_a_process_that_nobody_asked_for_is_not_kept_for_ever(stand: Stand) -> None:
    for name in ("used", "idle"):
        stand.submit(name, name)
        stand.take()
        stand.starter.hosts[-1].succeed()
        stand.take()
    stand.walks["idle"].close()
    stand.grammars.tidy()
    stand.now_s += IDLE_S - 1
    stand.grammars.tidy()
    assert not any(host.is_closed for host in stand.starter.hosts)
    stand.now_s += 2
    stand.grammars.tidy()
    assert [host.is_closed for host in stand.starter.hosts] == [False, True]


def test_memory_that_all_take_together_is_bounded() -> None:
    stand = Stand(most_bytes=100 * MIB)
    stand.requests, stand.walks = {}, {}
    for name, grown in (("idle", 60), ("small", 30), ("large", 50)):
        stand.submit(name, name)
        stand.take()
        stand.starter.hosts[-1].succeed(grown * MIB)
        stand.take()
        if name == "idle":
            stand.walks[name].close()
    # A newcomer costs the one that nobody uses its place.
    stand.submit("next", "next")
    assert stand.starter.hosts[0].is_closed
    stand.take()
    stand.starter.hosts[-1].succeed(30 * MIB)
    assert stand.take() == {"next": "compiled"}
    stand.submit("too much", "too much")
    assert isinstance(stand.take()["too much"], UnavailableError)
    # Growing afterwards is for the largest to pay.
    stand.starter.hosts[2].grown_bytes = 90 * MIB
    stand.grammars.tidy()
    closed = [host.spec.source for host in stand.starter.hosts if host.is_closed]
    assert closed == ["idle", "large"]
    assert stand.grammars.stats.outcomes["killed"] == 1


def test_no_process_to_be_had_is_said_and_passes(stand: Stand) -> None:
    stand.starter.error = OSError(24, "Too many open files")
    stand.submit("a", "x")
    error = stand.take()["a"]
    assert isinstance(error, UnavailableError)
    assert "Too many open files" in error.cause
    stand.starter.error = None
    stand.submit("b", "x")
    stand.take()
    stand.starter.hosts[0].succeed()
    assert stand.take() == {"b": "compiled"}
