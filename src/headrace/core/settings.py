"""The value of every setting, from flags, variables, a file and defaults, and where it came from.

Values in, configs out: this file reads neither the environment nor a disk. The configs check the
values (core/config.py, core/server_config.py). This file knows how a setting is written in each
place, and which place wins: a flag, then a variable, then the file, then the default.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from headrace.core.config import RENAMED, SHARED_NAMES, EngineConfig, renamed
from headrace.core.errors import ConfigError
from headrace.core.modes import PRESETS, Mode
from headrace.core.server_config import ServerConfig

PREFIX = "HEADRACE_"
DEFAULT = "default"
SECRETS = frozenset({"api_key", "metrics_key"})
HIDDEN = "***"
# Variables with that prefix that are not settings.
OTHER_VARIABLES = frozenset(
    f"{PREFIX}{name}"
    for name in ("CACHE", "STATE", "OFFLINE", "DEBUG", "CONFIG", "ACCEPT_TERMS", "RANK_KEY")
)
TEST_PREFIX = f"{PREFIX}TEST_"
# Kubernetes sets variables like these in every container if a Service is named "headrace".
_SERVICE_LINK = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_[A-Z]+(_\w+)?)")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://.*")
# Alternatives for one setting: one that is set in a place overrides all of them in weaker places.
_ALTERNATIVES = (("kv_memory", "kv_tokens", "kv_fraction"),)
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class Setting:
    """A field that a user may set, under the same name everywhere."""

    name: str
    table: str  # of the file: "server", "engine", or "" for the top
    kind: Any  # the field's type
    default: object
    help: str

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_bool(self) -> bool:
        return self.kind is bool

    @property
    def is_list(self) -> bool:
        """A list of texts: a list in the file, commas in a variable, a repeated flag."""
        return get_origin(self.kind) is tuple

    @property
    def choices(self) -> type[StrEnum] | None:
        for kind in get_args(self.kind) or (self.kind,):
            if isinstance(kind, type) and issubclass(kind, StrEnum):
                return kind
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsFile:
    """A file's values, table by table, and the lines that they are on."""

    name: str
    values: Mapping[str, object]
    lines: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def place(self, table: str, key: str) -> str:
        line = self.lines.get((table, key))
        return self.name if line is None else f"{self.name}:{line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    model: str | None
    server: ServerConfig
    engine: EngineConfig
    origins: Mapping[str, str]  # of every setting: "--port", "HEADRACE_PORT", "headrace.toml:3"

    def value(self, setting: Setting) -> object:
        owner = {"server": self.server, "engine": self.engine}.get(setting.table, self)
        return getattr(owner, setting.name)

    def facts(self) -> dict[str, dict[str, object]]:
        """The value of every setting (JSON types, secrets hidden), and where it came from."""
        return {
            each.name: {
                "value": shown_value(each.name, self.value(each)),
                "origin": self.origins[each.name],
            }
            for each in all_settings()
        }


def all_settings() -> list[Setting]:
    return [
        Setting("model", "", str | None, None, "A catalog name, a GGUF file, a folder, a hub id."),
        *_of("server", ServerConfig),
        *_of("engine", EngineConfig),
    ]


def _of(table: str, config: type[ServerConfig] | type[EngineConfig]) -> list[Setting]:
    hints = get_type_hints(config)
    chosen: Iterable[Field[Any]] = (each for each in fields(config) if "help" in each.metadata)
    return [
        Setting(each.name, table, hints[each.name], each.default, each.metadata["help"])
        for each in chosen
    ]


def shown_value(name: str, value: object) -> object:
    if name in SECRETS and value is not None:
        return HIDDEN
    if isinstance(value, tuple):
        return list(value)
    return value.value if isinstance(value, StrEnum) else value


def split_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def resolve_settings(
    flags: Mapping[str, object],
    variables: Mapping[str, str],
    file: SettingsFile | None = None,
) -> Settings:
    """`flags` has the flags that were given, already typed; `variables` may be the whole
    environment."""
    known = {setting.name: setting for setting in all_settings()}
    # In order: what comes later wins.
    sources = [
        _from_file(file, known) if file is not None else {},
        _from_variables(variables, known),
        {name: (value, known[name].flag) for name, value in flags.items()},
    ]
    found: dict[str, tuple[object, str]] = {}
    for source in sources:
        for alternatives in _ALTERNATIVES:
            if any(name in source for name in alternatives):
                for name in alternatives:
                    found.pop(name, None)
        found |= source
    found = _preset(found) | found
    values = {name: value for name, (value, _) in found.items()}
    origins = {name: found[name][1] if name in found else DEFAULT for name in known}

    def build(table: str, config: Any) -> Any:
        chosen = {n: v for n, v in values.items() if known[n].table == table}
        try:
            return config(**chosen)
        except ConfigError as error:
            raise _with_origin(error, origins) from error

    return Settings(
        model=values.get("model"),  # type: ignore[arg-type]
        server=build("server", ServerConfig),
        engine=build("engine", EngineConfig),
        origins=origins,
    )


