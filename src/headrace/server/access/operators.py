"""Who may read data about everybody's requests and about the server itself, and on which port.

Such routes (/metrics, /load, /history, /diagnosis, /fit, most of /version) are for operators. On
the main port they need the metrics key if one is set, else the key of --api-key or the only key
there is; a tenant's key is not enough. An admin port serves them without a key, unless there is a
metrics key; a main port with keys then no longer serves them. Knows keys and routes; no sockets.
"""

from __future__ import annotations

import hashlib
from typing import NoReturn

from headrace.core.errors import AuthenticationError, HeadraceError
from headrace.core.server_config import ServerConfig
from headrace.server.access.keys import API_KEY_NAME, Keys
from headrace.server.access.limits import Key
from headrace.server.api.route import Route
from headrace.server.api.routes import PROBES
from headrace.server.edge.listen import is_loopback
from headrace.server.request.call import Call, NotFoundError

ADMIN_PATHS = PROBES | {"/", "/metrics", "/load", "/version", "/history", "/diagnosis", "/fit"}


class OperatorOnlyError(HeadraceError):
    """The key is valid, but it is a tenant's."""

    status = 403


class Operators:
    """The rules of one port: the main port, or the admin port."""

    def __init__(self, config: ServerConfig, keys: Keys, *, is_admin: bool) -> None:
        self._keys = keys
        self._is_admin = is_admin
        self._has_moved = config.admin_port is not None and len(keys) > 0
        self._key: Keys | None = None
        if config.metrics_key is not None:
            digest = hashlib.sha256(config.metrics_key.encode("utf-8")).digest()
            self._key = Keys([Key(name="operator", digest=digest)])

    @property
    def needs_key(self) -> bool:
        """Whether most routes of this port need a key."""
        return self._key is not None if self._is_admin else len(self._keys) > 0

    def authenticate(self, call: Call, route: Route | None) -> None:
        """Raises unless the caller may use this route; sets the call's key."""
        if route is not None and route.is_open:
            return
        if self._is_admin:
            if self._key is not None:
                self._key.authenticate(call.headers)
            call.is_operators = True
            return
        wants = route is not None and (route.is_operators or route.tells_operators_more)
        if wants and self._is_operator(call):
            call.is_operators = True
            return
        call.key_name = self._keys.authenticate(call.headers)
        if route is not None and route.is_operators:
            self._refuse(call)

    def _is_operator(self, call: Call) -> bool:
        if self._has_moved:
            return False
        try:
            if self._key is not None:
                self._key.authenticate(call.headers)
                return True
            name = self._keys.authenticate(call.headers)
        except AuthenticationError:
            return False
        # No keys at all, the only key, or that of --api-key: the caller is the operator.
        if name is not None and len(self._keys) > 1 and name != API_KEY_NAME:
            return False
        call.key_name = name
        return True

    def _refuse(self, call: Call) -> NoReturn:
        if self._has_moved:
            raise NotFoundError(
                f"{call.path} is not served on this port.", "Use the port set by --admin-port."
            )
        if self._key is not None and len(self._keys) == 0:
            self._key.authenticate(call.headers)  # raises for any other key
        raise OperatorOnlyError(
            f"{call.path} shows data about all keys' requests, and this key is not the operator's.",
            "Send the key set by --metrics-key (if none is set, that of --api-key).",
        )


def admin_routes(routes: list[Route]) -> list[Route]:
    return [route for route in routes if route.path in ADMIN_PATHS]


def operator_warnings(config: ServerConfig, keys: Keys) -> list[str]:
    """Warnings to show at the start."""
    warnings = []
    if config.admin_port is not None:
        if config.metrics_key is None and not is_loopback(config.admin_host):
            warnings.append(
                f"the admin port can be reached from other machines ({config.admin_host}) and "
                "needs no key: set --metrics-key, or make sure that only operators can reach it"
            )
    elif config.metrics_key is None and len(keys) > 1 and config.api_key is None:
        warnings.append(
            "no key may read /metrics, which shows data about all keys: set --metrics-key or "
            "--admin-port"
        )
    return warnings
