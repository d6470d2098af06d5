"""The engine's loop over a runner that computes nothing: only the deciding is tested here."""

from __future__ import annotations

from collections import deque

import pytest

from headrace.core.config import SchedulerConfig
from headrace.core.errors import ContextLengthError, DeviceLostError, InvalidRequestError
from headrace.core.request import FinishReason, GenerateRequest, SampledToken, SamplingParams
from headrace.core.step import RowResult, RunnerLimits, StepPlan, StepResult
from headrace.engine.loop import Engine
from headrace.engine.sequence import RUN, uniforms

EOS = 99


class CountingRunner:
    """Draws 'the number of tokens seen so far', and checks every plan it is given: positions follow
    each other, and no block is written by two sequences."""

    def __init__(
        self,
        *,
        max_batch_tokens: int = 8,
        max_sequences: int = 4,
        total_blocks: int = 8,
        eos_at: int | None = None,
    ) -> None:
        self.limits = RunnerLimits(
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            total_blocks=total_blocks,
            block_tokens=4,
            context_tokens=32,
        )
        self.eos_at = eos_at
        self.progress = 0
        self.seen: dict[int, int] = {}
        self.plans: list[StepPlan] = []
        self.uniforms: dict[int, list[float]] = {}
        self.fail: set[int] = set()
        self._results: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        assert 0 < plan.batch_tokens <= self.limits.max_batch_tokens
        assert len(plan) <= self.limits.max_sequences
        blocks = [b for table in plan.tables for b in table]
        assert len(set(blocks)) == len(blocks)
        assert all(0 <= b < self.limits.total_blocks for b in blocks)
        result = StepResult(tokens=[], logprobs=[])
        for row, who in enumerate(plan.sequence_ids):
            assert plan.starts[row] == self.seen.get(who, 0)
            end = plan.starts[row] + plan.counts[row]
            assert len(plan.tables[row]) * self.limits.block_tokens >= end
            self.seen[who] = end
            drawn = []
            if who in self.fail:
                result.extras[row] = RowResult(error="broken")
            elif plan.draws[row] is not None:
                self.uniforms.setdefault(who, []).append(plan.uniforms[row])
                drawn = [EOS if end == self.eos_at else end]
            result.tokens.append(drawn)
            result.logprobs.append([0.0] * len(drawn))
        self.plans.append(plan)
        self._results.append(result)

    def collect(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        pass


def engine_over(runner: CountingRunner) -> Engine:
    """Without a prefix cache: the runner wants to see every position."""
    config = SchedulerConfig(prefix_cache=False, debug_invariants=True)
    return Engine(runner, frozenset({EOS}), config)


def request(name: str, prompt: int, **params: object) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=[1] * prompt,
        params=SamplingParams(**params),  # type: ignore[arg-type]
    )


def finish(engine: Engine) -> dict[str, list[SampledToken]]:
    tokens: dict[str, list[SampledToken]] = {}
    for _ in range(1000):
        if not engine.has_work:
            return tokens
        for token in engine.step():
            tokens.setdefault(token.request_id, []).append(token)
    raise AssertionError("the engine does not come to an end")


def test_a_long_prompt_is_computed_in_chunks_and_then_a_token_a_step() -> None:
    runner = CountingRunner()
    engine = engine_over(runner)
    engine.add(request("a", 19, max_tokens=3))
    tokens = finish(engine)["a"]
    assert [t.token_id for t in tokens] == [19, 20, 21]
    assert [t.finish_reason for t in tokens] == [None, None, FinishReason.LENGTH]
    assert [p.counts[0] for p in runner.plans] == [8, 8, 3, 1, 1]
    assert engine.blocks.used_blocks == 0


def test_requests_share_steps_and_every_block_comes_back() -> None:
    runner = CountingRunner()
    engine = engine_over(runner)
    for name, prompt, most in (("a", 3, 9), ("b", 1, 2), ("c", 20, 5), ("d", 6, 6), ("e", 2, 1)):
        engine.add(request(name, prompt, max_tokens=most))
    tokens = finish(engine)
    assert {name: len(t) for name, t in tokens.items()} == {"a": 9, "b": 2, "c": 5, "d": 6, "e": 1}
    assert max(len(plan) for plan in runner.plans) > 1
    assert engine.blocks.used_blocks == 0


