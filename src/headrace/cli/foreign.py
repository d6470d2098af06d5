"""Other engines' flags on our command line: translated before the flags are parsed, or answered.

What they mean is in core/foreign/answers.py. A flag that is ours is left as it is, and so is one
that nobody knows: the parser says so.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

from headrace.core.config import RENAMED, SHARED_NAMES, renamed
from headrace.core.errors import ConfigError

_NUMBER = re.compile(r"-[\d.]+")
_LEVEL = re.compile(r"-O\d")  # vLLM's optimization level


class ForeignCommand(TyperCommand):
    """A command that takes other engines' flags too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, translated(args, self.get_params(ctx), self.name or ""))


def translated(
    arguments: Sequence[str], params: Sequence[Any], command: str = "serve"
) -> list[str]:
    """The arguments with other engines' flags replaced by ours. `params` are the command's own."""
    own = {
        flag: param
        for param in params
        if param.param_type_name == "option"
        for flag in (*param.opts, *param.secondary_opts)
    }
    walk = _Walk(list(arguments), own, command)
    while walk.rest:
        walk.step()
    return walk.finished()


class _Walk:
    """Goes over the arguments once; `kept` are those that the parser gets as they are."""

    def __init__(self, rest: list[str], own: dict[str, Any], command: str) -> None:
        self.rest, self.own, self.command = rest, own, command
        self.kept: list[str] = []
        self.ours: dict[str, str] = {}  # settings that were given by our own flags
        self.theirs: dict[str, tuple[object, str]] = {}  # those given by other engines' flags

    def step(self) -> None:
        token = self.rest.pop(0)
        if token == "--":
            self.kept += [token, *self.rest]
            self.rest = []
        elif not _is_flag(token):
            self.kept.append(token)
        elif token.partition("=")[0] in self.own:
            self._keep(token)
        else:
            self._translate(token)

    def _keep(self, token: str) -> None:
        flag, equals, value = token.partition("=")
        param = self.own[flag]
        name = str(param.name).removeprefix("no_")
        self.ours[name] = flag
        if param.is_flag or param.count:
            self.kept.append(token)
            return
        if not equals and self.rest:
            value = self.rest.pop(0)
            given = [flag, value]
        else:
            given = [token]
        settings = None
        if name in SHARED_NAMES:
            from headrace.core.foreign.answers import shared_value

            settings = shared_value(name, value, _written(flag, value))
        if settings is None:
            self.kept += given
        else:
            del self.ours[name]
            self._set(settings, _written(flag, value))

    def _translate(self, token: str) -> None:
        from headrace.core.foreign.answers import find_flag, understand

        flag, equals, inline = token.partition("=")
        if flag.removeprefix("--") in RENAMED:
            old = inline if equals else "".join(self.rest[:1])
            raise renamed(flag.removeprefix("--"), old, "--{} {}".format)
        if _LEVEL.fullmatch(token):
            flag, equals, inline = "-O", "=", token[2:]
        found = find_flag(flag)
        if found is None:
            self.kept.append(token)
            return
        word, is_no = found
        value: str | None
        if word.is_switch:
            value = "false" if is_no else inline if equals else None
        elif equals:
            value = inline
        else:
            value = self._value(flag, several=word.takes_several)
        is_hidden = word.is_switch or word.field == "api_key"
        written = _written(flag, None if is_hidden else value)
        self._set(understand(word, value, written), written)

    def _value(self, flag: str, *, several: bool) -> str:
        if not self.rest or _is_flag(self.rest[0]):
            raise ConfigError(
                f"{flag} has no value; expected one after it.", f"Give {flag} a value."
            )
        values = [self.rest.pop(0)]
        while several and self.rest and not _is_flag(self.rest[0]):
            values.append(self.rest.pop(0))
        return ",".join(values)

    def _set(self, settings: dict[str, object], written: str) -> None:
        for name, value in settings.items():
            before = self.theirs.get(name)
            same_flag = before is not None and before[1].split()[0] == written.split()[0]
            if before is not None and before[0] != value and not same_flag:
                raise _both(before[1], written, name)
            self.theirs[name] = (value, written)

    def finished(self) -> list[str]:
        added: list[str] = []
        for name, (value, written) in self.theirs.items():
            if name in self.ours:
                raise _both(self.ours[name], written, name)
            added += self._spelled(name, value, written)
        return added + self.kept

    def _spelled(self, name: str, value: object, written: str) -> list[str]:
        """Our flag, as this command has it."""
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            wanted = flag if value else f"--no-{flag[2:]}"
            if wanted in self.own:
                return [wanted]
            if flag in self.own or f"--no-{flag[2:]}" in self.own:
                return []  # only the other flag is there: this one is the default
        if flag in self.own:
            return [flag, str(value)]
        raise ConfigError(
            f"{written}: this is {flag} of `headrace serve`; `headrace {self.command}` does not "
            "have it.",
            "Leave it out.",
        )


def _both(first: str, second: str, name: str) -> ConfigError:
    return ConfigError(
        f"{first} and {second} are given; both set {name}.", "Keep one of them.", param=name
    )


def _written(flag: str, value: str | None) -> str:
    return flag if value is None else f"{flag} {shlex.quote(value)}"


def _is_flag(token: str) -> bool:
    return len(token) > 1 and token.startswith("-") and not _NUMBER.fullmatch(token)
