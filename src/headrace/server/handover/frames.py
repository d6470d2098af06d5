"""The frames of a hand-over: typed, versioned, with lengths and checksums.

    4s magic | u8 version | u8 kind | u16 zero | u32 length | u32 crc32 | payload

All numbers are little-endian; the checksum covers the 12 bytes before it and the payload. A length
is checked against what its kind may have before anything is read or allocated, and a frame that is
not as expected ends the hand-over. Nothing in a frame can execute anything. Knows bytes; no
sockets, no engine.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Annotated, TypeVar

import msgspec

MAGIC = b"HRKV"
VERSION = 1
KEY_BYTES = 32  # of a block's hash, and of all nonces and signatures

_START = struct.Struct("<4sBBHI")
_CHECK = struct.Struct("<I")
HEAD_BYTES = _START.size + _CHECK.size
_RANGE = struct.Struct("<II")  # first block, count
_PLACE = struct.Struct("<IIII")  # first block, count, slot, checksum of the data

MAX_TOKENS = 1 << 20
MAX_SALT_BYTES = 1 << 12
MAX_ASK_BYTES = 4 * MAX_TOKENS + (1 << 13)
MAX_END_BYTES = 1 << 10
MAX_PIECE_BLOCKS = 1 << 12

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")


class Kind(IntEnum):
    HELLO = 1  # the asker's nonce
    WELCOME = 2  # the giver's nonce, and proof that it has the key
    ASK = 3  # which blocks, and proof that the asker has the key
    BLOCKS = 4  # some blocks: their hashes and their bytes
    PLACED = 5  # the same, with the bytes in a slot of shared memory
    FREED = 6  # the asker has taken what was in a slot
    BEAT = 7  # the giver lives; the next blocks are not computed yet
    END = 8  # no more will come, and why


class Cause(StrEnum):
    """Why a hand-over brought fewer blocks than asked for. Also the label of a metric."""

    UNREACHABLE = "unreachable"  # nobody listens there
    KEY = "key"  # the two do not have the same key
    VERSION = "version"  # of the frames
    FINGERPRINT = "fingerprint"  # another model, or computed in another way
    FRAME = "frame"  # cut short, too long, or not a frame
    CHECKSUM = "checksum"
    BLOCKS = "blocks"  # not those that were asked for
    BUSY = "busy"  # too many hand-overs at one time
    AVOIDED = "avoided"  # the one before failed just now
    REFUSED = "refused"  # the other engine can't compute this prompt
    EVICTED = "evicted"  # the other engine no longer has them
    TIMEOUT = "timeout"
    CUT = "cut"  # the connection, or the engine at the other end
    NO_ROOM = "no_room"  # no free blocks here


class HandoverError(Exception):
    """Ends a hand-over; the engine that asked computes the rest."""

    def __init__(self, cause: Cause, text: str) -> None:
        super().__init__(text)
        self.cause = cause


class Wanted(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The blocks of a prompt that an engine asks for."""

    fingerprint: Annotated[str, msgspec.Meta(max_length=256)]  # of the engine that asks
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    block_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
    salt: Annotated[str, msgspec.Meta(max_length=MAX_SALT_BYTES)]
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 31), le=1 << 31)]
    first_block: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]  # the asker has those before
    piece_blocks: Annotated[int, msgspec.Meta(ge=1, le=MAX_PIECE_BLOCKS)]  # most in one frame
    slots: Annotated[int, msgspec.Meta(ge=0, le=64)]  # of shared memory; 0: blocks are sent
    tokens: Annotated[bytes, msgspec.Meta(max_length=4 * MAX_TOKENS)]  # i32, whole blocks of them

    @property
    def token_ids(self) -> list[int]:
        found = array("i")
        found.frombytes(self.tokens)
        return found.tolist()

    @property
    def blocks(self) -> int:
        """All of them, those included that the asker has."""
        return len(self.tokens) // (4 * self.block_tokens)

    def check(self) -> None:
        """What the types above do not say."""
        whole = self.blocks * self.block_tokens * 4
        if not self.tokens or whole != len(self.tokens) or self.first_block >= self.blocks:
            raise HandoverError(Cause.FRAME, "the request is not for whole blocks")


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()


