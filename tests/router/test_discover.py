"""Replicas that are found by name: by DNS, and by a Kubernetes service in front of a fake API."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.router.fakes import FakeReplica, ask, rig

from headrace.client.connection import Address
from headrace.core.errors import ConfigError
from headrace.router.discover import Discovery, Name, parse_discover
from headrace.router.kubernetes import Cluster, Service, ready_hosts
from headrace.router.versions import Version


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30))


class Listed:
    """A source that has what a test says."""

    shown = "pods"

    def __init__(self, port: int, hosts: set[str]) -> None:
        self.port, self.hosts, self.fails = port, hosts, False

    async def addresses(self) -> set[Address]:
        if self.fails:
            raise OSError("no such name")
        return {Address(scheme="http", host=h, port=self.port, path="") for h in self.hosts}


def test_replicas_come_and_go() -> None:
    async def main() -> None:
        replica = FakeReplica()
        await replica.start()
        source = Listed(int(replica.url.rpartition(":")[2]), {"127.0.0.1"})
        async with rig(versions=[Version(name="", addresses=())], beats=False) as r:
            discovery = Discovery(source, r.fleet)
            assert await discovery.look()
            assert not await discovery.look()
            await r.heart.first()
            assert (await ask(r.port)).status == 200
            source.hosts.add("127.0.0.2")
            assert await discovery.look()
            assert len(list(r.fleet.replicas)) == 2
            source.fails = True
            assert not await discovery.look()
            assert len(list(r.fleet.replicas)) == 2
            source.fails = False
            source.hosts.clear()
            assert await discovery.look()
            assert (await ask(r.port)).status == 503
        replica.kill()

    run(main())


def test_a_name_of_dns() -> None:
    found = run(Name(host="127.0.0.1", port=8000).addresses())
    assert {address.url for address in found} == {"http://127.0.0.1:8000"}


class ApiServer:
    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []  # path, authorization
        self.status = 200
        self.answer: Any = {"items": []}
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                api.asked.append((self.path, self.headers.get("authorization", "")))
                body = json.dumps(api.answer).encode()
                self.send_response(api.status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def api() -> Iterator[ApiServer]:
    server = ApiServer()
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text("models")
    return tmp_path


def endpoints(*pods: tuple[str, bool | None]) -> list[dict[str, Any]]:
    return [{"addresses": [host], "conditions": {"ready": ready}} for host, ready in pods]


def test_ready_pods_of_a_service(api: ApiServer, account: Path) -> None:
    ports = [{"name": "metrics", "port": 9000}, {"name": "http", "port": 8000}]
    api.answer = {
        "items": [
            {"ports": ports, "endpoints": endpoints(("10.0.0.1", True), ("10.0.0.2", False))},
            {"ports": ports, "endpoints": endpoints(("10.0.0.3", None), ("fd00::1", True))},
            {"ports": None, "endpoints": None},
        ]
    }
    cluster = Cluster(url=api.url, account=account)
    service = Service(name="headrace", port="http", cluster=cluster)
    assert {a.url for a in run(service.addresses())} == {
        "http://10.0.0.1:8000",
        "http://10.0.0.3:8000",
        "http://[fd00::1]:8000",
    }
    path = "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"
    label = "kubernetes.io/service-name%3Dheadrace"
    assert api.asked == [(f"{path}?labelSelector={label}", "Bearer first")]
    # The token changes while the pod runs.
    (account / "token").write_text("second")
    elsewhere = Service(name="headrace", port="8001", namespace="other", cluster=cluster)
    assert "http://10.0.0.1:8001" in {a.url for a in run(elsewhere.addresses())}
    assert api.asked[-1][0].startswith("/apis/discovery.k8s.io/v1/namespaces/other/")
    assert api.asked[-1][1] == "Bearer second"


def test_an_api_server_that_refuses_says_why(api: ApiServer, account: Path) -> None:
    service = Service(name="a", port="80", cluster=Cluster(url=api.url, account=account))
    api.status = 403
    with pytest.raises(OSError, match="403: the pod's service account may not list"):
        run(service.addresses())
    api.status, api.answer = 200, ["odd"]
    with pytest.raises(OSError, match="no list"):
        run(service.addresses())
    api.server.shutdown()
    api.server.server_close()
    with pytest.raises(OSError, match="refused"):
        run(service.addresses())


def test_endpoints_without_addresses_are_none() -> None:
    assert ready_hosts({"endpoints": [{"addresses": []}, {}, {"addresses": ["a"]}]}) == ["a"]


def test_what_discover_takes(monkeypatch: pytest.MonkeyPatch, account: Path) -> None:
    assert parse_discover("dns:a.b.svc:8000") == Name(host="a.b.svc", port=8000)
    bad = ["a:1", "dns:a", "dns::8", "dns:a:b", "dns:a:0", "dns:http://a:1", "etcd:a:1"]
    for text in [*bad, "k8s:a", "k8s:a:", "k8s:a:99999", "k8s:a/b/c:1", "k8s:A:1"]:
        with pytest.raises(ConfigError, match="--discover"):
            parse_discover(text)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="inside a Kubernetes pod"):
        parse_discover("k8s:default/headrace:http")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::2")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    assert Cluster.around(account).url == "https://[fd00::2]:6443"
