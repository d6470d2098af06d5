"""Grammars in real processes: what they allow, what they may take, and how they end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.assemble import read_tokenizer
from headrace.core.constraint import Allowed, Foreseen, GrammarKind, GrammarSpec
from headrace.core.errors import HeadraceError, InvalidRequestError
from headrace.grammar import GrammarCompiler
from headrace.server.grammars.host import Host, RemoteWalk, Starter
from headrace.server.grammars.process import FIRST_S, MEMORY_BYTES, Setup
from headrace.tokenizer.tokenizer import Tokenizer
from headrace.weights.load import open_weights

PATIENCE_S = 60.0
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
AMBIGUOUS = 'start: s\ns: s s s | s s | "a"'


@pytest.fixture(scope="module")
def tokenizer(default_model_path: Path) -> Tokenizer:
    file = open_weights(default_model_path)
    try:
        return read_tokenizer(file)
    finally:
        file.close()


@pytest.fixture(scope="module")
def starter(default_model_path: Path, tokenizer: Tokenizer) -> Iterator[Starter]:
    made = Starter(Setup(str(default_model_path), "auto", tokenizer.vocab_size))
    yield made
    made.close()


def spec_of(kind: str, source: object = "") -> GrammarSpec:
    text = source if isinstance(source, str) else json.dumps(source)
    return GrammarSpec(kind=GrammarKind(kind), source=text)


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.01)


def start(starter: Starter, spec: GrammarSpec) -> Host:
    """Its process, once it has said something or ended."""
    host = starter.start(spec)

    def has_spoken() -> bool:
        host.pump(0.05)
        return host.compiled is not None or host.failed is not None or host.is_gone

    until(has_spoken)
    return host


def go_on(walk: RemoteWalk, token_id: int) -> Allowed:
    walk.accept(token_id)
    found: list[Allowed] = []

    def has_answered() -> bool:
        if (allowed := walk.allowed(0.05)) is not None:
            found.append(allowed)
        return bool(found)

    until(has_answered)
    return found[0]


def allows(allowed: Allowed, token_id: int) -> bool:
    return bool(allowed.mask[token_id >> 3] >> (token_id & 7) & 1)


def process_of(host: Host) -> int:
    assert host.compiled is not None
    return host.compiled.pid


def has_ended(process: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return True


def test_a_walk_allows_what_the_compiler_in_this_process_allows(
    starter: Starter, tokenizer: Tokenizer
) -> None:
    spec = spec_of("json_schema", PERSON)
    local = GrammarCompiler(tokenizer, tokenizer.vocab_size).compile(spec)
    host = start(starter, spec)
    walk = host.open()
    assert walk.allowed() == local.allowed()
    text = '{"name":"Joe","age":33}'
    for token in tokenizer.encode(text, add_bos=False):
        local.accept(token)
        remote = go_on(walk, token)
        assert remote == local.allowed()
        forked = walk.fork()
        assert forked.allowed() == remote
        forked.close()
    assert remote.is_stopped
    walk.close()
    assert host.is_idle
    host.close()


def foreseen(walk: RemoteWalk, *token_ids: int, forced: int = 0) -> Foreseen:
    walk.foresee(*token_ids, forced=forced)
    until(lambda: walk.foreseen(0.05) is not None)
    found = walk.foreseen()
    assert found is not None
    return found


def test_a_walk_foresees_what_the_compiler_in_this_process_foresees(
    starter: Starter, tokenizer: Tokenizer
) -> None:
    spec = spec_of("json_schema", PERSON)
    local = GrammarCompiler(tokenizer, tokenizer.vocab_size).compile(spec)
    host = start(starter, spec)
    walk = host.open()
    tokens = tokenizer.encode('{"name":"Joe","age":33}', add_bos=False)
    for at in range(len(tokens)):
        for ahead, forced in ((tokens[at : at + 4], 0), ([*tokens[at : at + 2], 5, 6], 0), ([], 8)):
            local.foresee(*ahead, forced=forced)
            expected = local.foreseen()
            assert expected is not None
            found = foreseen(walk, *ahead, forced=forced)
            assert list(found.token_ids) == list(expected.token_ids)
            assert list(found.masks) == list(expected.masks)
        local.accept(tokens[at])
        walk.foresee(5)  # its answer comes after the next token, and is dropped
        walk.accept(tokens[at])
        until(lambda: walk.allowed(0.05) is not None)
        assert walk.allowed() == local.allowed()
        assert walk.foreseen() is None
    several = host.open()
    several.accept(*tokens[:6])
    several.foresee(*tokens[6:9])
    until(lambda: several.allowed(0.05) is not None)
    until(lambda: several.foreseen(0.05) is not None)
    one_by_one = host.open()
    for token in tokens[:6]:
        found_next = go_on(one_by_one, token)
    assert several.allowed() == found_next
    ahead_of_it = several.foreseen()
    assert ahead_of_it is not None
    assert list(ahead_of_it.token_ids) == tokens[6:9]
    several.foresee(*tokens[6:9])
    host.close()
    assert several.foreseen(0.05) is None


def test_forks_go_their_own_way_and_many_answers_come_together(
    starter: Starter, tokenizer: Tokenizer
) -> None:
    host = start(starter, spec_of("regex", "(a|b)c(d|e)*"))
    walk = host.open()
    ids = {letter: tokenizer.encode(letter, add_bos=False)[0] for letter in "abcde"}
    others = [walk.fork() for _ in range(8)]
    for number, each in enumerate([walk, *others]):
        each.accept(ids["ab"[number % 2]])
    until(lambda: all(each.allowed(0.05) is not None for each in [walk, *others]))
    allowed = walk.allowed()
    assert allowed is not None
    assert allows(allowed, ids["c"])
    assert not allows(allowed, ids["d"])
    for each in [walk, *others]:
        each.close()
    host.close()


def test_a_token_that_may_not_come_is_a_mistake_of_ours_and_ends_that_walk_alone(
    starter: Starter, tokenizer: Tokenizer
) -> None:
    host = start(starter, spec_of("regex", "ab"))
    good, bad = host.open(), host.open()
    wrong = tokenizer.encode("z", add_bos=False)[0]
    with pytest.raises(HeadraceError, match="is not allowed by the grammar") as caught:
        go_on(bad, wrong)
    assert not isinstance(caught.value, InvalidRequestError)
    assert "mistake in Headrace" in caught.value.remedy
    assert not go_on(good, tokenizer.encode("a", add_bos=False)[0]).is_stopped
    host.close()


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        # Row 1 of issue 13: these went on for minutes, and into gigabytes, after their 400.
        (
            "json_schema",
            {"allOf": [{"type": "string", "pattern": f".*a{{{i}}}.{{5}}"} for i in range(1, 31)]},
        ),
        ("lark", "start: T\nT: " + " & ".join(f"/.*a{{{i}}}.{{5}}/" for i in range(1, 200))),
    ],
)
def test_a_grammar_that_takes_too_much_is_ended_with_its_process(
    starter: Starter, kind: str, source: object
) -> None:
    host = start(starter, spec_of(kind, source))
    assert host.is_gone
    assert host.compiled is None
    assert host.failed is None
    honest = start(starter, spec_of("regex", "(yes|no)"))
    assert honest.compiled is not None
    assert honest.grown_bytes < MEMORY_BYTES
    honest.close()


def test_one_that_can_not_be_compiled_says_why(starter: Starter) -> None:
    host = start(starter, spec_of("regex", "("))
    assert host.failed is not None
    assert "unclosed" in host.failed.cause
    host.close()


def test_a_request_whose_grammar_is_slow_to_follow_ends_and_others_of_it_do_not(
    starter: Starter, tokenizer: Tokenizer
) -> None:
    """Row 2 of issue 13: every further letter takes longer, and nothing ever ended it."""
    host = start(starter, spec_of("lark", AMBIGUOUS))
    letter = tokenizer.encode("a", add_bos=False)[0]
    first = host.open()
    walks = [first, *(first.fork() for _ in range(3))]
    other = host.open()
    steps = (go_on(walk, letter) for _ in range(2000) for walk in walks)
    with pytest.raises(InvalidRequestError, match="any further") as caught:
        list(steps)
    assert f"{FIRST_S:g} s" in caught.value.cause or "TooComplex" in caught.value.cause
    assert not go_on(other, letter).is_stopped
    host.close()


def test_a_process_that_is_killed_ends_its_walks_and_no_other(
    starter: Starter, tokenizer: Tokenizer
) -> None:
    doomed, safe = start(starter, spec_of("regex", "a*")), start(starter, spec_of("regex", "a+"))
    walk, other = doomed.open(), safe.open()
    letter = tokenizer.encode("a", add_bos=False)[0]
    go_on(walk, letter)
    process = process_of(doomed)
    doomed.close()
    with pytest.raises(InvalidRequestError, match="any further"):
        walk.accept(letter)
    walk.close()
    until(lambda: has_ended(process))
    assert not go_on(other, letter).is_stopped
    safe.close()


def test_a_starter_that_was_killed_is_started_again_and_nothing_outlives_its_end(
    default_model_path: Path, tokenizer: Tokenizer
) -> None:
    own = Starter(Setup(str(default_model_path), "auto", tokenizer.vocab_size))
    host = start(own, spec_of("regex", "a*"))
    assert own._process is not None
    own._process.kill()
    own._process.wait()
    again = start(own, spec_of("regex", "b*"))
    assert again.compiled is not None
    process = process_of(again)
    own.close()
    until(lambda: has_ended(process))
    again.pump(1.0)
    assert again.is_gone
    host.close()
