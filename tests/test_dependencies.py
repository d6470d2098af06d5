"""docs/development.md lists the versions that were tested: no floor is lower than the oldest."""

from __future__ import annotations

import re

from tests.floors import (  # fmt: skip
    EXTRAS,
    ROOT,
    TESTS,
    TOOLS,
    direct_dependencies,
    name_of,
    needing_oracles,
    project,
)


def floors() -> dict[str, str]:
    groups = project()
    listed = [*groups[""], *(each for extra in EXTRAS for each in groups[extra])]
    found = {name_of(each): re.search(r"[>~]=\s*([\d.]+)", each) for each in listed}
    assert None not in found.values(), "every dependency has a floor"
    return {name: match[1] for name, match in found.items() if match is not None}


def numbers(version: str) -> list[int]:
    """1.30 and 1.30.0 are the same."""
    parts = [int(part) for part in version.split(".")]
    while parts and parts[-1] == 0:
        parts.pop()
    return parts


def test_every_floor_is_one_that_was_tested() -> None:
    text = (ROOT / "docs/development.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert [name for name, _, _ in rows] == direct_dependencies()
    for name, oldest, newest in rows:
        assert numbers(oldest) == numbers(floors()[name]), name
        assert numbers(oldest) <= numbers(newest), name


def test_what_the_floors_are_tested_with_exists() -> None:
    assert {*TOOLS} <= {name_of(each) for each in project()["dev"]}
    assert [path for path in TESTS if not (ROOT / path).exists()] == []
    left_out = needing_oracles()
    assert left_out  # and not most of it
    assert len(left_out) < 8
