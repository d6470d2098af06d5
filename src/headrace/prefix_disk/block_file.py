"""One KV block in a file: a header that says what it is, and the block's bytes.

    "HRKVBLK1" | identity 32 | key 32 | length 8 | crc32 of the bytes 4 | of the header 4 | bytes

The identity stands for the model and everything else that a block's bits depend on; the key for
the tokens and the salt, of which the file has a hash only. A file is believed if all of this is as
expected, down to its length: one that a crash has cut short, one of another version or another
model, and one with a wrong bit are not. The checksum guards against accidents; whoever may write to
the folder is trusted, and it is the user's own. Knows no folders and no limits.
"""

from __future__ import annotations

import os
import struct
import zlib

from headrace.core.step import Contents

MAGIC = b"HRKVBLK1"  # with another version: other files, which are not read
_HEADER = struct.Struct("<8s32s32sQI")
_SUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _SUM.size

# O_NOFOLLOW: nothing in the folder is a link of ours.
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)


class BadFileError(Exception):
    """A file that is not what its name says."""


def write_block(path: str, identity: bytes, key: bytes, content: Contents) -> None:
    """Write a new file, for its owner alone. Not synced to the disk: after a crash of the machine
    it may be cut short or empty, and is not believed."""
    header = _HEADER.pack(MAGIC, identity, key, len(content), zlib.crc32(content))
    descriptor = os.open(path, _WRITE, 0o600)
    try:
        parts = [memoryview(header + _SUM.pack(zlib.crc32(header))), memoryview(content)]
        while parts:
            written = os.writev(descriptor, parts)
            while parts and written >= len(parts[0]):
                written -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][written:]
    finally:
        os.close(descriptor)


def open_block(path: str) -> int:
    """A descriptor; the system is asked to begin reading."""
    descriptor = os.open(path, _READ)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
    return descriptor


def read_block(descriptor: int, identity: bytes, key: bytes, size: int) -> memoryview:
    """The block's bytes, which are as many as `size`. Raises BadFileError."""
    if os.fstat(descriptor).st_size != HEADER_BYTES + size:
        raise BadFileError("another length than its block has")
    header, content = bytearray(HEADER_BYTES), bytearray(size)
    if not _fill(descriptor, header) or not _fill(descriptor, content):
        raise BadFileError("cut short while it was read")
    (header_sum,) = _SUM.unpack_from(header, _HEADER.size)
    if zlib.crc32(header[: _HEADER.size]) != header_sum:
        raise BadFileError("a damaged header")
    magic, found_identity, found_key, length, content_sum = _HEADER.unpack_from(header)
    if (magic, found_identity, found_key, length) != (MAGIC, identity, key, size):
        raise BadFileError("another block than its name says")
    if zlib.crc32(content) != content_sum:
        raise BadFileError("damaged contents")
    return memoryview(content)


def _fill(descriptor: int, buffer: bytearray) -> bool:
    left = memoryview(buffer)
    while left:
        count = os.readv(descriptor, [left])
        if count == 0:
            return False
        left = left[count:]
    return True
