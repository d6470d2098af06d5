"""Where ranks find each other: a file on this host, or an address that other hosts reach.

The leading rank listens at the address; `headrace rank ADDRESS` on another host connects, both
sides show that they have the same key, and the rank is told what to load. torch.distributed then
meets at the next port. Its traffic is neither checked nor encrypted: for a network of one's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from headrace.core.errors import ConfigError, DeviceError

KEY_VARIABLE = "HEADRACE_RANK_KEY"
LEAST_KEY = 16  # characters
_NONCE = 32
GREETING_S = 10.0
JOIN_S = 600.0  # for all ranks of other hosts
TCP = "tcp:"


def parse_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65535:
        raise ConfigError(
            f"rank_address is {text!r}; expected HOST:PORT, with a port from 1 to 65534.",
            "Give an address of this host that the others reach, as in 10.0.0.1:7000.",
            param="rank_address",
        )
    return host.strip("[]"), int(port)


def read_key() -> bytes:
    key = os.environ.get(KEY_VARIABLE, "")
    if len(key) < LEAST_KEY:
        raise ConfigError(
            f"Ranks on several hosts need a key in {KEY_VARIABLE}; it has {len(key)} characters, "
            f"expected {LEAST_KEY} or more.",
            f"Set {KEY_VARIABLE} to the same secret on every host.",
            param="rank_address",
        )
    return key.encode()


class Door:
    """Where ranks of other hosts come in, on the leading rank's side."""

    def __init__(self, address: str) -> None:
        host, port = parse_address(address)
        self._key = read_key()
        try:
            self._listener = socket.create_server((host, port), backlog=64)
        except OSError as error:
            raise ConfigError(
                f"Ranks can't be waited for at {address}: {error.strerror or error}.",
                "Give --rank-address an address of this host and a free port.",
                param="rank_address",
            ) from None
        self.meeting = f"{TCP}{host}:{port + 1}"

    def wait(self, count: int) -> list[Connection[Any, Any]]:
        """For so many ranks. One without the key is sent away."""
        found: list[Connection[Any, Any]] = []
        until_s = time.monotonic() + JOIN_S
        while len(found) < count:
            self._listener.settimeout(max(0.1, until_s - time.monotonic()))
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                raise DeviceError(
                    f"{len(found)} of {count} ranks of other hosts came within {JOIN_S:g} s.",
                    "Start `headrace rank ADDRESS` there, one for each rank.",
                ) from None
            with contextlib.suppress(OSError, EOFError):
                found.append(_greet(sock, self._key, asks=True))
        return found

    def close(self) -> None:
        self._listener.close()


def knock(address: str) -> Connection[Any, Any]:
    """On another host: a connection to the leading rank. Raises OSError while there is none."""
    host, port = parse_address(address)
    key = read_key()
    sock = socket.create_connection((host, port), timeout=GREETING_S)
    try:
        return _greet(sock, key, asks=False)
    except EOFError:
        raise DeviceError(
            f"{address} did not accept this rank.", f"Set the same {KEY_VARIABLE} on every host."
        ) from None


def _greet(sock: socket.socket, key: bytes, *, asks: bool) -> Connection[Any, Any]:
    """Each side proves that it has the key, without sending it. Raises EOFError where not."""
    try:
        sock.settimeout(GREETING_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine = secrets.token_bytes(_NONCE)
        sock.sendall(mine)
        theirs = _read(sock, _NONCE)
        sides = (b"leads", b"follows") if asks else (b"follows", b"leads")
        sock.sendall(_proof(key, sides[0], theirs, mine))
        proof = _read(sock, hashlib.sha256().digest_size)
        if not hmac.compare_digest(proof, _proof(key, sides[1], mine, theirs)):
            raise EOFError
        sock.settimeout(None)
        return Connection(sock.detach())
    except BaseException:
        sock.close()
        raise


def _proof(key: bytes, side: bytes, challenge: bytes, own: bytes) -> bytes:
    return hmac.digest(key, b"headrace rank " + side + challenge + own, "sha256")


def _read(sock: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        some = sock.recv(count - len(found))
        if not some:
            raise EOFError
        found += some
    return found


def open_store(meeting: str, rank: int, count: int, timeout: timedelta) -> Any:
    """torch.distributed's, where all ranks meet."""
    import torch.distributed as dist

    if not meeting.startswith(TCP):
        # All ranks are on this host: names of hosts need not be resolvable.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return dist.FileStore(meeting, count)  # type: ignore[attr-defined]
    host, port = parse_address(meeting.removeprefix(TCP))
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, count, is_master=rank == 0, timeout=timeout
    )
