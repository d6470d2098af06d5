"""The parameters of each row that a token is drawn from, sent in one copy, and the draws' launches.

The launches read only device memory, so that one CUDA graph works for any mix of requests. Knows
arrays of what is wanted (wanted.py) and rows of logits; nothing of sequences.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.backends.cuda.draws import adjust_kernel, draw_rows, draw_sizes
from headrace.backends.cuda.draws.draw_kernels import launch_draws
from headrace.backends.cuda.draws.draw_sizes import blocks_of, candidates_of
from headrace.backends.cuda.draws.logits_kernels import pieces_of as scratch_pieces
from headrace.backends.cuda.draws.wanted import Wanted

LEAST_WEIGHT = 2.0**-40
_MOST_INVERSE = 1e300  # of a temperature: keeps the inverse of a tiny one finite
_ASKED = draw_sizes.ASKED
_HOST_BUFFERS = 3  # in turn: two steps may be in flight while a third is written


class AskedRows:
    """Rows of parameters on the host: the same memory as float64, float32 and int32."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.tensor = torch.zeros(
            (rows, _ASKED), dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self.i32: NDArray[np.int32] = self.tensor.numpy()
        self.f32: NDArray[np.float32] = self.i32.view(np.float32)
        self.f64: NDArray[np.float64] = self.i32.view(np.float64)

    def write(self, wanted: Wanted, some: slice, offset: int) -> None:
        """Writes the draws `some` of `wanted`, whose logits begin at its row `offset`. Rows are not
        adjusted unless that is set afterwards."""
        self.i32[:] = 0
        at = wanted.sampled[some] - offset
        temperature, top_p, min_p, typical_p, top_k = wanted.draws[some].T
        is_typical = typical_p < 1
        # typical.py runs first, and applies top_k and min_p as well.
        least = np.maximum(np.where(is_typical, 0.0, min_p), LEAST_WEIGHT)
        with np.errstate(divide="ignore", over="ignore"):
            inverse = np.minimum(1.0 / temperature, _MOST_INVERSE)
        columns = (temperature, inverse, top_p, least, -np.log(least), wanted.uniforms[some])
        self.f64[at, :6] = np.stack(columns, 1)
        self.i32[at, draw_rows.KIND.value] = draw_rows.DRAW.value
        most = np.minimum(top_k, np.iinfo(np.int32).max)
        self.i32[at, draw_rows.TOP_K.value] = np.where(is_typical, 0, most)
        self.f32[at, adjust_kernel.REPETITION.value] = 1
        self.i32[at, adjust_kernel.HISTORY.value] = self.i32[at, adjust_kernel.MASK.value] = -1


class DrawWork:
    """Device memory shared by the kernels that draw, for `rows` rows at a time."""

    def __init__(self, rows: int, vocab: int, device: torch.device, candidates: int) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.most_candidates = candidates
        pieces = draw_sizes.most_pieces(rows)
        self.masses = empty(pieces, draw_sizes.DEPTHS, dtype=torch.float32)
        self.counts = empty(pieces, draw_sizes.BINS)
        self.states = empty(rows, draw_sizes.STATE)
        self.edges = empty(rows, draw_sizes.EDGES, dtype=torch.float32)
        self.sums = empty(rows, blocks_of(vocab), dtype=torch.float64)
        self.totals = empty(rows, draw_sizes.MOST_PIECES, dtype=torch.float64)
        self.candidates = empty(rows, candidates)

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in vars(self).values() if torch.is_tensor(value))


class Drawing:
    def __init__(
        self, rows: int, vocab: int, device: torch.device, candidates: int | None = None
    ) -> None:
        self._device = device
        self._vocab = vocab
        self.asked = torch.zeros((rows, _ASKED), dtype=torch.int32, device=device)
        self._work = DrawWork(rows, vocab, device, candidates or candidates_of(vocab))
        self._hosts = [AskedRows(rows, device) for _ in range(_HOST_BUFFERS)]
        self._turn = 0

    @property
    def nbytes(self) -> int:
        return self.asked.nbytes + self._work.nbytes

    def next_host(self, *, again: bool) -> AskedRows:
        """The next host buffer for parameters. `again`: one more for the same step, which may need
        any number of them."""
        if again:
            return AskedRows(len(self.asked), self._device)
        self._turn = (self._turn + 1) % _HOST_BUFFERS
        return self._hosts[self._turn]

    def send(self, host: AskedRows) -> None:
        self.asked.copy_(host.tensor, non_blocking=True)

    def launch(
        self,
        logits: torch.Tensor,
        original: torch.Tensor,
        scratch: torch.Tensor,
        log_sums: torch.Tensor,
        tokens: torch.Tensor,
        logprobs: torch.Tensor,
    ) -> None:
        """Writes the tokens and logprobs of all rows that draw; the others are not changed."""
        pieces, _ = scratch_pieces(self._vocab)
        launch_draws(
            logits,
            original,
            self.asked[: len(logits)],
            scratch,
            self._work,
            log_sums,
            tokens,
            logprobs,
            pieces,
        )
