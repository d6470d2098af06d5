"""The server's socket, bound before anything is loaded.

So a taken port is reported at once, not after a minute of loading. The socket is bound and not yet
listening, so that no client connects before the server can answer.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.core.errors import ConfigError
from headrace.core.server_config import ServerConfig

_TRIED_PORTS = 100
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def bind(host: str, port: int, prefix: str = "") -> socket.socket:
    """`prefix` is that of the settings' names: "admin_" for the admin port."""
    with _explained(host, port, prefix):
        family, address = _resolve(host, port)
        return _bind(family, address)


def bind_admin(config: ServerConfig) -> socket.socket | None:
    if config.admin_port is None:
        return None
    return bind(config.admin_host, config.admin_port, "admin_")


def listen(sock: socket.socket, backlog: int) -> None:
    host, port = sock.getsockname()[:2]
    with _explained(host, port):
        sock.listen(backlog)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def url_of(sock: socket.socket) -> str:
    """The URL for a client on this machine."""
    host, port = sock.getsockname()[:2]
    host = WILDCARDS.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # For a name with both kinds of addresses take IPv4, which most clients try for "localhost".
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, (str(address[0]), port)


def _bind(family: socket.AddressFamily, address: tuple[str, int]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


@contextmanager
def _explained(host: str, port: int, prefix: str = "") -> Iterator[None]:
    flag = f"--{prefix.replace('_', '-')}"
    try:
        yield
    except socket.gaierror as error:
        raise ConfigError(
            f"{prefix}host is {host!r}, which is not a valid address: {error.strerror}.",
            f"Set {flag}host to an address of this machine, such as 127.0.0.1 or 0.0.0.0.",
            param=f"{prefix}host",
        ) from error
    except OSError as error:
        raise _refused(host, port, error, flag, prefix) from error


def _refused(host: str, port: int, error: OSError, flag: str, prefix: str) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        free = _free_port(host, port)
        remedy = (
            f"Take a free one: {flag}port {free}" if free else f"Take a free one with {flag}port"
        )
        return ConfigError(
            f"Port {port} of {host} is taken by another process.",
            f"{remedy}, or stop the other process.",
            param=f"{prefix}port",
        )
    if error.errno == errno.EACCES:
        return ConfigError(
            f"This user has no permission to use port {port} of {host}.",
            f"Set {flag}port to 1024 or more.",
            param=f"{prefix}port",
        )
    return ConfigError(
        f"Can't listen on {host} port {port}: {error.strerror or error}.",
        f"Set {flag}host to an address of this machine, such as 127.0.0.1 or 0.0.0.0.",
        param=f"{prefix}host",
    )


def _free_port(host: str, port: int) -> int | None:
    for other in range(port + 1, min(port + _TRIED_PORTS, 65_536)):
        try:
            family, address = _resolve(host, other)
            _bind(family, address).close()
        except OSError:
            continue
        return other
    return None
