"""What to change on a baseline, and what each change gives: alone, and with those before it.

The measure is requests/s per GPU under the objective, because any rate can be bought with replicas.
Capacities are simulated at the middle of the cost model's band, from the estimate outwards until
the highest rate lies in a narrow space; speculation is by formula (speculation.py), over the same
step times. Knows no GPU and no model: a builder does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from headrace.search.candidate import Candidate
from headrace.search.capacity import about, capacities
from headrace.search.pool import Pool
from headrace.search.question import Question
from headrace.search.replica import Builder, Built
from headrace.search.speculation import Speculation
from headrace.search.steady import Batch, Steady, StepTime

WORTH = 1.01  # a change with less is not applied with the others

Fields = Mapping[str, Any]  # of Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    candidate: Candidate
    label: str
    requests_s: float  # of one replica under the objective


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    name: str
    requests_s: float | None  # of one replica with this change alone; None: not possible
    gpus: int
    alone: float  # times the baseline's requests/s per GPU
    together: float | None  # requests/s of a replica with this and all above; None: left out
    together_gpus: int
    remark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    baseline: Baseline
    changes: tuple[Change, ...]

    def facts(self) -> dict[str, Any]:
        return {
            "baseline": {
                "deployment": self.baseline.candidate.facts(),
                "label": self.baseline.label,
                "requests_s": self.baseline.requests_s,
            },
            "changes": [asdict(change) for change in self.changes],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    name: str
    fields: Fields
    remark: str = ""


@dataclass(slots=True)
class Advisor:
    """`advise` yields what is being done; `found` is the answer after it."""

    builder: Builder
    question: Question
    pool: Pool[Question]
    speculation: Speculation = field(default_factory=Speculation)
    found: Changes | None = None
    runs: int = 0

    def advise(self, winner: Candidate) -> Iterator[str]:
        baseline = self._baseline(winner)
        if baseline is None:
            return
        wishes = self._wishes(baseline, winner)
        yield f"what to change on {baseline.label}"
        alone = {wish.name: self._changed(baseline, wish.fields) for wish in wishes}
        held = self._capacities([baseline, *(c for c in alone.values() if c is not None)])
        start = held[baseline]

        def gain(wish: _Wish) -> float:
            changed = alone[wish.name]
            if changed is None:
                return 0.0
            per_gpu = held[changed] / changed.tp
            return per_gpu / (start / baseline.tp) if start else math.inf if per_gpu else 0.0

        order = sorted(wishes, key=lambda wish: (-gain(wish), wish.name))
        yield "changes together"
        steps: list[tuple[_Wish, Candidate | None]] = []
        merged: dict[str, Any] = {}
        for wish in order:
            if gain(wish) >= WORTH and not wish.fields.keys() & merged.keys():
                merged |= wish.fields
                steps.append((wish, self._changed(baseline, merged)))
        held |= self._capacities([c for _, c in steps if c is not None])
        together = {wish.name: c for wish, c in steps if c is not None}
        changes = [
            self._change(wish, gain(wish), alone[wish.name], together.get(wish.name), held)
            for wish in order
        ]
        last = next((c for _, c in reversed(steps) if c is not None), baseline)
        replicas = self._replicate(last, held[last])
        # Last, because it is by formula alone.
        changes += [replicas, self._speculate(baseline, last, replicas)]
        self.found = Changes(
            baseline=Baseline(
                candidate=baseline,
                label=f"{baseline.model} on {baseline.label}, {_settings(baseline)}",
                requests_s=start,
            ),
            changes=tuple(changes),
        )

    # -- what could be changed -----------------------------------------------------------------

    def _baseline(self, winner: Candidate) -> Candidate | None:
        """The model as its checkpoint is, on as few of the winner's GPUs as hold it, with the
        smallest steps and without a prefix cache."""
        plain = replace(
            winner,
            precision=self.builder.plain_precision(winner.model),
            kv_dtype=self.builder.plain_kv_dtype(winner.model),
            batch_tokens=min(self._values(winner, "batch_tokens")),
            prefix_cache=False,
        )
        for tp in sorted(self._values(winner, "tp")):
            candidate = replace(plain, tp=tp)
            if self.builder.refuse(candidate) is None:
                return candidate
        return None

    def _values(self, like: Candidate, name: str) -> set[Any]:
        return {
            getattr(each, name)
            for each in self.builder.candidates()
            if (each.model, each.gpu) == (like.model, like.gpu)
        }

    def _wishes(self, base: Candidate, winner: Candidate) -> list[_Wish]:
        wishes = self._quantizations(base)
        wishes += [
            _Wish(name=f"KV in {kv}", fields={"kv_dtype": kv})
            for kv in sorted(self._values(winner, "kv_dtype") - {base.kv_dtype})
        ]
        share = self.question.lengths.shared_share
        if share > 0:
            wishes.append(
                _Wish(
                    name="prefix cache",
                    fields={"prefix_cache": True},
                    remark=f"{share:.0%} of prompt tokens are shared",
                )
            )
        most = max(self._values(winner, "max_sequences"))
        if most > base.max_sequences:
            wishes.append(_Wish(name=f"{most:,} sequences", fields={"max_sequences": most}))
        chunk = max(self._values(winner, "batch_tokens"))
        if chunk > base.batch_tokens:
            wishes.append(_Wish(name=f"chunks of {chunk:,} tokens", fields={"batch_tokens": chunk}))
        wider = [tp for tp in sorted(self._values(winner, "tp")) if tp > base.tp]
        if wider:
            wishes.append(_Wish(name=f"tensor parallel {wider[0]}", fields={"tp": wider[0]}))
        return wishes

    def _quantizations(self, base: Candidate) -> list[_Wish]:
        """The two that promise most."""
        found: list[tuple[float, str]] = []
        for precision in self._values(base, "precision") - {base.precision}:
            changed = self._changed(base, {"precision": precision})
            rate = changed and self._about(changed, self.builder.build(changed, 1.0))
            if rate:
                found.append((-rate.requests_s, precision))
        return [
            _Wish(name=f"weights in {precision}", fields={"precision": precision})
            for _, precision in sorted(found)[:2]
        ]

    def _changed(self, base: Candidate, fields: Fields) -> Candidate | None:
        changed = replace(base, **fields)
        return None if self.builder.refuse(changed) is not None else changed

    # -- capacities ----------------------------------------------------------------------------

    def _capacities(self, candidates: Sequence[Candidate]) -> dict[Candidate, float]:
        found = capacities(candidates, self.builder, self.question, self.pool)
        self.runs += sum(each.runs for each in found.values())
        return {candidate: each.low for candidate, each in found.items()}

    def _about(
        self, candidate: Candidate, built: Built, step_s: StepTime | None = None
    ) -> Steady | None:
        return about(candidate, built, self.question, step_s)

    # -- lines of the list ---------------------------------------------------------------------

    def _change(
        self,
        wish: _Wish,
        gain: float,
        alone: Candidate | None,
        together: Candidate | None,
        held: Mapping[Candidate, float],
    ) -> Change:
        remark = wish.remark
        if alone is None:
            remark = "not possible here"
        elif gain < WORTH:
            remark = ", ".join(filter(None, [remark, "no gain here: left out"]))
        elif together is None:
            remark = "instead of a change above"
        return Change(
            name=wish.name,
            requests_s=None if alone is None else held[alone],
            gpus=1 if alone is None else alone.tp,
            alone=gain,
            together=None if together is None else held[together],
            together_gpus=0 if together is None else together.tp,
            remark=remark,
        )

    def _speculate(self, base: Candidate, last: Candidate, before: Change) -> Change:
        way = self.speculation
        alone, together = (self._speculation_gain(candidate) for candidate in (base, last))
        remark = (
            f"by formula: {way.draft_tokens} draft tokens, {way.acceptance:.0%} accepted, "
            f"{way.tokens_per_step:.2f} tokens a step"
        )
        if together < WORTH:
            remark += "; no gain in a full batch: left out"
        return Change(
            name="speculation",
            requests_s=None,
            gpus=base.tp,
            alone=alone,
            together=(before.together or 0.0) * together if together >= WORTH else None,
            together_gpus=before.together_gpus,
            remark=remark,
        )

    def _speculation_gain(self, candidate: Candidate) -> float:
        """Of the steady state's rate. A step computes all draft tokens of every sequence, and
        reads each sequence's KV once; prompts come in proportion to answers."""
        built = self.builder.build(candidate, 1.0)
        plain = self._about(candidate, built)
        faster = self._about(candidate, built, speculative_step(self.speculation, built.step_s))
        if plain is None or faster is None:
            return 0.0
        return faster.requests_s / plain.requests_s

    def _replicate(self, last: Candidate, rate: float) -> Change:
        count = max(1, math.ceil(self.question.rate / rate - 1e-9)) if rate else 0
        gpus = last.tp * count
        return Change(
            name=f"{count} replicas" if count != 1 else "1 replica",
            requests_s=None,
            gpus=last.tp * count,
            alone=1.0,
            together=rate * count,
            together_gpus=last.tp * count,
            remark=f"for {self.question.rate:g} requests/s, {gpus} GPU{'s' * (gpus != 1)} in all",
        )


def speculative_step(way: Speculation, step_s: StepTime) -> Callable[[Batch], float]:
    """The time that one token of every sequence takes, where a step yields several."""

    def per_token_s(batch: Batch) -> float:
        tokens = way.tokens_per_step
        verify = replace(
            batch,
            # Draft tokens are rows of the products; what they attend to is read already.
            prefill_tokens=batch.prefill_tokens * tokens + batch.decodes * way.draft_tokens,
        )
        drafting = replace(batch, prefill_tokens=0.0)
        draft_s = way.draft_tokens * way.draft_share * step_s(drafting)
        return (step_s(verify) + draft_s) / tokens

    return per_token_s


def _settings(candidate: Candidate) -> str:
    cache = "" if candidate.prefix_cache else ", no prefix cache"
    return f"{candidate.max_sequences:,} sequences, {candidate.batch_tokens:,} tokens a step{cache}"
