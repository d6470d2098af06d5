"""Prompts that peers get: the same for all, new in each round, shared where they should be."""

from __future__ import annotations

import itertools

from peers.workloads import (
    CONTENDERS,
    FIRST_TOKEN,
    LAST_TOKEN,
    WORKLOADS,
    make_prompt,
    make_prompts,
    rotate,
    takes_part,
    warm_prompt,
)

BY_NAME = {workload.name: workload for workload in WORKLOADS}
OWN, SHARED = BY_NAME["served own 16"], BY_NAME["served shared 16"]


def test_every_engine_gets_the_same_prompts() -> None:
    assert make_prompts(OWN, 4, 1) == make_prompts(OWN, 4, 1)
    assert make_prompt(64, "a") == make_prompt(64, "a")


def common_start(one: list[int], other: list[int]) -> int:
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return len(list(equal))


def test_own_prompts_share_less_than_a_block_with_any_other_of_any_round() -> None:
    prompts = [
        prompt
        for number in range(3)
        for prompt in (*make_prompts(OWN, 32, number), warm_prompt(OWN, number))
    ]
    assert {len(prompt) for prompt in prompts} == {128}
    worst = max(common_start(a, b) for a, b in itertools.combinations(prompts, 2))
    assert worst < 8  # the smallest piece that an engine's prefix cache keeps


def test_shared_prompts_share_exactly_the_prefix_and_only_within_a_round() -> None:
    first, second = make_prompts(SHARED, 8, 0), make_prompts(SHARED, 8, 1)
    for prompt in [*first[1:], warm_prompt(SHARED, 0)]:
        assert len(prompt) == 447
        assert 400 <= common_start(first[0], prompt) < 408
    assert all(common_start(first[0], prompt) < 8 for prompt in second)


def test_ids_are_in_the_vocabulary_and_no_control_tokens() -> None:
    ids = make_prompt(20_000, "range")
    assert min(ids) >= FIRST_TOKEN
    assert max(ids) < LAST_TOKEN
    assert len(set(ids)) > 10_000


def test_each_round_begins_with_another_contender_and_nobody_is_left_out() -> None:
    everyone = list(CONTENDERS["4-bit"])
    orders = [rotate(everyone, number) for number in range(len(everyone))]
    assert {order[0] for order in orders} == set(everyone)
    assert all(sorted(o, key=repr) == sorted(everyone, key=repr) for o in orders)
    assert rotate([], 3) == []


def test_served_rows_have_one_contender_of_each_engine() -> None:
    for workload in (OWN, SHARED, BY_NAME["first token 1"]):
        engines = [who.engine for who in CONTENDERS["4-bit"] if takes_part(who, workload)]
        assert sorted(engines) == ["headrace", "llama.cpp", "openvino", "vllm"]


def test_a_contender_takes_part_in_its_own_group_only() -> None:
    eight_bit = CONTENDERS["8-bit"][0]
    assert [w.name for w in WORKLOADS if takes_part(eight_bit, w)] == [
        "8-bit decode 1",
        "8-bit decode 16",
    ]
