"""`headrace plan`: what to rent for a model, a rate and an objective, and what it costs.

Reads flags, lets search/ search, prints. On Ctrl-C it prints what is known so far. The questions
are plan_asked.py's, the text plan_text.py's.
"""

from __future__ import annotations

import difflib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import AsJson, check_folder
from headrace.core.errors import ConfigError

if TYPE_CHECKING:
    from headrace.cli.plan_asked import Asked
    from headrace.search.answer import Answer, Row
    from headrace.search.changes import Changes
    from headrace.search.machine import Machines, Space
    from headrace.search.question import Question
    from headrace.search.replica import Builder

EXIT_NOT_MET, EXIT_INTERRUPT = 1, 130
PROCESSES = 2

Texts = list[str] | None


def plan(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL...", help="As `headrace fit` takes them.")
    ] = None,
    rps: Annotated[float | None, typer.Option(help="Requests a second, of all users.")] = None,
    input_tokens: Annotated[
        str | None, typer.Option("--input", help="Tokens of a prompt: 512, or a distribution.")
    ] = None,
    output_tokens: Annotated[
        str | None, typer.Option("--output", help="Tokens of an answer, in the same way.")
    ] = None,
    slo: Annotated[
        str | None, typer.Option(help="ttft=500ms,tpot=50ms; also e2e=20s and share=99%.")
    ] = None,
    workload: Annotated[
        str | None, typer.Option(help="Lengths and objective by name: chat, rag, code, ...")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Recorded requests: CSV, or Mooncake's JSON lines.")
    ] = None,
    measured: Annotated[
        Path | None, typer.Option(help="Lengths and rate from a result of `vllm bench serve`.")
    ] = None,
    gpu: Annotated[Texts, typer.Option(help="Only these; again for more.")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="A machine that `headrace calibrate` measured: this-machine."),
    ] = None,
    quant: Annotated[Texts, typer.Option(help="Only these types of weights.")] = None,
    kv_dtype: Annotated[Texts, typer.Option(help="Only these types of keys and values.")] = None,
    tp: Annotated[
        list[int] | None, typer.Option(min=1, help="Only these tensor parallelisms.")
    ] = None,
    budget: Annotated[float | None, typer.Option(help="At most so many USD a month.")] = None,
    price: Annotated[Texts, typer.Option(help="GPU=USD per hour, in place of the table's.")] = None,
    price_kind: Annotated[str, typer.Option(help="on-demand, spot or reserved.")] = "on-demand",
    engine: Annotated[
        str | None,
        typer.Option(help="Whose step times: vllm, sglang, trtllm, headrace; default: --emit's."),
    ] = None,
    emit: Annotated[
        str | None, typer.Option(help="Print the winner's command for an engine, or k8s.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the requests; the same gives the same.")] = 0,
    svg: Annotated[Path | None, typer.Option(help="Write the Pareto front there.")] = None,
    changes: Annotated[
        bool, typer.Option("--changes/--no-changes", help="What to change on a plain deployment.")
    ] = True,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show every formula with its numbers.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """What to rent: GPUs, parallelism, types and replicas that hold a rate under an objective, from
    simulating them, with what they cost and how sure that is.

    Exit status: 0 found, 1 nothing holds the objective, 2 what was asked is not valid."""
    from headrace.cli.plan_asked import Asked
    from headrace.dialects.write import emit_names
    from headrace.simulate.engines import engines

    if not models:
        raise ConfigError("No MODEL was given.", "Name one or more, as in llama-3.1-70b.")
    if emit is not None and emit not in emit_names():
        near = difflib.get_close_matches(emit.lower(), emit_names(), n=1)
        raise ConfigError(
            f"--emit is {emit[:40]!r}; expected one of {', '.join(emit_names())}.",
            f"Did you mean {near[0]}?" if near else "Choose one of them.",
        )
    check_folder(svg, "--svg")
    asked = Asked(
        models=tuple(models), rps=rps, input=input_tokens, output=output_tokens, slo=slo,
        workload=workload, trace=trace, measured=measured, gpus=tuple(gpu or ()),
        quants=tuple(quant or ()), kv_dtypes=tuple(kv_dtype or ()), tps=tuple(tp or ()),
        prices=tuple(price or ()), price_kind=price_kind, budget=budget, seed=seed,
        engine=engine or (emit if emit in engines() else "vllm"), profile=profile,
    )  # fmt: skip
    found = _Run(asked)
    interrupted = found.search(changes=changes)
    if as_json:
        typer.echo(json.dumps(found.facts(emit), indent=2))
    else:
        typer.echo("\n".join(found.lines(emit, explain=explain)))
    if svg is not None and found.answer.rows:
        svg.write_text(found.picture(), encoding="utf-8")
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPT)
    if not found.answer.rows:
        raise typer.Exit(EXIT_NOT_MET)


