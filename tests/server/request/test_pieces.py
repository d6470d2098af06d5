"""Large bodies read in pieces: values and errors as if read at once, with turns for others."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import msgspec
import pytest

from headrace.server.request import body as body_module
from headrace.server.request import pieces
from headrace.server.request.body import read_struct
from headrace.server.request.call import Call
from headrace.server.request.pieces import decode_in_pieces

MANY: list[Any] = [123456] * 100_000
FLAT: bytes = json.dumps({"prompt": MANY, "n": 1}).encode()


def read(body: bytes) -> Any:
    return asyncio.run(decode_in_pieces(body))


@pytest.mark.parametrize(
    "value",
    [
        MANY,
        [1.5, -2, 3e10, True, None, *MANY],
        [[1, 2], [], [3], MANY, MANY],
        [[7] * 3000] * 40,
        [[[1], [2]], MANY],
        [1, [2], *MANY],
        [*MANY, "a,b[c]"],
        [{"a": 1}, *MANY],
        [[1]] * 5000 + [MANY],
        {"a": MANY, "b": [MANY, {"c": MANY}]},
        ["[1,2],"] * 70_000,
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_the_same_as_read_at_once(value: Any, indent: int | None) -> None:
    body = json.dumps({"x": value, "y": [1], "": "z"}, indent=indent).encode()
    found = read(body)
    assert found == json.loads(body)
    assert json.dumps(found) == json.dumps(json.loads(body))  # true is no 1


def test_what_is_malformed_is_refused_as_at_once() -> None:
    rng = random.Random(3)
    for _ in range(60):
        at = rng.randrange(len(FLAT))
        for body in (FLAT[:at], FLAT[:at] + rng.choice([b",", b"]", b"[", b" 1"]) + FLAT[at:]):
            try:
                wanted = msgspec.json.decode(body)
            except msgspec.DecodeError:
                with pytest.raises(msgspec.DecodeError):
                    read(body)
            else:
                assert read(body) == wanted


def test_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    longest: list[int] = []
    decode = msgspec.json.decode

    def seen(data: bytes, **options: Any) -> Any:
        if not options:  # going through without making anything is quick
            longest.append(len(data))
        return decode(data, **options)

    monkeypatch.setattr(pieces, "_decode", seen)

    async def run() -> int:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        assert await decode_in_pieces(FLAT) == json.loads(FLAT)
        counting.cancel()
        return turns

    assert asyncio.run(run()) >= len(FLAT) // pieces.PIECE_BYTES
    assert max(longest) <= pieces.PIECE_BYTES + 20


class Sent(msgspec.Struct):
    prompt: list[int]
    n: int = 1


def test_large_bodies_are_read_one_after_the_other_and_small_ones_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pieces of thirty bodies, one after the other, kept a probe waiting for half a second."""
    reading, most, order = 0, 0, []

    async def watched(body: bytes) -> Any:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        found = await decode_in_pieces(body)
        await asyncio.sleep(0)
        reading -= 1
        return found

    monkeypatch.setattr(body_module, "decode_in_pieces", watched)

    async def ask(turn: asyncio.Lock, name: str, body: bytes) -> None:
        call = Call(
            method="POST", path="/", headers={}, request_id=name, body=body, large_turn=turn
        )
        assert (await read_struct(call, Sent)).n == 1
        order.append(name)

    async def all_at_once() -> None:
        turn = asyncio.Lock()
        large = [ask(turn, f"large{number}", FLAT) for number in range(5)]
        await asyncio.gather(*large, ask(turn, "small", b'{"prompt": [1]}'))

    asyncio.run(all_at_once())
    assert most == 1
    assert order[0] == "small"
    assert sorted(order[1:]) == [f"large{number}" for number in range(5)]
