"""Keys: who gets in, how much each may ask, and that their caches stay apart."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import (
    AuthenticationError,
    InvalidRequestError,
    TooManyRequestsError,
)
from headrace.core.request import ONCE, GenerateRequest, SamplingParams
from headrace.server.access.keys import KeyedCall, Keys
from headrace.server.access.limits import Bucket, Key, Reservation
from headrace.server.observe.record import RequestRecord

CHAT = "/v1/chat/completions"
GOOD: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


class FakeCall:
    def __init__(self, key_name: str | None, method: str = "POST") -> None:
        self.method = method
        self.key_name = key_name
        self.reply_headers: dict[str, str] = {}
        self.reservation: Reservation | None = None


def call(key_name: str | None, method: str = "POST") -> KeyedCall:
    return FakeCall(key_name, method)


def key(name: str, text: str = "", **limits: int) -> Key:
    return Key(name=name, digest=hashlib.sha256((text or name).encode()).digest(), **limits)


# -- who -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", ["Bearer one", "bearer one", "BEARER  one "])
def test_a_key_is_known_by_its_name(sent: str) -> None:
    assert Keys([key("a", "one"), key("b", "two")]).authenticate({"authorization": sent}) == "a"


@pytest.mark.parametrize(
    "sent", ["", "one", "Bearer", "Bearer ", "Bearer three", "Basic one", "Bearer one, Bearer two"]
)
def test_anything_else_is_refused(sent: str) -> None:
    with pytest.raises(AuthenticationError):
        Keys([key("a", "one"), key("b", "two")]).authenticate({"authorization": sent})


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({"x-api-key": "one"}, "a"),
        ({"x-api-key": " two "}, "b"),
        ({"x-api-key": "one", "authorization": "Bearer none"}, "a"),
        ({"x-api-key": "none", "authorization": "Bearer two"}, "b"),
        ({"x-api-key": "one", "authorization": "Bearer two"}, "b"),
    ],
)
def test_a_key_in_anthropics_header(headers: dict[str, str], name: str) -> None:
    assert Keys([key("a", "one"), key("b", "two")]).authenticate(headers) == name


@pytest.mark.parametrize("sent", ["", "three", "Bearer one", "one, two"])
def test_anything_else_is_refused_there_too(sent: str) -> None:
    with pytest.raises(AuthenticationError):
        Keys([key("a", "one"), key("b", "two")]).authenticate({"x-api-key": sent})


def test_without_keys_everybody_is_nobody() -> None:
    assert Keys().authenticate({"authorization": "Bearer x"}) is None


def test_a_key_beyond_ascii_is_compared_by_its_bytes() -> None:
    sent = "Bearer " + "schlüssel".encode().decode("latin-1")  # as a header's bytes are read
    assert Keys([key("a", "schlüssel")]).authenticate({"authorization": sent}) == "a"


# -- how much --------------------------------------------------------------------------------------


@given(
    st.integers(1, 10_000),
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 20_000)), max_size=40),
)
def test_a_bucket_gives_no_more_than_its_rate(per_minute: int, spends: list[Any]) -> None:
    """Whoever spends only while the level is above 0 gets, over any time, at most what a minute
    gives at once, what the time gives, and one overdraft."""
    bucket, now_s = Bucket(per_minute, 0.0), 0.0
    spent = largest = 0
    for passed_s, count in spends:
        now_s += passed_s
        if bucket.wait_s(1, now_s) == 0:
            bucket.spend(count, now_s)
            spent, largest = spent + count, max(largest, count)
        else:
            later_s = now_s + bucket.wait_s(1, now_s)
            assert bucket.level(later_s) == pytest.approx(1, abs=1e-6 * per_minute)
        assert bucket.level(now_s) <= per_minute
    assert spent <= per_minute + per_minute * now_s / 60 + largest + 1e-6


def test_requests_a_minute() -> None:
    clock = Clock()
    keys = Keys([key("a", requests_per_minute=3)], clock=clock)
    for left in (2, 1, 0):
        one = call("a")
        with keys.enter(one):
            assert one.reply_headers["x-ratelimit-remaining-requests"] == str(left)
            assert one.reply_headers["x-ratelimit-limit-requests"] == "3"
    refused = call("a")
    with pytest.raises(TooManyRequestsError) as error, keys.enter(refused):
        pass
    assert error.value.retry_after_s == pytest.approx(20)
    assert refused.reply_headers["x-ratelimit-reset-requests"] == "1m0s"
    with keys.enter(call("a", "GET")):
        pass  # looking is free
    clock.now_s += 20
    with keys.enter(call("a")):
        pass


def ask(prompt_tokens: int, max_tokens: int | None, **more: Any) -> GenerateRequest:
    embed = more.pop("embed", False)
    return GenerateRequest(
        request_id="r",
        prompt_token_ids=[1] * prompt_tokens,
        params=SamplingParams(max_tokens=max_tokens, **more),
        embed=embed,
    )


def begin(keys: Keys, one: KeyedCall, *requests: GenerateRequest) -> list[RequestRecord]:
    """As server/request/generation.py begins with the requests of a call."""
    keys.reserve(one, requests)
    records = []
    for request in requests:
        keys.reserve(one, [request])  # is part of what was set aside
        record = RequestRecord(
            request_id="r",
            endpoint=CHAT,
            arrived_s=0.0,
            prompt_tokens=len(request.prompt_token_ids),
            key_name=one.key_name,
        )
        if one.reservation is not None:
            record.reserved_tokens = one.reservation.take(request)
        keys.on_arrival(record)
        records.append(record)
    return records


def left_of(keys: Keys, name: str) -> int:
    one = call(name)
    with keys.enter(one):
        return int(one.reply_headers["x-ratelimit-remaining-tokens"])


def test_all_that_may_be_generated_is_set_aside_and_the_rest_given_back() -> None:
    keys = Keys([key("a", tokens_per_minute=1000), key("b")], clock=Clock())
    one = call("a")
    with keys.enter(one):
        records = begin(keys, one, ask(20, 50, n=2), ask(30, 100, n=1, best_of=3))
        assert left_of(keys, "a") == 1000 - 20 - 2 * 50 - 30 - 3 * 100
        assert one.reply_headers["x-ratelimit-remaining-tokens"] == "550"
        for record, count in zip(records, (60, 10), strict=True):
            keys.on_tokens(record, count, None)
        assert left_of(keys, "a") == 550  # they were set aside
        for record in records:
            keys.on_end(record)
        assert left_of(keys, "a") == 1000 - 50 - 70
    assert left_of(keys, "a") == 880
    with keys.enter(call("b")):
        pass


def test_what_never_began_is_given_back_whole() -> None:
    """One of several was refused: those after it have not begun."""
    keys = Keys([key("a", tokens_per_minute=1000)], clock=Clock())
    requests = [ask(10, 90) for _ in range(5)]
    with keys.enter(one := call("a")):
        keys.reserve(one, requests)
        assert one.reservation is not None
        one.reservation.take(requests[0])
    assert left_of(keys, "a") == 1000 - 100


def test_a_request_that_would_overdraw_waits_until_it_fits() -> None:
    clock = Clock()
    keys = Keys([key("a", tokens_per_minute=600)], clock=clock)
    with keys.enter(one := call("a")):
        begin(keys, one, ask(100, 300))
        with keys.enter(two := call("a")):
            with pytest.raises(TooManyRequestsError) as error:
                keys.reserve(two, [ask(50, 100, n=3)])
            assert error.value.retry_after_s == pytest.approx(15)  # 150 more, at 10 a second
            assert two.reservation is None
            clock.now_s += error.value.retry_after_s
            keys.reserve(two, [ask(50, 100, n=3)])
            assert two.reply_headers["x-ratelimit-remaining-tokens"] == "0"


def test_a_request_that_can_never_fit_says_so() -> None:
    keys = Keys([key("a", tokens_per_minute=1000, max_concurrent=8)], clock=Clock())
    with keys.enter(one := call("a")):
        with pytest.raises(InvalidRequestError, match="can never run") as error:
            keys.reserve(one, [ask(10, 100, n=2) for _ in range(4)] + [ask(200, 1, n=1)])
        assert error.value.param == "n"  # 9 continuations
        with pytest.raises(InvalidRequestError, match="may take 1010 tokens") as error:
            keys.reserve(one, [ask(10, 500, n=2)])
        assert error.value.param == "max_tokens"
        with pytest.raises(InvalidRequestError) as error:
            keys.reserve(one, [ask(1001, None)])
        assert error.value.param == "prompt"
        assert left_of(keys, "a") == 1000


def test_an_answer_of_no_chosen_length_may_overdraw() -> None:
    """Nobody knows how long it will be: a guess is set aside, and the next waits for the rest."""
    clock = Clock()
    keys = Keys([key("a", tokens_per_minute=60)], clock=clock)
    with keys.enter(one := call("a")):
        (record,) = begin(keys, one, ask(50, None))
        for _ in range(30):
            keys.on_tokens(record, 1, None)
        keys.on_end(record)
    with pytest.raises(TooManyRequestsError) as error, keys.enter(call("a")):
        pass
    assert error.value.retry_after_s == pytest.approx(21)  # at one a second, from -20 to 1
    clock.now_s += 21
    with keys.enter(call("a")):
        pass


@given(
    st.integers(50, 2000),
    st.lists(
        st.tuples(
            st.floats(0, 20),
            st.lists(
                st.tuples(st.integers(1, 50), st.integers(1, 80), st.integers(1, 4)),
                min_size=1,
                max_size=3,
            ),
            st.floats(0, 1),
        ),
        max_size=20,
    ),
)
def test_no_fan_out_gets_more_than_the_rate(per_minute: int, calls: list[Any]) -> None:
    """With lengths that were chosen, never more than a minute's at once and what time gives."""
    clock = Clock()
    keys = Keys([key("a", tokens_per_minute=per_minute)], clock=clock)
    began_s, used = clock.now_s, 0
    for passed_s, shapes, part in calls:
        clock.now_s += passed_s
        requests = [ask(prompt, most, n=n) for prompt, most, n in shapes]
        one = call("a")
        try:
            with keys.enter(one):
                for request, record in zip(requests, begin(keys, one, *requests), strict=True):
                    made = int(part * request.params.n * (request.params.max_tokens or 0))
                    keys.on_tokens(record, made, None)
                    keys.on_end(record)
                    used += made + record.prompt_tokens
        except (TooManyRequestsError, InvalidRequestError):
            pass
        assert used <= per_minute + per_minute * (clock.now_s - began_s) / 60 + 1e-6


