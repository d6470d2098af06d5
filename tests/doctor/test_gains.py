"""Predicted gains: a burst played by hand, what prompts of a few tokens tell about a step, step
times of a profile, and what an engine's own histograms tell."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.doctor.cases import HEALTHY, IDLE, STALLED, answer, but, lengths, serial, times, together

from headrace.doctor.buckets import Buckets
from headrace.doctor.calibrated import steps_of_profile
from headrace.doctor.carry import carry_of
from headrace.doctor.floor import base_name, long_ratio, row_ratio
from headrace.doctor.gains import burst_s, gain_in_burst, gain_of_places
from headrace.doctor.observation import EngineId, MeasuredSteps, Observation
from headrace.doctor.rules import RULES
from headrace.doctor.step_curve import Steps, steps_of_burst, steps_of_traffic
from headrace.hardware.profile import Limits, Profile, StepTime
from headrace.simulate.curve import Line

FLAT = Steps(decode=Line({1: 1.0}), prompt=Line({0: 0.0, 1: 0.1}), basis="-")


def test_a_burst_by_hand() -> None:
    """Steps of 1 s, 0.1 s a prompt token. Two at a time, 3 requests of 11 tokens, 3 tokens out."""
    # The first one's prompt alone (1 + 10 × 0.1), the second one's beside its second token, a step
    # of both, the third one's prompt beside the second one's last token, and its own two.
    wall = burst_s(FLAT, asked=3, places=2, prompt_tokens=11, answer_tokens=3)
    assert wall == pytest.approx(2.0 + 2.1 + 1 + 2.1 + 2)
    # In pieces of 8 tokens: 8, 8, 6 of the first two; the second waits for its last piece.
    wall = burst_s(FLAT, asked=2, places=2, prompt_tokens=11, answer_tokens=3, piece_tokens=8)
    # 8 | 3 + 5, the first has its token | 6 beside its second | third of the first | rest.
    assert wall == pytest.approx((1 + 0.7) + (1 + 0.7) + (1 + 0.6) + 1 + 1)


def test_a_burst_on_an_engine_that_keeps_steps_short() -> None:
    """A step with prompts may take twice as long, for each prompt that waits beside an answer: 20
    tokens for two beside one, 10 for one beside one, all of it beside none."""
    wall = burst_s(FLAT, asked=3, places=3, prompt_tokens=20, answer_tokens=2, growth=2.0)
    assert wall == pytest.approx((1 + 1.9) + (1 + 2) + (1 + 1) + (1 + 0.9) + 1)
    free = burst_s(FLAT, asked=3, places=3, prompt_tokens=20, answer_tokens=2)
    assert free == pytest.approx((1 + 1.9) + (1 + 4) + 1)


@given(
    st.integers(1, 12), st.integers(1, 12), st.integers(1, 300), st.integers(1, 20),
    st.floats(0, 1), st.floats(0, 0.1),
)  # fmt: skip
def test_more_places_never_take_longer_where_steps_are_shared(
    asked: int, places: int, prompt: int, tokens: int, each: float, cost: float
) -> None:
    steps = Steps(decode=Line({1: 1.0, 2: 1.0 + each}), prompt=Line({0: 0.0, 1: cost}), basis="-")
    walls = [
        burst_s(steps, asked=asked, places=count, prompt_tokens=prompt, answer_tokens=tokens,
                piece_tokens=10_000)
        for count in (places, places + 1)
    ]  # fmt: skip
    # A sequence that joins costs at most a step alone, so sharing never loses.
    assert walls[1] <= walls[0] + 1e-9
    assert math.isfinite(walls[0])


def sizes(alone: float, cost: float, overhead: float = 0.003) -> tuple[Any, ...]:
    """What bare prompts of 2, 8, 16 and 64 tokens take, several times."""
    return tuple(
        answer(overhead + alone + (n - 1) * cost, n=4, prompt=n) for n in (2, 8, 16, 64) * 3
    )


def test_prompts_of_a_few_tokens_tell_what_rows_cost() -> None:
    """One place: no burst ran together. A row adds 2 ms, which a long prompt's tokens do not show
    (0.5 ms each); the medium prompt's point lies on its own line."""
    narrow = but(config={"max_sequences": 1}, probe_bursts=serial(), probe_sizes=sizes(0.01, 0.002),
                 row_ratio=1.25)  # fmt: skip
    low, high = steps_of_burst(narrow)
    assert low.decode(1) == pytest.approx(0.01)
    assert low.decode(8) == pytest.approx(0.01 + 7 * 0.002)
    assert high.decode(8) == pytest.approx(0.01 + 7 * 0.002 * 1.25)
    without = replace(narrow, probe=replace(narrow.probe, sizes=()))  # type: ignore[type-var]
    low, high = steps_of_burst(without)
    assert low.decode(8) < 0.015  # which is what was believed before


