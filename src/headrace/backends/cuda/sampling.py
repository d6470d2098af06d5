"""Drawing and scoring tokens on the device, in the order of backends/reference/sampling.py.

Every wanted row gets the largest logit's token and its log-probability by two launches that a graph
can hold. Rows that ask for more (a temperature, adjustments, alternatives, targets) are worked on
afterwards, by numbers that were known when the plan was read: nothing waits for the device. Draws
look at a row's likeliest tokens first; where these do not decide, a kernel searches the whole row.
Knows arrays of what is wanted (backends/draws.py); nothing of sequences and blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.backends.cuda.triton.sampling import PIECES, launch_crossing, launch_largest
from headrace.backends.draws import Adjustments, Wanted

LEAST_WEIGHT = 2.0**-40
CANDIDATES = 1024  # of a row, that a draw looks at first
ROWS_TOGETHER = 32  # worked on at one time: copies and keys of whole rows take memory
# Of a row's token while it is drawn from: copy, key, candidates, weight in double precision.
SCRATCH_ROW_BYTES = 48
NONE_ALLOWED, PAST_RANGE = -2, -3  # in place of a token


class Sampler:
    """Buffers for `rows` rows of logits at a time, and for `results` wanted rows of a step."""

    def __init__(
        self,
        rows: int,
        results: int,
        vocab_size: int,
        device: torch.device,
        candidates: int = CANDIDATES,
    ) -> None:
        self.device = device
        self.vocab_size = vocab_size
        self._candidates = min(candidates, vocab_size)
        # Tokens, and logprobs beside them, so that one copy brings both to the host.
        self.results = torch.zeros((2, results), dtype=torch.int32, device=device)
        self.tokens = self.results[0]
        self.logprobs = self.results[1].view(torch.float32)
        self._log_sums = torch.zeros(results, dtype=torch.float32, device=device)
        self._scratch = torch.zeros((3, rows, PIECES), dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        return self.results.nbytes + self._log_sums.nbytes + self._scratch.nbytes

    def launch(self, logits: torch.Tensor, offset: int = 0) -> None:
        """For every row its likeliest token: results from `offset` on."""
        end = offset + len(logits)
        launch_largest(
            logits,
            self._scratch,
            self.tokens[offset:end],
            self.logprobs[offset:end],
            self._log_sums[offset:end],
        )

    def finish(self, wanted: Wanted, logits: torch.Tensor, offset: int = 0) -> Tops | None:
        """What rows offset.. of `wanted` ask beyond that, over their logits; the alternatives."""
        end = offset + len(logits)
        if len(wanted.scored):
            self._score(wanted, logits, offset, end)
        drawn = _between(wanted.sampled, offset, end)
        for first in range(drawn.start, drawn.stop, ROWS_TOGETHER):
            some = slice(first, min(first + ROWS_TOGETHER, drawn.stop))
            self._draw(wanted, some, logits, offset)
        return self._find_tops(wanted, logits, offset, end) if wanted.most_tops else None

    def send(self, values: NDArray[np.generic]) -> torch.Tensor:
        """An array to the device; the host goes on."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _score(self, wanted: Wanted, logits: torch.Tensor, offset: int, end: int) -> None:
        some = _between(wanted.scored, offset, end)
        rows = self.send(wanted.scored[some].astype(np.int64))
        targets = self.send(wanted.targets[wanted.scored[some]].astype(np.int64))
        found = logits[rows - offset, targets] - self._log_sums[rows]
        self.logprobs.index_copy_(0, rows, found)

    def _draw(self, wanted: Wanted, some: slice, logits: torch.Tensor, offset: int) -> None:
        numbers = wanted.sampled[some]
        rows = self.send(numbers.astype(np.int64))
        chosen = logits.index_select(0, rows - offset)
        if wanted.adjustments is not None:
            chosen = self._adjust(chosen, numbers, wanted.adjustments)
        params = self.send(wanted.draws[some])  # temperature, top_p, min_p, typical_p, top_k
        uniforms = self.send(wanted.uniforms[some])
        typical = bool((wanted.draws[some, 3] < 1).any())
        tokens, largest = self._choose(chosen, params, uniforms, typical)
        failed = self.tokens[rows] < 0
        tokens = torch.where(largest == -torch.inf, NONE_ALLOWED, tokens)
        tokens = torch.where(largest == torch.inf, PAST_RANGE, tokens)
        tokens = torch.where(failed, self.tokens[rows].long(), tokens)
        logprobs = logits[rows - offset, tokens.clamp(min=0)] - self._log_sums[rows]
        self.tokens.index_copy_(0, rows, tokens.to(torch.int32))
        self.logprobs.index_copy_(0, rows, logprobs)

    def _choose(
        self, rows: torch.Tensor, params: torch.Tensor, uniforms: torch.Tensor, typical: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A token of each row, and its largest logit: int64 and float64 [n]"""
        vocab = rows.shape[1]
        count = vocab if typical else self._candidates
        keys, _ = torch.topk(sort_keys(rows), count, dim=1, sorted=True)
        order = 0xFFFFFFFF - (keys & 0xFFFFFFFF)
        logits = rows.gather(1, order).double()
        largest = logits[:, 0].clone()
        greedy = params[:, 0] == 0
        temperature = torch.where(greedy, 1.0, params[:, 0])
        top_k = torch.where(greedy, 1, params[:, 4].long())
        least = params[:, 2].clamp(min=LEAST_WEIGHT)
        base = torch.where(largest.isfinite(), largest, 0.0)
        weights = torch.exp((logits - base[:, None]) / temperature[:, None])
        ranks = torch.arange(count, device=self.device)
        last = torch.where(top_k > 0, top_k, vocab)
        inside = (weights >= least[:, None]) & (ranks < last[:, None])
        weights = torch.where(inside, weights, 0.0)
        if typical:
            weights = _typical(logits, weights, params[:, 3])
        sums = weights.cumsum(1)
        covered = ~inside[:, -1] | (last == count)
        total = sums[:, -1]
        if count < vocab:
            every = torch.exp((rows.double() - base[:, None]) / temperature[:, None])
            every = torch.where(every >= least[:, None], every, 0.0).sum(1)
            total = torch.where(covered, total, every)
        token, complete = _cross(sums, weights, order, params[:, 1], total, covered, uniforms)
        if count < vocab:
            # A row limited to more tokens than were looked at can't know their sum from here.
            complete &= covered | (top_k == 0)
            known = torch.stack([temperature, params[:, 1], least, uniforms, base], 1)
            launch_crossing(rows, known, top_k, token, complete.to(torch.int32))
        return token, largest

    def _adjust(
        self, rows: torch.Tensor, numbers: NDArray[np.int32], asked: Adjustments
    ) -> torch.Tensor:
        """Steps 1 to 4 of the order; `rows` is a copy already."""
        some = slice(*np.searchsorted(asked.rows, (numbers[0], numbers[-1] + 1)))
        if some.start == some.stop:
            return rows
        places = np.searchsorted(numbers, asked.rows[some])  # adjusted rows among these
        part = asked.part(some)

        def flat(owners: NDArray[np.int64], ids: NDArray[np.int32]) -> torch.Tensor:
            return self.send(places[owners] * rows.shape[1] + ids)

        values = rows.view(-1)
        if len(part.bias_ids):
            at = flat(part.bias_owners, part.bias_ids)
            values[at] = values[at] + self.send(part.bias_values)
        self._limit(rows, places, part)
        if len(part.banned_ids):
            values[flat(part.banned_owners, part.banned_ids)] = -torch.inf
        if len(part.seen_ids):
            at = flat(part.seen_owners, part.seen_ids)
            penalty = self.send(part.penalties[part.seen_owners, 0])
            found = values[at]
            values[at] = torch.where(found > 0, found / penalty, found * penalty)
        if len(part.count_ids):
            at = flat(part.count_owners, part.count_ids)
            presence = self.send(part.penalties[part.count_owners, 1])
            frequency = self.send(part.penalties[part.count_owners, 2])
            less = frequency * self.send(part.count_values)
            values[at] = values[at] - less - presence
        return rows

    def _limit(self, rows: torch.Tensor, places: NDArray[np.int64], part: Adjustments) -> None:
        """Tokens outside `allowed` and `mask`: -infinity."""
        limited = np.flatnonzero(part.has_allowed)
        if len(limited):
            own = np.full(len(part.rows), -1)
            own[limited] = np.arange(len(limited))
            allowed = torch.zeros(
                (len(limited), rows.shape[1]), dtype=torch.bool, device=self.device
            )
            at = own[part.allowed_owners] * rows.shape[1] + part.allowed_ids
            allowed.view(-1)[self.send(at)] = True
            self._drop(rows, places[limited], allowed)
        masked = np.flatnonzero(part.has_mask)
        if len(masked):
            packed = self.send(part.masks(masked, -(-rows.shape[1] // 8)))
            bits = torch.arange(8, device=self.device, dtype=torch.uint8)
            allowed = (packed[:, :, None] >> bits) & 1 > 0
            self._drop(rows, places[masked], allowed.view(len(masked), -1)[:, : rows.shape[1]])

    def _drop(self, rows: torch.Tensor, places: NDArray[np.int64], allowed: torch.Tensor) -> None:
        at = self.send(places)
        rows.index_copy_(0, at, rows.index_select(0, at).masked_fill_(~allowed, -torch.inf))

    def _find_tops(
        self, wanted: Wanted, logits: torch.Tensor, offset: int, end: int
    ) -> Tops | None:
        asking = wanted.topped[_between(wanted.topped, offset, end)]
        if not len(asking):
            return None
        most = int(wanted.tops[asking].max())
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
    """Alternatives of some rows: numbers of wanted rows, tokens and logprobs [n, most]."""

    def __init__(
        self, rows: NDArray[np.int32], tokens: torch.Tensor, logprobs: torch.Tensor
    ) -> None:
        self.rows = rows
        self._host = [to_host(tokens), to_host(logprobs)]

    def lists(self, tops: NDArray[np.int32]) -> Iterator[tuple[int, list[tuple[int, float]]]]:
        """(wanted row, its alternatives); only once the device has come so far."""
        for number, tokens, logprobs in zip(
            self.rows.tolist(), self._host[0].tolist(), self._host[1].tolist(), strict=True
        ):
            yield number, list(zip(tokens, logprobs, strict=True))[: tops[number]]


def sort_keys(rows: torch.Tensor) -> torch.Tensor:
    """int64 whose order, largest first, is (logit descending, id ascending)."""
    bits = (rows + 0.0).view(torch.int32)  # + 0.0: there is one zero
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(rows.shape[1], device=rows.device)
    return (ordered.long() << 32) + (0xFFFFFFFF - ids)


def _cross(
    sums: torch.Tensor,
    weights: torch.Tensor,
    order: torch.Tensor,
    top_p: torch.Tensor,
    total: torch.Tensor,
    covered: torch.Tensor,
    uniforms: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps 9 and 10 over the candidates' running sums: tokens, and whether they are decided."""
    limit = (top_p * total)[:, None]
    cut = torch.searchsorted(sums, limit, right=False).clamp(max=sums.shape[1] - 1)
    limited = top_p < 1
    within = covered | (sums[:, -1] >= limit[:, 0])
    end_sum = torch.where(limited & within, sums.gather(1, cut)[:, 0], total)
    target = uniforms * end_sum
    at = torch.searchsorted(sums, target[:, None], right=True)
    # Past the end only by rounding: then it is the last that weighs anything.
    ranks = torch.arange(sums.shape[1], device=sums.device)
    weighing = torch.where(weights > 0, ranks, 0).amax(1, keepdim=True)
    at = torch.minimum(at, torch.where(limited[:, None], torch.minimum(cut, weighing), weighing))
    complete = torch.where(limited, within, covered | (sums[:, -1] > target))
    return order.gather(1, at)[:, 0].contiguous(), complete


def _typical(logits: torch.Tensor, weights: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Weights of the locally typical tokens; those of the others are 0."""
    first = logits[:, :1]
    apart = torch.where(weights > 0, logits - first, 0.0)
    mean = first + ((weights * apart).sum(1) / weights.sum(1))[:, None]
    distance = torch.where(weights > 0, (logits - mean).abs(), torch.inf)
    nearest = distance.argsort(dim=1, stable=True)
    sums = weights.gather(1, nearest).cumsum(1)
    end = torch.searchsorted(sums, mass[:, None] * sums[:, -1:], right=False)
    ranks = torch.arange(logits.shape[1], device=logits.device)
    kept = torch.zeros_like(weights, dtype=torch.bool)
    kept.scatter_(1, nearest, (ranks <= end) | (mass >= 1)[:, None])
    return torch.where(kept, weights, 0.0)


def _between(numbers: NDArray[np.int32], first: int, end: int) -> slice:
    """Where the numbers first..end lie in a rising array of them."""
    low, high = np.searchsorted(numbers, (first, end))
    return slice(int(low), int(high))


def to_host(values: torch.Tensor) -> torch.Tensor:
    """A copy that is there once the device has come so far."""
    if values.device.type == "cpu":
        return values.clone()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
