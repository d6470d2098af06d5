"""Drawing and scoring tokens on the device, in the order of backends/reference/sampling.py.

Two launches compute the argmax and its log-probability for every wanted row. A few more
(drawing.py) replace it by a drawn token for rows that sample. A CUDA graph can contain all of
these. If rows are adjusted (adjusting.py) or use typical_p (typical.py), their logits are copied
first. Targets and alternatives come last. Nothing waits for the device. Knows arrays of what is
wanted (wanted.py); nothing of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.backends.cuda.draws.adjusting import Adjusting
from headrace.backends.cuda.draws.draw_sizes import PIECES, ROWS_TOGETHER
from headrace.backends.cuda.draws.drawing import Drawing
from headrace.backends.cuda.draws.logits_kernels import launch_largest, launch_pieces
from headrace.backends.cuda.draws.tops_kernels import MOST, launch_tops
from headrace.backends.cuda.draws.typical import keep_typical
from headrace.backends.cuda.draws.wanted import Wanted

_TYPICAL_TOGETHER = 8  # likewise, with more of it


class Sampler:
    """Buffers for `rows` rows of logits at a time, for `results` wanted rows of a step, and for
    `slots` sequences whose logits are adjusted."""

    def __init__(
        self,
        rows: int,
        results: int,
        slots: int,
        vocab_size: int,
        device: torch.device,
        candidates: int | None = None,
    ) -> None:
        self.device = device
        self.vocab_size = vocab_size
        # Tokens and logprobs in one tensor, so that one copy brings both to the host.
        self.results = torch.zeros((2, results), dtype=torch.int32, device=device)
        self.tokens = self.results[0]
        self.logprobs = self.results[1].view(torch.float32)
        self._log_sums = torch.zeros(results, dtype=torch.float32, device=device)
        self._scratch = torch.zeros((4, rows, PIECES), dtype=torch.float32, device=device)
        self._drawing = Drawing(rows, vocab_size, device, candidates)
        self._adjusting = Adjusting(rows, slots, vocab_size, device)

    @property
    def nbytes(self) -> int:
        own = self.results.nbytes + self._log_sums.nbytes + self._scratch.nbytes
        return own + self._drawing.nbytes + self._adjusting.nbytes

    def launch(self, logits: torch.Tensor, offset: int = 0) -> None:
        """The argmax of every row, written to the results from `offset` on."""
        end = offset + len(logits)
        launch_largest(
            logits,
            self._scratch,
            self.tokens[offset:end],
            self.logprobs[offset:end],
            self._log_sums[offset:end],
        )

    def warm_up(self, logits: torch.Tensor) -> None:
        """Compile the kernels that no graph contains and only some requests need, so that no
        request has to wait for that."""
        none = torch.zeros(len(logits), dtype=torch.int32, device=self.device)
        self._adjusting.launch_kernel(logits, self._drawing.asked, none, none, self._scratch)
        launch_tops(logits, none[:1].long(), self._log_sums, 1)

    def prepare_draws(
        self,
        wanted: Wanted,
        logits: torch.Tensor,
        step_rows: torch.Tensor,
        inputs: torch.Tensor,
        offset: int = 0,
    ) -> bool:
        """Prepares `launch_draws` for rows from `offset` on of `wanted`, over their logits. Returns
        whether copies were made to draw from. `step_rows` is the index of each row in the step's
        tokens, `inputs`."""
        drawn = _between(wanted.sampled, offset, offset + len(logits))
        host = self._drawing.next_host(again=offset > 0)
        host.write(wanted, drawn, offset)
        is_typical = wanted.draws[drawn, 3] < 1
        if not wanted.adjusting and not is_typical.any():
            self._drawing.send(host)
            return False

        def send_asked() -> torch.Tensor:
            self._drawing.send(host)
            return self._drawing.asked

        self._adjusting.launch(
            wanted,
            logits,
            offset,
            host,
            self.send,
            send_asked,
            step_rows,
            inputs,
            self._scratch,
        )
        if is_typical.any():
            self._keep_typical(
                wanted, drawn.start + np.flatnonzero(is_typical), len(logits), offset
            )
        return True

    def launch_draws(self, logits: torch.Tensor, is_adjusted: bool, offset: int = 0) -> None:
        """Replaces the argmax by the drawn token in rows that draw."""
        end = offset + len(logits)
        self._drawing.launch(
            self._adjusting.adjusted[: len(logits)] if is_adjusted else logits,
            logits,
            self._scratch,
            self._log_sums[offset:end],
            self.tokens[offset:end],
            self.logprobs[offset:end],
        )

    def finish(self, wanted: Wanted, logits: torch.Tensor, offset: int = 0) -> Tops | None:
        """Scores the targets of rows from `offset` on of `wanted`; returns the alternatives."""
        end = offset + len(logits)
        if len(wanted.scored):
            self._score(wanted, logits, offset, end)
        return self._find_tops(wanted, logits, offset, end) if wanted.most_tops else None

    def send(self, values: NDArray[np.generic]) -> torch.Tensor:
        """Copies an array to the device without waiting."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _keep_typical(
        self, wanted: Wanted, numbers: NDArray[np.int64], rows: int, offset: int
    ) -> None:
        """Applies typical_p to the draws with these numbers, in their adjusted copies."""
        adjusted = self._adjusting.adjusted
        for first in range(0, len(numbers), _TYPICAL_TOGETHER):
            some = numbers[first : first + _TYPICAL_TOGETHER]
            at = self.send(wanted.sampled[some].astype(np.int64) - offset)
            asked = self.send(wanted.draws[some])
            adjusted.index_copy_(0, at, keep_typical(adjusted.index_select(0, at), asked))
        launch_pieces(adjusted[:rows], self._scratch)

    def _score(self, wanted: Wanted, logits: torch.Tensor, offset: int, end: int) -> None:
        some = _between(wanted.scored, offset, end)
        rows = self.send(wanted.scored[some].astype(np.int64))
        targets = self.send(wanted.targets[wanted.scored[some]].astype(np.int64))
        found = logits[rows - offset, targets] - self._log_sums[rows]
        self.logprobs.index_copy_(0, rows, found)

    def _find_tops(
        self, wanted: Wanted, logits: torch.Tensor, offset: int, end: int
    ) -> Tops | None:
        asking = wanted.topped[_between(wanted.topped, offset, end)]
        if not len(asking):
            return None
        most = int(wanted.tops[asking].max())
        if most <= MOST:
            rows = self.send(asking.astype(np.int64) - offset)
            log_sums = self._log_sums[offset:end]
            return Tops(asking, *launch_tops(logits, rows, log_sums, most))
        tokens, logprobs = [], []
        for first in range(0, len(asking), ROWS_TOGETHER):
            rows = self.send(asking[first : first + ROWS_TOGETHER].astype(np.int64))
            found = logits.index_select(0, rows - offset)
            keys, _ = torch.topk(sort_keys(found), most, dim=1, sorted=True)
            order = 0xFFFFFFFF - (keys & 0xFFFFFFFF)
            tokens.append(order)
            logprobs.append(found.gather(1, order) - self._log_sums[rows, None])
        return Tops(asking, torch.cat(tokens), torch.cat(logprobs))


