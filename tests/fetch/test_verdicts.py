"""What is remembered of hashing: private, trusted no further than it can be, never in the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.fetch.verdicts import FileState, forget, recall, remember


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_STATE", str(tmp_path / "state"))
    return tmp_path / "state" / "verified"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.write_bytes(b"weights")
    return path


@pytest.fixture
def kept(file: Path, folder: Path) -> Path:
    """The verdict's own file."""
    remember(file, FileState.of(file), "sha256:1")
    assert recall(file, FileState.of(file)) == "sha256:1"
    (kept,) = folder.iterdir()
    return kept


def test_it_is_its_owners_alone(kept: Path) -> None:
    assert kept.stat().st_mode & 0o077 == 0
    assert kept.parent.stat().st_mode & 0o077 == 0
    assert kept.parent.parent.stat().st_mode & 0o022 == 0


@pytest.mark.parametrize("name", list(FileState.__dataclass_fields__))
def test_every_part_of_the_state_counts(kept: Path, file: Path, name: str) -> None:
    from dataclasses import replace

    state = FileState.of(file)
    changed: Any = {name: getattr(state, name) + 1}
    assert recall(file, replace(state, **changed)) is None


def test_another_file_is_not_known(kept: Path, file: Path, tmp_path: Path) -> None:
    """Even a second name of the very same one, or a verdict that was moved to its place."""
    link = tmp_path / "link"
    os.link(file, link)
    remember(file, FileState.of(file), "sha256:1")  # its count of links changed it
    assert recall(link, FileState.of(link)) is None
    remember(link, FileState.of(link), "sha256:2")
    (other,) = set(kept.parent.iterdir()) - {kept}
    os.replace(kept, other)
    assert recall(link, FileState.of(link)) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"[" * 50_000,
        b"\xff\xfe",
        b'{"digest": "sha256:1"}',
        b"x" * 1_000_000,
    ],
    ids=["empty", "cut", "null", "list", "deep", "not text", "fields missing", "large"],
)
def test_bad_content_is_as_nothing(kept: Path, file: Path, content: bytes) -> None:
    kept.write_bytes(content)
    assert recall(file, FileState.of(file)) is None
    remember(file, FileState.of(file), "sha256:1")  # and is no obstacle
    assert recall(file, FileState.of(file)) == "sha256:1"


def test_wrong_types_are_as_nothing(kept: Path, file: Path) -> None:
    good = json.loads(kept.read_text())
    several: tuple[object, ...] = (None, [], {}, 1.5, "x", True)
    for name in good:
        for wrong in several:
            kept.write_text(json.dumps(good | {name: wrong}))
            if name != "digest" or wrong != "x":
                assert recall(file, FileState.of(file)) is None, (name, wrong)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners here")
def test_what_others_may_have_written_is_not_taken(kept: Path, file: Path, tmp_path: Path) -> None:
    state = FileState.of(file)
    for mode in (0o620, 0o602, 0o666):
        kept.chmod(mode)
        assert recall(file, state) is None
    kept.chmod(0o600)
    assert recall(file, state) == "sha256:1"
    planted = tmp_path / "planted.json"
    os.replace(kept, planted)
    kept.symlink_to(planted)
    assert recall(file, state) is None
    kept.unlink()
    os.mkfifo(kept)
    assert recall(file, state) is None  # and nobody waits for a writer
    kept.unlink()
    if os.geteuid() == 0:
        os.replace(planted, kept)
        os.chown(kept, 12345, -1)
        assert recall(file, state) is None


def test_a_folder_that_cannot_be_written_is_no_error(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in the way").write_text("a file")
    monkeypatch.setenv("HEADRACE_STATE", str(tmp_path / "in the way"))
    remember(file, FileState.of(file), "sha256:1")
    assert recall(file, FileState.of(file)) is None
    forget(file)


def test_no_home_is_no_error(file: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from headrace.fetch.verdicts import FileState, recall, remember\n"
        "path = Path(sys.argv[1])\n"
        "Path.home = classmethod(lambda cls: (_ for _ in ()).throw(RuntimeError('no home')))\n"
        "remember(path, FileState.of(path), 'sha256:1')\n"
        "print(recall(path, FileState.of(path)))"
    )
    kept_out = {"HOME", "HEADRACE_STATE", "XDG_STATE_HOME"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)],
        env={name: value for name, value in os.environ.items() if name not in kept_out},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "None\n", done.stderr


def test_writers_at_once_leave_a_whole_one(file: Path, folder: Path) -> None:
    state = FileState.of(file)
    seen = set()

    def turn(number: int) -> None:
        remember(file, state, f"sha256:{number}")
        seen.add(recall(file, state))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(turn, range(200)))
    assert None not in seen
    assert len(list(folder.iterdir())) == 1
