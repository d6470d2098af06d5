"""What holds files, threads or memory until it is closed, by `close()` or by a with-block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closes(ABC):
    @abstractmethod
    def close(self) -> None:
        """May be called more than once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
