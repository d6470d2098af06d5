"""Opens the prefix cache on disk that the setting `prefix_disk` names."""

from __future__ import annotations

from headrace.core.prefix_disk import read_prefix_disk
from headrace.core.step import MovesBlocks
from headrace.prefix_disk.outlook import check_room
from headrace.prefix_disk.shelf import Shelf
from headrace.prefix_disk.store import DiskStore


def open_store(setting: str, identity: bytes, runner: MovesBlocks) -> DiskStore:
    """`identity` is a hash of all that the bits of a block depend on besides its tokens."""
    disk, size = read_prefix_disk(setting), runner.block_bytes
    check_room(disk, size)
    shelf = Shelf(disk.folder, disk.most_bytes, identity, size)
    return DiskStore(shelf, identity, size)
