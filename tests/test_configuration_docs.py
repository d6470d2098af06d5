"""docs/configuration.md lists the settings as the dataclasses have them.

HEADRACE_TEST_WRITE_DOCS=1 pytest tests/test_configuration_docs.py writes the tables anew.
"""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from headrace.backends.registry import find_backend
from headrace.core.config import Device
from headrace.core.settings import (
    OTHER_VARIABLES,
    Setting,
    SettingsFile,
    all_settings,
    resolve_settings,
)
from headrace.server.access.keys_file import read_keys_file
from headrace.server.access.limits import Key

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


def documented() -> dict[str, list[str]]:
    """The tables' cells, by setting."""
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    return {name: cells for name, *cells in rows}


def test_a_documented_default_is_what_the_program_takes() -> None:
    """By the program's own reading of it: a server that is told nothing is as the tables say. The
    tables are made of the dataclasses; what those make of their defaults is another thing."""
    untold = resolve_settings({}, {})
    for setting in all_settings():
        default = documented()[setting.name][0].strip("` ")
        told = {setting.variable: default} if default else {}
        value = resolve_settings({}, told).value(setting)
        assert value == untold.value(setting), setting.name
        assert default or value in (None, ()), setting.name


def test_defaults_that_depend_on_the_device_are_those_of_the_code() -> None:
    """Help texts have them in words: "default: 512, on a GPU 8192"."""
    config = resolve_settings({}, {}).engine
    devices = (Device.CPU, Device.CUDA)
    sizes = {each: asdict(config.sizes(find_backend(each).defaults)) for each in devices}
    told = 0
    for setting in all_settings():
        found = re.search(r"default: (\S+), on a GPU ([\w.]+?)\.?(?:\s|$)", setting.help)
        if found is None or setting.name not in sizes[Device.CPU]:
            continue
        for device, words in ((Device.CPU, found[1]), (Device.CUDA, found[2])):
            value = sizes[device][setting.name]
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            assert words == shown, f"{setting.name} on {device}"
        told += 1
    unset = {s.name for s in all_settings() if s.table == "engine" and s.default is None}
    assert told == len(unset & sizes[Device.CPU].keys())


def test_its_examples_are_good(tmp_path: Path) -> None:
    examples = re.findall(r"```toml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    kinds = []
    for example in examples:
        values = tomllib.loads(example)
        if "keys" in values:
            (tmp_path / "keys.toml").write_text(example)
            keys = read_keys_file(tmp_path / "keys.toml")
            limits = [getattr(key, field.name) for key in keys for field in fields(key)]
            assert [f.name for f in fields(keys[0]) if getattr(keys[0], f.name) is None] == []
            assert None in limits  # and one without
            kinds.append("keys")
        else:
            resolve_settings({}, {}, SettingsFile(name="the example", values=values))
            kinds.append("settings")
    assert {"keys", "settings"} == set(kinds)


def test_every_field_of_a_key_is_described() -> None:
    text = DOCUMENT.read_text()
    section = text[text.index("## Keys") :]
    names = {field.name for field in fields(Key)} - {"digest"} | {"key", "key_sha256"}
    assert [name for name in sorted(names) if f"`{name}`" not in section] == []


def test_every_variable_of_another_kind_is_named() -> None:
    text = DOCUMENT.read_text()
    assert [name for name in sorted(OTHER_VARIABLES) if f"`{name}`" not in text] == []
