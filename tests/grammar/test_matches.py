"""Every finished sample matches its grammar, judged by jsonschema and by Python's `re`.

Most are drawn by the simulated runner, which knows nothing of text: whatever comes out as JSON does
so because of the masks.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace import LLM, AsyncEngine, SamplingParams
from headrace.core.clock import VirtualClock
from headrace.core.config import SchedulerConfig
from headrace.core.constraint import GrammarKind, GrammarSpec
from headrace.core.errors import HeadraceError, InvalidRequestError
from headrace.core.request import FinishReason, GenerateRequest
from headrace.core.step import RunnerLimits
from headrace.engine.loop import Engine
from headrace.grammar import GrammarCompiler
from headrace.simulate.cost import linear_cost
from headrace.simulate.runner import SimulatedRunner
from headrace.tokenizer.tokenizer import Tokenizer

MAX_TOKENS = 80


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Preemptions are logged; here they come by the hundred."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def spec_of(kind: str, source: object = "") -> GrammarSpec:
    text = source if isinstance(source, str) else json.dumps(source)
    return GrammarSpec(kind=GrammarKind(kind), source=text)


def sample(
    tokenizer: Tokenizer,
    compiler: GrammarCompiler,
    spec: GrammarSpec,
    *,
    total_blocks: int = 200,
    requests: int = 2,
    **params: Any,
) -> list[tuple[str, FinishReason]]:
    """Texts under a grammar, of several requests at once, and why each ended."""
    clock = VirtualClock()
    limits = RunnerLimits(
        max_batch_tokens=32, max_sequences=8, total_blocks=total_blocks, block_tokens=4,
        context_tokens=MAX_TOKENS + 8, steps_in_flight=2,
    )  # fmt: skip
    runner = SimulatedRunner(
        limits, cost=linear_cost(), clock=clock, vocab_size=tokenizer.vocab_size + 7, strict=True
    )
    config = SchedulerConfig(watermark=0.0, debug_invariants=True)
    engine = Engine(runner, tokenizer.eos_ids, config, clock)
    started = compiler.compile(spec)
    for number in range(requests):
        asked = GenerateRequest(
            request_id=str(number),
            prompt_token_ids=[3, 4, number],
            params=SamplingParams(**{"max_tokens": MAX_TOKENS, **params}),
            grammar=spec,
        )
        engine.add(asked, started.fork())
    ids: dict[tuple[str, int], list[int]] = {}
    reasons: dict[tuple[str, int], FinishReason] = {}
    while engine.has_work:
        for token in engine.step():
            assert token.error is None, token.error
            key = token.request_id, token.index
            ids.setdefault(key, []).append(token.token_id)
            if token.finish_reason is not None:
                reasons[key] = token.finish_reason
    assert reasons.keys() == ids.keys()
    assert len(ids) == requests * params.get("n", 1)
    return [(tokenizer.decode(ids[key], continuation=True), reasons[key]) for key in ids]


# -- JSON --------------------------------------------------------------------------------------


@st.composite
def strings(draw: st.DrawFn) -> dict[str, Any]:
    shape: dict[str, Any] = {"type": "string", "maxLength": draw(st.integers(0, 6))}
    if draw(st.booleans()):
        shape["minLength"] = draw(st.integers(0, shape["maxLength"]))
    if draw(st.integers(0, 4)) == 0:
        return {"type": "string", "pattern": draw(st.sampled_from(["^[a-c]{2,4}$", "^x?y+$"]))}
    return shape


@st.composite
def integers(draw: st.DrawFn) -> dict[str, Any]:
    low = draw(st.integers(-300, 300))
    shape: dict[str, Any] = {"type": "integer", "minimum": low}
    if draw(st.booleans()):
        shape["maximum"] = low + draw(st.integers(0, 500))
    return shape


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(["a", "b", "long name", 'q"', "é"]), unique=True))
    return {
        "type": "object",
        "properties": {name: draw(inner) for name in names},
        "required": [name for name in names if draw(st.booleans())],
        "additionalProperties": False,
    }


@st.composite
def arrays(draw: st.DrawFn, inner: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    least = draw(st.integers(0, 2))
    most = least + draw(st.integers(0, 2))
    return {"type": "array", "items": draw(inner), "minItems": least, "maxItems": most}


values = st.one_of(st.integers(-5, 5), st.sampled_from(["x", "", "ü\n"]), st.booleans(), st.none())
schemas = st.recursive(
    st.one_of(
        strings(),
        integers(),
        st.just({"type": "number", "minimum": 0, "maximum": 99.5}),
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["null", "boolean"]}]),
        st.lists(values, min_size=1, max_size=4).map(lambda found: {"enum": found}),
        values.map(lambda found: {"const": found}),
    ),
    lambda inner: st.one_of(
        objects(inner),
        arrays(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
    ),
    max_leaves=6,
)


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    schema=schemas,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 2.0]),
    n=st.integers(1, 3),
    total_blocks=st.sampled_from([26, 200]),
    seed=st.integers(0, 99),
)
def test_every_finished_sample_is_valid_json_of_its_schema(
    tokenizer: Tokenizer,
    compiler: GrammarCompiler,
    schema: dict[str, Any],
    temperature: float,
    n: int,
    total_blocks: int,
    seed: int,
) -> None:
    found = sample(
        tokenizer, compiler, spec_of("json_schema", schema), total_blocks=total_blocks,
        temperature=temperature, n=n, seed=seed,
    )  # fmt: skip
    for text, reason in found:
        if reason is FinishReason.STOP:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        else:
            assert reason is FinishReason.LENGTH


def test_most_samples_do_finish(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """Otherwise the test above would say nothing; and blanks never fill an answer up."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "ages": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
        },
        "required": ["name", "ages"],
        "additionalProperties": False,
    }
    found = sample(tokenizer, compiler, spec_of("json_schema", schema), n=8, requests=4, seed=1)
    ended = [text for text, reason in found if reason is FinishReason.STOP]
    assert len(ended) > len(found) // 2
    for text in ended:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        between = re.sub(r'"(\\.|[^"\\])*"', '""', text)
        assert re.search(r"\s\s", re.sub(r"\n {0,16}", "\n", between)) is None
    assert len(set(ended)) > 8