@pytest.mark.parametrize(("ignore", "count"), [(False, 3), (True, 10)])
def test_an_end_token_ends_unless_it_is_ignored(ignore: bool, count: int) -> None:
    engine = engine_over(CountingRunner(eos_at=7))
    engine.add(request("a", 5, max_tokens=10, ignore_eos=ignore))
    tokens = finish(engine)["a"]
    assert len(tokens) == count
    assert tokens[-1].finish_reason is (FinishReason.LENGTH if ignore else FinishReason.STOP)


def test_stop_ids_end_too() -> None:
    engine = engine_over(CountingRunner())
    engine.add(request("a", 5, max_tokens=10, stop_token_ids=[8]))
    assert [t.token_id for t in finish(engine)["a"]] == [5, 6, 7, 8]


def test_without_max_tokens_an_answer_fills_the_context() -> None:
    engine = engine_over(CountingRunner())
    engine.add(request("a", 30, max_tokens=None))
    tokens = finish(engine)["a"]
    assert len(tokens) == 2
    assert tokens[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("steps", range(7))
def test_cancelling_at_any_time_frees_every_block(steps: int) -> None:
    engine = engine_over(CountingRunner())
    engine.add(request("a", 18, max_tokens=8))
    engine.add(request("b", 3, max_tokens=8))
    before = [token for _ in range(steps) for token in engine.step()]
    engine.cancel("a")
    engine.cancel("a")
    engine.cancel("unknown")
    after = finish(engine)
    assert "a" not in after
    # The other one is whole, as if it had been alone.
    others = [token for token in before if token.request_id == "b"] + after["b"]
    assert [token.token_id for token in others] == list(range(3, 11))
    assert others[-1].finish_reason is FinishReason.LENGTH
    assert engine.blocks.used_blocks == 0


def test_a_sequence_that_fails_fails_alone() -> None:
    runner = CountingRunner()
    runner.fail.add(0)
    engine = engine_over(runner)
    engine.add(request("a", 4, max_tokens=4))
    engine.add(request("b", 4, max_tokens=4))
    tokens = finish(engine)
    assert [(t.finish_reason, t.error) for t in tokens["a"]] == [(FinishReason.ERROR, "broken")]
    assert len(tokens["b"]) == 4
    assert engine.blocks.used_blocks == 0


@pytest.mark.parametrize("at", ["submit", "collect"])
def test_a_lost_device_ends_its_requests_and_is_told(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = CountingRunner()
    engine = engine_over(runner)
    engine.add(request("one", 3, max_tokens=4))
    assert engine.lost is None
    engine.step()

    def fail(*plans: StepPlan) -> StepResult:
        raise DeviceLostError("The GPU failed: an illegal address.", "Start the engine anew.")

    monkeypatch.setattr(runner, at, fail)
    (last,) = engine.step()
    assert last.finish_reason is FinishReason.ERROR
    assert "an illegal address" in (last.error or "")
    assert isinstance(engine.lost, DeviceLostError)
    assert not engine.has_work
    engine.check_integrity()


def test_what_can_never_run_is_refused_at_once_with_both_numbers() -> None:
    engine = engine_over(CountingRunner(total_blocks=4))
    with pytest.raises(ContextLengthError, match=r"32 tokens.*33 tokens") as error:
        engine.add(request("a", 33))
    assert error.value.param == "prompt"
    with pytest.raises(ContextLengthError, match=r"32 tokens.*32 tokens"):
        engine.add(request("a", 32))
    with pytest.raises(ContextLengthError, match=r"up to 20 tokens.*holds 16"):
        engine.add(request("a", 10, max_tokens=10))
    with pytest.raises(InvalidRequestError, match="empty"):
        engine.add(request("a", 0))
    assert not engine.has_work


def test_randomness_follows_from_seed_and_place_alone() -> None:
    numbers = [n for seed in range(50) for run in range(7) for n in uniforms(seed, run)]
    assert len(set(numbers)) == 50 * 7 * RUN
    assert all(0 <= n < 1 for n in numbers)
    assert 0.48 < sum(numbers) / len(numbers) < 0.52
    assert uniforms(7, 3) == uniforms(7, 3)

    def drawn(batch: int) -> list[float]:
        runner = CountingRunner(max_batch_tokens=batch)
        engine = engine_over(runner)
        engine.add(request("other", 3, max_tokens=5))
        engine.add(request("a", 9, max_tokens=10, seed=5))
        finish(engine)
        return runner.uniforms[1]

    assert drawn(8) == drawn(3) == [*uniforms(5, 0), *uniforms(5, 1)][:10]
