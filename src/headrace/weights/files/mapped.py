"""A file mapped read-only into memory, and a guess at what a wrong file is.

Knows nothing of formats. Pages are loaded when they are read and dropped by `release`, so that a
model is not in memory twice, in its file and as a backend's packed copy.
"""

from __future__ import annotations

import contextlib
import mmap
import stat
from pathlib import Path

from headrace.core.errors import WeightsError

DAMAGED = "The file is damaged or incomplete: fetch it again."

# First bytes of files that people pass by mistake -> how to describe them.
_MAGICS = (
    (b"GGUF", "a GGUF file"),
    (b"PK\x03\x04", "a zip archive (as PyTorch checkpoints are; they contain pickles)"),
    (b"\x80\x02", "a Python pickle"),
    (b"\x80\x03", "a Python pickle"),
    (b"\x80\x04", "a Python pickle"),
    (b"\x80\x05", "a Python pickle"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file that it points to"),
    (b"tjgg", "a GGML file from before GGUF"),
    (b"fmgg", "a GGML file from before GGUF"),
    (b"lmgg", "a GGML file from before GGUF"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x89HDF", "an HDF5 file"),
)


def describe_content(head: bytes) -> str:
    """What a file that begins with `head` seems to be, for an error message."""
    for magic, description in _MAGICS:
        if head.startswith(magic):
            return description
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page (an error or login page saved under this name?)"
    if head[8:10] == b'{"':
        return "a safetensors file"
    if text.startswith(b"{"):
        return "a JSON text"
    return f"neither GGUF nor safetensors (starts with {_start(head)})"


def _start(head: bytes) -> str:
    """A file's first bytes for an error message: as text if they are text, else in hexadecimal."""
    text = head[:16].split(b"\n")[0].rstrip(b"\r")
    if len(text) >= 4 and text.isascii() and text.decode().isprintable():
        return text.decode()
    return f"the bytes {head[:8].hex(' ')}"


def shown(name: str) -> str:
    """A name from a file in a form that is safe in a message: quoted, escaped and shortened."""
    return repr(name if len(name) <= 80 else name[:77] + "...")


class MappedFile:
    """The whole file as one read-only view. If the file is truncated while it is mapped, the
    operating system ends the process on the next read; we can't prevent that."""

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self.size = len(mapping)
        self.view = memoryview(mapping)
        self._mapping: mmap.mmap | None = mapping  # None once closed

    @classmethod
    def open(cls, path: Path) -> MappedFile:
        try:
            found = path.stat()
            if not stat.S_ISREG(found.st_mode):  # opening a named pipe would wait forever
                raise WeightsError(
                    f"{path}: not a regular file; expected a model file.", "Give another path."
                )
            if found.st_size == 0:
                raise WeightsError(f"{path}: the file is empty.", DAMAGED)
            with path.open("rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise WeightsError(
                f"{path}: can't be opened: {reason}.", "Check the path and its permissions."
            ) from error
        return cls(path, mapping)

    def head(self) -> bytes:
        return bytes(self.view[:64])

    def release(self, start: int, size: int) -> None:
        """Free the memory of the pages that hold these bytes.

        Rounded up to whole pages: a page that also holds other data is loaded again when read.
        """
        if self._mapping is None or size == 0 or not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = start - start % mmap.PAGESIZE
        self._mapping.madvise(mmap.MADV_DONTNEED, first, start + size - first)

    def close(self) -> None:
        """Unmap the file, or if views of it still exist, let the last of them do so."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            with contextlib.suppress(BufferError):
                self.view.release()
                mapping.close()
