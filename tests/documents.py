"""The documents as blocks: what a reader would type, and what they say would come of it.

Every fenced block has a language: `sh` and `python` are typed, `console` is typed after `$` (and
after `>>>`, to a program) with its output, `toml` and `json` are data, `text` is to be looked at.
Knows nothing of what the blocks say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Other programs' lines, which run where those are installed: tests/clients/test_documents.py.
ELSEWHERE = ROOT / "docs" / "clients.md"
DOCUMENTS = [
    ROOT / "README.md",
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path != ELSEWHERE),
]
LANGUAGES = frozenset({"sh", "python", "console", "toml", "json", "yaml", "text"})

_FENCE = re.compile(r"^```(\S*)[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    document: str
    line: int  # of its first line
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.document}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A command, what is typed to it, and what it should answer."""

    place: str
    command: str
    typed: list[str]
    output: list[str]


def read_blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    return [
        Block(
            document=str(path.relative_to(ROOT)),
            line=text.count("\n", 0, found.start(2)) + 1,
            language=found[1],
            text=found[2],
        )
        for found in _FENCE.finditer(text)
    ]


def blocks_of(language: str, document: str | None = None) -> list[Block]:
    return [
        block
        for path in DOCUMENTS
        for block in read_blocks(path)
        if block.language == language and document in (None, block.document)
    ]


def read_samples(block: Block) -> list[Sample]:
    samples: list[Sample] = []
    for number, line in enumerate(block.text.splitlines(), start=block.line):
        if line.startswith("$ "):
            place = f"{block.document}:{number}"
            samples.append(Sample(place=place, command=line[2:], typed=[], output=[]))
        elif not samples:
            raise ValueError(f"{block.place}: a console block begins with a command")
        elif line.startswith(">>> "):
            samples[-1].typed.append(line[4:])
        else:
            samples[-1].output.append(line)
    return samples
