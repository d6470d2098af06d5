"""Prefix keys: what is found, what is not, and why."""

from __future__ import annotations

from headrace.engine.blocks import BlockPool
from headrace.engine.prefix import PrefixCache, chain_key, root_key

SIZE = 4


def store(
    pool: BlockPool, cache: PrefixCache, tokens: list[int], salt: str = "", keep: bool = False
) -> list[int]:
    """As a finished sequence leaves its full blocks."""
    blocks = []
    parent, plain = root_key(salt), root_key("")
    for at in range(0, len(tokens) - SIZE + 1, SIZE):
        parent = chain_key(parent, tokens[at : at + SIZE])
        plain = chain_key(plain, tokens[at : at + SIZE])
        block = pool.take()
        cache.publish(block, parent, plain)
        blocks.append(block)
    if not keep:
        pool.give_back(blocks)
    return blocks


def look(cache: PrefixCache, tokens: list[int], salt: str = "") -> list[int]:
    keys: list[bytes] = []
    found = cache.match(tokens, keys, salt)
    cache.count(tokens, keys, len(found), salt)
    return found


def test_a_beginning_is_found_block_by_block_and_never_the_last_token() -> None:
    pool = BlockPool(16, SIZE)
    cache = PrefixCache(pool)
    blocks = store(pool, cache, list(range(12)))
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
    assert cache.stats.misses == {"too_short": 2, "never_seen": 0, "evicted": 0, "salt": 0}
    look(cache, [1, 2, 3, 4, 5])
    assert cache.stats.misses["never_seen"] == 1
    store(pool, cache, [1, 2, 3, 4])
    look(cache, [1, 2, 3, 4, 5], salt="tenant")
    assert cache.stats.misses["salt"] == 1
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
    mine = store(pool, cache, tokens, salt="a")
    assert look(cache, tokens, salt="a") == mine
    assert look(cache, tokens, salt="b") == []
    assert look(cache, tokens) == []
    assert cache.stats.misses["salt"] == 2


def test_keys_depend_on_every_token_before() -> None:
    seen = set()
    for tokens in ([1, 2], [2, 1], [1, 3], [12], [1, 2, 0]):
        seen.add(chain_key(root_key(""), tokens))
        seen.add(chain_key(root_key("x"), tokens))
        seen.add(chain_key(chain_key(root_key(""), [9]), tokens))
    assert len(seen) == 15


def test_what_is_remembered_of_the_past_is_bounded() -> None:
    pool = BlockPool(2, SIZE)
    cache = PrefixCache(pool)
    for number in range(100):
        store(pool, cache, [number] * SIZE)
    assert len(pool._evicted) <= 8
    assert len(cache._unsalted) <= 8
