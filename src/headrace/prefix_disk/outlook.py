"""What a prefix cache on disk will hold, before it is opened: for `--dry-run` and the first lines.

Looks at the disk; makes and changes nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

from headrace.core.disk import free_at
from headrace.core.errors import ConfigError
from headrace.core.prefix_disk import PrefixDisk, read_prefix_disk
from headrace.core.sizes import show_bytes
from headrace.prefix_disk.shelf import file_bytes
from headrace.prefix_disk.store import QUEUE_BYTES


def describe_disk(setting: str, block_bytes: int, block_tokens: int) -> list[str]:
    """Notes for a person."""
    disk = read_prefix_disk(setting)
    blocks = disk.most_bytes // file_bytes(block_bytes)
    notes = [
        f"the prefix cache on disk, {disk.folder}, holds up to {blocks * block_tokens:,} tokens in "
        f"{show_bytes(disk.most_bytes)} ({show_bytes(block_bytes)} for {block_tokens}); up to "
        f"{show_bytes(QUEUE_BYTES)} of memory wait to be written, which the ledger does not count"
    ]
    free = free_at(Path(disk.folder))
    if free is not None and free < disk.most_bytes:
        notes.append(
            f"prefix_disk allows {show_bytes(disk.most_bytes)} where {show_bytes(free)} are free: "
            "when the disk is full, blocks are no longer written"
        )
    return notes


def check_disk(setting: str, block_bytes: int) -> None:
    """Refuses what opening would refuse, as far as that can be known without writing."""
    disk = read_prefix_disk(setting)
    check_room(disk, block_bytes)
    place = Path(disk.folder)
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(
            f"prefix_disk: {disk.folder} can't be written to.",
            "Choose a folder that this user may write to.",
            param="prefix_disk",
        )


def check_room(disk: PrefixDisk, block_bytes: int) -> None:
    """Refuses a size that does not hold one block."""
    if disk.most_bytes < file_bytes(block_bytes):
        raise ConfigError(
            f"prefix_disk allows {show_bytes(disk.most_bytes)}; one KV block of this model takes "
            f"{show_bytes(file_bytes(block_bytes))}.",
            "Allow more: some GiB hold thousands of blocks.",
            param="prefix_disk",
        )
