"""Versions: how they are written, what is refused, and who gets which."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.client.connection import parse_address
from headrace.core.errors import ConfigError
from headrace.router.versions import Version, check_versions, parse_version, pick, read_routes

URL = parse_address("http://a:8000")


def version(name: str, weight: float = 1.0, **more: object) -> Version:
    address = parse_address(f"http://{name or 'x'}:8000")
    return Version(name=name, addresses=(address,), weight=weight, **more)  # type: ignore[arg-type]


def test_a_version_is_read() -> None:
    found = parse_version("blue=http://a:8000,http://b:8001:2.5")
    assert (found.name, found.weight, found.shadow) == ("blue", 2.5, None)
    assert [address.url for address in found.addresses] == ["http://a:8000", "http://b:8001"]
    assert parse_version("next=http://a:8000:0.1", is_shadow=True).shadow == 0.1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a=http://b",
        "a=http://b:8000",
        "a=http://b:8000:x",
        "=http://b:8000:1",
        "a b=c:1:1",
    ],
)
def test_what_is_no_version(text: str) -> None:
    with pytest.raises(ConfigError, match="--version"):
        parse_version(text)


@pytest.mark.parametrize(
    ("versions", "why"),
    [
        ([version("a", -1)], "weight of version 'a' is -1"),
        ([version("a", float("nan"))], "weight of version 'a' is nan"),
        ([version("a", float("inf"))], "weight of version 'a' is inf"),
        ([version("a", 0), version("b", 0)], "All weights are 0"),
        ([version("a"), version("b", shadow=1.5)], "share of shadow 'b' is 1.5"),
        ([version("a", shadow=1.0)], "only shadows"),
        ([version("a"), version("a")], "named 'a'"),
        (
            [version("a", users=frozenset({"u"})), version("b", users=frozenset({"u"}))],
            "'u' is in two",
        ),
        ([Version(name="a", addresses=(URL, URL))], "given twice"),
    ],
)
def test_what_can_not_share_the_traffic(versions: list[Version], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_versions(versions)


def test_a_file_of_routes(tmp_path: Path) -> None:
    path = tmp_path / "routes.toml"
    path.write_text(
        '[[versions]]\nname = "a"\nurls = ["http://a:1"]\nweight = 9\n'
        '[[versions]]\nname = "b"\nurls = ["http://b:1"]\nweight = 1\nusers = ["ann"]\n'
        '[[versions]]\nname = "c"\nurls = ["http://c:1"]\nshadow = 0.5\n'
    )
    a, b, c = read_routes(path)
    assert (a.weight, b.users, c.shadow) == (9.0, frozenset({"ann"}), 0.5)
    for text, why in (
        ("x = 1", "'x'"),
        ("[[versions]]\nname = 1", "the name 1"),
        ('[[versions]]\nname = "a"', "urls"),
        ('[[versions]]\nname = "a"\nurls = ["http://a:1"]\nweight = "1"', "weight = '1'"),
        ('[[versions]]\nname = "a"\nurls = ["http://a:1"]\nwait = 1', "'wait'"),
        ("[[versions", "not TOML"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=why):
            read_routes(path)
    with pytest.raises(ConfigError, match="can't be read"):
        read_routes(tmp_path / "none")


def test_the_documents_routes_are_good(tmp_path: Path) -> None:
    document = Path(__file__).parents[2] / "docs/router.md"
    (example,) = re.findall(r"```toml\n(.*?)```", document.read_text(), re.DOTALL)
    (tmp_path / "routes.toml").write_text(example)
    names = [version.name for version in check_versions(read_routes(tmp_path / "routes.toml"))]
    assert names == ["stable", "canary", "next"]


def test_a_user_stays_and_shares_are_those_of_the_weights() -> None:
    versions = [version("a", 3), version("b", 1), version("c", 0)]
    users = [f"user {number}" for number in range(4000)]
    first = {user: pick(versions, user, 0.0).name for user in users}
    assert first == {user: pick(versions, user, 0.99).name for user in users}
    shares = Counter(first.values())
    assert shares["c"] == 0
    assert 0.70 < shares["a"] / len(users) < 0.80
    pinned = [*versions, version("d", 0, users=frozenset({"ann"}))]
    assert pick(pinned, "ann", 0.0).name == "d"


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6), st.floats(0, 1, exclude_max=True))
def test_somebody_is_always_picked(weights: list[float], chance: float) -> None:
    versions = [version(f"v{n}", weight) for n, weight in enumerate(weights)]
    found = pick(versions, None, chance)
    assert found.weight > 0 or not any(weights)
