"""What is said of a prefix cache on disk before it is opened, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.core.errors import ConfigError
from headrace.prefix_disk import outlook
from headrace.prefix_disk.outlook import check_disk, describe_disk


def test_it_says_how_much_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlook, "free_at", lambda _: 2 << 30)
    (note,) = describe_disk(f"{tmp_path}/new,1GiB", 100_000, 16)
    blocks = (1 << 30) // 102_400  # a header more, in whole units of the disk
    assert f"holds up to {blocks * 16:,} tokens in 1.0 GiB" in note
    assert "64.0 MiB of memory" in note
    _, warning = describe_disk(f"{tmp_path}/new,3GiB", 100_000, 16)
    assert "allows 3.0 GiB where 2.0 GiB are free" in warning


def test_what_a_start_would_refuse_is_refused_without_writing(tmp_path: Path) -> None:
    check_disk(f"{tmp_path}/new/er,1GiB", 100_000)
    with pytest.raises(ConfigError, match=r"allows 97\.7 KiB; one KV block of this model takes"):
        check_disk(f"{tmp_path}/new,100000", 100_000)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't be written to"):
        check_disk(f"{tmp_path}/file,1GiB", 100_000)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
