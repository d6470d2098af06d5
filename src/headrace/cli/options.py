"""Options that several commands share, and what is done to them before anything is loaded.

Knows flags and SamplingParams; no model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError, HeadraceError

if TYPE_CHECKING:
    from headrace.core.request import SamplingParams


def complete_model(incomplete: str) -> list[str]:
    """For a shell's completion: names of the catalog, and GGUF files beside us and in the cache."""
    from headrace.fetch.catalog import catalog_names
    from headrace.fetch.resolve import local_files

    return sorted(n for n in {*catalog_names(), *local_files()} if n.startswith(incomplete))


_MODEL_HELP = "A catalog name, a GGUF file, a folder, a hub id; default: smollm2."
ModelName = Annotated[
    str | None,
    typer.Option("--model", "-m", help=_MODEL_HELP, autocompletion=complete_model),
]
ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help="As --model.", autocompletion=complete_model),
]
MaxTokens = Annotated[int | None, typer.Option(help="Longest answer.", show_default=False)]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; default: the model's own.")]
TopP = Annotated[
    float | None,
    typer.Option(help="Keep the likeliest, up to this probability; default: the model's own."),
]
TopK = Annotated[
    int | None, typer.Option(help="Keep the k likeliest; 0 keeps all; default: the model's own.")
]
MinP = Annotated[
    float, typer.Option(help="Drop what is less likely than this times the likeliest.")
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(help="Above 1 discourages what was said before; default: the model's own."),
]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="End at this text; may be given again.")]
System = Annotated[str | None, typer.Option(help="The system prompt.")]
Offline = Annotated[bool, typer.Option("--offline", help="Fetch nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


def one_model(argument: str | None, option: str | None) -> str | None:
    """MODEL, however it was given."""
    if argument is not None and option is not None and argument != option:
        raise ConfigError(
            f"Two models are given: {argument!r}, and {option!r} by --model.", "Keep one of them."
        )
    return argument if option is None else option


@contextmanager
def named_as_flags() -> Iterator[None]:
    """Errors about a field name the flag that set it: max_tokens is --max-tokens here."""
    try:
        yield
    except HeadraceError as error:
        if error.param is None:
            raise
        flag = f"--{error.param.replace('_', '-')}"
        named = re.compile(rf"(?<![\w-]){re.escape(error.param)}\b")
        raise type(error)(
            error.cause, named.sub(flag, error.remedy), param=error.param, detail=error.detail
        ) from error


def sampling(
    *,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float,
    repetition_penalty: float | None,
    seed: int | None,
    stop: list[str] | None,
) -> SamplingParams:
    """Checked before anything is fetched or loaded. What is None is left to the model."""
    from headrace.core.request import SamplingParams

    with named_as_flags():
        return SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            max_tokens=max_tokens,
            seed=seed,
            stop=stop or (),
        )


def for_one(engine: EngineConfig) -> EngineConfig:
    """For a single conversation: a KV pool of one context, unless a size was asked for."""
    asked = (engine.max_sequences, engine.kv_memory, engine.kv_tokens, engine.kv_fraction)
    return engine if any(each is not None for each in asked) else replace(engine, max_sequences=1)
