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

from headrace.core.errors import AuthenticationError, ConfigError, TooManyRequestsError
from headrace.core.server_config import ServerConfig
from headrace.server.keys import Bucket, Key, KeyedCall, Keys, read_keys, read_keys_file
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


def test_tokens_a_minute_count_prompt_and_output_as_they_come() -> None:
    clock = Clock()
    keys = Keys([key("a", tokens_per_minute=60), key("b")], clock=clock)
    record = RequestRecord(
        request_id="r", endpoint=CHAT, arrived_s=0.0, prompt_tokens=50, key_name="a"
    )
    with keys.enter(call("a")):
        keys.on_arrival(record)
        with keys.enter(call("a")):
            pass  # 10 are left
        for _ in range(30):  # begun is begun: it may overdraw
            keys.on_tokens(record, 1, None)
    with pytest.raises(TooManyRequestsError) as error, keys.enter(call("a")):
        pass
    assert error.value.retry_after_s == pytest.approx(21)  # at one a second, from -20 to 1
    with keys.enter(call("b")):
        pass
    clock.now_s += 21
    with keys.enter(call("a")):
        pass


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
        """,
    )
    config = ServerConfig(api_keys_file=str(path), api_key="three")
    keys, warnings = read_keys(config)
    sent = {"one": "a", "two": "b", "three": "default"}
    for text, name in sent.items():
        assert keys.authenticate({"authorization": f"Bearer {text}"}) == name
    assert warnings == []
    assert read_keys_file(path)[1].max_concurrent == 2


def test_a_file_that_all_can_read_is_warned_of(tmp_path: Path) -> None:
    path = write(tmp_path, '[[keys]]\nname = "a"\nkey = "x"', mode=0o644)
    _, warnings = read_keys(ServerConfig(api_keys_file=str(path)))
    assert [str(path) in warning for warning in warnings] == [True]


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
        '[[keys]]\nname = "one"\nkey = "key-of-one"\nmax_concurrent = 1\n',
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
