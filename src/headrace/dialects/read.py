"""Another engine's command line, read as a `Deployment`.

    read_command("vllm serve meta-llama/Llama-3.1-8B --max-model-len 8192 -tp 2")

Knows how command lines are written and what the tables in core/foreign/ say; opens no file, so
what stands in a file that a flag names is not read, and that is said.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.core.errors import ConfigError
from headrace.core.foreign.engines import ENGINES
from headrace.core.foreign.speculation import SpeculationJson
from headrace.core.foreign.words import Engine, Word
from headrace.dialects.deployment import Deployment
from headrace.dialects.fields import to_deployment
from headrace.dialects.modelfile import is_modelfile, modelfile_words
from headrace.dialects.own import own

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
_NUMBER = re.compile(r"-[\d.]+")
_LEVEL = re.compile(r"(-O)(\d)")  # vLLM's -O3
_ENDS = frozenset({"|", "||", "&&", ";", "&", ">", ">>", "2>", "2>&1", "<"})
_BEFORE = frozenset({"env", "exec", "sudo", "nohup", "time"})
# Images whose arguments are those of the engine's command.
_IMAGES = {
    "vllm/vllm-openai": "vllm",
    "text-generation-inference": "tgi",
    "llama.cpp:server": "llama.cpp",
}
_SECRETS = frozenset({"api_key"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a command line says. `others` are words of the engine that say nothing about memory or
    speed (secrets hidden); `unknown` are words that this version of the engine does not have."""

    deployment: Deployment
    engine: Engine
    others: tuple[tuple[str, str], ...] = ()
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_command(text: str) -> Reading:
    """`text` is a command line of any engine that `engine_names()` lists, with its environment
    variables or in a `docker run`, or an Ollama Modelfile. Raises ConfigError for other text and
    for values that the engine would refuse."""
    if is_modelfile(text):
        engine, found = ENGINES["ollama"], _Found(ENGINES["ollama"])
        for flag, value in modelfile_words(text):
            found.take(flag, value)
    else:
        tokens = _tokens(text)
        engine, variables, arguments = _find_engine(tokens)
        found = _Found(engine)
        for name, value in variables:
            found.take(f"${name}", value)
        found.take_arguments(arguments)
    deployment, notes = to_deployment(engine, found.values)
    return Reading(
        deployment=deployment,
        engine=engine,
        others=tuple(found.others),
        unknown=tuple(found.unknown),
        notes=notes,
    )


def engine_names() -> tuple[str, ...]:
    return ("headrace", *ENGINES)


def find_engine(name: str) -> Engine:
    if name == "headrace":
        return own()
    if name in ENGINES:
        return ENGINES[name]
    raise ConfigError(
        f"Unknown engine {name!r}.", f"Choose one of {', '.join(engine_names())}.", param="engine"
    )


