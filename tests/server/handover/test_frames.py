"""Frames: what was written is read, and nothing else is: cut, changed, foreign, too long."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.server.handover import frames
from headrace.server.handover.frames import (
    HEAD_BYTES,
    KEY_BYTES,
    Cause,
    End,
    HandoverError,
    Kind,
    Wanted,
)

ALL = dict.fromkeys(Kind, 1 << 16)
KEYS = st.lists(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), min_size=1, max_size=4)


def joined(kind: Kind, *parts: bytes) -> bytes:
    return b"".join(bytes(part) for part in frames.write_frame(kind, *parts))


def read(data: bytes, most: dict[Kind, int] = ALL) -> tuple[Kind, bytes]:
    at = 0

    def fill(view: memoryview) -> None:
        nonlocal at
        if len(data) - at < len(view):
            raise HandoverError(Cause.CUT, "the connection was closed")
        view[:] = data[at : at + len(view)]
        at += len(view)

    kind, payload = frames.read_frame(fill, most)
    assert at == len(data)
    return kind, bytes(payload)


def wanted(**changed: object) -> Wanted:
    values: dict[str, object] = {
        "fingerprint": "kv-1",
        "block_tokens": 4,
        "block_bytes": 100,
        "salt": "",
        "priority": 0,
        "first_block": 1,
        "piece_blocks": 2,
        "slots": 0,
        "tokens": frames.pack_tokens(list(range(12))),
    }
    return Wanted(**{**values, **changed})  # type: ignore[arg-type]


@given(kind=st.sampled_from(Kind), parts=st.lists(st.binary(max_size=200), max_size=4))
def test_what_is_written_is_read(kind: Kind, parts: list[bytes]) -> None:
    assert read(joined(kind, *parts)) == (kind, b"".join(parts))


@given(payload=st.binary(max_size=100), data=st.data())
def test_one_changed_byte_is_always_found(payload: bytes, data: st.DataObject) -> None:
    frame = bytearray(joined(Kind.BLOCKS, payload))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(HandoverError) as caught:
        read(bytes(frame))
    if at >= HEAD_BYTES:
        assert caught.value.cause is Cause.CHECKSUM


@given(payload=st.binary(max_size=60), cut=st.integers(1, 70))
def test_a_frame_that_is_cut_short(payload: bytes, cut: int) -> None:
    frame = joined(Kind.BLOCKS, payload)
    with pytest.raises(HandoverError) as caught:
        read(frame[: max(0, len(frame) - cut)])
    assert caught.value.cause is Cause.CUT


@given(noise=st.binary(min_size=HEAD_BYTES, max_size=200))
def test_noise_is_no_frame(noise: bytes) -> None:
    with pytest.raises(HandoverError):
        read(noise)


def test_a_length_is_checked_before_memory_is_taken_for_it() -> None:
    frame = bytearray(joined(Kind.BLOCKS, b"x"))
    struct.pack_into("<I", frame, 8, 0xFFFFFFFF)
    tracemalloc.start()
    try:
        with pytest.raises(HandoverError, match="at most 65536") as caught:
            read(bytes(frame))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.cause is Cause.FRAME


def test_foreign_frames() -> None:
    other = bytearray(joined(Kind.BEAT))
    other[4] = 2
    with pytest.raises(HandoverError, match="version 2; expected 1") as caught:
        read(bytes(other))
    assert caught.value.cause is Cause.VERSION
    with pytest.raises(HandoverError, match="not b'HRKV'"):
        read(b"HTTP/1.1 400 Bad Request\r\n")
    with pytest.raises(HandoverError, match="kind 4 that was not expected"):
        read(joined(Kind.BLOCKS, b"x"), {Kind.BEAT: 0})


@settings(max_examples=40)
@given(
    tokens=st.lists(st.integers(0, 2**31 - 1), min_size=4, max_size=40),
    salt=st.text(max_size=50),
    proof=st.binary(min_size=32, max_size=32),
)
def test_a_request_survives(tokens: list[int], salt: str, proof: bytes) -> None:
    tokens = tokens[: len(tokens) // 4 * 4]
    asked = wanted(tokens=frames.pack_tokens(tokens), salt=salt, first_block=0)
    found_proof, packed = frames.unpack_ask(frames.pack_ask(proof, frames.pack_wanted(asked)))
    found = frames.unpack_wanted(packed)
    assert (found_proof, found, found.token_ids) == (proof, asked, tokens)
    assert found.blocks == len(tokens) // 4


@pytest.mark.parametrize(
    "changed",
    [
        {"tokens": b""},
        {"tokens": b"123"},
        {"tokens": frames.pack_tokens([1, 2, 3])},  # no whole block
        {"first_block": 3},
        {"first_block": -1},
        {"block_tokens": 0},
        {"block_bytes": 0},
        {"piece_blocks": 0},
        {"piece_blocks": 1 << 20},
        {"slots": 1000},
        {"fingerprint": "x" * 1000},
        {"salt": "x" * 10_000},
        {"priority": "high"},
        {"tokens": "text"},
    ],
)
def test_requests_that_make_no_sense(changed: dict[str, object]) -> None:
    with pytest.raises(HandoverError):
        frames.unpack_wanted(frames.pack_wanted(wanted(**changed)))


@given(noise=st.binary(max_size=200))
def test_noise_in_payloads(noise: bytes) -> None:
    for unpack in (frames.unpack_ask, frames.unpack_wanted):
        with pytest.raises(HandoverError):
            unpack(noise)
    view = memoryview(noise)
    for size in (1, 7):
        try:
            found = frames.unpack_blocks(view, size)
        except HandoverError:
            continue
        assert len(found.data) == len(found.keys) * size
    try:
        assert len(frames.unpack_placed(view).keys) > 0
        frames.unpack_freed(view)
        frames.unpack_end(view)
    except HandoverError:
        pass


@settings(max_examples=40)
@given(first=st.integers(0, 2**32 - 1), keys=KEYS, size=st.integers(1, 50), data=st.data())
def test_blocks_survive(first: int, keys: list[bytes], size: int, data: st.DataObject) -> None:
    content = data.draw(st.binary(min_size=size * len(keys), max_size=size * len(keys)))
    payload = frames.pack_blocks(first, keys) + content
    assert len(payload) == frames.blocks_bytes(len(keys), size)
    found = frames.unpack_blocks(memoryview(payload), size)
    assert (found.first, list(found.keys), bytes(found.data)) == (first, keys, content)
    for wrong in (payload[:-1], payload + b"x"):
        with pytest.raises(HandoverError):
            frames.unpack_blocks(memoryview(wrong), size)


@settings(max_examples=40)
@given(first=st.integers(0, 100), keys=KEYS, slot=st.integers(0, 9), crc=st.integers(0, 2**32 - 1))
def test_places_survive(first: int, keys: list[bytes], slot: int, crc: int) -> None:
    payload = frames.pack_placed(first, keys, slot, crc)
    assert len(payload) == frames.placed_bytes(len(keys))
    found = frames.unpack_placed(memoryview(payload))
    assert (found.first, list(found.keys), found.slot, found.checksum) == (first, keys, slot, crc)


def test_an_end_survives_and_its_text_is_bounded() -> None:
    payload = frames.pack_end(End(Cause.BUSY, "x" * 10_000))
    assert len(payload) < frames.MAX_END_BYTES
    assert frames.unpack_end(payload).cause is Cause.BUSY
    assert frames.unpack_end(frames.pack_end(End(None))).cause is None
