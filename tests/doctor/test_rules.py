"""Every rule fires where it should and nowhere near it; healthy endpoints have no findings."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.doctor.cases import CASES, HEALTHY, IDLE, MORE, Make, but, queued

from headrace.dialects.read import engine_names, find_engine
from headrace.doctor import fixes
from headrace.doctor.finding import Finding, Kind
from headrace.doctor.names import ENGINES
from headrace.doctor.observation import EngineId, Observation, Probe
from headrace.doctor.report import Diagnosis, examine, facts, lines
from headrace.doctor.rules import EXPLAINS, RULES, diagnose

# nvidia-smi's, and `ollama create`'s.
NOT_ITS_FLAGS = ("-q", "-d", "--quantize")
LABELS = {each.engine: each.label for each in ENGINES} | {"ollama": "Ollama", "": "unknown engine"}


def test_every_row_of_the_table_is_a_rule_with_both_cases() -> None:
    assert set(RULES) == set(CASES) == set(range(42))
    table = (Path(__file__).parents[2] / "docs/doctor.md").read_text()
    rows = {int(number) for number in re.findall(r"^\| (\d+) \|", table, re.M)}
    assert rows == set(RULES)


@pytest.mark.parametrize("number", sorted(CASES))
def test_it_fires(number: int) -> None:
    found = RULES[number](CASES[number][0]())
    assert found is not None
    _is_whole(found, number)


@pytest.mark.parametrize("number", sorted(CASES))
def test_it_does_not_fire(number: int) -> None:
    assert RULES[number](CASES[number][1]()) is None


@pytest.mark.parametrize(("number", "fires", "make"), MORE)
def test_other_ways(number: int, fires: bool, make: Make) -> None:
    assert (RULES[number](make()) is not None) is fires


def _is_whole(found: Finding, number: int) -> None:
    assert found.rule == number
    assert found.evidence
    assert all(found.evidence)
    assert any(ch.isdigit() for ch in " ".join(found.evidence)) or number in (26, 35)
    assert found.cause
    assert found.fix
    assert all(found.fix)
    assert found.unless
    gain = found.gain
    assert gain.basis
    if gain.low is not None and gain.high is not None:
        assert 0 < gain.low <= gain.high * 1.0001


@pytest.mark.parametrize("seen", [HEALTHY, IDLE], ids=["busy", "idle"])
def test_a_healthy_endpoint_has_no_finding(seen: Observation) -> None:
    assert diagnose(seen) == ((), ())


def test_saturation_is_said_and_is_no_fault() -> None:
    """256 of 256 run, and a step of more takes as much longer: nothing to tune."""
    flat = tuple(tuple(dataclasses.replace(a) for a in b) for b in _flat_bursts())
    seen = queued(256, 60, 0.6, probe_bursts=flat)
    found, _ = diagnose(seen)
    assert [(f.rule, f.kind) for f in found] == [(4, Kind.LIMIT)]
    assert "saturated" in found[0].cause


def _flat_bursts() -> Any:
    from tests.doctor.cases import together

    return together(0.08)  # 8 sequences take 8 times as long


def test_a_missing_value_never_fires_anything() -> None:
    bare = Observation(url="http://x", engine=EngineId(name="", label="unknown engine"))
    assert diagnose(bare) == ((), ())
    assert diagnose(dataclasses.replace(bare, probe=Probe())) == ((), ())


@given(st.data())
def test_any_part_may_be_missing(data: st.DataObject) -> None:
    """No rule falls over what an engine does not tell."""
    base = CASES[data.draw(st.sampled_from(sorted(CASES)))][0]()
    changes: dict[str, Any] = {}
    for name in ("levels", "deltas", "histograms", "config", "groups"):
        table = getattr(base, name)
        kept = data.draw(st.sets(st.sampled_from(sorted(table)))) if table else set()
        changes[name] = {key: table[key] for key in kept}
    seen = dataclasses.replace(base, **changes)
    if base.probe is not None:
        names = ["short", "medium", "long", "cold", "warm", "bursts", "plain", "grammar", "penalty"]
        groups = data.draw(st.sets(st.sampled_from(names)))
        emptied: dict[str, Any] = dict.fromkeys(groups, ())
        seen = dataclasses.replace(seen, probe=dataclasses.replace(base.probe, **emptied))
    for rule in RULES.values():
        rule(seen)


@pytest.mark.parametrize("name", [*LABELS])
@pytest.mark.parametrize("number", sorted(CASES))
def test_every_engine_gets_a_fix_in_its_own_words(number: int, name: str) -> None:
    seen = CASES[number][0]()
    engine = EngineId(name=name, label=LABELS[name])
    found = RULES[number](dataclasses.replace(seen, engine=engine))
    if found is None:  # needs what only some engines tell
        assert number in (29, 38)
        return
    for fix in found.fix:
        flags = re.findall(r"(?<![\w-])--?[a-z][\w-]*", fix.partition(", after")[0])
        if name in engine_names():
            known = find_engine(name)
            wrong = [f for f in flags if known.find(f) is None and f not in NOT_ITS_FLAGS]
            assert wrong == []
        else:
            assert flags in ([], ["-q", "-d"])


def test_words_of_engines_exist() -> None:
    for (name, _), text in fixes.WORDS.items():
        if name not in engine_names():
            continue
        engine = find_engine(name)
        flags = re.findall(r"(?<![\w-])(?:--?[a-z][\w-]*|\$[A-Z_]+)", text)
        assert [flag for flag in flags if engine.find(flag) is None] == []


def test_what_is_explained_is_set_aside() -> None:
    seen = but(CASES[20][0](), levels={"kv_usage": (0.99,) * 3, "waiting": (4.0,) * 3})
    found, explained = diagnose(seen)
    assert 20 in [f.rule for f in found]
    assert 3 in [f.rule for f in explained]
    assert all(
        set(general) <= set(RULES) and number in RULES for number, general in EXPLAINS.items()
    )


def test_the_client_comes_first() -> None:
    seen = but(CASES[0][0](), probe_warm=CASES[19][0]().probe.warm, config={"prefix_cache": False})  # type: ignore[union-attr]
    found, _ = diagnose(seen)
    assert found[0].rule == 0
    assert 19 in [f.rule for f in found]


@pytest.mark.parametrize("number", sorted(CASES))
def test_reports_are_narrow_and_json(number: int) -> None:
    import json

    found: Diagnosis = examine(CASES[number][0]())
    text = list(lines(found, explain=True))
    assert [line for line in text if len(line) > 100 and " " in line.strip()] == []
    again = json.loads(json.dumps(facts(found)))
    assert number in [f["rule"] for f in (*again["findings"], *again["explained"])]


def test_the_gain_of_places_is_measured_where_it_can_be() -> None:
    found = RULES[4](CASES[4][0]())
    assert found is not None
    # 12 ms a step at 4 sequences, and 80 ms for the tokens of a mean prompt that are computed, of
    # which one step is others'; 4 → 16 sequences. Prompts are work at any batch size.
    seen = CASES[4][0]()
    length = seen.histograms["prompt_length"].mean
    assert length is not None
    each = (0.08 - 0.012) / (0.4 * length)
    share = 20_000 * 0.4 / 5000  # prompt tokens that are computed for each token of an answer
    now, then = (share * each + (0.012 + (n - 4) * each) / n for n in (4, 16))
    assert found.gain.low == pytest.approx(now / then)
    assert found.gain.high == pytest.approx(now / then)