def test_continuations_take_places() -> None:
    keys = Keys([key("a", max_concurrent=4)], clock=Clock())
    with keys.enter(one := call("a")):
        begin(keys, one, ask(1, 1, n=2), ask(1, 1))
        with keys.enter(two := call("a")):
            with pytest.raises(TooManyRequestsError, match="3 continuations running; 2 more"):
                keys.reserve(two, [ask(1, 1, n=2)])
            keys.reserve(two, [ask(1, 1)])
            with pytest.raises(TooManyRequestsError), keys.enter(call("a")):
                pass
    with keys.enter(one := call("a")):
        begin(keys, one, ask(1, 1, n=4))


def test_embeddings_take_as_many_places_as_there_are() -> None:
    inputs = [ask(5, 1, embed=True) for _ in range(100)]
    keys = Keys([key("a", max_concurrent=4, tokens_per_minute=1000)], clock=Clock())
    with keys.enter(one := call("a")):
        assert keys.reserve(one, inputs, 32) == 4
        assert one.reservation is not None
        assert one.reservation.tokens == 500
    with keys.enter(call("a")), keys.enter(call("a")), keys.enter(one := call("a")):
        assert keys.reserve(one, inputs, 32) == 2
    assert Keys().reserve(call(None), inputs, 32) == 32
    assert Keys([key("b")]).reserve(call("b"), inputs[:3], 32) == 3


