"""Who may read what tells of everybody's requests: the table of docs/deploy.md, row by row."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.conftest import RunningServer
from tests.server.edge_server import EdgeServer
from tests.server.raw_client import PATIENCE_S, RawClient

from headrace.core.errors import ConfigError
from headrace.core.server_config import ServerConfig
from headrace.server.access.keys_file import read_keys
from headrace.server.access.operators import ADMIN_PATHS, operator_warnings
from headrace.server.api.routes import PROBES, all_routes
from headrace.server.edge.listen import bind, bind_admin

OWN, TENANT, METRICS = "own-key", "tenant-key", "metrics-key"
TWO_KEYS = '[[keys]]\nname = "a"\nkey = "tenant-key"\n[[keys]]\nname = "b"\nkey = "other"\n'

# (settings, path, on the admin port, {key that is sent: status}); None is no key at all.
CASES: list[tuple[str, str, bool, dict[str | None, int]]] = [
    # No keys: everybody.
    ("", "/metrics", False, {None: 200, "x": 200}),
    ("", "/load", False, {None: 200}),
    ("", "/version", False, {None: 200}),
    ("metrics", "/metrics", False, {None: 401, "x": 401, METRICS: 200}),
    ("metrics", "/echo", False, {None: 200}),
    ("admin", "/metrics", False, {None: 200}),
    ("admin", "/metrics", True, {None: 200}),
    # One key, which is the operator's own.
    ("own", "/metrics", False, {None: 401, "x": 401, OWN: 200}),
    ("own", "/load", False, {None: 401, OWN: 200}),
    ("own metrics", "/metrics", False, {None: 401, OWN: 403, METRICS: 200}),
    ("own metrics", "/echo", False, {None: 401, OWN: 200, METRICS: 401}),
    # Tenants.
    ("tenants", "/metrics", False, {None: 401, "x": 401, TENANT: 403}),
    ("tenants", "/load", False, {TENANT: 403}),
    ("tenants", "/version", False, {None: 401, TENANT: 200}),
    ("tenants own", "/metrics", False, {TENANT: 403, OWN: 200}),
    ("tenants metrics", "/metrics", False, {None: 401, TENANT: 403, METRICS: 200}),
    ("tenants metrics", "/version", False, {TENANT: 200, METRICS: 200}),
    # A port of their own.
    ("tenants own admin", "/metrics", False, {None: 401, TENANT: 404, OWN: 404}),
    ("tenants own admin", "/metrics", True, {None: 200}),
    ("tenants own admin", "/version", True, {None: 200}),
    ("tenants own admin", "/echo", True, {None: 404, OWN: 404}),
    ("tenants metrics admin", "/metrics", False, {METRICS: 401, TENANT: 404}),
    ("tenants metrics admin", "/metrics", True, {None: 401, TENANT: 401, METRICS: 200}),
    ("tenants own", "/history", False, {None: 401, TENANT: 403, OWN: 200}),
    ("tenants own", "/diagnosis", False, {None: 401, TENANT: 403, OWN: 200}),
    ("tenants own admin", "/history", True, {None: 200}),
    ("tenants own admin", "/history", False, {TENANT: 404}),
    # The page has no data of its own.
    ("tenants own", "/", False, {None: 200, TENANT: 200}),
    ("tenants metrics admin", "/", True, {None: 200}),
    # Probes: always, everywhere.
    ("tenants metrics admin", "/health", False, {None: 200}),
    ("tenants metrics admin", "/health", True, {None: 200}),
]


def settings_of(words: str, folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if "tenants" in words:
        (folder / "keys.toml").write_text(TWO_KEYS)
        (folder / "keys.toml").chmod(0o600)
        settings["api_keys_file"] = str(folder / "keys.toml")
    if "own" in words:
        settings["api_key"] = OWN
    if "metrics" in words:
        settings["metrics_key"] = METRICS
    if "admin" in words:
        settings["admin_port"] = 0
    return settings


def ask(port: int, path: str, key: str | None) -> tuple[int, Any]:
    lines = [f"GET {path} HTTP/1.1", "host: localhost"]
    if key is not None:
        lines.append(f"authorization: Bearer {key}")
    with RawClient(port) as client:
        answer = client.send("\r\n".join(lines) + "\r\n\r\n").answer()
        return answer.status, json.loads(answer.body)


@pytest.mark.parametrize(("words", "path", "is_admin", "statuses"), CASES)
def test_who_may_read_it(
    tmp_path: Path, words: str, path: str, is_admin: bool, statuses: dict[str | None, int]
) -> None:
    with EdgeServer(**settings_of(words, tmp_path)) as server:
        port = server.admin_port if is_admin else server.port
        for key, wanted in statuses.items():
            assert ask(port, path, key)[0] == wanted, (words, path, key)


def test_the_routes_of_the_table_are_those_of_the_server() -> None:
    operators = {route.path for route in all_routes() if route.is_operators}
    assert operators == {"/metrics", "/load", "/history", "/diagnosis", "/fit"}
    assert operators <= ADMIN_PATHS
    assert {route.path for route in all_routes() if route.is_open} == {*PROBES, "/"}


@pytest.mark.parametrize(
    ("words", "key", "is_all"),
    [
        ("", None, True),
        ("metrics", None, False),
        ("metrics", METRICS, True),
        ("own", OWN, True),
        ("own metrics", OWN, False),
        ("tenants own", TENANT, False),
        ("tenants own", OWN, True),
        ("tenants own admin", OWN, False),
    ],
)
def test_who_is_told_the_settings(
    tmp_path: Path, words: str, key: str | None, is_all: bool
) -> None:
    with EdgeServer(**settings_of(words, tmp_path)) as server:
        assert ask(server.port, "/version", key) == (200, {"all": is_all})


def test_a_page_may_not_ask_the_admin_port_by_another_name() -> None:
    with EdgeServer(admin_port=0) as server, RawClient(server.admin_port) as client:
        client.send(b"GET /metrics HTTP/1.1\r\nhost: rebound.example\r\n\r\n")
        assert client.answer().status == 403


def test_what_an_operator_is_warned_of(tmp_path: Path) -> None:
    def warnings(**settings: Any) -> list[str]:
        config = ServerConfig(**settings)
        return operator_warnings(config, read_keys(config)[0])

    tenants = settings_of("tenants", tmp_path)
    assert warnings() == warnings(**settings_of("own", tmp_path)) == []
    assert "no key may read /metrics" in warnings(**tenants)[0]
    assert warnings(**tenants, api_key=OWN) == warnings(**tenants, metrics_key=METRICS) == []
    assert warnings(**tenants, admin_port=0) == []
    assert "0.0.0.0" in warnings(admin_port=0, admin_host="0.0.0.0")[0]


def test_an_admin_port_that_is_taken_is_named() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"Port {port} .* is taken.*--admin-port \d+"
        ) as found:
            bind_admin(ServerConfig(admin_port=port))
        assert found.value.param == "admin_port"


def test_both_ports_can_not_be_the_same() -> None:
    with pytest.raises(ConfigError, match="admin_port is 8000; expected another port than"):
        ServerConfig(admin_port=8000)
    assert ServerConfig(port=0, admin_port=0).admin_port == 0


def test_a_server_with_an_admin_port(start_server: Any) -> None:
    server: RunningServer = start_server(
        server={"admin_port": 0, "api_key": "sk-1", "metrics_key": "sk-2", "max_connections": 4}
    )
    found = re.search(r"the admin port is at (http://127\.0\.0\.1:\d+)", server.log)
    assert found is not None
    url, key = found[1], {"authorization": "Bearer sk-2"}

    def status(base: str, path: str, **options: Any) -> int:
        return httpx.get(f"{base}{path}", timeout=PATIENCE_S, **options).status_code

    assert "headrace:engine_up" in httpx.get(f"{url}/metrics", headers=key).text
    assert status(url, "/metrics") == 401
    assert (
        status(url, "/ready") == status(url, "/health") == status(server.base_url, "/ready") == 200
    )
    assert status(url, "/v1/models", headers=key) == 404
    assert status(server.base_url, "/metrics", headers={"authorization": "Bearer sk-1"}) == 404
    facts = httpx.get(f"{url}/version", headers=key).json()
    assert facts["config"]["server"]["metrics_key"] == "***"
    assert "sk-2" not in server.log
    own = httpx.get(f"{server.base_url}/version", headers={"authorization": "Bearer sk-1"}).json()
    assert own.keys() == {"version", "fingerprint"}