def _preset(found: Mapping[str, tuple[object, str]]) -> dict[str, tuple[object, str]]:
    """What the mode sets, weaker than any other place. A mode that is none is refused later."""
    chosen, _ = found.get("mode", (None, ""))
    if not isinstance(chosen, str) or chosen not in list(Mode):
        return {}
    return {name: (value, f"mode {chosen}") for name, value in PRESETS[Mode(chosen)].items()}


# -- the file --------------------------------------------------------------------------------------


def _from_file(file: SettingsFile, known: Mapping[str, Setting]) -> dict[str, tuple[object, str]]:
    found: dict[str, tuple[object, str]] = {}
    for table, entries in _tables(file):
        names = [name for name, setting in known.items() if setting.table == table]
        for key, value in entries.items():
            place = file.place(table, key)
            if key in RENAMED:
                error = renamed(key, value, "{} = {!r}".format)
                remedy = f"{error.remedy} It belongs to [{known[RENAMED[key]].table}]."
                raise ConfigError(f"{place}: {error.cause}", remedy, param=key)
            theirs = _theirs(key, value, "{} = {!r}".format, is_own=key in known)
            if theirs is None and key not in names:
                raise _unknown_key(key, table, place, known)
            for name, meant in ({key: value} if theirs is None else theirs).items():
                if known[name].table != table:
                    raise ConfigError(
                        f"{place}: {key} is {name} here, which does not belong {_where(table)}.",
                        f"Move it to {_right_place(known[name])}.",
                        param=key,
                    )
                _refuse_both(found, name, place)
                found[name] = (_typed(known[name], meant, place), place)
    return found


def _theirs(
    name: str, value: object, write: Callable[[str, object], str], *, is_own: bool
) -> dict[str, object] | None:
    """Our settings for another engine's word; None where it is ours, or nobody's."""
    if is_own and name not in SHARED_NAMES:
        return None
    from headrace.core.foreign.keywords import own_settings

    return own_settings(name, value, write, is_own=is_own)


def _refuse_both(found: Mapping[str, tuple[object, str]], name: str, place: str) -> None:
    if name in found:
        raise ConfigError(
            f"{name} is set twice, by {found[name][1]} and by {place}.",
            "Keep one of them.",
            param=name,
        )


def _tables(file: SettingsFile) -> list[tuple[str, Mapping[str, object]]]:
    top = dict(file.values)
    tables: list[tuple[str, Mapping[str, object]]] = []
    for name in ("server", "engine"):
        entries = top.pop(name, {})
        if not isinstance(entries, Mapping):
            raise ConfigError(
                f"{file.place('', name)}: {name} is {entries!r}; expected a table.",
                f"Write [{name}] on its own line, and its settings below.",
                param=name,
            )
        tables.append((name, entries))
    return [("", top), *tables]


def _unknown_key(key: str, table: str, place: str, known: Mapping[str, Setting]) -> ConfigError:
    if key in known:
        remedy = f"It belongs to {_right_place(known[key])}."
    else:
        here = [n for n, s in known.items() if s.table == table]
        tables = [] if table else ["server", "engine"]
        near = difflib.get_close_matches(key, [*here, *tables, *known], n=1)
        remedy = (
            f"Did you mean {near[0]}?" if near else f"Choose one of {', '.join(here + tables)}."
        )
    cause = f"{place}: unknown setting {key!r} {_where(table)}."
    return ConfigError(cause, remedy, param=key)


def _where(table: str) -> str:
    return f"in [{table}]" if table else "at the top of the file"


def _right_place(setting: Setting) -> str:
    return f"[{setting.table}]" if setting.table else "the top of the file"


def _typed(setting: Setting, value: object, place: str) -> object:
    """Checks the type of a value from the file."""
    if setting.is_list:
        if isinstance(value, str):
            return split_list(value)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise _wrong(setting, value, place)
        return tuple(value)
    accepted = tuple(_plain_types(setting.kind))
    good = isinstance(value, accepted) and (setting.is_bool or not isinstance(value, bool))
    if not good:
        raise _wrong(setting, value, place)
    return value