class Tops:
    """Alternatives of some rows: indexes of wanted rows, tokens and logprobs [n, most]."""

    def __init__(
        self, rows: NDArray[np.int32], tokens: torch.Tensor, logprobs: torch.Tensor
    ) -> None:
        self.rows = rows
        self._host = [to_host(tokens), to_host(logprobs)]

    def lists(self, tops: NDArray[np.int32]) -> Iterator[tuple[int, list[tuple[int, float]]]]:
        """(wanted row, its alternatives). Only after the device has finished the copies."""
        for number, tokens, logprobs in zip(
            self.rows.tolist(), self._host[0].tolist(), self._host[1].tolist(), strict=True
        ):
            yield number, list(zip(tokens, logprobs, strict=True))[: tops[number]]


def sort_keys(rows: torch.Tensor) -> torch.Tensor:
    """int64 whose descending order is (logit descending, id ascending)."""
    bits = (rows + 0.0).view(torch.int32)  # + 0.0: turns -0.0 into 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(rows.shape[1], device=rows.device)
    return (ordered.long() << 32) + (0xFFFFFFFF - ids)


def _between(numbers: NDArray[np.int32], first: int, end: int) -> slice:
    """The slice of a sorted array with the numbers from `first` up to `end`."""
    low, high = np.searchsorted(numbers, (first, end))
    return slice(int(low), int(high))


def to_host(values: torch.Tensor) -> torch.Tensor:
    """An asynchronous copy to the host: complete once the device has reached it."""
    if values.device.type == "cpu":
        return values.clone()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
