"""A connection between two engines: opened, and each side proves to the other that it has the key.

    asker                          giver
    HELLO nonce            ->
                           <-      WELCOME nonce, proof
    ASK proof, what        ->      (with the descriptor of shared memory, on one machine)

The key itself is never sent. Blocks that follow are protected against accidents by checksums, not
against somebody who can change bytes on the way. On one machine the two meet at a Unix socket, else
over TCP. Blocking sockets with time limits: used by threads beside the engine's loop.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.server.handover import frames
from headrace.server.handover.frames import Buffer, Cause, HandoverError, Kind

GREET_S = 5.0  # for each step of the greeting
_MOST_PARTS = 64


@dataclass(frozen=True, slots=True)
class Peer:
    """Where an engine listens for those who ask."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_peer(text: str) -> Peer | None:
    """HOST:PORT, or None."""
    host, _, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_port = port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65536
    if not host or not is_port or len(host) > 255 or not host.isascii() or not host.isprintable():
        return None
    return Peer(host, int(port))


def unix_name(port: int) -> str | None:
    """Of the socket beside a TCP port. In Linux' abstract namespace, which has no files that could
    be left behind, and which ends where the loopback interface does."""
    return f"\0headrace-handover-{port}" if sys.platform == "linux" else None


def secret_of(key: str) -> bytes:
    return hashlib.sha256(b"headrace hand-over\0" + key.encode("utf-8", "surrogatepass")).digest()


def _proof(secret: bytes, side: bytes, *said: Buffer) -> bytes:
    return hmac.new(secret, side + b"".join(said), hashlib.sha256).digest()


class Wire:
    """Whole frames over a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.is_unix = sock.family == getattr(socket, "AF_UNIX", None)
        if not self.is_unix:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        self.socket.close()

    def shut(self) -> None:
        """From any thread: whoever waits in `receive` or `send` stops."""
        with contextlib.suppress(OSError):  # it is closed
            self.socket.shutdown(socket.SHUT_RDWR)

    def send(self, kind: Kind, *parts: Buffer) -> None:
        with _as_handover():
            self._send_all(frames.write_frame(kind, *parts))

    def _send_all(self, parts: Sequence[Buffer]) -> None:
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        while views:
            sent = self.socket.sendmsg(views[:_MOST_PARTS])
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]

    def receive(
        self, most: dict[Kind, int], memory: frames.Memory = frames.fresh
    ) -> tuple[Kind, memoryview]:
        with _as_handover():
            return frames.read_frame(self._fill, most, memory)

    def _fill(self, view: memoryview) -> None:
        at = 0
        while at < len(view):
            count = self.socket.recv_into(view[at:])
            if not count:
                raise HandoverError(Cause.CUT, "the connection was closed")
            at += count

    # -- with a descriptor -----------------------------------------------------------------------

    def send_with(self, descriptor: int, kind: Kind, payload: Buffer) -> None:
        """Only the first byte carries the descriptor."""
        with _as_handover():
            head, *rest = frames.write_frame(kind, payload)
            sent = socket.send_fds(self.socket, [head], [descriptor])
            self._send_all([head[sent:], *rest])

    def receive_with(self, most: dict[Kind, int]) -> tuple[Kind, memoryview, int | None]:
        """The caller owns the descriptor."""
        found: list[int] = []
        try:
            with _as_handover():
                head = b""
                while len(head) < frames.HEAD_BYTES:
                    part, more, _, _ = socket.recv_fds(
                        self.socket, frames.HEAD_BYTES - len(head), 2
                    )
                    found += more
                    if not part:
                        raise HandoverError(Cause.CUT, "the connection was closed")
                    head += part
                kind, payload = frames.read_rest(head, self._fill, most)
        except BaseException:
            for each in found:
                os.close(each)
            raise
        for each in found[1:]:
            os.close(each)
        return kind, payload, found[0] if found else None


class _as_handover:
    """An operating system's error as ours."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TimeoutError):
            raise HandoverError(Cause.TIMEOUT, "nothing came in time") from None
        if isinstance(error, OSError):
            raise HandoverError(Cause.CUT, error.strerror or str(error)) from None


# -- the two sides ---------------------------------------------------------------------------------


def connect(peer: Peer, *, shares: bool = True) -> Wire:
    """`shares`: by the Unix socket where the peer is on this machine."""
    name = unix_name(peer.port)
    if shares and name is not None and peer.is_loopback:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(GREET_S)
        try:
            sock.connect(name)
            return Wire(sock)
        except OSError:
            sock.close()
    try:
        return Wire(socket.create_connection((peer.host, peer.port), timeout=GREET_S))
    except OSError as error:
        raise HandoverError(Cause.UNREACHABLE, error.strerror or str(error)) from None


def greet(wire: Wire, secret: bytes) -> Callable[[bytes], bytes]:
    """The asker's part. Returns what makes its proof, for what it asks."""
    wire.socket.settimeout(GREET_S)
    mine = os.urandom(frames.KEY_BYTES)
    wire.send(Kind.HELLO, mine)
    # A giver that does not know this version says so.
    kind, payload = wire.receive(
        {Kind.WELCOME: 2 * frames.KEY_BYTES, Kind.END: frames.MAX_END_BYTES}
    )
    if kind is Kind.END:
        raise _ended(payload)
    theirs, proof = payload[: frames.KEY_BYTES], payload[frames.KEY_BYTES :]
    if not hmac.compare_digest(proof, _proof(secret, b"giver", mine, theirs)):
        raise HandoverError(Cause.KEY, "the other engine does not have this key")
    return lambda wanted: _proof(secret, b"asker", theirs, mine, wanted)


def ask(
    wire: Wire,
    prove: Callable[[bytes], bytes],
    wanted: frames.Wanted,
    descriptor: int | None = None,
) -> None:
    packed = frames.pack_wanted(wanted)
    payload = frames.pack_ask(prove(packed), packed)
    if descriptor is None:
        wire.send(Kind.ASK, payload)
    else:
        wire.send_with(descriptor, Kind.ASK, payload)


def answer(wire: Wire, secret: bytes) -> tuple[frames.Wanted, int | None]:
    """The giver's part: what is asked for, and the descriptor that came with it."""
    wire.socket.settimeout(GREET_S)
    _, payload = wire.receive({Kind.HELLO: frames.KEY_BYTES})
    if len(payload) != frames.KEY_BYTES:
        raise HandoverError(Cause.FRAME, "a short nonce")
    theirs = bytes(payload)
    mine = os.urandom(frames.KEY_BYTES)
    wire.send(Kind.WELCOME, mine, _proof(secret, b"giver", theirs, mine))
    descriptor: int | None = None
    if wire.is_unix:
        _, payload, descriptor = wire.receive_with({Kind.ASK: frames.MAX_ASK_BYTES})
    else:
        _, payload = wire.receive({Kind.ASK: frames.MAX_ASK_BYTES})
    try:
        proof, packed = frames.unpack_ask(payload)
        if not hmac.compare_digest(proof, _proof(secret, b"asker", mine, theirs, packed)):
            raise HandoverError(Cause.KEY, "the engine that asks does not have this key")
        return frames.unpack_wanted(packed), descriptor
    except BaseException:
        if descriptor is not None:
            os.close(descriptor)
        raise


def _ended(payload: Buffer) -> HandoverError:
    end = frames.unpack_end(payload)
    return HandoverError(end.cause or Cause.FRAME, end.text)
