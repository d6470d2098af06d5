"""Replicas of a Kubernetes service: the ready endpoints of its EndpointSlices, from the API server.

Asked as a pod is allowed to: with its service account's token, which is read anew each time because
it changes, and the cluster's certificate. The account needs `list` on `endpointslices`. Knows the
API server's answers; no fleet.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.client.connection import Address
from headrace.core.errors import ConfigError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 4.0
MAX_ANSWER_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Where the API server is, and how a pod shows who it is."""

    url: str
    account: Path = field(default=ACCOUNT)

    @classmethod
    def around(cls, account: Path = ACCOUNT) -> Cluster:
        """The one that this process runs in."""
        host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not (account / "token").is_file():
            raise ConfigError(
                "--discover k8s:… works inside a Kubernetes pod with a service account, and this "
                "is none.",
                "Use --discover dns:NAME:PORT, or give the replicas' URLs.",
            )
        shown = f"[{host}]" if ":" in host else host
        return cls(url=f"https://{shown}:{port}", account=account)

    def get(self, path: str) -> Any:
        """Blocks. Raises OSError with what is wrong."""
        token = (self.account / "token").read_text(encoding="ascii").strip()
        request = urllib.request.Request(
            self.url + path,
            headers={"Authorization": f"Bearer {token}", "Accept": "application/json"},
        )
        authority = self.account / "ca.crt"
        context = None
        if self.url.startswith("https:"):
            context = ssl.create_default_context(cafile=str(authority))
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
                return json.loads(answer.read(MAX_ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            error.close()
            hint = ""
            if error.code == 403:
                hint = ": the pod's service account may not list endpointslices (a Role is missing)"
            raise OSError(f"the API server answered {error.code}{hint}") from None
        except ValueError:
            raise OSError("the API server's answer is no JSON") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A source of replicas, for discover.py."""

    name: str
    port: str  # a number, or the name of one of the slices' ports
    namespace: str = ""  # empty: the pod's own
    cluster: Cluster

    @property
    def shown(self) -> str:
        return f"the service {self.name}"

    async def addresses(self) -> set[Address]:
        return await asyncio.to_thread(self._look)

    def _look(self) -> set[Address]:
        account = self.cluster.account
        namespace = self.namespace or (account / "namespace").read_text(encoding="ascii").strip()
        label = urllib.parse.quote(f"kubernetes.io/service-name={self.name}")
        path = f"/apis/discovery.k8s.io/v1/namespaces/{urllib.parse.quote(namespace)}"
        found = self.cluster.get(f"{path}/endpointslices?labelSelector={label}")
        items = found.get("items") if isinstance(found, dict) else None
        if not isinstance(items, list):
            raise OSError("the API server's answer is no list of EndpointSlices")
        return {
            Address(scheme="http", host=host, port=port, path="")
            for each in items
            if (port := self._port_of(each)) is not None
            for host in ready_hosts(each)
        }

    def _port_of(self, slice_: Any) -> int | None:
        if self.port.isdigit():
            return int(self.port)
        for port in slice_.get("ports") or ():
            if port.get("name") == self.port and isinstance(port.get("port"), int):
                return int(port["port"])
        return None


def ready_hosts(slice_: Any) -> list[str]:
    """Of an EndpointSlice. A pod that ends is not ready; where it is not said, it is."""
    found = []
    for endpoint in slice_.get("endpoints") or ():
        conditions = endpoint.get("conditions") or {}
        if endpoint.get("addresses") and conditions.get("ready") is not False:
            found.append(str(endpoint["addresses"][0]))  # all of them are the same pod
    return found