def test_cores_that_compute_also_carry_tokens() -> None:
    """1.2 ms of CPU time a token, two cores: 0.6 ms at least, 1.2 at most, for each one more."""
    narrow = but(config={"max_sequences": 1, "device": "cpu"}, engine=OURS.engine, gpus=(),
                 probe_bursts=serial(), probe_sizes=sizes(0.01, 0.002), cores=2,
                 deltas={"generation_tokens": 0.0},
                 probe_deltas={"generation_tokens": 2000.0, "process_cpu_s": 2.0})  # fmt: skip
    assert narrow.probe is not None
    got = sum(a.tokens for a in narrow.probe.answers)
    narrow = but(narrow, probe_cpu_s=got * 0.0002)
    carry = carry_of(narrow, is_here=True)
    assert carry == pytest.approx(0.0012)
    low, high = steps_of_burst(replace(narrow, carry_s=carry))
    assert low.decode(8) == pytest.approx(0.01 + 7 * (0.002 + 0.0006))
    assert high.decode(8) == pytest.approx(0.01 + 7 * (0.002 + 0.0012))
    assert "1.2 ms of CPU time" in high.basis
    # A client elsewhere takes nothing of it; the endpoint's own traffic tells more than probes.
    assert carry_of(narrow, is_here=False) == pytest.approx(0.001)
    own = but(narrow, deltas={"generation_tokens": 1000.0, "process_cpu_s": 0.5})
    assert carry_of(own, is_here=True) == pytest.approx(0.0005)
    # A GPU computes beside it; and who exports no such time has the client's part alone.
    assert carry_of(but(narrow, config={"device": "cuda"}), is_here=True) is None
    other = but(narrow, engine=EngineId(name="llama.cpp", label="llama.cpp"))
    assert carry_of(other, is_here=True) == pytest.approx(0.0002)


def test_the_gain_of_places_meets_what_a_real_step_gives() -> None:
    """Bursts that are played with the same step times before and after: the prediction is them."""
    alone, row = 0.01, 0.002
    true = Steps(decode=Line({1: alone, 2: alone + row}), prompt=Line({0: 0, 1: row}), basis="-")

    def played(places: int) -> float:
        return burst_s(true, asked=8, places=places, prompt_tokens=50, answer_tokens=40)

    first = alone + 49 * row
    one = tuple(answer(0.003 + first + i * (first + 39 * alone), alone, 40) for i in range(8))
    seen = but(config={"max_sequences": 1}, probe_bursts=(one,) * 3, probe_sizes=sizes(alone, row),
               probe_short=tuple(answer(0.003 + first, alone) for _ in range(5)),
               levels={"running": (0.0,), "waiting": (0.0,), "kv_usage": (0.0,)},
               probe_medium=())  # fmt: skip
    found = RULES[4](seen)
    assert found is not None
    middle = found.gain.middle
    assert middle == pytest.approx((0.003 + played(1)) / (0.003 + played(8)), rel=0.03)
    assert found.fix[0].startswith("--max-num-seqs 8")


def profile_of(name: str = "Llama-3.1-8B-Instruct.Q8_0.gguf") -> Profile:
    def step(rows: int, prompt: int, seconds: float, context: int = 32) -> StepTime:
        return StepTime(decode_rows=rows, context_tokens=context if rows else 0,
                        prompt_tokens=prompt, prompt_start=0, draws=True, seconds=seconds,
                        spread=0.01, repetitions=5)  # fmt: skip

    steps = [step(n, 0, 0.010 + (n - 1) * 0.001) for n in (1, 2, 4, 8, 16)]
    steps += [step(0, n, 0.010 + (n - 1) * 0.0005) for n in (1, 16, 64, 256)]
    return Profile(
        headrace="1", date="2026-11-16T10:00:00Z", machine={}, model={"name": name},
        limits=Limits(max_batch_tokens=512, max_sequences=64, total_blocks=100, block_tokens=16,
                      context_tokens=8192, steps_in_flight=1, max_step_growth=2.0),
        steps=tuple(steps),
    )  # fmt: skip


