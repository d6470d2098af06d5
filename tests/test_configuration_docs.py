"""docs/configuration.md lists the settings as the dataclasses have them.

HEADRACE_TEST_WRITE_DOCS=1 pytest tests/test_configuration_docs.py writes the tables anew.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest

from headrace.core.settings import (
    OTHER_VARIABLES,
    Setting,
    SettingsFile,
    all_settings,
    resolve_settings,
)

DOCUMENT = Path(__file__).parents[1] / "docs/configuration.md"


def table(name: str) -> str:
    rows = ["| setting | default | |", "|---|---|---|"]
    rows += [row(setting) for setting in all_settings() if setting.table == name]
    return "\n".join(rows)


def row(setting: Setting) -> str:
    default = "" if setting.default in (None, ()) else f"`{str(setting.default).lower()}`"
    if isinstance(setting.default, str):
        default = f"`{setting.default}`"
    help, choices = setting.help, setting.choices
    if setting.default is True:
        help = f"`false`: {help[0].lower()}{help[1:]}"  # the help is that of the flag, --no-...
    if choices is not None:
        help += " " + ", ".join(f"`{choice}`" for choice in choices) + "."
    return f"| `{setting.name}` | {default} | {help.replace('|', '/')} |"


@pytest.mark.parametrize("name", ["", "server", "engine"])
def test_the_tables_are_those_of_the_code(name: str) -> None:
    text = DOCUMENT.read_text()
    marked = re.compile(rf"(<!-- settings: {name or 'top'} -->\n).*?(\n<!-- end -->)", re.DOTALL)
    assert len(marked.findall(text)) == 1
    written = marked.sub(lambda found: f"{found[1]}{table(name)}{found[2]}", text)
    if os.environ.get("HEADRACE_TEST_WRITE_DOCS"):
        DOCUMENT.write_text(written)
    assert text == written, "HEADRACE_TEST_WRITE_DOCS=1 pytest tests/test_configuration_docs.py"


def test_its_example_is_good() -> None:
    text = DOCUMENT.read_text()
    examples = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert examples
    for example in examples:
        file = SettingsFile(name="the example", values=tomllib.loads(example))
        resolve_settings({}, {}, file)


def test_every_variable_of_another_kind_is_named() -> None:
    text = DOCUMENT.read_text()
    assert [name for name in sorted(OTHER_VARIABLES) if f"`{name}`" not in text] == []
