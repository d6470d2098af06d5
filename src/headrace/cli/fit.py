"""`headrace fit MODEL`: whether a model fits on a GPU, what is left, and what would make it fit.

Reads arguments and another engine's command line, and prints what fits/report.py found.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import AsJson, ModelArgument, ModelName, one_model
from headrace.core.errors import ConfigError
from headrace.fetch.catalog import DEFAULT_NAME
from headrace.fits.report import DEFAULT_HOST, DEFAULT_SHARE, Asked, make_report

EXIT_DOES_NOT_FIT = 1


def fit(
    name: ModelArgument = None,
    model: ModelName = None,
    gpu: Annotated[
        str | None, typer.Option(help="As `headrace gpus` lists them; default: this machine.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="How many of them.")] = None,
    tp: Annotated[
        int | None, typer.Option(min=1, help="GPUs that share one copy; default: all of them.")
    ] = None,
    pp: Annotated[
        int | None,
        typer.Option(min=1, help="Pipeline stages: groups of --tp GPUs that share the layers."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a sequence; default: 8,192, or the model's if less."),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Sequences at one time.")] = 1,
    prompt: Annotated[
        int | None, typer.Option("--input", min=1, help="Tokens of a prompt, for the TTFT.")
    ] = None,
    quant: Annotated[
        str | None, typer.Option(help="Type of the weights; default: the checkpoint's.")
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Type of keys and values.")] = None,
    draft: Annotated[str | None, typer.Option(help="A second model that proposes tokens.")] = None,
    gpu_memory: Annotated[
        str, typer.Option(help="What may be used of each GPU: a fraction, or as in 60GiB.")
    ] = DEFAULT_SHARE,
    max_batch_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a step.")] = None,
    max_sequences: Annotated[
        int | None, typer.Option(min=1, help="Most sequences of a step.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="The host whose memory layers spill into: its bandwidth counts.")
    ] = DEFAULT_HOST,
    profile: Annotated[
        Path | None,
        typer.Option(help="A machine that `headrace calibrate` measured, in place of --gpu."),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(
            "--from", help="Another engine's command line, in quotes: answers for what it says."
        ),
    ] = None,
    as_json: AsJson = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show every formula with its numbers.")
    ] = False,
) -> None:
    """Whether a model fits on a GPU: the ledger, the limits, and what would make it fit.

    Exit status: 0 it fits, 1 it does not, 2 what was asked is not valid."""
    from headrace.plan.fit_text import report_facts, report_lines

    wanted = one_model(name, model)
    asked = Asked(
        gpu=gpu, gpus=gpus, tp=tp, pp=pp, context=context, concurrency=concurrency, prompt=prompt,
        quant=quant, kv_dtype=kv_dtype, draft=draft, gpu_memory=gpu_memory,
        max_batch_tokens=max_batch_tokens, max_sequences=max_sequences, host=host, profile=profile,
    )  # fmt: skip
    notes: tuple[str, ...] = ()
    if command is not None:
        wanted, asked, notes = from_command(command, wanted, asked)
    report = make_report(wanted or DEFAULT_NAME, asked, notes)
    if as_json:
        typer.echo(json.dumps(report_facts(report), indent=2))
    else:
        typer.echo("\n".join(report_lines(report, explain=explain)))
    if not report.fit.fits:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def from_command(
    command: str, wanted: str | None, asked: Asked
) -> tuple[str | None, Asked, tuple[str, ...]]:
    """What another engine's command line asks for; flags of our own win over it."""
    from headrace.dialects.read import read_command

    reading = read_command(command)
    said = reading.deployment
    notes = [f"{reading.engine.name}: {note}" for note in reading.notes]
    notes += [f"{reading.engine.name} has no {word}" for word in reading.unknown]
    memory = asked.gpu_memory
    if memory == DEFAULT_SHARE and said.gpu_memory_bytes is not None:
        memory = str(said.gpu_memory_bytes)
    elif memory == DEFAULT_SHARE and said.gpu_memory is not None:
        memory = str(said.gpu_memory)
    elif said.static_memory is not None:
        notes.append("its share of memory holds weights and keys alone: counted as the whole share")
        memory = str(said.static_memory) if memory == DEFAULT_SHARE else memory
    tp = asked.tp or said.tensor_parallel
    pp = asked.pp or said.pipeline_parallel
    if wanted is None and said.model is None and reading.engine.name != "headrace":
        raise ConfigError(
            "The command names no model.",
            "Name it beside --from, as in `headrace fit MODEL --from ...`.",
            param="from",
        )
    draft = said.speculation.draft if said.speculation is not None else None
    return (
        wanted or said.model,
        replace(
            asked,
            gpus=asked.gpus or tp * pp * said.replicas,
            tp=tp,
            pp=pp,
            divided_by=reading.engine.name,
            context=asked.context or said.context_tokens,
            takes_whole_context=asked.context is None and said.context_tokens is None,
            quant=asked.quant or said.quantization,
            kv_dtype=asked.kv_dtype or said.kv_dtype,
            draft=asked.draft or draft,
            gpu_memory=memory,
            max_batch_tokens=asked.max_batch_tokens or said.max_batch_tokens,
            max_sequences=asked.max_sequences or said.max_sequences,
            graphs=not said.eager,
        ),
        tuple(notes),
    )