OURS = but(engine=EngineId(name="headrace", label="Headrace", version="1"))


def test_a_profile_is_used_for_its_own_model_alone() -> None:
    steps, why_not = steps_of_profile(profile_of(), OURS)
    assert why_not is None
    assert steps is not None
    assert dict(steps.decode_s)[8] == pytest.approx(0.017)
    assert dict(steps.prompt_s)[64] == pytest.approx(63 * 0.0005 + 0.0005, rel=0.1)
    assert steps_of_profile(profile_of("other.gguf"), OURS)[0] is None
    none, why_not = steps_of_profile(profile_of(), HEALTHY)
    assert none is None
    assert why_not is not None
    assert "vLLM" in why_not


def test_a_profile_gives_a_gain_without_a_probe() -> None:
    steps, _ = steps_of_profile(profile_of(), OURS)
    busy = but(OURS, levels={"running": (2.0,) * 3, "waiting": (6.0,) * 3, "kv_usage": (0.1,) * 3},
               config={"max_sequences": 2})  # fmt: skip
    found = RULES[4](replace(busy, probe=None, steps=steps))
    assert found is not None
    # 2 → 8 sequences: prompts of the mean request are work at any batch size.
    share = 20_000 * 0.4 / 5000
    work = [0.0005 * share + step / n for n, step in ((2, 0.011), (8, 0.017))]
    assert found.gain.middle == pytest.approx(work[0] / work[1], rel=0.02)
    assert "profile of 2026-11-16" in found.gain.basis


def test_a_profile_is_scaled_by_the_stream_that_was_measured() -> None:
    """The machine is half as fast as when it was calibrated: so is every step."""
    seen = replace(OURS, steps=MeasuredSteps(decode_s=((1.0, 0.005), (2.0, 0.006)),
                                             prompt_s=((1.0, 0.001),), source="-"))  # fmt: skip
    (steps,) = steps_of_burst(seen)
    assert steps.decode(1) == pytest.approx(0.01)
    assert steps.decode(2) == pytest.approx(0.012)
    assert steps.prompt(10) == pytest.approx(0.02)


def busy(running: float, waiting: float, **more: Any) -> Observation:
    levels = {"running": (running,) * 3, "waiting": (waiting,) * 3, "kv_usage": (0.1,) * 3}
    return but(levels=levels, config={"max_sequences": running}, **more)


def test_probes_beside_others_requests_do_not_tell_steps() -> None:
    """They measured the others too: the engine's own histograms are asked instead."""
    seen = busy(2, 10, histograms={"itl": times(0.010, of=300), "prefill_time": times(0.1, of=80),
                                   "prompt_length": lengths(200, of=80)},
                deltas={"prefix_queries": 0.0, "prefix_hits": 0.0})  # fmt: skip
    (steps,) = steps_of_traffic(seen)
    # A prompt's token takes (100 - 10) ms / 200, and so does a row: 10 ms at 2 is 14.5 at 12.
    assert steps.decode(2) == pytest.approx(0.010)
    assert steps.decode(12) == pytest.approx(0.0145)
    # Steps with prompts take at most twice as long as those without: half of the 100 ms is others'.
    (low, high) = steps_of_traffic(but(seen, config={"max_step_growth": 2.0}))
    assert low.decode(12) == pytest.approx(0.010 + 10 * 0.05 / 200)
    assert high.decode(12) == pytest.approx(0.0145)
    blind = replace(seen, histograms={})
    assert steps_of_traffic(blind) == ()
    gain = gain_of_places(blind, 2, 12)
    assert gain.low is None
    assert "beside others" in gain.basis