def test_a_json_object_is_an_object(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    found = sample(tokenizer, compiler, spec_of("json_object"), n=4, requests=4, seed=3)
    ended = [json.loads(text) for text, reason in found if reason is FinishReason.STOP]
    assert ended
    assert all(isinstance(value, dict) for value in ended)


# -- regular expressions and the rest ----------------------------------------------------------


def joined(parts: list[str]) -> str:
    return "".join(f"(?:{part})" for part in parts)


patterns = st.recursive(
    st.sampled_from(["a", "[b-f]", r"\d", "é", "😀", r"\.", "[^x]", " ", "true"]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(joined),
        st.lists(inner, min_size=1, max_size=3).map("|".join),
        st.tuples(inner, st.sampled_from(["?", "{2}", "{1,3}", "{0,2}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=6,
)


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(pattern=patterns, temperature=st.sampled_from([0.0, 1.0, 2.0]), ignore_eos=st.booleans())
def test_every_sample_matches_its_regular_expression(
    tokenizer: Tokenizer,
    compiler: GrammarCompiler,
    pattern: str,
    temperature: float,
    ignore_eos: bool,
) -> None:
    found = sample(
        tokenizer, compiler, spec_of("regex", pattern), temperature=temperature, seed=4, n=2,
        ignore_eos=ignore_eos,
    )  # fmt: skip
    for text, reason in found:
        assert reason is FinishReason.STOP
        assert re.fullmatch(pattern, text), (pattern, text)


def test_one_of_some_texts(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    texts = ["yes", "no", "ye", 'a "quoted" \\ word\n', "😀 ü", " true"]
    found = sample(
        tokenizer, compiler, spec_of("choice", texts), temperature=2.0, n=8, requests=8, seed=9
    )
    assert {reason for _, reason in found} == {FinishReason.STOP}
    assert {text for text, _ in found} <= set(texts)
    assert len({text for text, _ in found}) > 2


def test_a_lark_grammar_with_a_schema_in_it(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    lark = 'start: "<call>" %json {"type": "integer", "minimum": 10, "maximum": 99} "</call>"'
    found = sample(tokenizer, compiler, spec_of("lark", lark), temperature=1.0, n=4, seed=2)
    for text, reason in found:
        assert reason is FinishReason.STOP
        assert re.fullmatch(r"<call>[1-9]\d</call>", text)


def test_forced_text_is_spelled_as_the_model_spells_it(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    """Not byte by byte: a model is at its best among the tokens that it was trained on."""
    text = "true true"
    spelled = tokenizer.encode("\n" + text, add_bos=False)
    while tokenizer.decode(spelled, continuation=True) != text:
        del spelled[0]
    constraint = compiler.compile(spec_of("regex", text))
    taken = []
    while not constraint.is_stopped:
        mask = constraint.mask()
        allowed = [t for t in range(tokenizer.vocab_size) if mask[t >> 3] >> (t & 7) & 1]
        taken.append(max(allowed, key=lambda token: len(tokenizer.token_bytes(token))))
        constraint.accept(taken[-1])
    assert taken == spelled
    assert len(taken) < len(text) / 2


def test_a_fork_goes_its_own_way(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    one = compiler.compile(spec_of("regex", "(a|b){2}"))
    a, b = (tokenizer.encode(f"\n{text}", add_bos=False)[-1] for text in "ab")
    one.accept(a)
    other = one.fork()
    one.accept(b)
    assert one.is_stopped
    assert not other.is_stopped
    other.accept(a)
    assert other.is_stopped
    again = compiler.compile(spec_of("regex", "a"))
    with pytest.raises(HeadraceError, match="is not allowed by the grammar"):
        again.accept(b)


# -- with a real model -------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["kind", "tall", "old"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def test_the_default_model_answers_by_schema(default_model_path: Path) -> None:
    with LLM(default_model_path, kv_tokens=256, max_sequences=4) as llm:
        params = [
            SamplingParams(temperature=t, n=2, seed=1, max_tokens=60) for t in (0.0, 1.0, 2.0)
        ]
        outputs = llm.generate(
            ["Describe a person as JSON: "] * 3, params, grammar=spec_of("json_schema", PERSON)
        )
        ended = [c for out in outputs for c in out.outputs if c.finish_reason == "stop"]
        assert len(ended) >= 4
        for completion in ended:
            jsonschema.Draft202012Validator(PERSON).validate(json.loads(completion.text))
        # Without one the same engine still says what it likes.
        (free,) = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=8))
        assert len(free.outputs[0].token_ids) == 8


async def _ask(engine: AsyncEngine, spec: GrammarSpec) -> str:
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=20)
    return "".join([e.text async for e in engine.generate("A date: ", params, grammar=spec)])


def test_many_callers_each_with_a_grammar(default_model_path: Path) -> None:
    async def all_of_them(engine: AsyncEngine) -> list[str | BaseException]:
        specs = [r"[0-9]{4}-[01][0-9]", "(", "[a-z]{3,5}!"]
        asked = (_ask(engine, spec_of("regex", source)) for source in specs)
        return await asyncio.gather(*asked, return_exceptions=True)

    with AsyncEngine(default_model_path, kv_tokens=256) as engine:
        date, refused, word = asyncio.run(all_of_them(engine))
    assert isinstance(date, str)
    assert re.fullmatch(r"[0-9]{4}-[01][0-9]", date)
    assert isinstance(word, str)
    assert re.fullmatch("[a-z]{3,5}!", word)
    assert isinstance(refused, InvalidRequestError)
