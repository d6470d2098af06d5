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
    """Some share a stage's layers, and are `count`; others have other layers. The first rank of the
    last stage has the logits, draws, and leads."""

    @property
    def rank(self) -> int: ...  # of those of this stage

    @property
    def count(self) -> int: ...  # of this stage

    def sum(self, values: Values) -> Values:
        """The sum over this stage's ranks, added in the order of ranks: a value's bits do not
        depend on where in the array it is, and every rank has the same."""
        ...

    def gather(self, values: Values, widths: Sequence[int]) -> Values | None:
        """This stage's ranks' columns side by side, for its first rank: [m, widths[rank]] each.
        None on the others."""
        ...

    def send(self, values: Values) -> None:
        """To the rank of the next stage that has the same number."""
        ...

    def receive(self, values: Values) -> Values:
        """From that of the stage before; `values` are of the same shape, and may be written to."""
        ...

    def first(self, values: Values) -> Values:
        """The leading rank's values, on all of them, of every stage."""
        ...

    def share(self, value: Plain) -> Plain:
        """The same for lists and numbers."""
        ...

    def close(self) -> None:
        """Leave the others. A process is in one such group at a time."""
        ...
