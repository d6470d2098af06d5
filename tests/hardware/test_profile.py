"""A profile is written and read again; one that can't be used is refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.profiles import profile

from headrace.core.errors import ConfigError
from headrace.hardware.profile import Ceilings, ProductRate, load_profile


@pytest.mark.parametrize("serves", [True, False])
def test_what_is_written_is_read_again(tmp_path: Path, serves: bool) -> None:
    path = tmp_path / "profile.json"
    made = profile(serves=serves)
    made.save(path)
    assert load_profile(path) == made
    assert [one.name for one in tmp_path.iterdir()] == ["profile.json"]


def test_ceilings_are_part_of_it(tmp_path: Path) -> None:
    from dataclasses import replace

    rate = ProductRate(operation="linear", rows=1, multiplies_s=1e9, bytes_s=2e9)
    ceilings = Ceilings(
        read_bytes_s={"1": 1e10, "2": 1.9e10},
        multiplies_s={"int8": 4e11, "fp32": 5e10},
        products=(rate,),
    )
    made = replace(profile(), ceilings=ceilings)
    made.save(tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == made


def changed(path: Path, **values: Any) -> None:
    read = json.loads(path.read_text())
    path.write_text(json.dumps(read | values))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"format": "something"}, "no object with"),
        ({"version": 1}, "version 1 of the profile's format"),
        ({"steps": []}, "no step that decodes"),
        ({"steps": {}}, "profile.steps is not a list"),
        ({"steps": [{"decode_rows": 1}]}, r"steps\[0\] lacks context_tokens"),
        ({"limits": None}, "profile.limits is not an object"),
        ({"limits": {"max_batch_tokens": -1}}, "max_batch_tokens is -1, not a number"),
        ({"limits": {"max_batch_tokens": 1.5}}, "max_batch_tokens is 1.5, not a number"),
        ({"is_complete": "yes"}, "is_complete is 'yes', not a bool"),
        ({"extra": 1}, "unknown field, extra"),
        ({"machine": []}, "profile.machine is not an object"),
        ({"ceilings": {"read_bytes_s": {"1": None}}}, r"read_bytes_s\.1 is None"),
    ],
)
def test_a_bad_profile_is_refused(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    path = tmp_path / "profile.json"
    profile().save(path)
    changed(path, **values)
    with pytest.raises(ConfigError, match=said) as found:
        load_profile(path)
    assert "headrace calibrate" in found.value.remedy


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        load_profile(tmp_path / "none.json")
    for content in ("", "[]", "{", '{"format": "headrace profile"}', "\\xff"):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(ConfigError):
            load_profile(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="no JSON"):
        load_profile(tmp_path / "bad.json")