class _Ask(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    proof: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    wanted: Annotated[bytes, msgspec.Meta(max_length=MAX_ASK_BYTES)]


class End(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """`cause` is None where all blocks were sent."""

    cause: Cause | None
    text: Annotated[str, msgspec.Meta(max_length=512)] = ""


@dataclass(frozen=True, slots=True)
class Blocks:
    first: int
    keys: tuple[bytes, ...]
    data: memoryview  # of all of them, one after the other


@dataclass(frozen=True, slots=True)
class Placed:
    first: int
    keys: tuple[bytes, ...]
    slot: int
    checksum: int


# -- whole frames ----------------------------------------------------------------------------------

Fill = Callable[[memoryview], None]  # fills all of it with what comes next, or raises
Memory = Callable[[int], memoryview]  # for so many bytes


def fresh(size: int) -> memoryview:
    return memoryview(bytearray(size))


def write_frame(kind: Kind, *parts: Buffer) -> list[Buffer]:
    """The frame as parts, so that large ones are not copied."""
    start = _START.pack(MAGIC, VERSION, kind, 0, sum(len(part) for part in parts))
    checksum = zlib.crc32(start)
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return [start + _CHECK.pack(checksum), *parts]


def read_frame(
    fill: Fill, most: dict[Kind, int], memory: Memory = fresh
) -> tuple[Kind, memoryview]:
    """The next frame. `most` says which kinds are expected, and how long each may be."""
    head = bytearray(HEAD_BYTES)
    fill(memoryview(head))
    return read_rest(head, fill, most, memory)


def read_rest(
    head: Buffer, fill: Fill, most: dict[Kind, int], memory: Memory = fresh
) -> tuple[Kind, memoryview]:
    """The same, after its head was read."""
    magic, version, number, zero, length = _START.unpack_from(head)
    (checksum,) = _CHECK.unpack_from(head, _START.size)
    if magic != MAGIC or zero:
        raise HandoverError(Cause.FRAME, f"it begins with {bytes(head[:4])!r}, not {MAGIC!r}")
    if version != VERSION:
        raise HandoverError(Cause.VERSION, f"frames of version {version}; expected {VERSION}")
    longest = most.get(number)
    if longest is None:
        raise HandoverError(Cause.FRAME, f"a frame of kind {number} that was not expected")
    if length > longest:
        raise HandoverError(Cause.FRAME, f"a frame of {length} bytes; expected at most {longest}")
    payload = memory(length)
    if length:
        fill(payload)
    if zlib.crc32(payload, zlib.crc32(head[: _START.size])) != checksum:
        raise HandoverError(Cause.CHECKSUM, "a frame's checksum is wrong")
    return Kind(number), payload


# -- payloads --------------------------------------------------------------------------------------

_encode = msgspec.msgpack.Encoder().encode
_decode_ask = msgspec.msgpack.Decoder(_Ask).decode
_decode_wanted = msgspec.msgpack.Decoder(Wanted).decode
_decode_end = msgspec.msgpack.Decoder(End).decode


def pack_wanted(wanted: Wanted) -> bytes:
    return _encode(wanted)


def pack_ask(proof: bytes, wanted: bytes) -> bytes:
    return _encode(_Ask(proof, wanted))


def unpack_ask(payload: Buffer) -> tuple[bytes, bytes]:
    """The proof, and what it is a proof of, not decoded yet."""
    found = _decoded(_decode_ask, payload)
    return found.proof, found.wanted


def unpack_wanted(payload: Buffer) -> Wanted:
    found = _decoded(_decode_wanted, payload)
    found.check()
    return found


def pack_end(end: End) -> bytes:
    return _encode(End(end.cause, end.text[:200]))


def unpack_end(payload: Buffer) -> End:
    return _decoded(_decode_end, payload)


def _decoded(decode: Callable[[Buffer], T], payload: Buffer) -> T:
    try:
        return decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HandoverError(Cause.FRAME, f"a frame that can't be decoded: {error}") from None


def pack_blocks(first: int, keys: Sequence[bytes]) -> bytes:
    """What goes before the blocks' bytes."""
    return _RANGE.pack(first, len(keys)) + b"".join(keys)


def unpack_blocks(payload: memoryview, block_bytes: int) -> Blocks:
    first, count = _unpack(_RANGE, payload)
    start = _RANGE.size + count * KEY_BYTES
    if not count or len(payload) != start + count * block_bytes:
        raise HandoverError(Cause.FRAME, f"{len(payload)} bytes are not {count} blocks")
    return Blocks(first, _keys(payload[_RANGE.size : start]), payload[start:])


def pack_placed(first: int, keys: Sequence[bytes], slot: int, checksum: int) -> bytes:
    return _PLACE.pack(first, len(keys), slot, checksum) + b"".join(keys)


def unpack_placed(payload: memoryview) -> Placed:
    first, count, slot, checksum = _unpack(_PLACE, payload)
    if not count or len(payload) != _PLACE.size + count * KEY_BYTES:
        raise HandoverError(Cause.FRAME, f"{len(payload)} bytes are not {count} hashes")
    return Placed(first, _keys(payload[_PLACE.size :]), slot, checksum)


def pack_freed(slot: int) -> bytes:
    return _CHECK.pack(slot)


def unpack_freed(payload: memoryview) -> int:
    return int(_unpack(_CHECK, payload)[0])


def blocks_bytes(count: int, block_bytes: int) -> int:
    """The payload of a BLOCKS frame with so many."""
    return _RANGE.size + count * (KEY_BYTES + block_bytes)


def placed_bytes(count: int) -> int:
    return _PLACE.size + count * KEY_BYTES


FREED_BYTES = _CHECK.size


def _unpack(form: struct.Struct, payload: memoryview) -> tuple[int, ...]:
    if len(payload) < form.size:
        raise HandoverError(Cause.FRAME, f"{len(payload)} bytes; expected at least {form.size}")
    return form.unpack_from(payload)


def _keys(data: memoryview) -> tuple[bytes, ...]:
    return tuple(bytes(data[at : at + KEY_BYTES]) for at in range(0, len(data), KEY_BYTES))
