"""Options that several commands share, and how they are checked before anything is loaded.

Knows no model. Flags for sampling and the engine are made from their tables in cli/flags.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError, HeadraceError


def complete_model(incomplete: str) -> list[str]:
    """Shell completion: catalog names, and GGUF files in the current folder and in the cache."""
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
System = Annotated[str | None, typer.Option(help="The system prompt.")]
Offline = Annotated[bool, typer.Option("--offline", help="Fetch nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


def one_model(argument: str | None, option: str | None) -> str | None:
    """MODEL, given as an argument or as --model."""
    if argument is not None and option is not None and argument != option:
        raise ConfigError(
            f"Two models were given: {argument!r}, and --model {option!r}.", "Keep one of them."
        )
    return argument if option is None else option


def check_folder(path: Path | None, flag: str) -> None:
    """Before a long search, and not after it."""
    if path is not None and (not path.absolute().parent.is_dir() or path.is_dir()):
        raise ConfigError(
            f"{flag} is {path}; expected a file in a folder that exists.",
            "Create the folder first.",
        )


@contextmanager
def named_as_flags() -> Iterator[None]:
    """Inside, errors about a field name its flag: --max-tokens instead of max_tokens."""
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


def for_one(engine: EngineConfig) -> EngineConfig:
    """For a single conversation: a KV pool of one context, unless a size was given."""
    asked = (engine.max_sequences, engine.kv_memory, engine.kv_tokens, engine.kv_fraction)
    return engine if any(each is not None for each in asked) else replace(engine, max_sequences=1)
