"""Blocks from another engine change no answer, whatever happens on the way: bit for bit.

On the real CPU kernels over a tiny model. What a whole server does is in test_servers.py.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.engine.conftest import TinyModel
from tests.server.handover.engines import (
    Answer,
    Giving,
    answer_of,
    bad_way,
    fetch,
    finish,
    make_engine,
    make_taker,
    prompt_of,
    request_of,
)

from headrace.core.request import GenerateRequest
from headrace.engine.loop import Engine
from headrace.engine.prefix import block_keys
from headrace.server.handover import frames, giver, receiving, sending, taker
from headrace.server.handover.frames import Cause
from headrace.server.handover.session import Peer, secret_of

WAYS = [
    {},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 1.0, "seed": 3, "n": 3, "logprobs": 2},
    {"logprobs": 5, "repetition_penalty": 1.3, "presence_penalty": 0.5},
]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One block in a piece, so that there is something between the first and the last."""
    monkeypatch.setattr(taker, "PIECE_BYTES", 1)
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def giving(tiny_model: TinyModel) -> Iterator[Giving]:
    running = Giving(tiny_model)
    yield running
    running.close()


@pytest.fixture(scope="module")
def one(tiny_model: TinyModel) -> Engine:
    """One process that does everything, and caches nothing."""
    return make_engine(tiny_model, prefix_cache=False)


def alone(one: Engine, request: GenerateRequest) -> Answer:
    one.add(request)
    return answer_of(finish(one))


def through(
    model: TinyModel, request: GenerateRequest, peer: Peer, **more: Any
) -> tuple[Answer, dict[str, int], int]:
    """The answer of a fresh engine that fetches the prompt; how that ended; blocks that came."""
    engine = make_engine(model, **more.pop("engine", {}))
    side = make_taker(engine, **more)
    try:
        fetch(engine, side, request, peer)
        answer = answer_of(finish(engine))
    finally:
        side.close()
    engine.check_integrity()
    return answer, dict(side.counts.outcomes), side.counts.blocks


