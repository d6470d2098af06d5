"""Two engines of one process in turns of a twentieth of a second, each in a thread of its own.

A comparison of two runs, one after the other, compares two states of the machine. Here both see the
same: an engine asks for its turn with every step, and gives it away when its time is up. Its time
is that of its turns. Knows LLMs, and nothing of what they compute.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from headrace import LLM
from headrace.core.request import SampledToken

T = TypeVar("T")

# Some steps. The weights are read anew in every step, so a turn is no dearer for being short.
TURN_S = 0.05


@dataclass(slots=True)
class Took:
    seconds: float = 0.0


class Turns:
    """One engine's turns. Between steps it may lose its turn, and waits until it has it again."""

    def __init__(self, table: Table, name: str) -> None:
        self._table = table
        self._name = name
        self._had_s = 0.0  # turns that are over
        self._since_s = 0.0  # when this one began

    def begin(self) -> None:
        self._table.wait(self._name)
        self._since_s = time.perf_counter()

    def pause(self) -> None:
        """Between two steps: somebody else's turn, if this one has lasted long enough."""
        took_s = time.perf_counter() - self._since_s
        if took_s < TURN_S:
            return
        self._had_s += took_s
        self._table.hand_on(self._name)
        self.begin()

    def end(self) -> None:
        self._had_s += time.perf_counter() - self._since_s
        self._table.leave(self._name)

    @contextmanager
    def measured(self) -> Iterator[Took]:
        """The time of the turns while this is open."""
        took = Took()
        before_s = self._now_s()
        yield took
        took.seconds = self._now_s() - before_s

    def _now_s(self) -> float:
        return self._had_s + time.perf_counter() - self._since_s


class Table:
    def __init__(self, names: list[str]) -> None:
        self._order = list(names)
        self._changed = threading.Condition()

    def wait(self, name: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._order[0] == name)

    def hand_on(self, name: str) -> None:
        with self._changed:
            self._order.remove(name)
            self._order.append(name)
            self._changed.notify_all()

    def leave(self, name: str) -> None:
        with self._changed:
            self._order.remove(name)
            self._changed.notify_all()


def take_turns(works: Mapping[str, tuple[LLM, Callable[[Turns], T]]]) -> dict[str, T]:
    """Do all works together; each has an engine, and is given its turns."""
    table = Table(list(works))
    done: dict[str, T] = {}
    failed: list[BaseException] = []

    def do(name: str, llm: LLM, work: Callable[[Turns], T]) -> None:
        turns = Turns(table, name)
        engine = llm._engine
        step = engine.step

        def paused_step() -> list[SampledToken]:
            turns.pause()
            return step()

        turns.begin()
        engine.step = paused_step  # type: ignore[method-assign]
        try:
            done[name] = work(turns)
        except BaseException as error:
            failed.append(error)
        finally:
            del engine.step
            turns.end()

    threads = [
        threading.Thread(target=do, args=(name, *each), name=name) for name, each in works.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return done
