"""Bounds over a simulated queue: they hold, and what is promised about waiting is about true.

The queue here is the oracle: it knows when a place really comes free.
"""

from __future__ import annotations

import heapq
import json
import random
from collections import deque

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.conftest import RunningServer
from tests.server.raw_client import CHAT, RawClient, post

from headrace.core.errors import (
    ContextLengthError,
    InvalidRequestError,
    QueueTimeoutError,
    RetryLaterError,
    TooManyRequestsError,
)
from headrace.core.request import GenerateRequest, SamplingParams
from headrace.policies.queue import UNKNOWN_RETRY_S, QueueBounds, Ticket


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def request(tokens: int = 10, timeout_s: float | None = None, tenant: str = "") -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        prompt_token_ids=[1] * tokens,
        params=SamplingParams(),
        timeout_s=timeout_s,
        tenant=tenant,
    )


def queue_bounds(
    clock: Clock, requests: int = 4, tokens: int = 1000, prompt: int | None = None
) -> QueueBounds:
    return QueueBounds(
        max_waiting_requests=requests,
        max_waiting_tokens=tokens,
        max_prompt_tokens=prompt,
        clock=clock,
    )


def test_requests_that_wait_are_bounded() -> None:
    gate = queue_bounds(Clock())
    tickets = [gate.enter(request()) for _ in range(4)]
    with pytest.raises(TooManyRequestsError, match="4 requests are waiting") as refused:
        gate.enter(request())
    assert refused.value.retry_after_s == UNKNOWN_RETRY_S  # nothing was measured yet
    tickets[0].started()
    tickets[0].started()  # said twice, counted once
    assert gate.waiting_requests == 3
    gate.enter(request())


def test_tokens_that_wait_are_bounded_but_a_lone_long_prompt_gets_in() -> None:
    gate = queue_bounds(Clock())
    with gate.enter(request(5000)), pytest.raises(TooManyRequestsError, match="5000 prompt tokens"):
        gate.enter(request(1))
    assert gate.waiting_tokens == gate.waiting_requests == 0
    gate.enter(request(400))
    gate.enter(request(600))
    with pytest.raises(TooManyRequestsError):
        gate.enter(request(1))


SHARED = {"crowd": 1, "honest": 2, "third": 1}


def shared(clock: Clock, requests: int = 8, tokens: int = 1000) -> QueueBounds:
    return QueueBounds(
        max_waiting_requests=requests, max_waiting_tokens=tokens, weights=SHARED, clock=clock
    )


def test_who_fills_the_queue_keeps_nobody_else_out() -> None:
    gate = shared(Clock())
    for _ in range(8):
        gate.enter(request(tenant="crowd"))  # nobody else wants a place
    with pytest.raises(TooManyRequestsError, match=r"has 8 requests and 80 .* share is 2 requests"):
        gate.enter(request(tenant="crowd"))
    for _ in range(4):
        gate.enter(request(tenant="honest"))
    with pytest.raises(TooManyRequestsError, match="has 4 requests") as refused:
        gate.enter(request(tenant="honest"))
    assert "12" not in refused.value.cause  # nothing about others
    gate.enter(request(tenant="third"))


def test_nor_does_who_fills_it_with_tokens() -> None:
    gate = shared(Clock())
    gate.enter(request(1000, tenant="crowd"))
    with pytest.raises(TooManyRequestsError, match="1000 prompt tokens"):
        gate.enter(request(1, tenant="crowd"))
    gate.enter(request(900, tenant="third"))  # alone, as long as it likes
    with pytest.raises(TooManyRequestsError):
        gate.enter(request(1, tenant="third"))
    gate.enter(request(400, tenant="honest"))
    gate.enter(request(100, tenant="honest"))
    with pytest.raises(TooManyRequestsError):
        gate.enter(request(1, tenant="honest"))


@given(st.lists(st.tuples(st.sampled_from(sorted(SHARED)), st.integers(1, 300)), max_size=60))
def test_all_shares_together_are_bounded(arrivals: list[tuple[str, int]]) -> None:
    gate = shared(Clock())
    for tenant, tokens in arrivals:
        had = sum(ticket.tenant == tenant for ticket in gate._all.tickets)
        try:
            gate.enter(request(tokens, tenant=tenant))
        except TooManyRequestsError:
            assert had > 0  # whoever has nobody waiting gets in
    assert gate.waiting_requests <= 2 * 8
    assert gate.waiting_tokens <= 2 * 1000 + len(SHARED) * 300


