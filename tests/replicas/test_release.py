"""Which settings a rolling change may have, and what replicas get of them."""

from __future__ import annotations

import pytest

from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError
from headrace.core.server_config import ServerConfig
from headrace.core.settings import all_settings
from headrace.replicas.process import named
from headrace.replicas.release import ROUTERS, Release, change, for_replicas

OLD = Release(
    number=1,
    path="/a.gguf",
    typed="a",
    server=ServerConfig(api_key="secret", metrics_key="more", port=9, max_waiting_requests=5),
    engine=EngineConfig(kv_tokens=512),
)


def test_a_model_and_settings_change() -> None:
    new = change(OLD, "b", {"max_sequences": "8", "max_waiting_requests": 7, "prefix_cache": False})
    assert (new.number, new.typed) == (2, "b")
    assert (new.engine.max_sequences, new.server.max_waiting_requests) == (8, 7)
    assert new.engine.prefix_cache is False
    assert new.engine.kv_tokens == 512


def test_one_size_of_the_pool_replaces_another() -> None:
    new = change(OLD, None, {"kv_memory": "1GiB"})
    assert (new.engine.kv_memory, new.engine.kv_tokens, new.typed) == (1 << 30, None, "a")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"nothing": 1}, "Unknown setting 'nothing'"),
        ({"port": 1}, "belongs to the router"),
        ({"api_key": "x"}, "belongs to the router"),
        ({"max_sequences": "x"}, "max_sequences is 'x'"),
        ({"max_sequences": 0}, "max_sequences"),
        ({"kv_tokens": 1, "kv_memory": "1GiB"}, "at most one"),
    ],
)
def test_what_can_not_change(settings: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        change(OLD, None, settings)


def test_the_routers_settings_exist() -> None:
    assert {setting.name for setting in all_settings()} >= ROUTERS


def test_replicas_get_no_keys_and_no_port() -> None:
    found = for_replicas(OLD.server)
    assert (found.api_key, found.metrics_key, found.api_keys_file) == (None, None, None)
    assert found.max_waiting_requests == 5
    assert found.replicas is None


def test_names_that_clients_use_stay() -> None:
    assert named(ServerConfig(), "new", ("old",)).served_names == ("new", "old")
    assert named(ServerConfig(), "new", ()).served_names == ()
    chosen = ServerConfig(served_model_name="mine")
    assert named(chosen, "new", ("old",)).served_names == ("mine",)
