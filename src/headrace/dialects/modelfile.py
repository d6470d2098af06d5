"""Ollama's Modelfile: its lines as words, and the script that makes one.

A script that `write_script` made is read again, with the variables of its `ollama serve`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

_FROM = re.compile(r"^\s*FROM\s+\S", re.IGNORECASE | re.MULTILINE)
_LINE = re.compile(r"\s*(?P<word>[A-Za-z]+)\s+(?P<rest>.*\S)\s*")
_WORDS = frozenset(
    {
        "from", "parameter", "draft", "template", "system", "adapter", "license", "message",
        "renderer", "parser", "requires",
    }
)  # fmt: skip
_LONG = frozenset({"template", "system", "license", "message"})  # may go over several lines
_VARIABLE = re.compile(r"(OLLAMA_\w+)=(.*)", re.DOTALL)


def is_modelfile(text: str) -> bool:
    return _FROM.search(text) is not None


def modelfile_words(text: str) -> Iterator[tuple[str, str]]:
    """(%num_ctx, "8192") for each line, and ($OLLAMA_NUM_PARALLEL, "4") for each variable before an
    `ollama serve`."""
    in_text = False  # of a template or a system prompt over several lines
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        opens = match is not None and match["word"].lower() in _LONG
        if in_text or (opens and line.count('"""') == 1):
            in_text ^= line.count('"""') == 1
            continue
        if "ollama" in line and not _FROM.match(line):
            yield from _variables(line)
            continue
        if match is None or match["word"].lower() not in _WORDS:
            continue
        word, rest = match["word"].lower(), match["rest"]
        if word == "parameter":
            word, _, rest = rest.partition(" ")
        yield f"%{word.lower()}", rest.strip().strip('"')


def _variables(line: str) -> Iterator[tuple[str, str]]:
    try:
        tokens = shlex.split(line, comments=True)
    except ValueError:
        return
    for token in tokens:
        if match := _VARIABLE.fullmatch(token):
            yield f"${match[1]}", match[2]


def write_script(
    lines: Sequence[tuple[str, str]], variables: Sequence[tuple[str, str]], name: str
) -> str:
    """A shell script: the Modelfile, the server, and the model that it serves."""
    body = [
        f"{word.upper()} {value}" if word in ("from", "draft") else f"PARAMETER {word} {value}"
        for word, value in lines
    ]
    server = " ".join(
        [*(f"{key}={shlex.quote(value)}" for key, value in variables), "ollama serve"]
    )
    return "\n".join(
        [
            "cat > Modelfile <<'END'",
            *body,
            "END",
            f"{server} &",
            f"ollama create {shlex.quote(name)} -f Modelfile",
        ]
    )