class _Run:
    """One question, and what came of it."""

    def __init__(self, asked: Asked) -> None:
        from headrace.cli.plan_asked import question_of, space_of
        from headrace.search.machine import Machines

        self.asked = asked
        self.question: Question
        self.question, notes = question_of(asked)
        self.space: Space
        self.space, more = space_of(asked, self.question)
        self.notes = [*notes, *more]
        self.machines: Machines = Machines(self.space, self.question)
        self.builder: Builder = self._builder()
        self.answer: Answer
        self.changes: Changes | None = None

    def _builder(self) -> Builder:
        """Rented GPUs, and the measured machine beside them."""
        from headrace.cli.plan_asked import profile_of
        from headrace.hardware.this_machine import NAME
        from headrace.search.calibrated import Calibrated

        found = profile_of(self.asked, self.space)
        if found is None:
            return self.machines
        profile, model = found
        usd = self.space.prices.get(NAME)
        if usd is None:
            self.notes.append(f"{NAME} has no price: --price {NAME}=USD gives one")
        return Calibrated(
            profile,
            self.machines,
            self.question,
            model=model.name,
            precision=model.precision,
            usd_per_hour=usd,
        )

    @property
    def models(self) -> list[str]:
        return [model.name for model in self.space.models]

    def search(self, *, changes: bool) -> bool:
        """Returns whether it was interrupted."""
        from headrace.search.changes import Advisor
        from headrace.search.planner import Planner
        from headrace.search.pool import Pool

        pool = Pool(self.question, PROCESSES)
        planner = Planner(self.builder, self.question, pool)
        advisor = Advisor(self.builder, self.question, pool)
        interrupted = False
        with _Progress() as progress:
            try:
                for doing in planner.search():
                    progress.show(doing)
                self.answer = planner.answer()
                if changes and self.answer.rows:
                    for doing in advisor.advise(self.answer.rows[0].candidate):
                        progress.show(doing)
            except KeyboardInterrupt:
                interrupted = True
            finally:
                pool.close(at_once=interrupted)
        self.answer, self.changes = planner.answer(), advisor.found
        self.answer.tally.runs += advisor.runs
        return interrupted

    def lines(self, emit: str | None, *, explain: bool) -> list[str]:
        from headrace.cli import plan_text as text
        from headrace.cli.plan_explain import explained, work_lines

        several = len(self.models) > 1
        lines = text.head_lines(self.question, self.models)
        lines += [line for model in self.space.models for line in work_lines(model, self.question)]
        lines.append("")
        if self.answer.rows:
            lines += text.ranking_lines(self.answer, several_models=several)
            lines += text.reading_lines(self.answer)
            picture = text.picture_lines(self.question, self.answer, self.models)
            lines += ["", *picture] if picture else []
        elif self.answer.complete:
            lines += text.nothing_lines(self.answer)
        losses = text.loss_lines(self.answer)
        lines += ["", *losses] if losses else []
        if self.changes is not None:
            lines += ["", *text.change_lines(self.changes)]
        if explain and self.answer.rows:
            lines += [
                "", *explained(self.answer.rows[0], self.builder, self.machines, self.question)
            ]  # fmt: skip
        if emit is not None and self.answer.rows:
            lines += ["", *self._emitted(emit, self.answer.rows[0])["shown"].splitlines()]
        return [*lines, "", *text.tally_lines(self.answer, self._all_notes())]

    def _all_notes(self) -> list[str]:
        bands = {
            self.builder.band(row.candidate).source: self.builder.band(row.candidate)
            for row in self.answer.rows
        }
        shown = [
            f"step times: {band.whose or self.asked.engine}'s, {band.fast:.2f} to {band.slow:.2f} "
            f"times the model's (first tokens {band.fast * band.first_fast:.2f} to "
            f"{band.slow * band.first_slow:.2f}): {source}"
            for source, band in bands.items()
        ]
        return [*self.notes, *shown]

    def _emitted(self, engine: str, row: Row) -> dict[str, Any]:
        from headrace.dialects.write import emit
        from headrace.search.deploy import deployment_of

        model = next(m for m in self.space.models if m.name == row.candidate.model)
        deployment = deployment_of(row, model, self.question)
        written = emit(deployment, engine)
        return {
            "engine": engine,
            "version": written.version,
            "text": written.text,
            "notes": list(written.notes),
            "shown": written.shown(),
        }

    def picture(self) -> str:
        from headrace.cli.plan_text import axes, points
        from headrace.search.picture import svg

        rows = self.answer.rows
        drawn = points(rows, several_models=len(self.models) > 1)
        return svg(drawn, axes(self.question, rows, self.models))

    def facts(self, emit: str | None) -> dict[str, Any]:
        from headrace.cli.plan_text import points
        from headrace.search.answer import grouped
        from headrace.search.pareto import front_of

        rows, question = self.answer.rows, self.question
        drawn = points(rows, several_models=False)
        return {
            "question": {
                "models": self.models,
                "requests_s": question.rate,
                "prompt_tokens": question.lengths.prompt_tokens,
                "output_tokens": question.lengths.output_tokens,
                "slo": str(question.slo),
                "engine": self.asked.engine,
                "seed": question.seed,
            },
            "complete": self.answer.complete,
            "rows": [row.facts() for row in rows],
            "fleet": None if self.answer.fleet is None else self.answer.fleet.facts(),
            "front": front_of(drawn),
            "losses": [group.facts() for group in grouped(self.answer.losses)],
            "changes": None if self.changes is None else self.changes.facts(),
            "emitted": self._emitted(emit, rows[0]) if emit is not None and rows else None,
            "looked_at": {
                "candidates": self.answer.tally.candidates,
                "runs": self.answer.tally.runs,
                "steps": self.answer.tally.steps,
            },
            "notes": self._all_notes(),
        }


class _Progress:
    """One line on a terminal; nothing anywhere else."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def show(self, doing: str) -> None:
        if self._is_shown:
            print(f"\r\x1b[K{doing[:90]} ...", end="", file=sys.stderr, flush=True)
