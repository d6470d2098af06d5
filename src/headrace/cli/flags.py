"""Makes command-line flags from config dataclasses: one for each field that has a help text.

A command takes `engine: EngineConfig`, `params: SamplingParams`, or `given: dict` (the settings
whose flags were given); the user sees the single flags instead. What the fields mean and which
values are allowed is defined in core/.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from headrace.cli.foreign import ForeignCommand
from headrace.cli.options import named_as_flags
from headrace.core.checks import plain_types
from headrace.core.config import EngineConfig
from headrace.core.request import SamplingParams
from headrace.core.sampling import MODEL_DEFAULTS, Row, Taken, rows_of
from headrace.core.settings import Setting, all_settings, split_list

ENGINE, GIVEN, PARAMS = "engine", "given", "params"
_TITLES = {"server": "Server", "engine": "Engine"}


def with_engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with its `engine` parameter replaced by flags."""
    chosen = [setting for setting in all_settings() if setting.table == "engine"]

    def take(given: dict[str, Any]) -> dict[str, Any]:
        settings = {setting.name: _take(given, setting) for setting in chosen}
        with named_as_flags():
            return {ENGINE: EngineConfig(**settings)}

    flags = [_engine_flag(setting) for setting in chosen]
    return _replaced(command, ENGINE, flags, take)


def with_sampling_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with its `params` parameter replaced by flags, one per sampling parameter that
    commands take. What is not given keeps the model's default sampling values."""
    chosen = dict(rows_of(SamplingParams, Taken.COMMANDS))
    hints = get_type_hints(SamplingParams)
    defaults = {each.name: each.default for each in fields(SamplingParams)}
    defaults["max_tokens"] = (
        None  # as many as the context has room for, up to the command's own limit
    )

    def flag(name: str, row: Row) -> inspect.Parameter:
        kinds, _ = plain_types(hints[name])
        is_list, default = len(kinds) > 1, defaults[name]
        help = f"{row.help} May be given several times." if is_list else row.help
        if name in MODEL_DEFAULTS:
            help += " Default: the model's value."
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default or None if is_list else default,
            annotation=Annotated[
                (list[str] if is_list else kinds[0]) | None,
                typer.Option(f"--{name.replace('_', '-')}", help=help),
            ],
        )

    def take(given: dict[str, Any]) -> dict[str, Any]:
        sent = {name: given.pop(name) for name in chosen}
        with named_as_flags():  # before anything is fetched or loaded
            return {PARAMS: SamplingParams(**sent | {"stop": sent["stop"] or ()})}

    return _replaced(command, PARAMS, [flag(*each) for each in chosen.items()], take)


def with_settings_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with its `given` parameter replaced by flags: a dictionary of the settings that
    were given, so that the others can come from the environment or the file."""
    chosen = [setting for setting in all_settings() if setting.table]

    def take(given: dict[str, Any]) -> dict[str, Any]:
        taken = {setting.name: _take(given, setting) for setting in chosen}
        return {GIVEN: {name: value for name, value in taken.items() if value is not None}}

    flags = [_open_flag(setting) for setting in chosen]
    return _replaced(command, GIVEN, flags, take)


class SectionedCommand(ForeignCommand):
    """A command whose help lists the flags of each config in a panel of its own."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        tables = {_flag_name(setting): setting.table for setting in all_settings()}
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            plain = "Arguments" if param.param_type_name == "argument" else "Options"
            title = _TITLES.get(tables.get(param.name or "", ""), plain)
            sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _replaced(
    command: Callable[..., None],
    parameter: str,
    flags: Sequence[inspect.Parameter],
    take: Callable[[dict[str, Any]], dict[str, Any]],
) -> Callable[..., None]:
    @wraps(command)
    def call(**given: Any) -> None:
        taken = take(given)
        command(**given, **taken)

    own = inspect.signature(command, eval_str=True)
    parameters = [
        each
        for name, declared in own.parameters.items()
        for each in (flags if name == parameter else (declared,))
    ]
    # Typer reads a command's signature and, separately, its annotations.
    call.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    del call.__wrapped__  # Typer would read its annotations instead
    return call


def _engine_flag(setting: Setting) -> inspect.Parameter:
    option = typer.Option(_spelled(setting), help=setting.help)
    default = False if setting.is_bool else setting.default
    return _parameter(setting, _written_kind(setting), option, default)


def _open_flag(setting: Setting) -> inspect.Parameter:
    """A flag whose absence can be told from its default. A boolean has both an on and an off flag,
    since the file may have set the opposite."""
    spelled = [_spelled(setting)]
    help = setting.help
    if setting.is_bool:
        on_off = (setting.flag, f"--no-{setting.flag[2:]}")
        spelled = ["/".join(on_off[::-1] if setting.default else on_off)]
    elif setting.is_list:
        help += " May be given several times."
    elif setting.default is not None:
        help += f"  [default: {setting.default}]"
    if setting.name.endswith("_s"):
        spelled.append(setting.flag.removesuffix("-s"))  # as other servers spell it
    metavar = "<str>" if setting.is_list else None
    option = typer.Option(*spelled, help=help, show_default=False, metavar=metavar)
    return _parameter(setting, _written_kind(setting) | None, option, None)


def _parameter(setting: Setting, kind: Any, option: Any, default: object) -> inspect.Parameter:
    return inspect.Parameter(
        _flag_name(setting),
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, option],
    )


def _written_kind(setting: Setting) -> Any:
    """Sizes are given as text; a bare number is valid text too."""
    if setting.is_list:
        return list[str]
    if setting.kind == int | str | None:
        return str | None
    return str if setting.kind in (int | str, float | str) else setting.kind


def _spelled(setting: Setting) -> str:
    return f"--{_flag_name(setting).replace('_', '-')}"


def _flag_name(setting: Setting) -> str:
    """A setting that is on by default has a flag that turns it off."""
    return f"no_{setting.name}" if setting.default is True else setting.name


def _take(given: dict[str, Any], setting: Setting) -> Any:
    value = given.pop(_flag_name(setting))
    if setting.is_list:
        return tuple(part for each in value for part in split_list(each)) if value else None
    return not value if setting.default is True and value is not None else value
