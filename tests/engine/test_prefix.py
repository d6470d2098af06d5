"""Prefix keys: what is found, what is not, and why."""

from __future__ import annotations

from headrace.core.clock import VirtualClock
from headrace.core.request import GenerateRequest, SamplingParams
from headrace.core.step import RunnerLimits
from headrace.engine.blocks import BlockPool
from headrace.engine.loop import Engine
from headrace.engine.prefix import PrefixCache, PrefixStats, chain_key, root_key
from headrace.simulate.cost import linear_cost
from headrace.simulate.drive import Arrival, drive
from headrace.simulate.runner import SimulatedRunner

SIZE = 4
LIMITS = RunnerLimits(
    max_batch_tokens=64, max_sequences=4, total_blocks=64, block_tokens=SIZE, context_tokens=64
)


def store(pool: BlockPool, tokens: list[int], salt: str = "", keep: bool = False) -> list[int]:
    """As a finished sequence leaves its full blocks."""
    blocks = []
    parent = root_key(salt)
    for at in range(0, len(tokens) - SIZE + 1, SIZE):
        parent = chain_key(parent, tokens[at : at + SIZE])
        block = pool.take()
        pool.publish(block, parent)
        blocks.append(block)
    if not keep:
        pool.give_back(blocks)
    return blocks


def look(cache: PrefixCache, tokens: list[int], salt: str = "") -> list[int]:
    keys: list[bytes] = []
    found = cache.match(tokens, keys, salt)
    cache.count(tokens, keys, len(found))
    return found


def test_a_beginning_is_found_block_by_block_and_never_the_last_token() -> None:
    pool = BlockPool(16, SIZE)
    cache = PrefixCache(pool)
    blocks = store(pool, list(range(12)))
    assert look(cache, list(range(12))) == blocks[:2]  # the third holds the last token
    assert look(cache, list(range(13))) == blocks
    assert look(cache, [*range(8), 99, 98, 97]) == blocks[:2]
    assert look(cache, [99, *range(1, 12)]) == []
    assert look(cache, [4, 5, 6, 7, 8]) == []  # a middle is no beginning
    assert cache.stats.queries_tokens == 12 + 13 + 11 + 12 + 5
    assert cache.stats.hits_tokens == 8 + 12 + 8


def test_each_miss_has_its_reason() -> None:
    pool = BlockPool(3, SIZE)
    cache = PrefixCache(pool)
    look(cache, [1, 2, 3])
    look(cache, [1, 2, 3, 4])
    assert cache.stats.misses == {"too_short": 2, "never_seen": 0, "evicted": 0}
    look(cache, [1, 2, 3, 4, 5])
    assert cache.stats.misses["never_seen"] == 1
    store(pool, [1, 2, 3, 4])
    look(cache, [1, 2, 3, 4, 5])
    assert cache.stats.misses["too_short"] == 3  # all full blocks were found
    taken = [pool.take() for _ in range(3)]
    pool.give_back(taken)
    look(cache, [1, 2, 3, 4, 5])
    assert cache.stats.misses["evicted"] == 1


def test_salts_keep_tenants_apart() -> None:
    pool = BlockPool(8, SIZE)
    cache = PrefixCache(pool)
    tokens = [1, 2, 3, 4, 5]
    mine = store(pool, tokens, salt="a")
    assert look(cache, tokens, salt="a") == mine
    assert look(cache, tokens, salt="b") == []
    assert look(cache, tokens) == []


def test_counts_tell_nothing_of_what_others_have_sent() -> None:
    """Whoever asks under a salt sees the same, whether or not another has sent that text: found,
    held now, or evicted since."""
    tokens = list(range(3 * SIZE + 1))

    def seen(others: list[int], *, is_held: bool = False, is_gone: bool = False) -> PrefixStats:
        pool = BlockPool(8, SIZE)
        cache = PrefixCache(pool)
        for salt in ("", "other"):
            store(pool, others, salt=salt, keep=is_held)
        if is_gone:
            pool.give_back([pool.take() for _ in range(8)])
        look(cache, tokens, salt="mine")
        store(pool, tokens[:SIZE], salt="mine")
        look(cache, tokens, salt="mine")
        return cache.stats

    unknown = seen([99] * len(tokens))
    assert unknown.misses["never_seen"] == 2
    for others in (tokens, tokens[: 2 * SIZE]):
        assert seen(others) == unknown
        assert seen(others, is_gone=True) == unknown
    assert seen(tokens[: 2 * SIZE], is_held=True) == unknown


def test_keys_depend_on_every_token_before() -> None:
    seen = set()
    for tokens in ([1, 2], [2, 1], [1, 3], [12], [1, 2, 0]):
        seen.add(chain_key(root_key(""), tokens))
        seen.add(chain_key(root_key("x"), tokens))
        seen.add(chain_key(chain_key(root_key(""), [9]), tokens))
    assert len(seen) == 15


def test_what_is_remembered_of_the_past_is_bounded() -> None:
    pool = BlockPool(2, SIZE)
    for number in range(100):
        store(pool, [number] * SIZE)
    assert len(pool._evicted) <= 8


def test_nor_do_an_engines() -> None:
    """The count that told a tenant, block by block, what another had sent."""

    def misses(others_prompt: list[int]) -> dict[str, int]:
        clock = VirtualClock()
        runner = SimulatedRunner(LIMITS, cost=linear_cost(), clock=clock)
        engine = Engine(runner, frozenset(), None, clock)
        for number, (salt, prompt) in enumerate((("other", others_prompt), ("mine", [*range(30)]))):
            request = GenerateRequest(
                request_id=str(number),
                prompt_token_ids=prompt,
                params=SamplingParams(max_tokens=2),
                cache_salt=salt,
            )
            list(drive(engine, clock, [Arrival(request=request)]))
        return dict(engine.stats.prefix_misses)

    assert misses([*range(30)]) == misses([*range(100, 130)])
