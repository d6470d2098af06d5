"""What a word of another engine is: a field with a value, or a topic that has an answer.

A field is a field of dialects/deployment.py, or a setting of Headrace that has the same meaning.
Which of them Headrace can do is decided in answers.py; the words are in one file for each engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from headrace.core.foreign.values import TEXT, Fixed, Kind

_LISTED = re.compile(r"(?P<flags>[^\s=]+)(?P<value>=[+]?)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A flag, or a variable of the environment ($NAME). `field` is what it sets; without one,
    `topic` says what kind of thing it is about."""

    flags: tuple[str, ...]  # all spellings, with their dashes; the first is the one to write
    field: str = ""
    kind: Kind = TEXT
    topic: str = ""
    takes_several: bool = False
    is_written: bool = True  # False: understood, but another spelling is written

    @property
    def is_switch(self) -> bool:
        return isinstance(self.kind, Fixed)

    @property
    def is_variable(self) -> bool:
        return self.flags[0].startswith("$")

    @property
    def name(self) -> str:
        """As a keyword: max_model_len."""
        return plain(self.flags[0])


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine's words, in the version that they were read from."""

    name: str  # "vllm"
    label: str  # "vLLM"
    version: str
    source: str  # where the words were read
    commands: tuple[str, ...]  # the words that begin its command line; the first is written
    words: tuple[Word, ...]
    model_is_argument: bool = False
    # What the engine does where nothing is said, of the fields where that matters.
    defaults: Mapping[str, object] = field(default_factory=dict)

    @cached_property
    def by_flag(self) -> dict[str, Word]:
        """The first word that has a flag is the one that reads it."""
        return {flag: word for word in reversed(self.words) for flag in word.flags}

    def find(self, flag: str) -> tuple[Word, bool] | None:
        """The word of a flag, and whether the flag says no (--no-...). As their parsers find it:
        dashes and underscores are the same, and a JSON setting may come in parts
        (--speculative-config.method)."""
        for spelled in (
            flag,
            flag.replace("_", "-"),
            flag.replace("-", "_").replace("__", "--", 1),
        ):
            if word := self.by_flag.get(spelled):
                return word, False
        spelled = flag.replace("_", "-")
        if spelled.startswith("--no-"):
            word = self.by_flag.get(f"--{spelled.removeprefix('--no-')}")
            if word is not None and word.is_switch:
                return word, True
        if "." in spelled and (word := self.by_flag.get(spelled.partition(".")[0])):
            return word, False
        return None

    def for_field(self, name: str) -> Iterator[Word]:
        return (word for word in self.words if word.field == name and word.is_written)


def plain(flag: str) -> str:
    """--max-model-len as a keyword: max_model_len."""
    return flag.lstrip("-").replace("-", "_")


def sets(
    flags: str, field: str, kind: Kind = TEXT, *, written: bool = True, several: bool = False
) -> Word:
    return Word(
        flags=tuple(flags.split()),
        field=field,
        kind=kind,
        is_written=written,
        takes_several=several,
    )


def about(topics: Mapping[str, str]) -> tuple[Word, ...]:
    """Words by topic. `--flag` has no value, `--flag=` has one, `--flag=+` several; several
    spellings of a word are joined by |."""
    return tuple(
        Word(
            flags=tuple(match["flags"].split("|")),
            kind=TEXT if match["value"] else Fixed(True),
            topic=topic,
            takes_several=match["value"] == "=+",
        )
        for topic, listed in topics.items()
        for match in _LISTED.finditer(listed)
    )
