"""Messages between this server's own processes: typed msgpack, length first.

    4 bytes, little-endian: length | msgpack of one message

Sent over Unix socket pairs that no other process can open. Every message is checked against its
type; unlike a pickle, it can't execute anything. The messages are in wire.py and
server/grammars/messages.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from headrace.core.errors import HeadraceError

LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 256 << 20  # a longer one is a bug

M = TypeVar("M")


class Encoder:
    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()

    def frame(self, message: object) -> bytes:
        frame = bytearray(LENGTH_BYTES)
        self._encoder.encode_into(message, frame, LENGTH_BYTES)
        frame[:LENGTH_BYTES] = (len(frame) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
        return bytes(frame)


class Decoder(Generic[M]):
    """Takes bytes as they arrive and returns complete messages."""

    def __init__(self, messages: type[M]) -> None:
        self._decoder = msgspec.msgpack.Decoder(messages)
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        self._pending += data
        at = 0
        while len(self._pending) - at >= LENGTH_BYTES:
            body = at + LENGTH_BYTES
            length = int.from_bytes(self._pending[at:body], "little")
            if length > MAX_MESSAGE_BYTES:
                raise HeadraceError(
                    f"A message between the server's processes claims {length} bytes; expected at "
                    f"most {MAX_MESSAGE_BYTES}.",
                    "This is a mistake in Headrace: please report it.",
                )
            if len(self._pending) - body < length:
                break
            at = body + length
            yield self._decoder.decode(memoryview(self._pending)[body:at].tobytes())
        del self._pending[:at]
