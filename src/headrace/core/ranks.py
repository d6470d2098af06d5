"""The processes that compute one model together, as a backend sees them: this one is `rank`.

All of them run the same steps in the same order, and meet in these calls. `Values` are a backend's
own: numpy arrays or torch tensors. Knows neither processes nor a network; parallel/ has those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

Values = TypeVar("Values")
Plain = TypeVar("Plain")  # lists and numbers


class Ranks(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def count(self) -> int: ...

    def sum(self, values: Values) -> Values:
        """The sum over all ranks, added in the order of ranks: a value's bits do not depend on
        where in the array it is, and every rank has the same."""
        ...

    def gather(self, values: Values, widths: Sequence[int]) -> Values | None:
        """All ranks' columns side by side, for the first rank: [m, widths[rank]] each. None on
        the others."""
        ...

    def first(self, values: Values) -> Values:
        """The first rank's values, on all of them."""
        ...

    def share(self, value: Plain) -> Plain:
        """The same for lists and numbers."""
        ...

    def close(self) -> None:
        """Leave the others. A process is in one such group at a time."""
        ...
