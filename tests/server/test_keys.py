"""Keys: who gets in, how much each may ask, and that their caches stay apart."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.conftest import RunningServer, StartServer

from headrace.core.errors import (
    AuthenticationError,
    ConfigError,
    InvalidRequestError,
    TooManyRequestsError,
)
from headrace.core.request import GenerateRequest, SamplingParams
from headrace.core.server_config import ServerConfig
from headrace.server.keys import KeyedCall, Keys
from headrace.server.keys_file import read_keys, read_keys_file
from headrace.server.limits import Bucket, Key, Reservation
from headrace.server.record import RequestRecord

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
    """As generation.py begins with the requests of a call."""
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
            with pytest.raises(TooManyRequestsError, match="3 continuations under way; 2 more"):
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
    keys, other_process = Keys(two), Keys(two)
    salts = [keys.cache_salt(name, sent) for name in ("a", "b") for sent in ("", "x")]
    assert len(set(salts)) == 4
    assert keys.cache_salt("a", "x") == salts[1]
    assert other_process.cache_salt("a", "x") != salts[1]
    assert keys.cache_salt("a", "\ud800")  # whatever came through


def test_a_lone_key_and_no_key_share_one_cache() -> None:
    assert Keys([key("a")]).cache_salt("a", "x") == "x"
    assert Keys().cache_salt(None, "") == ""


# -- the file --------------------------------------------------------------------------------------


def write(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_of_keys(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"two").hexdigest()
    path = write(
        tmp_path,
        f"""
        [[keys]]
        name = "a"
        key = "one"
        requests_per_minute = 5
        [[keys]]
        name = "b"
        key_sha256 = "{digest}"
        tokens_per_minute = 100
        max_concurrent = 2
        weight = 3
        """,
    )
    config = ServerConfig(api_keys_file=str(path), api_key="three")
    keys, warnings = read_keys(config)
    sent = {"one": "a", "two": "b", "three": "default"}
    for text, name in sent.items():
        assert keys.authenticate({"authorization": f"Bearer {text}"}) == name
    assert warnings == []
    assert read_keys_file(path)[1].max_concurrent == 2
    assert keys.weights == {"default": 1, "a": 1, "b": 3}


def test_a_file_that_all_can_read_is_warned_of(tmp_path: Path) -> None:
    path = write(tmp_path, '[[keys]]\nname = "a"\nkey = "x"', mode=0o644)
    _, warnings = read_keys(ServerConfig(api_keys_file=str(path)))
    assert [str(path) in warning for warning in warnings] == [True]


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        (0o600, []),
        (0o640, []),
        (0o644, ["read"]),
        (0o660, ["its group"]),
        (0o664, ["its group", "read"]),
    ],
)
def test_who_else_may_read_or_write_the_file_is_warned_of(
    tmp_path: Path, mode: int, says: list[str]
) -> None:
    path = write(tmp_path, '[[keys]]\nname = "a"\nkey = "x"', mode=mode)
    _, warnings = read_keys(ServerConfig(api_keys_file=str(path)))
    assert len(warnings) == len(says)
    assert all(each in warning for each, warning in zip(says, warnings, strict=True))


@pytest.mark.parametrize("mode", [0o666, 0o602, 0o777])
def test_a_file_that_all_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path, '[[keys]]\nname = "a"\nkey = "x"', mode=mode)
    with pytest.raises(ConfigError, match="written to by every user") as error:
        read_keys(ServerConfig(api_keys_file=str(path)))
    assert "chmod 600" in error.value.remedy


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no [[keys]]"),
        ("keys = 3", "no [[keys]]"),
        ("keys = [3]", "other than tables"),
        ("[[keys]", "not TOML"),
        ('title = "x"\n[[keys]]\nname = "a"\nkey = "x"', "'title'"),
        ('[[keys]]\nkey = "x"', "no name"),
        ('[[keys]]\nname = "a"', "no key"),
        (f'[[keys]]\nname = "a"\nkey = "x"\nkey_sha256 = "{"0" * 64}"', "both"),
        ('[[keys]]\nname = "a"\nkey_sha256 = "abc"', "64 hexadecimal"),
        ('[[keys]]\nname = "a"\nkey = 3', "no text"),
        ('[[keys]]\nname = "a"\nkey = "x"\nrequests = 3', "'requests'"),
        ('[[keys]]\nname = "a"\nkey = "x"\nmax_concurrent = 0', "max_concurrent = 0"),
        ('[[keys]]\nname = "a"\nkey = "x"\nmax_concurrent = true', "max_concurrent = True"),
        ('[[keys]]\nname = "a"\nkey = "x"\nweight = 0', "weight = 0"),
        ('[[keys]]\nname = "a"\nkey = "x"\nweight = 1.5', "weight = 1.5"),
        ('[[keys]]\nname = "a"\nkey = "x"\nweight = 1001', "1 to 1000"),
        ('[[keys]]\nname = "a"\nkey = "x"\n[[keys]]\nname = "a"\nkey = "y"', "twice"),
        ('[[keys]]\nname = "a"\nkey = "x"\n[[keys]]\nname = "b"\nkey = "x"', "twice"),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        read_keys(ServerConfig(api_keys_file=str(path)))
    assert says in error.value.cause
    assert error.value.param == "api_keys_file"


def test_no_file_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        read_keys(ServerConfig(api_keys_file=str(tmp_path / "nothing")))


# -- over HTTP -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    path = write(
        tmp_path_factory.mktemp("keys"),
        '[[keys]]\nname = "a"\nkey = "key-of-a"\n[[keys]]\nname = "b"\nkey = "key-of-b"\n'
        '[[keys]]\nname = "few"\nkey = "key-of-few"\nrequests_per_minute = 1\n'
        '[[keys]]\nname = "one"\nkey = "key-of-one"\nmax_concurrent = 1\n'
        '[[keys]]\nname = "two"\nkey = "key-of-two"\nmax_concurrent = 2\n'
        '[[keys]]\nname = "small"\nkey = "key-of-small"\ntokens_per_minute = 1000\n',
    )
    return start_server(server={"api_keys_file": str(path)})


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-of-{name}"}


def test_every_route_but_probes_needs_a_key(keyed: RunningServer) -> None:
    described = httpx.get(f"{keyed.base_url}/openapi.json", headers=bearer("a")).json()["paths"]
    assert len(described) > 8
    probes = {"/health", "/ready", "/ping"}
    assert probes < described.keys()
    with httpx.Client(base_url=keyed.base_url) as client:
        for path in [*described, "/nowhere", "/health/", "//health"]:
            for method in ("GET", "POST", "OPTIONS", "HEAD"):
                reply = client.request(method, path)
                assert (reply.status_code == 401) == (path not in probes), path
                if reply.status_code == 401 and method != "HEAD":
                    assert reply.headers["www-authenticate"] == "Bearer"
                    assert reply.json()["error"]["type"] == "authentication_error"
    assert httpx.get(f"{keyed.base_url}/nowhere", headers=bearer("a")).status_code == 404


def test_two_keys_at_once_are_none(keyed: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", keyed.port)) as sock:
        sock.sendall(
            b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer no\r\n"
            b"authorization: Bearer key-of-a\r\n\r\n"
        )
        assert sock.recv(100).startswith(b"HTTP/1.1 401 ")


def test_the_openai_client_sends_its_key(keyed: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{keyed.base_url}/v1", api_key="key-of-a") as client:
        assert client.models.list().data[0].id == "smollm2"
    with (
        openai.OpenAI(base_url=f"{keyed.base_url}/v1", api_key="wrong") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_a_spent_key_gets_429_with_the_time_and_the_limits(keyed: RunningServer) -> None:
    url = keyed.base_url + CHAT
    first = httpx.post(url, json=GOOD, headers=bearer("few"), timeout=60)
    assert (first.status_code, first.headers["x-ratelimit-remaining-requests"]) == (200, "0")
    second = httpx.post(url, json=GOOD, headers=bearer("few"), timeout=60)
    assert second.status_code == 429
    assert 1 <= int(second.headers["retry-after"]) <= 61
    assert second.headers["x-ratelimit-limit-requests"] == "1"
    assert second.json()["error"]["type"] == "rate_limit_error"
    assert httpx.post(url, json=GOOD, headers=bearer("a"), timeout=60).status_code == 200


def test_a_stream_is_open_until_its_end(keyed: RunningServer) -> None:
    url, headers = keyed.base_url + CHAT, bearer("one")
    body = {**GOOD, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as stream:
        chunks = stream.iter_bytes()
        next(chunks)
        assert httpx.post(url, json=GOOD, headers=headers).status_code == 429
        assert next(chunks)
    keyed.wait_for(
        lambda: httpx.post(url, json=GOOD, headers=headers, timeout=60).status_code == 200
    )


def test_keys_do_not_see_each_others_prefixes(keyed: RunningServer) -> None:
    """By what the prefix cache says it found."""
    text = f"{os.urandom(8).hex()} " + "A prefix that is long enough for some blocks. " * 20
    body = {**GOOD, "messages": [{"role": "user", "content": text}]}

    def cached(name: str, **more: object) -> int:
        reply = httpx.post(
            keyed.base_url + CHAT, json={**body, **more}, headers=bearer(name), timeout=60
        )
        found: int = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    def cached_later(name: str, **more: object) -> int:
        cached(name, **more)
        return cached(name, **more)

    assert cached("a") < 64
    alone = cached_later("a")
    assert alone > 64
    assert cached("b") < 64
    assert cached("a", cache_salt="mine") < 64
    assert cached("b", cache_salt="mine") < 64
    assert cached_later("b") == alone


def test_limits_count_fan_out(keyed: RunningServer) -> None:
    """128 prompts with 16 continuations of 2,000 tokens each went through a limit of 1,000 tokens a
    minute, and one of 2 at a time."""
    prompts = ["Hi"] * 128
    for name, param in (("two", "n"), ("small", "max_tokens")):
        reply = httpx.post(
            f"{keyed.base_url}/v1/completions",
            json={"prompt": prompts, "n": 16, "max_tokens": 2000},
            headers=bearer(name),
            timeout=60,
        )
        assert reply.status_code == 400
        assert "can never run" in reply.json()["error"]["message"]
        assert reply.json()["error"]["param"] == param
    body = {"prompt": prompts[:2], "max_tokens": 1}
    url = f"{keyed.base_url}/v1/completions"
    assert httpx.post(url, json=body, headers=bearer("two"), timeout=60).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {**GOOD, "max_tokens": 2000}),
        (CHAT, {**GOOD, "max_tokens": 500, "n": 2}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 600, "best_of": 2}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 2000, "stream": True}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2000}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2000, "stream": True}),
        ("/v1/messages", {**GOOD, "max_tokens": 2000}),
        ("/v1/messages", {**GOOD, "max_tokens": 2000, "stream": True}),
        ("/v1/embeddings", {"input": ["one two three four five six"] * 300}),
    ],
)
def test_every_way_to_the_engine_is_limited(
    keyed: RunningServer, path: str, body: dict[str, Any]
) -> None:
    reply = httpx.post(
        keyed.base_url + path,
        json={"model": "smollm2", **body},
        headers=bearer("small"),
        timeout=60,
    )
    assert reply.status_code == 400, reply.text
    assert "has 1000 a minute, so that it can never run" in reply.text
    assert reply.headers["x-ratelimit-limit-tokens"] == "1000"


def test_what_was_not_generated_comes_back(keyed: RunningServer) -> None:
    """A lot set aside, a little used: the next one of the same size fits."""
    for _ in range(3):
        reply = httpx.post(
            keyed.base_url + CHAT,
            json={**GOOD, "max_tokens": 800, "stop": [" "], "seed": 1},
            headers=bearer("small"),
            timeout=60,
        )
        assert reply.status_code == 200, reply.text
        assert int(reply.headers["x-ratelimit-remaining-tokens"]) < 200
    texts = ["one two three"] * 40
    reply = httpx.post(
        f"{keyed.base_url}/v1/embeddings", json={"input": texts}, headers=bearer("two"), timeout=60
    )
    assert len(reply.json()["data"]) == 40  # two at a time
