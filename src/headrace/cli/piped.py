"""Text that is piped in: read in the background, so that a pipe that never sends anything (one
inherited from a supervisor, say) delays an answer a little but never prevents it.

Knows standard input; run.py decides what the text is for.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from headrace.core.errors import HeadraceError, InvalidRequestError

MAX_BYTES = 32 << 20  # more than any context holds; /dev/zero has no end
_CHUNK_BYTES = 1 << 16


class PipedText:
    """Standard input up to its end. Read in daemon threads, so that a read that never returns does
    not keep the process alive."""

    def __init__(self, descriptor: int | None, data: bytes = b"") -> None:
        self._data = bytearray(data)
        self._began_s = time.monotonic()
        self._first = threading.Event()  # set once a byte, or the end of the input, has arrived
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None
        if descriptor is None:
            self._first.set()
            return
        self._thread = threading.Thread(target=self._read, args=(descriptor,), daemon=True)
        self._thread.start()

    def _read(self, descriptor: int) -> None:
        try:
            while len(self._data) <= MAX_BYTES and (chunk := os.read(descriptor, _CHUNK_BYTES)):
                self._data += chunk
                self._first.set()
        except OSError as error:  # a folder, or a descriptor that was closed
            self._error = error
        finally:
            self._first.set()

    def has_begun(self, within_s: float) -> bool:
        """Whether a byte or the end arrived within `within_s` of the start; waits until then."""
        return self._first.wait(max(0.0, self._began_s + within_s - time.monotonic()))

    def text(self) -> str:
        """The whole text; waits for the end of the input."""
        if self._thread is not None:
            self._thread.join()
        if len(self._data) > MAX_BYTES:
            raise bad_prompt(f"standard input is over {MAX_BYTES >> 20} MiB")
        try:
            return self._data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise bad_prompt(f"standard input is not UTF-8 (byte {error.start})") from error


def piped_text() -> PipedText | None:
    """None where standard input is closed or a keyboard."""
    stream = sys.stdin
    if stream is None or stream.closed or stream.isatty():
        return None
    try:
        return PipedText(stream.fileno())
    except (OSError, ValueError):  # no file descriptor: replaced by an in-memory object
        return PipedText(None, stream.buffer.read())


def bad_prompt(cause: str) -> HeadraceError:
    return InvalidRequestError(
        f"{cause[0].upper()}{cause[1:]}; expected some text.",
        'Give it as `headrace run "..."`, or pipe UTF-8 text in.',
        param="prompt",
    )
