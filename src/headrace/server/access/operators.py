"""Who may read what tells of everybody's requests and of the server itself, on which port.

Routes that do (/metrics, /load) are operators', and so is most of /version. On the main port they
take the metrics key where there is one, else the key of --api-key or the only key there is; a
tenant's key does not do. An admin port has them without a key, unless there is a metrics key; the
main port then has them no more, if it has keys. Knows keys and routes; no sockets.
"""

from __future__ import annotations

import hashlib
from typing import NoReturn

from headrace.core.errors import AuthenticationError, HeadraceError
from headrace.core.server_config import ServerConfig
from headrace.server.access.keys import Keys
from headrace.server.access.limits import Key
from headrace.server.api.route import Route
from headrace.server.api.routes import PROBES
from headrace.server.edge.listen import is_loopback
from headrace.server.request.call import Call, NotFoundError

API_KEY_NAME = "default"  # as keys.py calls the key of --api-key
ADMIN_PATHS = PROBES | {"/metrics", "/load", "/version"}


class OperatorOnlyError(HeadraceError):
    """A good key, but a tenant's."""

    status = 403


class Operators:
    """Of one port: the main one, or the admin port."""

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
        """Whether there is little to be had here without a key."""
        return self._key is not None if self._is_admin else len(self._keys) > 0

    def authenticate(self, call: Call, route: Route | None) -> None:
        """Raises unless the caller may have this route; notes who it is."""
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
        # No keys at all, the only one, or that of --api-key: whoever's server it is.
        if name is not None and len(self._keys) > 1 and name != API_KEY_NAME:
            return False
        call.key_name = name
        return True

    def _refuse(self, call: Call) -> NoReturn:
        if self._has_moved:
            raise NotFoundError(
                f"{call.path} is not on this port.", "Ask the port that --admin-port names."
            )
        if self._key is not None and len(self._keys) == 0:
            self._key.authenticate(call.headers)  # raises: nobody else's key would do
        raise OperatorOnlyError(
            f"{call.path} tells of everybody's requests, and this key is not the operator's.",
            "Send the key of --metrics-key (where none is set, that of --api-key).",
        )


def admin_routes(routes: list[Route]) -> list[Route]:
    return [route for route in routes if route.path in ADMIN_PATHS]


def operator_warnings(config: ServerConfig, keys: Keys) -> list[str]:
    """What to say at the start."""
    warnings = []
    if config.admin_port is not None:
        if config.metrics_key is None and not is_loopback(config.admin_host):
            warnings.append(
                f"the admin port can be reached from other machines ({config.admin_host}) and "
                "needs no key: set --metrics-key, or see that only operators reach it"
            )
    elif config.metrics_key is None and len(keys) > 1 and config.api_key is None:
        warnings.append(
            "nobody can read /metrics, which tells of all keys' requests: set --metrics-key or "
            "--admin-port"
        )
    return warnings