def test_a_step_is_known_from_all_steps_together() -> None:
    """Headrace's totals: 300 steps of 10 ms in 5 s and 1,000 prompt tokens, so 2 ms a token. What
    a request's own prefill took is no measure: others' prompts are in it."""
    bounds = (0.0099, 0.0101, math.inf)
    gaps = Buckets(bounds=bounds, counts=(0.0, 600.0, 0.0), total=6.0)
    seen = busy(2, 10, engine=OURS.engine, row_ratio=1.5,
                histograms={"itl": gaps, "prefill_time": times(0.3, of=80)},
                groups={"step_parts": {"compute": 4.5, "publish": 0.5}},
                deltas={"steps": 300.0, "computed_prompt_tokens": 1000.0})  # fmt: skip
    low, high = steps_of_traffic(seen)
    assert low.prompt(10) == high.prompt(10) == pytest.approx(0.02)
    assert low.decode(2) == pytest.approx(0.010)
    assert low.decode(12) == pytest.approx(0.010 + 10 * 0.002)
    assert high.decode(12) == pytest.approx(0.010 + 10 * 0.003)
    # vLLM counts steps too; without seconds of its own, all the time counts if somebody waits.
    told = Buckets(bounds=(8.0, math.inf), counts=(300.0, 0.0), total=1600.0)
    other = busy(2, 10, histograms={"itl": gaps, "iteration_tokens": told},
                 deltas={"prompt_tokens": 1000.0, "prefix_hits": 0.0})  # fmt: skip
    (steps,) = steps_of_traffic(other)
    assert steps.decode(12) == pytest.approx(0.030)


def test_a_prefix_that_is_found_leaves_the_question() -> None:
    """20 tokens of the question and up to a block: 1 ms each, and attention to 1,000 before."""
    first, pair_s = 0.003, 2e-7

    def prompt(n: int) -> Any:
        return answer(first + n * 1e-3 + n * n * pair_s / 2, n=4, prompt=n)

    seen = but(config={"prefix_cache": False}, probe_question=(prompt(20),) * 3,
               probe_sizes=tuple(prompt(n) for n in (2, 8, 16, 64) * 3),
               probe_short=(prompt(50),) * 5, probe_medium=(prompt(500),) * 2,
               probe_long=(prompt(2000),) * 2, probe_cold=(prompt(1000),) * 3,
               probe_warm=(replace(prompt(1000), cached_tokens=0),) * 3)  # fmt: skip
    finding = RULES[19](seen)
    assert finding is not None
    cold = first + 1.0 + 1e6 * pair_s / 2
    for end, rows in ((finding.gain.high, 20), (finding.gain.low, 36)):
        assert end == pytest.approx(cold / (first + rows * (1e-3 + 1000 * pair_s)), rel=0.02)


def test_steps_that_stop_streams_are_sized_by_the_objective() -> None:
    """A prompt's token takes 0.5 ms early, 1 ms at the end of the long prompt. With 50 ms a token
    wanted, a step may take 100: 90 beside the 10 of the tokens, so 64 tokens of a prompt."""
    prompts = {"short": (50, 0.025, 5), "medium": (450, 0.225, 2), "long": (2050, 1.525, 2)}
    groups: dict[str, Any] = {
        f"probe_{name}": tuple(answer(first, n=24, prompt=tokens) for _ in range(count))
        for name, (tokens, first, count) in prompts.items()
    }
    finding = RULES[18](but(probe_stream=STALLED, **groups))
    assert finding is not None
    assert "64" in finding.fix[0]
    longest = 0.4
    assert finding.gain.high == pytest.approx(longest / (0.010 + 64 * 0.0005), rel=0.01)
    assert finding.gain.low == pytest.approx(longest / (0.010 + 64 * 0.0010), rel=0.01)


def test_a_template_that_is_found_is_no_work() -> None:
    """Half of each prompt comes from the cache: a burst is played with the other half."""
    whole = but(config={"max_sequences": 1}, probe_bursts=serial(), probe_sizes=sizes(0.01, 0.002))
    assert whole.probe is not None
    half = tuple(tuple(replace(a, cached_tokens=25) for a in b) for b in whole.probe.bursts)
    found = but(whole, probe_bursts=half)
    less, more = (gain_in_burst(each, 8).high for each in (whole, found))
    assert less is not None
    assert more is not None
    assert more > 1.05 * less  # beside the same rate of now


def test_llama_cpp_tells_what_prompts_take() -> None:
    """No histograms: two counters give the time of a prompt's token, and of an answer's."""
    engine = EngineId(name="llama.cpp", label="llama.cpp")
    one = {"tpot": times(0.010, of=100), "prompt_token_time": times(0.002, of=100)}
    seen = replace(busy(1, 7, engine=engine), histograms=one, probe=None,
                   deltas={"generation_tokens": 500.0, "prompt_tokens": 500.0})  # fmt: skip
    gain = gain_of_places(seen, 1, 8)
    # 2 ms of prompt for each token: 12 ms alone; 2 + (10 + 7 × 2) / 8 ms with eight.
    assert gain.low == pytest.approx(12 / 5)
    assert gain.high == pytest.approx(12 / 5)


