"""Adjusted copies of logits: bias, masks and penalties, with state that is kept on the device.

Each adjusted sequence has a slot with a history (how often each token occurred), which the device
updates from step to step, and a mask, which is sent when it changes. So most steps send only slot
numbers. Bias and banned tokens are added to the logits in place, and undone after the copy is made.
Knows the parameters of draws; nothing of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.backends.cuda.draws import adjust_kernel
from headrace.backends.cuda.draws.adjust_kernel import PROMPTED, launch_adjust
from headrace.backends.cuda.draws.drawing import AskedRows
from headrace.backends.cuda.draws.logits_kernels import pieces_of
from headrace.backends.cuda.draws.wanted import Wanted
from headrace.backends.shared.answers import flat_bias, flat_ids
from headrace.backends.shared.plan_check import mistaken
from headrace.core.errors import HeadraceError
from headrace.core.step import NO_EXTRA, PREVIOUS, DrawParams, RowExtra

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Send = Callable[[NDArray[np.generic]], torch.Tensor]

_MOST_COUNTED = 32767  # of one token: an int16


@dataclass(slots=True)
class _Slot:
    """What the device holds for one sequence."""

    number: int
    counted: int = -1  # positions before this are in its history; -1: there is none
    # The objects that its mask and bias were made from. They are compared by identity, and held so
    # that no other object can get the same id.
    params: DrawParams | None = None
    mask: bytes | None = None
    has_mask: bool = False
    bias_ids: Ints = field(default_factory=lambda: np.empty(0, np.int32))
    bias_values: Floats = field(default_factory=lambda: np.empty(0, np.float32))


class Adjusting:
    def __init__(self, rows: int, slots: int, vocab: int, device: torch.device) -> None:
        self._vocab = vocab
        self.adjusted = torch.zeros((rows, vocab), dtype=torch.float32, device=device)
        self._histories = torch.zeros((slots, vocab), dtype=torch.int16, device=device)
        # One for each slot, and one for each row whose place has a mask of its own.
        self._masks = torch.zeros((slots + rows, -(-vocab // 8)), dtype=torch.uint8, device=device)
        self._kept_masks = slots
        self._slots: dict[int, _Slot] = {}  # by sequence
        self._free = list(range(slots - 1, -1, -1))

    @property
    def nbytes(self) -> int:
        return self.adjusted.nbytes + self._histories.nbytes + self._masks.nbytes

    def launch(
        self,
        wanted: Wanted,
        logits: torch.Tensor,
        offset: int,
        host: AskedRows,
        send: Send,
        send_asked: Callable[[], torch.Tensor],
        step_rows: torch.Tensor,
        inputs: torch.Tensor,
        scratch: torch.Tensor,
    ) -> None:
        """Copies all rows that are drawn from, and adjusts those in `wanted.adjusting`. Completes
        the rows' parameters in `host` and sends them."""
        end = offset + len(logits)
        some = [each for each in wanted.adjusting if offset <= each[0] < end]
        try:
            changes = self._read(wanted, some, offset, host)
        except HeadraceError:
            self._forget()
            raise
        changes.send(self._histories, self._masks, send)
        asked = send_asked()
        flat = logits.view(-1)
        at, saved = None, None
        if changes.bias_at:
            at = send(np.concatenate(changes.bias_at))
            saved = flat.index_select(0, at)
            flat.index_copy_(0, at, saved + send(np.concatenate(changes.bias_values)))
        self.launch_kernel(logits, asked, step_rows, inputs, scratch)
        if at is not None and saved is not None:
            flat.index_copy_(0, at, saved)

    def launch_kernel(
        self,
        logits: torch.Tensor,
        asked: torch.Tensor,
        step_rows: torch.Tensor,
        inputs: torch.Tensor,
        scratch: torch.Tensor,
    ) -> None:
        launch_adjust(
            logits,
            self.adjusted[: len(logits)],
            asked[: len(logits)],
            self._histories,
            self._masks,
            step_rows,
            inputs,
            scratch,
            *pieces_of(self._vocab),
        )

    def _read(
        self, wanted: Wanted, some: Sequence[tuple[int, int, int]], offset: int, host: AskedRows
    ) -> _Changes:
        plan, changes = wanted.plan, _Changes(self._vocab)
        here = {plan.sequence_ids[row] for _, row, _ in some}
        for number, row, place in some:
            sequence_id, params = plan.sequence_ids[row], plan.draws[row]
            extra = wanted.extra_at(row, place)
            assert params is not None
            slot = self._slots.get(sequence_id) or self._take_slot(sequence_id, here)
            is_new = slot.params is not params
            if is_new:
                slot.params = params
                ids, slot.bias_values = flat_bias(params.bias)
                slot.bias_ids = _checked(ids, self._vocab)
            at = number - offset
            if params.penalizes:
                host.f32[at, 12:15] = params.penalties
                host.i32[at, adjust_kernel.HISTORY.value] = slot.number
                host.i32[at, adjust_kernel.AHEAD.value] = place
                if row in plan.drafts:
                    self._count_known(slot, wanted, row, changes)
                else:
                    last = plan.token_ids[int(wanted.rows[number])]
                    share = (plan.starts[row], plan.counts[row], last == PREVIOUS)
                    advance = _follow(slot, extra, share, changes)
                    host.i32[at, adjust_kernel.ADVANCE.value] = advance
            is_limited = params.allowed is not None or extra.mask is not None
            if is_limited and place and slot.mask is not extra.mask:  # of this step only
                host.i32[at, adjust_kernel.MASK.value] = self._kept_masks + at
                changes.take_mask(self._kept_masks + at, params.allowed, extra.mask)
            elif is_limited:
                host.i32[at, adjust_kernel.MASK.value] = slot.number
                if is_new or not slot.has_mask or slot.mask is not extra.mask:
                    slot.mask, slot.has_mask = extra.mask, True
                    changes.take_mask(slot.number, params.allowed, extra.mask)
            if len(params.bias) or len(extra.banned):
                self._bias(slot, extra.banned, at, changes)
        return changes

    def _count_known(self, slot: _Slot, wanted: Wanted, row: int, changes: _Changes) -> None:
        """The history up to the row's drafts, which all its draws share: the kernel adds the drafts
        before each. Sent whole, once for a step (and piece): how many of the last step's drafts
        were right, the device does not know."""
        plan = wanted.plan
        known = plan.starts[row] + plan.counts[row] - len(plan.drafts[row])
        extra = plan.extras.get(row, NO_EXTRA)
        if slot.counted != known:
            slot.counted = known
            changes.take_history(slot.number, extra.history, extra.prompt_tokens)

    def _bias(self, slot: _Slot, banned_ids: Collection[int], at: int, changes: _Changes) -> None:
        ids, values = slot.bias_ids, slot.bias_values
        if len(banned_ids):
            banned = _checked(np.unique(flat_ids(banned_ids)), self._vocab)
            others = ~np.isin(ids, banned)  # each token only once: its logit is restored afterwards
            ids = np.concatenate([ids[others], banned])
            dropped = np.full(len(banned), -np.inf, np.float32)
            values = np.concatenate([values[others], dropped])
        changes.bias_at.append(ids.astype(np.int64) + at * self._vocab)
        changes.bias_values.append(values)

    def _take_slot(self, sequence_id: int, here: set[int]) -> _Slot:
        if not self._free:
            for other in [each for each in self._slots if each not in here]:
                self._free.append(self._slots.pop(other).number)
        slot = self._slots[sequence_id] = _Slot(self._free.pop())
        return slot

    def _forget(self) -> None:
        """A plan was refused, perhaps half-way: everything is sent again."""
        self._free += [slot.number for slot in self._slots.values()]
        self._slots.clear()


