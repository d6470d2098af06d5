"""What one rendering of a chat template may cost: steps, characters, nesting, time.

A template comes with a model's files and is not trusted. Every value it creates is counted here;
exceeding a limit raises TemplateError. It knows nothing of Jinja.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from itertools import chain
from typing import Any, TypeVar

from headrace.core.errors import TemplateError

MAX_STEPS = 1_000_000  # loop turns, calls and filters
MAX_VALUE_CHARS = 4 << 20  # one value: about a million tokens of text
MAX_TOTAL_CHARS = 64 << 20  # all values ever made, which bounds memory too
MAX_NESTING = 64
MAX_INT_BITS = 4096
DEADLINE_S = 2.0

_ITEM_CHARS = 8  # what an element counts for in addition to its own size: a pointer

T = TypeVar("T")


def over_limit(what: str) -> TemplateError:
    return TemplateError(
        f"The chat template ran past its limits: {what}.",
        "Shorten the messages; if they are short, the model's template is broken or hostile: "
        "send a plain prompt instead.",
    )


class Budget:
    """One rendering's allowance. Not shared between renderings or threads."""

    def __init__(self) -> None:
        self._deadline = time.monotonic() + DEADLINE_S
        self._steps_left = MAX_STEPS
        self._chars_left = MAX_TOTAL_CHARS
        # Sizes of containers by identity. The container is kept, so that its id is not reused; a
        # template can't change one (the sandbox is immutable).
        self._sizes: dict[int, tuple[object, int]] = {}

    def step(self) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise over_limit(f"over {MAX_STEPS} steps")
        if time.monotonic() > self._deadline:
            raise over_limit(f"over {DEADLINE_S:g} s")

    def charge(self, chars: int) -> None:
        self._chars_left -= chars
        if self._chars_left < 0:
            raise over_limit(f"over {MAX_TOTAL_CHARS} characters in all its values together")

    def require(self, chars: int) -> None:
        """Refuse a value before it is made."""
        if chars > MAX_VALUE_CHARS:
            raise over_limit(f"a value of over {MAX_VALUE_CHARS} characters")
        if chars > self._chars_left:
            self.charge(chars)

    def iterate(self, values: Iterable[T]) -> Iterator[T]:
        for value in values:
            self.step()
            yield value

    def size(self, value: object, depth: int = 0) -> int:
        """Characters in a value with everything it contains; an item contained twice counts twice.

        Converting a value to text and comparing it take time in proportion to this, so a small
        structure that expands into a huge one is refused here, when it is created.
        """
        if isinstance(value, str):
            return len(value)
        if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise over_limit(f"an integer of over {MAX_INT_BITS} bits")
        if not isinstance(value, (list, tuple, dict)):
            return _ITEM_CHARS
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        if depth > MAX_NESTING:
            raise over_limit(f"a value nested more than {MAX_NESTING} deep")
        self.charge(_ITEM_CHARS * (len(value) + 1))
        items: Iterable[object] = value
        if isinstance(value, dict):
            items = chain(value.keys(), value.values())
        total = _ITEM_CHARS
        for item in items:
            total += _ITEM_CHARS + self.size(item, depth + 1)
            if total > MAX_VALUE_CHARS:
                self.require(total)
        self._sizes[id(value)] = (value, total)
        return total

    def made(self, value: T) -> T:
        """Account for a new value and hand it on."""
        if isinstance(value, str):
            self.require(len(value))
            self.charge(len(value))
        else:
            self.size(value)
        return value

    def text(self, value: Any) -> str:
        """`str(value)`, accounted for."""
        if isinstance(value, str):
            return value
        self.require(self.size(value))
        return self.made(str(value))


# The rendering under way in this thread.
current_budget: ContextVar[Budget] = ContextVar("current_budget")