def test_the_pool_is_predicted_from_how_many_fit() -> None:
    seen = but(config={"kv_tokens": 512}, probe_bursts=together(count=8))
    gain = gain_in_burst(seen, 8, 5)
    assert gain.low is not None
    assert gain.high is not None
    assert 1.0 <= gain.low <= gain.high < 2.0


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("/root/.cache/headrace/models/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("models/Llama-3.1-8B-Instruct-Q4_K_M.gguf", "Llama-3.1-8B-Instruct"),
        ("x-IQ2_XXS.gguf", "x"),
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("/srv/models/Qwen3-8B", "Qwen3-8B"),
    ],
)
def test_a_models_name_without_its_format(told: str, name: str) -> None:
    assert base_name(told) == name


def test_the_ledger_knows_what_the_output_layer_adds() -> None:
    # 49,152 × 576 values over 30 layers of 576 × (576 + 2 × 192 + 576 + 3 × 1536).
    inner = 30 * 576 * (576 + 2 * 192 + 576 + 3 * 1536)
    assert row_ratio("SmolLM2-135M-Instruct.Q4_1.gguf") == pytest.approx(1 + 49_152 * 576 / inner)
    assert row_ratio("nobody-knows-this") is None
    assert row_ratio(None) is None


def test_attention_to_a_long_prompt_is_no_fault_of_the_kernel() -> None:
    """The model's own ratio, known without a GPU: a small model's attention weighs more."""
    small = long_ratio("SmolLM2-135M-Instruct.Q4_1.gguf", (512, 2048))
    large = long_ratio("meta-llama/Llama-3.1-8B-Instruct", (512, 2048))
    assert small is not None
    assert large is not None
    assert small > large > 1
    steep = but(floor=None, probe_long=(answer(2.1, n=4, prompt=2000),) * 2)
    assert RULES[5](steep) is not None
    assert RULES[5](replace(steep, long_ratio=1.2)) is None


# Grammars.


def test_masks_that_take_long_in_the_endpoints_own_traffic() -> None:
    """5,000 tokens, one every 12 ms, each waits 6 ms for its mask."""
    seen = but(OURS, deltas={"grammar_s": 30.0}, histograms={"itl": times(0.012, of=300)})
    finding = RULES[34](seen)
    assert finding is not None
    assert "6 ms of CPU time a token" in finding.evidence[0]
    assert finding.gain.high == pytest.approx(2)
    assert "--" not in finding.fix[0].partition("  (")[0]
    assert RULES[34](but(OURS, deltas={"grammar_s": 5.0})) is None  # 1 ms: a step hides it


def test_a_slow_schema_is_predicted_from_a_small_one() -> None:
    slow, small = (tuple(answer(0.06, tpot) for _ in range(3)) for tpot in (0.033, 0.011))
    finding = RULES[34](but(IDLE, probe_grammar=slow, probe_grammar_small=small))
    assert finding is not None
    assert finding.gain.low == pytest.approx(3)
    assert finding.gain.high == pytest.approx(3.3)


def test_a_schema_of_ones_own_is_probed() -> None:
    late = tuple(answer(t, 0.011) for t in (0.9, 1.0, 1.1))
    finding = RULES[34](but(probe_grammar_new=late))
    assert finding is not None
    assert finding.gain.of == "TTFT with a new schema, as speed,"
    assert finding.gain.middle == pytest.approx(1.0 / 0.06, rel=0.02)


def test_a_schema_must_be_json(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from headrace.cli.commands import app

    for text in ("[1]", "{", ""):
        path = tmp_path / "schema.json"
        path.write_text(text)
        done = CliRunner().invoke(app, ["doctor", ":1", "--schema", str(path)])
        assert done.exit_code == 2
        assert "no JSON schema" in done.output


def test_a_burst_that_has_a_place_for_each_waits_for_a_step() -> None:
    """A sample between the burst and the step that admits it: CI saw one on a healthy server."""
    levels = {"running": (4.0,), "waiting": (4.0,), "kv_usage": (0.1,)}
    idle = {"running": (0.0,), "waiting": (0.0,), "kv_usage": (0.0,)}
    seen = but(levels=idle, config={"max_sequences": 64})
    assert seen.probe is not None
    roomy = replace(seen, probe=replace(seen.probe, burst_levels=levels))
    assert RULES[4](roomy) is None
    narrow = but(roomy, config={"max_sequences": 4})
    assert RULES[4](replace(narrow, probe=roomy.probe)) is not None