class _Changes:
    """What a step has to send before its rows are adjusted."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._mask_bytes = -(-vocab // 8)
        self._new: list[int] = []  # slots whose histories are reset
        self._history_at: list[NDArray[np.int64]] = []
        self._histories: list[NDArray[np.int16]] = []
        self._mask_slots: list[int] = []
        self._masks: list[NDArray[np.uint8]] = []
        self.bias_at: list[NDArray[np.int64]] = []
        self.bias_values: list[Floats] = []

    def take_history(self, slot: int, history: Sequence[int], prompt_tokens: int) -> None:
        ids = _checked(flat_ids(history), self._vocab)
        tokens, places = np.unique(ids, return_inverse=True)
        often = np.bincount(places[prompt_tokens:], minlength=len(tokens))
        values = np.minimum(often, _MOST_COUNTED)
        values[places[:prompt_tokens]] += PROMPTED * (values[places[:prompt_tokens]] >= 0)
        self._new.append(slot)
        self._history_at.append(tokens.astype(np.int64) + slot * self._vocab)
        self._histories.append(values.astype(np.int16))

    def take_mask(self, slot: int, allowed: Collection[int] | None, mask: bytes | None) -> None:
        packed = np.zeros(self._mask_bytes, np.uint8)
        if allowed is None:
            packed[:] = 255
        else:
            may = np.zeros(8 * self._mask_bytes, bool)
            may[_checked(flat_ids(allowed), self._vocab)] = True
            packed = np.packbits(may, bitorder="little")
        if mask is not None:
            given = np.frombuffer(mask, np.uint8)[: self._mask_bytes]
            packed[: len(given)] &= given
            packed[len(given) :] = 0
        self._mask_slots.append(slot)
        self._masks.append(packed)

    def send(self, histories: torch.Tensor, masks: torch.Tensor, send: Send) -> None:
        if self._new:
            histories.index_fill_(0, send(np.array(self._new, np.int64)), 0)
            at = send(np.concatenate(self._history_at))
            histories.view(-1).index_copy_(0, at, send(np.concatenate(self._histories)))
        if self._masks:
            slots = send(np.array(self._mask_slots, np.int64))
            masks.index_copy_(0, slots, send(np.stack(self._masks)))


def _follow(slot: _Slot, extra: RowExtra, share: tuple[int, int, bool], changes: _Changes) -> bool:
    """Whether the device has all of the history except the row's own token, which the kernel adds.
    `share` is the row's start, its count, and whether its token is PREVIOUS."""
    start, count, is_previous = share
    before, slot.counted = slot.counted, start + count
    if before == start and count == 1 and start >= extra.prompt_tokens:
        return True
    changes.take_history(slot.number, extra.history, extra.prompt_tokens)
    return is_previous


def _checked(ids: Ints, vocab: int) -> Ints:
    """Refuses ids outside of the vocabulary: a kernel would write out of bounds."""
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab):
        raise mistaken("a draw that names a token outside the vocabulary", f"0 to {vocab - 1}")
    return ids