@pytest.mark.parametrize("shares", [True, False], ids=["shared memory", "TCP"])
@pytest.mark.parametrize("params", WAYS)
def test_same_answers(
    tiny_model: TinyModel, one: Engine, giving: Giving, shares: bool, params: dict[str, Any]
) -> None:
    for length in (17, 48, 49, 100):
        request = request_of(prompt_of(length), **params)
        answer, outcomes, blocks = through(tiny_model, request, giving.peer, shares=shares)
        assert answer == alone(one, request)
        assert (outcomes, blocks) == ({"whole": 1}, (length - 1) // 16)
    assert sum(giving.giver.counts.outcomes.values()) == 4


def test_only_what_is_missing_is_fetched(
    tiny_model: TinyModel, one: Engine, giving: Giving
) -> None:
    engine = make_engine(tiny_model)
    side = make_taker(engine)
    shared = prompt_of(50)
    engine.add(request_of(shared, "first"))
    finish(engine)
    longer = request_of(shared + prompt_of(40, seed=2), "second")
    fetch(engine, side, longer, giving.peer)
    assert answer_of(finish(engine)) == alone(one, longer)
    assert side.counts.blocks == 89 // 16 - 50 // 16
    fetch(engine, side, request_of(shared + prompt_of(40, seed=2), "third"), giving.peer)
    finish(engine)
    assert (side.counts.skipped, side.counts.outcomes) == (1, {"whole": 1})  # all of it is here
    side.close()


def test_short_prompts_and_those_that_need_every_token_are_computed_here(
    tiny_model: TinyModel, giving: Giving
) -> None:
    engine = make_engine(tiny_model)
    side = make_taker(engine, least_tokens=33)
    assert not side.fetch(request_of(prompt_of(48)), giving.peer)  # two blocks and the last token
    assert not side.fetch(request_of(prompt_of(90), prompt_logprobs=1), giving.peer)
    embedded = request_of(prompt_of(90))
    embedded.embed = True
    assert not side.fetch(embedded, giving.peer)
    assert side.counts.skipped == 1
    assert not side.counts.outcomes
    assert side.fetch(request_of(prompt_of(49)), giving.peer)
    side.close()


def test_salts_are_kept_apart(tiny_model: TinyModel, one: Engine, giving: Giving) -> None:
    tokens = prompt_of(100)
    for salt in ("ann", "ben"):
        request = request_of(tokens, salt=salt)
        answer, outcomes, _ = through(tiny_model, request, giving.peer)
        assert (answer, outcomes) == (alone(one, request), {"whole": 1})
    # The second one's prompt was computed again: nothing of the first was found.
    assert giving.engine.stats.prompt_tokens == 2 * 96


@pytest.mark.parametrize(
    ("giver_side", "taker_side", "cause"),
    [
        ({"fingerprint": "kv-other"}, {}, Cause.FINGERPRINT),
        ({"secret": secret_of("other")}, {}, Cause.KEY),
        ({"kv_dtype": "f32"}, {}, Cause.FINGERPRINT),  # blocks of another size
        ({"blocks": 4}, {}, Cause.REFUSED),  # a prompt that does not fit
    ],
)
def test_engines_that_do_not_match(
    tiny_model: TinyModel,
    one: Engine,
    giver_side: dict[str, Any],
    taker_side: dict[str, Any],
    cause: Cause,
) -> None:
    giving = Giving(tiny_model, **giver_side)
    request = request_of(prompt_of(100), temperature=0.8, seed=1)
    for shares in (True, False):
        answer, outcomes, blocks = through(
            tiny_model, request, giving.peer, shares=shares, **taker_side
        )
        assert (answer, outcomes, blocks) == (alone(one, request), {str(cause): 1}, 0)
    giving.close()
    answer, outcomes, _ = through(tiny_model, request, giving.peer)  # nobody listens there now
    assert (answer, outcomes) == (alone(one, request), {"unreachable": 1})


def test_cut_or_changed_at_any_byte(tiny_model: TinyModel, one: Engine, giving: Giving) -> None:
    """Before, during and after the blocks: what came whole is used, the rest is computed."""
    chooser = random.Random(5)
    request = request_of(prompt_of(100), temperature=0.9, seed=11, logprobs=1)
    expected = alone(one, request)
    block_bytes = giving.engine.moves.block_bytes  # type: ignore[union-attr]
    whole = 6 * (block_bytes + 100)
    places = [0, 1, 50, 100, whole - 1, *(chooser.randrange(whole) for _ in range(12))]
    seen: set[str] = set()
    for place in places:
        for damage in ({"cut": place}, {"flip": place}):
            with bad_way(giving.peer, **damage) as peer:
                answer, outcomes, blocks = through(tiny_model, request, peer, shares=False)
            assert answer == expected, (damage, outcomes)
            assert blocks <= max(0, place) // block_bytes + 6 * ("whole" in outcomes)
            seen |= outcomes.keys()
    assert seen <= {"cut", "checksum", "frame", "version", "key", "whole"}
    assert {"cut", "checksum"} <= seen


def test_shared_memory_whose_checksum_is_wrong(
    tiny_model: TinyModel, one: Engine, giving: Giving, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, sent = frames.pack_placed, []

    def wrong(first: int, keys: list[bytes], slot: int, checksum: int) -> bytes:
        sent.append(first)
        return real(first, keys, slot, checksum ^ (len(sent) == 3))

    monkeypatch.setattr(frames, "pack_placed", wrong)
    request = request_of(prompt_of(100))
    answer, outcomes, blocks = through(tiny_model, request, giving.peer)
    assert (answer, outcomes, blocks) == (alone(one, request), {"checksum": 1}, 2)


def test_blocks_of_another_prompt_are_refused(
    tiny_model: TinyModel, one: Engine, giving: Giving, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = block_keys
    monkeypatch.setattr(
        giver, "block_keys", lambda tokens, salt, size: real(tokens[::-1], salt, size)
    )
    giving.engine.add(request_of(prompt_of(96)[::-1], "other"))  # so that it has such blocks
    request = request_of(prompt_of(97))
    answer, outcomes, blocks = through(tiny_model, request, giving.peer)
    assert (answer, outcomes, blocks) == (alone(one, request), {"blocks": 1}, 0)


def test_a_giver_that_is_silent(
    tiny_model: TinyModel, one: Engine, giving: Giving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after SIGSTOP. And one that lives and is too slow."""
    monkeypatch.setattr(taker, "SILENCE_S", 0.05)
    request = request_of(prompt_of(100))
    giving.hold.clear()  # it beats less often than that
    answer, outcomes, _ = through(tiny_model, request, giving.peer)
    assert (answer, outcomes) == (alone(one, request), {"timeout": 1})
    monkeypatch.setattr(taker, "SILENCE_S", 30.0)
    answer, outcomes, _ = through(tiny_model, request, giving.peer, patience_s=0.3)
    assert (answer, outcomes) == (alone(one, request), {"timeout": 1})
    giving.hold.set()


def test_a_peer_that_failed_is_not_asked_again_at_once(
    tiny_model: TinyModel, one: Engine, giving: Giving, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tiny_model)
    side = make_taker(engine, fingerprint="kv-other")
    for name in ("first", "second"):
        request = request_of(prompt_of(100, seed=len(name)), name)
        fetch(engine, side, request, giving.peer)
        assert answer_of(finish(engine)) == alone(one, request)
    assert side.counts.outcomes == {"fingerprint": 1, "avoided": 1}
    monkeypatch.setattr(taker, "AVOID_S", 0.0)
    side._avoided.clear()
    for name in ("third", "fourth"):
        fetch(engine, side, request_of(prompt_of(100, seed=len(name)), name), giving.peer)
        finish(engine)
    assert side.counts.outcomes["avoided"] == 1
    side.close()


def test_tokens_that_the_model_does_not_have(tiny_model: TinyModel, giving: Giving) -> None:
    """They must not fail the step of others."""
    engine = make_engine(tiny_model)
    side = make_taker(engine)
    request = request_of([*prompt_of(40), 100_000, *prompt_of(40)])
    assert side.fetch(request, giving.peer)
    while not (ready := side.turn()):
        pass
    assert ready == [request]
    assert side.counts.outcomes == {"frame": 1}
    side.close()


def test_nobody_waits_any_more(tiny_model: TinyModel, giving: Giving) -> None:
    """A client that leaves ends the work at the other engine too."""
    engine = make_engine(tiny_model)
    side = make_taker(engine)
    giving.hold.clear()
    request = request_of(prompt_of(100))
    assert side.fetch(request, giving.peer)
    while not giving.engine.has_work:
        pass
    side.forget(request.request_id)
    assert side.turn() == []
    assert not side.is_busy
    while giving.engine.has_work:
        pass
    assert giving.engine.blocks.used_blocks == 0
    giving.hold.set()
    side.close()


def test_pools_without_room(tiny_model: TinyModel, one: Engine) -> None:
    """The giver's blocks are evicted by others' prompts; the taker has none free."""
    request = request_of(prompt_of(100), temperature=0.7, seed=2)
    small = Giving(tiny_model, blocks=8)
    with ExitStack() as stack:
        stack.callback(small.close)
        answer, outcomes, _ = through(tiny_model, request, small.peer)
        assert answer == alone(one, request)
        assert outcomes in ({"whole": 1}, {"evicted": 1})
        engine = make_engine(tiny_model, blocks=8)
        side = make_taker(engine)
        stack.callback(side.close)
        engine.add(request_of(prompt_of(60, seed=4), "long", max_tokens=30))
        for _ in range(3):
            engine.step()
        fetch(engine, side, request, small.peer)  # four blocks are in use
        found = [token for token in finish(engine) if token.request_id == "r"]
        assert answer_of(found) == alone(one, request)
        assert side.counts.outcomes == {"no_room": 1}
        assert side.counts.blocks < 6


def test_memory_is_bounded(
    tiny_model: TinyModel, giving: Giving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither side keeps more than a few pieces, however slow the other is; and the number of
    fetches is bounded."""
    monkeypatch.setattr(taker, "MAX_FETCHES", 2)
    monkeypatch.setattr(sending, "COPIED_PIECES", 2)
    for shares in (True, False):
        engine = make_engine(tiny_model)
        side = make_taker(engine, shares=shares)
        requests = [request_of(prompt_of(120, seed=s), f"{shares}-{s}") for s in range(4)]
        waits = [side.fetch(request, giving.peer) for request in requests]
        assert waits == [True, True, False, False]
        assert side.counts.outcomes == {"busy": 2}
        fetches = list(side._fetches.values())
        while not all(len(each.arrived) == receiving.PIECES for each in fetches):
            pass  # seven blocks each; nobody takes them
        assert all(each.end is None for each in fetches)
        ready: list[GenerateRequest] = []
        while len(ready) < 2:
            ready += side.turn()
        assert side.counts.outcomes["whole"] == 2
        assert len(side._slots) <= 2
        side.close()
    assert giving.most_copied <= sending.COPIED_PIECES


def test_many_at_a_time_while_the_engine_is_busy(
    tiny_model: TinyModel, one: Engine, giving: Giving
) -> None:
    """Blocks are put in between the steps of others, with plans in flight."""
    engine = make_engine(tiny_model, blocks=128, overlap=True)
    side = make_taker(engine, least_tokens=16)
    requests = {
        f"r{seed}": request_of(
            prompt_of(40 + 4 * seed, seed), f"r{seed}", temperature=0.9, seed=seed, max_tokens=12
        )
        for seed in range(12)
    }
    running = request_of(prompt_of(20, 99), "running", max_tokens=100, ignore_eos=True)
    engine.add(running)
    tokens = []
    for request in requests.values():
        if not side.fetch(request, giving.peer):
            engine.add(request)
    while side.is_busy or engine.has_work:
        for ready in side.turn():
            engine.add(ready)
        tokens += engine.step() if engine.has_work else []
    for name, request in (*requests.items(), ("running", running)):
        found = [token for token in tokens if token.request_id == name]
        assert answer_of(found) == alone(one, request)
    assert side.counts.outcomes == {"whole": 12}
    side.close()