def test_a_key_waits_for_its_own_turns_not_for_the_whole_queue() -> None:
    clock = Clock()
    gate = shared(clock, requests=100, tokens=10**6)
    crowd = deque(gate.enter(request(tenant="crowd")) for _ in range(60))
    for _ in range(20):  # one a second leaves
        clock.now_s += 1
        crowd.popleft().started()
    assert gate.estimated_wait_s("crowd") == pytest.approx(40, rel=0.1)
    with pytest.raises(QueueTimeoutError):
        gate.enter(request(timeout_s=5, tenant="crowd"))
    gate.enter(request(timeout_s=5, tenant="honest"))  # is next
    with pytest.raises(QueueTimeoutError):
        gate.enter(request(timeout_s=5, tenant="crowd"))


def test_with_one_key_the_queue_is_its_own() -> None:
    gate = QueueBounds(
        max_waiting_requests=2, max_waiting_tokens=1000, weights={"only": 1}, clock=Clock()
    )
    gate.enter(request(tenant="only"))
    gate.enter(request(tenant="only"))
    with pytest.raises(TooManyRequestsError, match="2 requests are waiting"):
        gate.enter(request(tenant="only"))


def test_a_prompt_beyond_the_bound_is_refused_with_both_numbers() -> None:
    with pytest.raises(ContextLengthError, match=r"21 tokens; .* at most 20"):
        queue_bounds(Clock(), prompt=20).enter(request(21))


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
def test_no_time_at_all_is_a_mistake(timeout_s: float) -> None:
    with pytest.raises(InvalidRequestError):
        queue_bounds(Clock()).enter(request(timeout_s=timeout_s))


def test_leaving_gives_the_place_up_even_by_an_error() -> None:
    gate = queue_bounds(Clock())
    with pytest.raises(RuntimeError), gate.enter(request()):
        raise RuntimeError
    assert gate.waiting_requests == 0


def test_a_timeout_that_the_queue_exceeds_is_refused_at_once() -> None:
    clock = Clock()
    gate = queue_bounds(clock, requests=100, tokens=10**6)
    queue = deque(gate.enter(request()) for _ in range(40))
    for _ in range(20):  # one a second leaves
        clock.now_s += 1
        queue.popleft().started()
    assert gate.estimated_wait_s() == pytest.approx(20, rel=0.1)
    gate.enter(request(timeout_s=30))
    with pytest.raises(QueueTimeoutError, match="timeout_s is 5") as refused:
        gate.enter(request(timeout_s=5))
    assert refused.value.retry_after_s == pytest.approx(16, rel=0.1)


def test_an_empty_queue_never_refuses_a_timeout() -> None:
    clock = Clock()
    gate = queue_bounds(clock)
    for _ in range(10):
        ticket = gate.enter(request())
        clock.now_s += 50
        ticket.started()
    gate.enter(request(timeout_s=0.001))


def test_a_queue_that_stands_still_is_noticed() -> None:
    clock = Clock()
    gate = queue_bounds(clock, requests=10)
    queue = deque(gate.enter(request()) for _ in range(10))
    for _ in range(20):
        clock.now_s += 0.1
        queue.popleft().started()
        queue.append(gate.enter(request()))
    before_s = gate.estimated_wait_s()
    clock.now_s += 30
    assert gate.estimated_wait_s() > 20 * before_s


def test_pauses_without_a_queue_do_not_count() -> None:
    """A night in which nobody came says nothing about how fast the engine is."""
    clock = Clock()
    gate = queue_bounds(clock, requests=1)
    for _ in range(10):
        ticket = gate.enter(request())
        clock.now_s += 0.5
        ticket.started()
        clock.now_s += 3600
    with gate.enter(request()), pytest.raises(TooManyRequestsError) as refused:
        gate.enter(request())
    assert refused.value.retry_after_s == pytest.approx(0.5, rel=0.05)


def test_requests_that_start_together_do_not_wait_for_each_other() -> None:
    """One at a time took a second each. Now many come at once, and the engine has room for all:
    nobody is to be refused because of a rate that only says how few came before."""
    clock = Clock()
    gate = queue_bounds(clock, requests=100)
    for _ in range(10):
        ticket = gate.enter(request())
        clock.now_s += 1
        ticket.started()
    for _ in range(5):
        tickets = [gate.enter(request(timeout_s=1.5)) for _ in range(20)]
        clock.now_s += 1
        for ticket in tickets:
            clock.now_s += 1e-5
            ticket.started()


