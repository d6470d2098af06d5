"""Shows a fetch's progress on standard error: a bar on a terminal, else one line per stage.

Knows nothing of what is fetched; the caller reports (what, bytes so far, bytes in all).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def shown_progress(
    say: Callable[[str], None] | None = None,
) -> Iterator[Callable[[str, int, int | None], None]]:
    """Nothing appears, and rich is not imported, until something is reported. `say`
    replaces standard error as the place where the lines go."""
    shown = _Bar() if say is None and sys.stderr.isatty() else _Lines(say or _print)
    try:
        yield shown.report
    finally:
        shown.close()


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Lines:
    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._what = ""

    def report(self, what: str, done_bytes: int, total_bytes: int | None) -> None:
        if what == self._what:
            return
        self._what = what
        size = "" if total_bytes is None else f" ({total_bytes / 1e6:.1f} MB)"
        self._say(f"{what}{size}")

    def close(self) -> None:
        pass


class _Bar:
    def __init__(self) -> None:
        self._end: Callable[[], None] | None = None
        self._update: Callable[[str, int, int | None], None] | None = None

    def report(self, what: str, done_bytes: int, total_bytes: int | None) -> None:
        if self._update is None:
            self._update = self._start()
        self._update(what, done_bytes, total_bytes)

    def _start(self) -> Callable[[str, int, int | None], None]:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        bars = Progress(
            *columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True)
        )
        bars.start()
        self._end = bars.stop
        stages = {}

        def update(what: str, done_bytes: int, total_bytes: int | None) -> None:
            if what not in stages:
                stages[what] = bars.add_task(what, total=total_bytes)
            bars.update(stages[what], completed=done_bytes, total=total_bytes)

        return update

    def close(self) -> None:
        if self._end is not None:
            self._end()
