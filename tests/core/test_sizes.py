"""Bytes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.core.sizes import parse_bytes, show_bytes, write_bytes


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("4GiB", 4 * 1024**3),
        ("512 MiB", 512 * 1024**2),
        ("1.5GB", 1_500_000_000),
        ("0.1GB", 100_000_000),
        ("1073741824", 1_073_741_824),
        (" 7 kb ", 7_000),
        ("3b", 3),
        ("2TiB", 2 * 1024**4),
        ("0.5KiB", 512),
        (12, 12),
    ],
)
def test_sizes_are_read(written: int | str, expected: int) -> None:
    assert parse_bytes(written, "x") == expected


@pytest.mark.parametrize(
    "written",
    ["", "GiB", "4 parsecs", "-1GiB", "1e9", "1,5GB", "4GiB 3", "4G", "٤GiB", True, None, 1.5],
)
def test_what_is_no_size_is_refused_by_name(written: object) -> None:
    with pytest.raises(ConfigError, match=r"kv_memory is .*expected .*4GiB, 512 MiB") as error:
        parse_bytes(written, "kv_memory")  # type: ignore[arg-type]
    assert error.value.param == "kv_memory"


@pytest.mark.parametrize("written", [0, "0GiB", -5, "0.1b", "9" * 40])
def test_nothing_and_more_than_there_can_be(written: int | str) -> None:
    with pytest.raises(ConfigError, match="at least 1 byte and less than 8 EiB"):
        parse_bytes(written, "kv_memory")


@given(st.integers(1, 2**60))
def test_what_is_written_for_a_flag_reads_back_on_the_right_side(count: int) -> None:
    above, below = (parse_bytes(write_bytes(count, up=up), "x") for up in (True, False))
    assert below <= count <= above
    assert above <= count * 17 / 16
    assert below >= count * 15 / 16


def test_sizes_are_shown() -> None:
    shown = [show_bytes(n) for n in (0, 1023, 1536, 100 * 1024**2, 5 * 1024**4)]
    assert shown == ["0 B", "1023 B", "1.5 KiB", "100.0 MiB", "5,120.0 GiB"]
