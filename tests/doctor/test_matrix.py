"""Rules × engines: each rule that metrics alone can show, over every engine that exports what it
needs. Real HTTP, the engine's own names, two scripted pages; then one that is nearly the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.doctor.fakes import MODELS, FakeEngine, Values, has, render, serving
from tests.doctor.matrix import TOLD, table
from tests.doctor.test_collect import SETTINGS

from headrace.doctor.collect import Wanted, observe
from headrace.doctor.names import ENGINES, EngineNames
from headrace.doctor.observation import Observation
from headrace.doctor.rules import RULES

ALL = {each.engine for each in ENGINES}
ZERO = dict.fromkeys(
    ("generation_tokens", "prompt_tokens", "preemptions", "finished", "requests", "draft_tokens",
     "accepted_tokens", "drafts", "rejected", "failed", "aborted"), 0.0,
)  # fmt: skip


def page(levels: dict[str, float], **more: object) -> Values:
    counters = {**ZERO, **more.pop("counters", {})}  # type: ignore[dict-item]
    return Values(
        levels={"running": 10.0, "waiting": 0.0, "kv_usage": 0.3, **levels},
        counters=counters,
        **more,  # type: ignore[arg-type]
    )


QUIET = page({})
BUSY = {"ttft": (0.1,) * 40, "queue_time": (0.005,) * 40, "tpot": (0.02,) * 40}


def slow(**histograms: tuple[float, ...]) -> Values:
    return page({}, histograms={**BUSY, **histograms})


# Rule -> what it needs, the second page that makes it fire, one that does not, who can show it.
WITH_KV = ALL - {"tgi", "llama.cpp"}
WITH_TTFT = ALL - {"tgi", "llama.cpp"}
MATRIX: dict[int, tuple[set[str], Values, Values, set[str]]] = {
    3: ({"waiting", "kv_usage"}, page({"waiting": 5, "kv_usage": 0.99}),
        page({"waiting": 0, "kv_usage": 0.99}), WITH_KV),
    4: ({"running", "waiting"}, page({"waiting": 5, "kv_usage": 0.2}),
        page({"waiting": 0, "kv_usage": 0.2}), ALL),
    7: ({"startup_s"}, page({"startup_s": 900}), page({"startup_s": 40}), {"sglang"}),
    11: ({"ttft", "queue_time"}, slow(ttft=(2.5,) * 40, queue_time=(2.2,) * 40),
         slow(ttft=(0.4,) * 40, queue_time=(0.3,) * 40), WITH_TTFT),
    12: ({"ttft", "queue_time"}, slow(ttft=(2.5,) * 40, queue_time=(0.01,) * 40), slow(),
         WITH_TTFT),
    13: ({"tpot"}, slow(tpot=(0.2,) * 40), slow(),
         {"headrace", "vllm", "tgi", "llama.cpp", "trtllm", "lmdeploy"}),
    14: ({"ttft", "prompt_length"},
         slow(ttft=(*[0.04] * 36, *[6.0] * 4), prompt_length=(*[50.0] * 36, *[20_000.0] * 4)),
         slow(prompt_length=(*[50.0] * 36, *[20_000.0] * 4)), {"headrace", "vllm"}),
    15: ({"preemptions"}, page({}, counters={"preemptions": 3, "finished": 30, "requests": 30},
                               groups={"finished": {"stop": 30.0}}),
         page({}, counters={"finished": 30}), {"headrace", "vllm", "sglang"}),
    16: ({"generation_length", "decode_time", "e2e"},
         page({}, histograms={"generation_length": (3500.0,) * 20, "decode_time": (28.0,) * 20,
                              "e2e": (30.0,) * 20},
              groups={"finished": {"stop": 10.0, "length": 10.0}}),
         page({}, histograms={"generation_length": (90.0,) * 20, "decode_time": (1.0,) * 20,
                              "e2e": (1.2,) * 20}), {"headrace", "vllm"}),
    18: ({"itl"}, page({}, counters={"prompt_tokens": 9000},
                       histograms={"itl": (*[0.02] * 380, *[3.0] * 20)}),
         page({}, counters={"prompt_tokens": 9000}, histograms={"itl": (0.02,) * 400}),
         {"headrace", "vllm", "sglang"}),
    20: ({"preemptions"}, page({}, counters={"preemptions": 90, "finished": 30, "requests": 30},
                               groups={"finished": {"stop": 30.0}}),
         page({}, counters={"preemptions": 1, "finished": 30, "requests": 30},
              groups={"finished": {"stop": 30.0}}), {"headrace", "vllm", "sglang"}),
    24: ({"finished"}, page({}, groups={"finished": {"stop": 20.0, "abort": 9.0}}),
         page({}, groups={"finished": {"stop": 20.0, "abort": 0.0}}),
         {"headrace", "vllm", "trtllm", "lmdeploy"}),
    26: ({"graphs_used"}, page({"graphs_used": 0}, counters={"generation_tokens": 500}),
         page({"graphs_used": 1}, counters={"generation_tokens": 500}), {"sglang"}),
    27: ({"draft_tokens"}, page({}, counters={"draft_tokens": 100, "accepted_tokens": 10,
                                              "drafts": 20}),
         page({}, counters={"draft_tokens": 100, "accepted_tokens": 80, "drafts": 20}),
         {"vllm", "llama.cpp", "trtllm", "headrace"}),
    30: ({"waiting", "running"}, page({"waiting": 90}), page({"waiting": 8}), ALL),
}  # fmt: skip


def look(names: EngineNames, before: Values, after: Values) -> Observation:
    pages = [render(names, each) for each in (before, after)]
    engine = FakeEngine(pages, paths={"/v1/models": MODELS})
    with serving(engine) as endpoint:
        return observe(endpoint, Wanted(interval_s=0.0, probes=False))


def started(values: Values) -> Values:
    """The first page: the same series, before anything happened."""
    return replace(
        QUIET,
        levels={**dict.fromkeys(values.levels, 0.0), **QUIET.levels},
        groups={name: dict.fromkeys(parts, 0.0) for name, parts in values.groups.items()},
        histograms=dict.fromkeys(values.histograms, ()),
    )


@pytest.mark.parametrize(
    ("number", "name"), [(number, name) for number in MATRIX for name in sorted(MATRIX[number][3])]
)
def test_a_rule_on_an_engine(number: int, name: str) -> None:
    names = next(each for each in ENGINES if each.engine == name)
    _, fires, does_not, _ = MATRIX[number]
    found = look(names, started(fires), fires)
    assert found.engine.name == name
    finding = RULES[number](found)
    assert finding is not None
    assert finding.evidence
    assert RULES[number](look(names, started(does_not), does_not)) is None


def test_the_matrix_names_every_engine_that_could() -> None:
    """An engine that gets a metric must get its rules too."""
    for number, (needs, _, _, engines) in MATRIX.items():
        could = {each.engine for each in ENGINES if has(each, needs)}
        assert could - engines <= NOT_ENOUGH.get(number, set()), number
        assert engines <= could, number


# Engines that have the metrics but not what else the rule reads.
NOT_ENOUGH = {
    24: {"tgi", "triton", "sglang"},  # counts without a reason
    15: set[str](),
}


def test_the_documents_table_is_what_rules_do() -> None:
    """`python -m tests.doctor.matrix` prints it."""
    text = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    assert "\n".join(table()) in text


@pytest.mark.parametrize("name", SETTINGS)
def test_the_table_knows_what_engines_tell(name: str) -> None:
    _, told = SETTINGS[name]
    assert told.keys() <= TOLD[name]


@pytest.mark.parametrize("names", ENGINES, ids=lambda each: each.engine)
def test_a_quiet_engine_has_no_finding(names: EngineNames) -> None:
    found = look(names, started(QUIET), slow())
    assert [number for number, rule in RULES.items() if rule(found)] == []
