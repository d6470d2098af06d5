"""Block files: what is believed, what is not, how much there may be, and who may read it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from headrace.core.errors import ConfigError
from headrace.prefix_disk.block_file import (
    HEADER_BYTES,
    BadFileError,
    open_block,
    read_block,
    write_block,
)
from headrace.prefix_disk.shelf import FOLDER, Shelf

ONE, OTHER, KEY = b"1" * 32, b"2" * 32, b"k" * 32
CONTENT = bytes(range(256)) * 8  # half a unit of the disk


def read(path: Path, identity: bytes = ONE, key: bytes = KEY, size: int = len(CONTENT)) -> bytes:
    descriptor = open_block(str(path))
    try:
        return bytes(read_block(descriptor, identity, key, size))
    finally:
        os.close(descriptor)


def shelf_in(folder: Path, blocks: int = 3, identity: bytes = ONE) -> Shelf:
    shelf = Shelf(str(folder), blocks * 4096, identity, len(CONTENT))
    shelf.look()
    return shelf


def put(shelf: Shelf, key: bytes, used_s: float | None = None) -> str:
    place, name = shelf.place_of(key)
    shelf.write(place, name, CONTENT)
    if used_s is not None:
        os.utime(shelf.path_of(place), (used_s, used_s))
    return place


def test_a_block_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "block"
    write_block(str(path), ONE, KEY, memoryview(CONTENT))
    assert read(path) == CONTENT
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        write_block(str(path), ONE, KEY, CONTENT)


def test_every_wrong_bit_and_every_cut_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "block"
    write_block(str(path), ONE, KEY, CONTENT)
    whole = path.read_bytes()
    for at in [*range(HEADER_BYTES + 8), len(whole) - 1]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(BadFileError):
            read(path)
    for length in (0, 7, HEADER_BYTES, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(BadFileError, match="length"):
            read(path)
    path.write_bytes(whole + b"?")
    with pytest.raises(BadFileError, match="length"):
        read(path)
    path.write_bytes(whole)
    for wrong in ({"identity": OTHER}, {"key": OTHER}):
        with pytest.raises(BadFileError, match="another block"):
            read(path, **wrong)  # type: ignore[arg-type]
    assert read(path) == CONTENT
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        read(tmp_path / "link")


def test_files_are_found_again_and_tell_nothing(tmp_path: Path) -> None:
    shelf = shelf_in(tmp_path)
    place = put(shelf, KEY)
    assert shelf.total_bytes == 4096
    again = shelf_in(tmp_path)
    assert again.has(again.place_of(KEY)[0])
    assert again.total_bytes == 4096
    other = shelf_in(tmp_path, identity=OTHER)
    assert not other.has(other.place_of(KEY)[0])
    assert other.total_bytes == 4096  # it counts for everybody
    assert KEY.hex() not in place
    assert KEY not in (tmp_path / FOLDER / place).read_bytes()
    for folder, _, _ in os.walk(tmp_path / FOLDER):
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700


def test_the_least_recently_used_goes_first_whosever_it_is(tmp_path: Path) -> None:
    old = shelf_in(tmp_path, identity=OTHER)
    theirs = put(old, KEY, used_s=1000)
    shelf = shelf_in(tmp_path)
    first, second = put(shelf, b"a", used_s=2000), put(shelf, b"b", used_s=3000)
    shelf = shelf_in(tmp_path)
    shelf.use(first)
    put(shelf, b"c")
    assert not shelf.has(theirs)
    assert not (tmp_path / FOLDER / theirs).exists()
    os.utime(tmp_path / FOLDER / second)  # another process uses it now
    put(shelf, b"d")
    assert shelf.has(second)
    assert not shelf.has(first)
    assert shelf.total_bytes <= 3 * 4096
    assert shelf.evicted == 2


def test_processes_share_a_folder(tmp_path: Path) -> None:
    one, two = shelf_in(tmp_path), shelf_in(tmp_path)
    place = put(one, KEY)
    assert not two.has(place)
    two.look()
    assert two.has(place)
    put(two, KEY)  # both computed it: the same file
    assert two.total_bytes == 4096
    two.delete(place)
    one.look()
    assert not one.has(place)
    assert one.total_bytes == 0
    two.delete(place)
    one.use(place)
    for number in range(9):
        put(one, b"one%d" % number)
        put(two, b"two%d" % number)
    one.look()
    one.make_room()
    assert one.total_bytes <= 3 * 4096
    assert sum(path.is_file() for path in (tmp_path / FOLDER).rglob("*.kv")) <= 3


def test_what_a_crash_leaves_is_no_block_and_goes(tmp_path: Path) -> None:
    shelf = shelf_in(tmp_path)
    fresh, stale = (tmp_path / FOLDER / "new" / name for name in ("1-2-3", "4-5-6"))
    fresh.write_bytes(b"half")
    stale.write_bytes(b"half")
    os.utime(stale, (1000, 1000))
    shelf.look()
    assert shelf.total_bytes == 0
    shelf.sweep()
    assert fresh.exists()  # somebody may be writing it
    assert not stale.exists()


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    shelf = shelf_in(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / FOLDER / "notes.txt").write_text("mine")
    own = tmp_path / FOLDER / ONE.hex()[:32] / "ab"
    own.mkdir()
    (own / "notes.txt").write_text("mine")
    (own / "folder.kv").mkdir()
    (own / "link.kv").symlink_to(tmp_path / "notes.txt")
    shelf.look()
    assert shelf.total_bytes == 0
    for number in range(9):
        put(shelf, b"%d" % number)
    assert len(list(tmp_path.rglob("notes.txt"))) == 3


def test_a_deleted_folder_is_made_again(tmp_path: Path) -> None:
    shelf = shelf_in(tmp_path)
    put(shelf, KEY)
    for path in sorted((tmp_path / FOLDER).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / FOLDER).rmdir()
    place = put(shelf, b"new")
    assert (tmp_path / FOLDER / place).is_file()
    shelf.look()
    assert shelf.total_bytes == 4096


def test_bad_folders_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="can't be written to"):
        shelf_in(file)
    open_to_all = tmp_path / "shared"
    (open_to_all / FOLDER).mkdir(parents=True)
    (open_to_all / FOLDER).chmod(0o755)
    with pytest.raises(ConfigError, match="reached by other users"):
        shelf_in(open_to_all)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(0o700)
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / FOLDER).symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="reached by other users"):
        shelf_in(linked)
