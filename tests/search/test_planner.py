"""The search over a toy world finds what trying everything finds; nothing in it is random."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.toy import CARDS, Card, Toy, question

from headrace.search.answer import Answer, Why, grouped
from headrace.search.candidate import Candidate
from headrace.search.changes import Advisor
from headrace.search.jobs import Job, prove, run_job
from headrace.search.planner import Planner
from headrace.search.pool import Pool
from headrace.search.question import Question
from headrace.workload.slo import Slo


def search(toy: Toy, asked: Question, processes: int = 1, until: str = "") -> Answer:
    """To its end, or until it says what it does next."""
    with Pool(asked, processes) as pool:
        planner = Planner(toy, asked, pool)
        for doing in planner.search():
            if until and doing.startswith(until):
                break
        return planner.answer()


@pytest.fixture(scope="module")
def answer() -> Answer:
    return search(Toy(), question(30.0))


def test_rows_are_ranked_by_cost_and_hold(answer: Answer) -> None:
    costs = [row.usd_month for row in answer.rows]
    assert costs == sorted(costs)  # type: ignore[type-var]
    assert all(row.trials[0].holds for row in answer.rows)
    assert answer.complete


def test_every_row_can_be_computed_again(answer: Answer) -> None:
    toy, asked = Toy(), question(30.0)
    for row in answer.rows:
        facts = row.facts()
        for trial in row.trials:
            job = Job(
                candidate=row.candidate,
                recipe=toy.build(row.candidate, trial.slowness).recipe,
                rate=asked.rate / row.replicas,
                seed=trial.seed,
                slowness=trial.slowness,
                lateness=trial.lateness,
                requests=trial.requests,
            )
            assert run_job(asked, job) == trial
        assert facts["usd_month"] == pytest.approx(facts["gpus"] * facts["usd_per_gpu_hour"] * 720)
        tokens_month = 30.0 * 240 * 720 * 3600
        assert facts["usd_million_tokens"] == pytest.approx(facts["usd_month"] / tokens_month * 1e6)
        p99s = [trial.ttft_s.p99 for trial in row.trials if trial.ttft_s is not None]
        assert (row.ttft_p99_s.low, row.ttft_p99_s.high) == (min(p99s), max(p99s))


def test_the_bracket_holds_the_rate(answer: Answer) -> None:
    for row in answer.rows:
        assert row.holds_to is not None
        assert 30.0 <= row.holds_to[0] < row.holds_to[1]


def test_losers_have_their_reasons(answer: Answer) -> None:
    groups = {group.why: group for group in grouped(answer.losses)}
    assert groups[Why.DIVIDES].count == 4
    assert "116 ms" in groups[Why.TPOT].nearest.text
    assert answer.tally.candidates == 24


def test_the_same_question_has_the_same_answer_in_two_processes(answer: Answer) -> None:
    assert search(Toy(), question(30.0), processes=2) == answer


cards = st.builds(
    Card,
    weights_s=st.floats(0.005, 0.04),
    token_s=st.floats(10e-6, 100e-6),
    context_s=st.floats(1e-9, 50e-9),
    kv_tokens=st.sampled_from([3000, 30_000]),
    usd=st.floats(0.5, 5.0),
)


@given(one=cards, other=cards, rate=st.floats(2.0, 40.0))
@settings(max_examples=4, deadline=None)
def test_pruning_never_removes_a_winner(one: Card, other: Card, rate: float) -> None:
    toy = Toy(cards={"small": one, "big": other}, sequences=(8, 48), batch_tokens=(512,))
    asked = question(rate, keep=1)
    rows = search(toy, asked, until="bands").rows
    cheapest = math.inf
    for candidate in toy.candidates():
        if toy.refuse(candidate) is None:
            cheapest = min(cheapest, exhaustive_cost(toy, asked, candidate, cheapest))
    found = rows[0].usd_month if rows else math.inf
    assert found is not None
    assert found / 720 <= cheapest * (1 + 1e-9)


def exhaustive_cost(toy: Toy, asked: Question, candidate: Candidate, below: float) -> float:
    """By trying counts one by one, without any bound but what was found already."""
    usd = toy.usd_per_gpu_hour(candidate)
    assert usd is not None
    replicas = 1
    while replicas * candidate.tp * usd < below and replicas < 30:
        rate = asked.rate / replicas
        recipe = toy.build(candidate, 1.15).recipe
        job = Job(
            candidate=candidate,
            recipe=recipe,
            rate=rate,
            seed=0,
            slowness=1.15,
            lateness=1.0,
            requests=300,
        )
        if prove(asked, job).holds:
            return replicas * candidate.tp * usd
        replicas += 1
    return math.inf


def test_the_first_row_holds_as_a_fleet() -> None:
    toy = Toy(cards={"small": CARDS["small"]}, tps=(1,), batch_tokens=(512,))
    answer = search(toy, question(120.0, keep=1))
    assert answer.rows[0].replicas > 1
    assert answer.fleet is not None
    assert answer.fleet.replicas == answer.rows[0].replicas
    assert answer.fleet.rate == pytest.approx(120.0)
    assert answer.fleet.holds


def test_an_impossible_objective_has_no_rows_and_says_what_came_nearest() -> None:
    answer = search(Toy(), question(30.0, Slo(tpot_s=0.001)))
    assert answer.rows == ()
    (group,) = [g for g in grouped(answer.losses) if g.why is Why.TPOT]
    assert group.nearest.candidate.gpu == "big"
    assert group.nearest.candidate.tp == 2


def test_a_budget_is_kept() -> None:
    answer = search(Toy(), question(30.0, most_usd_month=800.0), until="bands")
    assert [row.candidate.gpu for row in answer.rows] == ["small"]
    assert {group.why for group in grouped(answer.losses)} >= {Why.BUDGET}


def test_cards_without_a_price_come_last_and_are_counted_in_hours() -> None:
    toy = Toy(cards={**CARDS, "big": replace(CARDS["big"], usd=None)}, tps=(1,))
    rows = search(toy, question(10.0), until="bands").rows
    assert [row.candidate.gpu for row in rows] == ["small", "big"]
    assert (rows[1].usd_month, rows[1].usd_million) == (None, None)
    assert rows[1].gpu_hours_month == 720


def test_an_interrupted_search_says_what_it_knows() -> None:
    toy, asked = Toy(), question(30.0)
    planner = Planner(toy, asked, Pool(asked))
    steps = planner.search()
    while not planner.sized:
        next(steps)
    answer = planner.answer()
    assert answer.rows
    assert not answer.complete


def test_changes_alone_and_together() -> None:
    toy, asked = Toy(), question(30.0)
    with Pool(asked) as pool:
        advisor = Advisor(toy, asked, pool)
        for _ in advisor.advise(toy.candidates()[0]):
            pass
    found = advisor.found
    assert found is not None
    more = next(change for change in found.changes if change.name == "64 sequences")
    assert more.alone > 1.5
    assert more.together is not None
    assert more.together > found.baseline.requests_s
    names = [change.name for change in found.changes]
    assert names[-1] == "speculation"
    assert "replica" in names[-2]
