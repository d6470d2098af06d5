"""Did a fix help? Verdicts, promises, and the ten questions."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from tests.doctor.cases import CASES, HEALTHY, answer, but, serial, together

from headrace.core.errors import ConfigError
from headrace.core.ratio import Verdict
from headrace.doctor.observation import EngineId, GpuNow, Observation
from headrace.doctor.preflight import Answered, preflight
from headrace.doctor.report import earlier_of, examine, facts
from headrace.doctor.verify import compare, helped, promises

GROUPS = ("short", "warm", "cold", "references")


def report(seen: Observation) -> dict[str, Any]:
    return facts(examine(seen))


def jittered(seen: Observation, seed: int, factor: float = 1.0) -> Observation:
    """The same probes with a spread of 5%, as real ones have."""
    draw = random.Random(seed)

    def one(a: Any) -> Any:
        scale = factor * draw.uniform(0.95, 1.05)
        return answer(a.ttft_s * scale, a.tpot_s * scale, a.tokens, a.prompt_tokens)

    assert seen.probe is not None
    groups: dict[str, Any] = {
        name: tuple(one(a) for a in getattr(seen.probe, name)) for name in GROUPS
    }
    bursts = tuple(tuple(one(a) for a in burst) for burst in seen.probe.bursts)
    return replace(seen, probe=replace(seen.probe, bursts=bursts, **groups))


def test_the_same_again_is_inconclusive_and_faster_is_better() -> None:
    base = report(jittered(HEALTHY, 1))
    same = compare(base, report(jittered(HEALTHY, 2)))
    assert helped(same) is Verdict.INCONCLUSIVE
    assert {row.name for row in same} >= {"TTFT of a short prompt", "burst tokens/s"}
    faster = compare(base, report(jittered(HEALTHY, 3, 0.5)))
    assert helped(faster) is Verdict.BETTER
    (steady,) = [row for row in faster if row.name == "burst over one stream"]
    assert steady.verdict is Verdict.INCONCLUSIVE  # a machine that is faster is no better batching
    assert all(row.low < 2 < row.high * 1.2 for row in faster if row.verdict is Verdict.BETTER)
    assert helped(compare(base, report(jittered(HEALTHY, 4, 2.0)))) is Verdict.WORSE


def test_a_prediction_is_compared_with_what_came() -> None:
    narrow = but(config={"max_sequences": 1}, probe_bursts=serial(),
                 levels={"running": (0.0,), "waiting": (0.0,), "kv_usage": (0.0,)})  # fmt: skip
    before = report(jittered(narrow, 5))
    assert [f["rule"] for f in before["findings"]] == [4]
    after = report(jittered(HEALTHY, 6))
    rows = compare(before, after)
    (kept,) = promises(before, after, rows)
    assert kept.is_gone
    assert kept.measured is not None
    assert kept.measured.verdict is Verdict.BETTER
    assert kept.within
    assert helped(rows) is Verdict.BETTER
    assert [row.name for row in rows if row.is_meant] == ["burst over one stream"]
    nothing = report(jittered(narrow, 8))
    (kept,) = promises(before, nothing, compare(before, nothing))
    assert not kept.is_gone
    assert not kept.within


def test_a_prefix_is_compared_with_a_new_one_of_the_same_run() -> None:
    """The machine became twice as fast in between: a prefix that is found is no better for that."""
    again = tuple(answer(0.54, n=4, prompt=1000) for _ in range(3))
    off = but(probe_warm=again, probe_warm_deltas={}, config={"prefix_cache": False})
    before = report(jittered(off, 1))
    same = compare(before, report(jittered(off, 2, 0.5)))
    rows = {row.name: row for row in same}
    assert rows["TTFT of a repeated prefix"].verdict is Verdict.BETTER
    assert rows["a prefix again, over new"].verdict is Verdict.INCONCLUSIVE
    after = report(jittered(HEALTHY, 3, 0.5))
    rows = {row.name: row for row in compare(before, after)}
    assert rows["a prefix again, over new"].ratio == pytest.approx(0.55 / 0.07, rel=0.1)
    (kept,) = [each for each in promises(before, after, tuple(rows.values())) if each.rule == 19]
    assert kept.measured is not None
    assert kept.measured.name == "a prefix again, over new"


def test_a_report_without_probes_is_refused() -> None:
    bare = report(replace(HEALTHY, probe=None))
    with pytest.raises(ConfigError, match="has no probes"):
        compare(bare, report(HEALTHY))
    assert earlier_of(bare) is None
    earlier = earlier_of(report(HEALTHY))
    assert earlier is not None
    assert earlier.rate == pytest.approx(100)
    assert earlier.uptime_s == 5000
    assert "uptime_s" not in earlier.config


def answers(seen: Observation) -> dict[int, str]:
    return {check.number: check.answer for check in preflight(seen)}


def test_ten_questions_of_a_good_endpoint() -> None:
    gpu = GpuNow(name="x", used_bytes=70e9, memory_bytes=80e9, busy_share=0.9)
    seen = but(config={"quantization": "fp8", "max_waiting": 100}, probe_gpus=(gpu,))
    assert answers(seen) == dict.fromkeys(range(1, 11), "pass")


def test_ten_questions_without_an_answer() -> None:
    bare = Observation(url="http://x", engine=EngineId(name="", label="unknown engine"))
    found = preflight(bare)
    assert {check.answer for check in found} == {Answered.UNKNOWN}
    assert all(check.evidence for check in found)


@pytest.mark.parametrize(
    ("number", "seen"),
    [
        (2, but(config={"gpu_memory": 0.97})),
        (4, CASES[19][0]()),
        (5, but(config={"dtype": "bfloat16"})),
        (6, but(probe_bursts=together(0.2))),
        (7, but(probe_deltas={"generation_tokens": 0.0})),
        (8, HEALTHY),
        (9, HEALTHY),  # vLLM's queue has no bound
    ],
)
def test_questions_that_fail(number: int, seen: Observation) -> None:
    if number == 8:
        seen = replace(seen, histograms={}, unknown={"ttft": "not exported", "tpot": "neither"})
    assert answers(seen)[number] == "fail"