def test_concurrent_requests_are_those_that_are_open() -> None:
    keys = Keys([key("a", max_concurrent=1), key("b", max_concurrent=1)], clock=Clock())
    with keys.enter(call("a")):
        with pytest.raises(TooManyRequestsError), keys.enter(call("a")):
            pass
        with keys.enter(call("b")):
            pass
    with pytest.raises(KeyError), keys.enter(call("a")):
        raise KeyError
    with keys.enter(call("a")):
        pass


# -- caches ----------------------------------------------------------------------------------------


def test_salts_differ_by_key_and_by_what_was_sent_and_can_not_be_guessed() -> None:
    two = [key("a"), key("b")]
    keys, after_a_restart = Keys(two), Keys(two)
    salts = [keys.cache_salt(name, sent) for name in ("a", "b") for sent in ("", "x")]
    assert len(set(salts)) == 4
    assert keys.cache_salt("a", "x") == salts[1]
    # So that a prefix cache on disk is found again.
    assert after_a_restart.cache_salt("a", "x") == salts[1]
    replaced = Keys([key("a", "another"), two[1]])
    assert replaced.cache_salt("a", "x") != salts[1]
    assert keys.cache_salt("a", f"{ONCE}1") == f"{ONCE}1"  # nobody else's anyway
    assert keys.cache_salt("a", "\ud800")  # whatever came through


def test_a_lone_key_and_no_key_share_one_cache() -> None:
    assert Keys([key("a")]).cache_salt("a", "x") == "x"
    assert Keys().cache_salt(None, "") == ""
