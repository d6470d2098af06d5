"""Flags out of EngineConfig: one for each field that has a help text, with its name and default.

A command takes `engine: EngineConfig` and is shown to the user with the flags instead. What the
fields mean and which values they may have is core/config.py's affair.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import Field, fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from headrace.core.config import EngineConfig

PARAMETER = "engine"


def with_engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with flags in the place of its `engine`."""
    chosen = [field for field in fields(EngineConfig) if "help" in field.metadata]
    flags = [_parameter(field) for field in chosen]

    @wraps(command)
    def call(**given: Any) -> None:
        settings = {field.name: _take(given, field) for field in chosen}
        command(**given, **{PARAMETER: EngineConfig(**settings)})

    own = inspect.signature(command, eval_str=True)
    kept = [parameter for name, parameter in own.parameters.items() if name != PARAMETER]
    # Typer reads a command's signature, and its annotations once more.
    call.__signature__ = own.replace(parameters=[*kept, *flags])  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in [*kept, *flags]}
    del call.__wrapped__  # whose annotations would be read instead
    return call


def _parameter(field: Field[Any]) -> inspect.Parameter:
    option = typer.Option(f"--{_flag_name(field).replace('_', '-')}", help=field.metadata["help"])
    shown = get_type_hints(EngineConfig)[field.name]
    if shown == int | str | None:  # sizes are written as text; a bare number is such a text too
        shown = str | None
    return inspect.Parameter(
        _flag_name(field),
        inspect.Parameter.KEYWORD_ONLY,
        default=False if isinstance(field.default, bool) else field.default,
        annotation=Annotated[shown, option],
    )


def _flag_name(field: Field[Any]) -> str:
    """What is on by default has a flag that turns it off."""
    return f"no_{field.name}" if field.default is True else field.name


def _take(given: dict[str, Any], field: Field[Any]) -> Any:
    value = given.pop(_flag_name(field))
    return not value if field.default is True else value