def _plain_types(kind: Any) -> Iterable[type]:
    for each in get_args(kind) if get_origin(kind) is UnionType else (kind,):
        if each is NoneType:
            continue
        if each is float:
            yield int
        yield str if issubclass(each, StrEnum) else each


# -- variables -------------------------------------------------------------------------------------


def _from_variables(
    variables: Mapping[str, str], known: Mapping[str, Setting]
) -> dict[str, tuple[object, str]]:
    settings = {setting.variable: setting for setting in known.values()}
    found: dict[str, tuple[object, str]] = {}
    for name, text in variables.items():
        if not name.startswith(PREFIX) or _is_for_others(name, text):
            continue
        setting = settings.get(name)
        if (old := name.removeprefix(PREFIX).lower()) in RENAMED:
            raise renamed(old, text, _as_variable)
        theirs = _theirs(old, text, _as_variable, is_own=setting is not None)
        if theirs is not None:
            for meant, value in theirs.items():
                _refuse_both(found, meant, name)
                written = str(value).lower() if isinstance(value, bool) else str(value)
                found[meant] = (_parsed(known[meant], written), name)
            continue
        if setting is None:
            # Compare without the prefix, which would make any two names similar.
            words = [
                known_name.removeprefix(PREFIX) for known_name in (*settings, *OTHER_VARIABLES)
            ]
            near = difflib.get_close_matches(name.removeprefix(PREFIX), words, n=1)
            remedy = f"Did you mean {PREFIX}{near[0]}?" if near else "Unset it."
            raise ConfigError(f"Unknown variable {name}.", remedy, param=name)
        _refuse_both(found, setting.name, name)
        found[setting.name] = (_parsed(setting, text), name)
    return found


def _as_variable(name: str, value: object) -> str:
    return f"{PREFIX}{name.upper()}={value}"


def _is_for_others(name: str, text: str) -> bool:
    if name in OTHER_VARIABLES or name.startswith(TEST_PREFIX):
        return True
    return bool(_SERVICE_LINK.fullmatch(name) or _SERVICE_URL.fullmatch(text))


def _parsed(setting: Setting, text: str) -> object:
    """A variable's text as the field's type."""
    if not text:
        # Not treated as unset: an empty key would leave a server open that should be protected.
        raise ConfigError(
            f"The variable {setting.variable} is empty; expected {_wanted(setting)}.",
            "Give it a value, or unset it.",
            param=setting.name,
        )
    return parse_value(setting, text, setting.variable)


def parse_value(setting: Setting, text: str, place: str) -> object:
    """Text as the field's type; `place` is where it was given."""
    if setting.is_list:
        return split_list(text)
    if setting.is_bool:
        if text.lower() in (*_YES, *_NO):
            return text.lower() in _YES
        raise _wrong(setting, text, place)
    kinds = set(_plain_types(setting.kind))
    if str in kinds:
        return text
    try:
        return float(text) if float in kinds else int(text)
    except ValueError:
        raise _wrong(setting, text, place) from None


# -- errors ----------------------------------------------------------------------------------------


def _with_origin(error: ConfigError, origins: Mapping[str, str]) -> ConfigError:
    """The same error, with the place where the value was set."""
    name = error.param or ""
    together = next((group for group in _ALTERNATIVES if name in group), (name,))
    places = [origins[n] for n in together if origins.get(n, DEFAULT) != DEFAULT]
    if not places:
        return error
    remedy = error.remedy
    if all(place.startswith("--") for place in places):  # use the flag's spelling
        remedy = re.sub(rf"(?<![\w-]){name}\b", f"--{name.replace('_', '-')}", remedy)
    return ConfigError(
        f"{error.cause.removesuffix('.')} (set by {' and '.join(dict.fromkeys(places))}).",
        remedy,
        param=error.param,
        detail=error.detail,
    )


def _wrong(setting: Setting, value: object, place: str) -> ConfigError:
    found = HIDDEN if setting.name in SECRETS else repr(value)
    return ConfigError(
        f"{setting.name} is {found}; expected {_wanted(setting)} (set by {place}).",
        f"Correct it in {place}, or leave it out.",
        param=setting.name,
    )


def _wanted(setting: Setting) -> str:
    if setting.is_list:
        return "a list of texts"
    kinds = set(_plain_types(setting.kind))
    if setting.choices is not None:
        return f"one of {', '.join(setting.choices)}"
    if setting.is_bool:
        return "true or false"
    if kinds == {int, str}:
        return "a number of bytes, or a size such as 4GiB"
    if kinds == {int, float, str}:
        return "a fraction, or a size such as 4GiB"
    if str in kinds:
        return "some text"
    return "a number" if float in kinds else "a whole number"