class Queue:
    """An engine that starts waiting requests in order, `rate` a second, at random times."""

    def __init__(self, gate: QueueBounds, clock: Clock, rate: float, rng: random.Random) -> None:
        self.gate = gate
        self._clock = clock
        self._rate = rate
        self._rng = rng
        self.waiting: deque[Ticket] = deque()
        self._next_s = clock.now_s

    def run_until(self, end_s: float) -> None:
        while self._next_s <= end_s:
            self._clock.now_s = self._next_s
            if self.waiting:
                self.waiting.popleft().started()
            self._next_s += self._rng.expovariate(self._rate)
        self._clock.now_s = end_s

    def room_after_s(self, tokens: int, most_requests: int, most_tokens: int) -> float:
        """Without anybody else coming: how long until a request of this size would get in, if
        each start takes what it takes on average."""
        requests = self.gate.waiting_requests
        waiting_tokens = self.gate.waiting_tokens
        for starts, ticket in enumerate(self.waiting):
            if requests < most_requests and waiting_tokens + tokens <= most_tokens:
                return starts / self._rate
            requests -= 1
            waiting_tokens -= ticket.prompt_tokens
        return len(self.waiting) / self._rate


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    rate=st.floats(0.5, 200),
    load=st.floats(0.5, 4),
    most_requests=st.integers(1, 40),
    most_tokens=st.integers(50, 4000),
)
def test_bounds_hold_and_promises_are_about_true(
    seed: int, rate: float, load: float, most_requests: int, most_tokens: int
) -> None:
    rng, clock = random.Random(seed), Clock()
    gate = queue_bounds(clock, most_requests, most_tokens)
    queue = Queue(gate, clock, rate, rng)
    promised_s = true_s = 0.0
    for count in range(1500):
        queue.run_until(clock.now_s + rng.expovariate(rate * load))
        tokens = rng.randint(1, 100)
        try:
            queue.waiting.append(gate.enter(request(tokens)))
        except RetryLaterError as refused:
            if count > 500:  # steady by then
                promised_s += refused.retry_after_s
                true_s += queue.room_after_s(tokens, most_requests, most_tokens)
        assert gate.waiting_requests == len(queue.waiting) <= most_requests
        assert gate.waiting_tokens == sum(ticket.prompt_tokens for ticket in queue.waiting)
        assert gate.waiting_tokens <= most_tokens or gate.waiting_requests == 1
    if true_s > 20 / rate:  # enough were refused to compare
        assert true_s / 3 < promised_s < true_s * 3, (promised_s, true_s)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), rate=st.floats(0.5, 200), most=st.integers(8, 40))
def test_the_wait_that_is_estimated_is_about_the_wait(seed: int, rate: float, most: int) -> None:
    rng, clock = random.Random(seed), Clock()
    gate = queue_bounds(clock, most, 10**9)
    queue = Queue(gate, clock, rate, rng)
    estimates_s: list[float] = []
    for count in range(1000):
        queue.run_until(clock.now_s + rng.expovariate(rate * 2))
        if gate.waiting_requests < most:
            queue.waiting.append(gate.enter(request()))
        elif count > 300:
            estimates_s.append(gate.estimated_wait_s())
    typical_s = heapq.nsmallest(len(estimates_s) // 2 + 1, estimates_s)[-1]
    assert most / rate / 2.5 < typical_s < most / rate * 2.5


def test_a_full_queue_is_429_with_a_time_and_empties_again(strict: RunningServer) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3000,
                       "ignore_eos": True, "stream": True})  # fmt: skip
    clients = [RawClient(strict.port) for _ in range(3)]
    try:
        clients[0].send(post(CHAT, body)).socket.recv(1)  # one runs, two wait: that is all
        for client in clients[1:]:
            client.send(post(CHAT, body))

        def is_full() -> bool:
            reply = httpx.post(strict.base_url + CHAT, json={"messages": [
                {"role": "user", "content": "Hi"}], "max_tokens": 1, "timeout_s": 0.2})  # fmt: skip
            return reply.status_code == 429

        strict.wait_for(is_full)
        with RawClient(strict.port) as client:
            answer = client.send(post(CHAT, body)).answer()
        assert answer.status == 429
        assert answer.error["type"] == "rate_limit_error"
        assert int(answer.headers["retry-after"]) >= 1
    finally:
        for client in clients:
            client.close()
    good = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    strict.wait_for(
        lambda: httpx.post(strict.base_url + CHAT, json=good, timeout=60).status_code == 200
    )