def _tokens(text: str) -> list[str]:
    try:
        tokens = shlex.split(text.replace("\\\r\n", " ").replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError(
            f"The command line can't be read: {error}.", "Check its quotes.", param="from"
        ) from error
    end = next((at for at, token in enumerate(tokens) if token in _ENDS), len(tokens))
    return tokens[:end]


def _find_engine(
    tokens: Sequence[str],
) -> tuple[Engine, list[tuple[str, str]], Sequence[str]]:
    """The engine, the variables set before its command, and the command's arguments."""
    variables, rest = [], list(tokens)
    while rest and (rest[0] in _BEFORE or _ASSIGNMENT.fullmatch(rest[0])):
        if match := _ASSIGNMENT.fullmatch(rest.pop(0)):
            variables.append((match[1], match[2]))
    if rest[:2] in (["docker", "run"], ["podman", "run"]):
        return _in_container(rest, variables)
    if rest:
        program = rest[0].rpartition("/")[2]
        rest[0] = "python" if _PYTHON.fullmatch(program) else program
    for engine in (own(), *ENGINES.values()):
        for command in sorted(engine.commands, key=len, reverse=True):
            words = command.split()
            if rest[: len(words)] == words:
                return engine, variables, rest[len(words) :]
    begins = " ".join(rest[:3]) or "nothing"
    known = ", ".join(engine.commands[0] for engine in (own(), *ENGINES.values()))
    raise ConfigError(
        f"The command line begins with {begins!r}; expected the command of an engine.",
        f"Begin with one of: {known}.",
        param="from",
    )


def _in_container(
    rest: list[str], variables: list[tuple[str, str]]
) -> tuple[Engine, list[tuple[str, str]], Sequence[str]]:
    for at, token in enumerate(rest):
        is_given = token in ("-e", "--env") and at + 1 < len(rest)
        if is_given and (match := _ASSIGNMENT.fullmatch(rest[at + 1])):
            variables.append((match[1], match[2]))
        for image, name in _IMAGES.items():
            if image in token and not token.startswith("-"):
                return ENGINES[name], variables, rest[at + 1 :]
        for engine in ENGINES.values():
            for command in engine.commands:
                words = command.split()
                inner = [_PYTHON.sub("python", word) for word in rest[at : at + len(words)]]
                if inner == words:
                    return engine, variables, rest[at + len(words) :]
    raise ConfigError(
        "The container's image is not one of an engine that is known.",
        "Give the engine's own command line, without docker run.",
        param="from",
    )


class _Found:
    """What was read so far."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.values: dict[str, object] = {}
        self.others: list[tuple[str, str]] = []
        self.unknown: list[str] = []

    def take_arguments(self, arguments: Sequence[str]) -> None:
        rest = list(arguments)
        while rest:
            token = rest.pop(0)
            if not _is_flag(token):
                self._take_argument(token)
                continue
            if level := _LEVEL.fullmatch(token):
                token = f"{level[1]}={level[2]}"
            flag, equals, inline = token.partition("=")
            found = self.engine.find(flag)
            if found is None:
                if not equals and rest and not _is_flag(rest[0]):
                    rest.pop(0)
                self.unknown.append(flag)
                continue
            word, is_no = found
            value: object = inline if equals else None
            if word.is_switch:
                self._set(word, flag, "false" if is_no else value)
            elif equals:
                self._set(word, flag, value)
            else:
                self._set(word, flag, _value_of(word, flag, rest))

    def take(self, flag: str, value: str) -> None:
        """A variable or a line of a Modelfile. Variables of others are none of our business."""
        found = self.engine.find(flag)
        if found is not None:
            self._set(found[0], flag, value)
        elif not flag.startswith("$"):
            self.unknown.append(flag)

    def _take_argument(self, token: str) -> None:
        if self.engine.model_is_argument and "model" not in self.values:
            self.values["model"] = token
        else:
            self.unknown.append(token)

    def _set(self, word: Word, flag: str, value: object) -> None:
        if not word.field:
            self.others.append((flag, "" if value is None else str(value)))
            return
        field, kind = word.field, word.kind
        if "." in flag and isinstance(kind, SpeculationJson):
            part = kind.part(flag)
            if part is None:
                self.others.append((flag, str(value)))
                return
            field, kind = part
        try:
            read = kind.read(value)
        except ValueError as error:
            raise ConfigError(
                f"{flag} is {value!r}; expected {error}.", f"Correct {flag}.", param="from"
            ) from error
        if field in _SECRETS:
            self.others.append((flag, "***"))
        else:
            self.values[field] = read


def _is_flag(token: str) -> bool:
    return len(token) > 1 and token.startswith("-") and not _NUMBER.fullmatch(token)


def _value_of(word: Word, flag: str, rest: list[str]) -> object:
    if not rest or _is_flag(rest[0]):
        raise ConfigError(
            f"{flag} has no value; expected one after it.", f"Give {flag} a value.", param="from"
        )
    if not word.takes_several:
        return rest.pop(0)
    return list(_up_to_a_flag(rest))


def _up_to_a_flag(rest: list[str]) -> Iterator[str]:
    while rest and not _is_flag(rest[0]):
        yield rest.pop(0)
