"""Whether a request can ever run, and whether a sequence may start now. Decides; moves nothing."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from itertools import islice
from operator import itemgetter

from headrace.core.context import check_fits_context, longest
from headrace.core.errors import ContextLengthError, InvalidRequestError
from headrace.core.request import GenerateRequest
from headrace.core.step import RunnerLimits
from headrace.engine.blocks import BlockPool
from headrace.engine.embedding import check_embed
from headrace.engine.sequence import Sequence

Table = tuple[Sequence, list[int], int]  # a sequence, its blocks, and how many of these are full

FIRST_GUESS_TOKENS = 128.0  # of output, before any request has ended


def check_request(
    request: GenerateRequest, limits: RunnerLimits, live: Collection[str] = ()
) -> int:
    """The most tokens that a request may generate. Refuses a request that can never run."""
    prompt, context = len(request.prompt_token_ids), limits.context_tokens
    if request.request_id in live:
        raise InvalidRequestError(
            f"The request id {request.request_id!r} is in use; expected an id that is not.",
            "Choose another id.",
            param="request_id",
        )
    if prompt == 0:
        raise InvalidRequestError(
            "The prompt is empty: it has 0 tokens; expected at least 1.",
            "Give some text or token ids.",
            param="prompt",
        )
    if request.beam is not None and request.grammar is not None:
        raise InvalidRequestError(
            "The request asks for a beam search and a grammar; expected one or the other.",
            "Sample (n, best_of) under a grammar, or search without one.",
            param="grammar",
        )
    if request.embed:
        check_embed(request)
        if prompt > context:
            raise ContextLengthError(
                f"{longest(context)} However, your prompt resulted in {prompt} tokens.",
                f"Shorten the prompt to {context} tokens or fewer.",
                param="prompt",
            )
    else:
        asked = request.params.max_tokens if request.beam is None else request.beam.max_tokens
        check_fits_context(prompt_tokens=prompt, context_tokens=context, max_tokens=asked)
    return _check_pool(request, limits, prompt, context)


def _check_pool(request: GenerateRequest, limits: RunnerLimits, prompt: int, context: int) -> int:
    width = 1 if request.beam is None else request.beam.beam_width
    # In the worst case no beam shares a block, and one needs an extra block while it is copied.
    held = (limits.total_blocks // width - (width > 1)) * limits.block_tokens
    asked = request.params.max_tokens if request.beam is None else request.beam.max_tokens
    asked = 1 if request.embed else asked
    room = max(context - prompt, 1)
    most = prompt + (room if asked is None else min(asked, room))
    if prompt > held or (asked is not None and most - 1 > held):
        whole = f"{width} beams of up to {most} tokens" if width > 1 else f"up to {most} tokens"
        raise ContextLengthError(
            f"The request may need {whole}; the KV pool holds "
            f"{limits.total_blocks * limits.block_tokens} tokens.",
            "Lower max_tokens, shorten the prompt, or give the engine more KV memory.",
            param="prompt" if prompt > held else "max_tokens",
        )
    return min(room, held - prompt + 1)


class Admission:
    """Decides by looking ahead: the largest number of blocks that the running sequences and the new
    one will hold at any one time, if each ends after the usual number of tokens. Reserving the
    maximum length for each would leave half of the pool empty, as they do not all peak at once;
    reserving nothing would cause preemptions."""

    SMOOTHING = 0.1

    def __init__(self, pool: BlockPool, watermark: float) -> None:
        self._pool = pool
        self._watermark_blocks = math.ceil(pool.total_blocks * watermark)
        self._output_tokens = FIRST_GUESS_TOKENS  # of requests that ended

    def learn(self, generated_tokens: int) -> None:
        self._output_tokens += self.SMOOTHING * (generated_tokens - self._output_tokens)

    def spare_blocks(self, running: Iterable[Sequence]) -> int:
        """Blocks left if every running sequence grows to its maximum length; negative if they do
        not all fit. A sequence that needs no more than this may start without looking ahead."""
        taken = sum(self.most_blocks(sequence) for sequence in running)
        return self._pool.total_blocks - self._watermark_blocks - taken

    def most_blocks(self, sequence: Sequence) -> int:
        return sequence.most_tokens // self._pool.block_tokens + 1

    def fits(
        self, sequence: Sequence, found: list[int], running: Collection[Sequence], held_blocks: int
    ) -> bool:
        """Whether the sequence may start. `found` are the blocks that the prefix cache has for it;
        `held_blocks` is the number of blocks held by sequences that are not running."""
        pool = self._pool
        if not running:  # alone it always fits: check_request() made sure
            taken_over = sum(1 for block in found if pool.is_cached(block))
            own = pool.blocks_for(len(sequence.token_ids)) + 1 - len(sequence.blocks) - len(found)
            return own <= pool.available_blocks - taken_over or (
                pool.used_blocks == len(sequence.blocks)
            )
        room = pool.total_blocks - self._watermark_blocks - held_blocks
        size = pool.block_tokens
        tables = [(each, each.blocks, each.computed_tokens // size) for each in running]
        full = len(found) or sequence.computed_tokens // size
        tables.append((sequence, found or sequence.blocks, full))
        peak = self._peak_blocks(tables)
        if peak <= room:
            return True
        # Blocks that several hold were counted for each of them: at most so many times too often.
        again = sum(len(blocks) for _, blocks, _ in tables) - (pool.used_blocks - held_blocks)
        return peak - again <= room and self._peak_blocks(tables, SharedBlocks(pool, found)) <= room

    def _peak_blocks(self, tables: Iterable[Table], shared: SharedBlocks | None = None) -> int:
        """The most blocks that these will hold at one time, each growing by one token per step.

        The peak is at a moment when a sequence ends. When the sequence with the k-th most tokens
        left ends, the k longest ones have each grown by its number of tokens left.
        """
        size = self._pool.block_tokens
        usual = int(self._output_tokens)
        futures: list[tuple[int, int, list[int], int]] = []
        for s, blocks, full in tables:
            length = len(s.token_ids)
            generated = length - s.prompt_tokens
            # Sequences longer than usual are assumed to be half way.
            expected = min(max(usual, 2 * generated, 1), s.max_tokens)
            futures.append((expected - generated, length, blocks, full))
        futures.sort(key=itemgetter(0), reverse=True)
        peak = tokens = again = 0
        for count, (left, length, blocks, full) in enumerate(futures, start=1):
            tokens += length
            if shared is not None:
                again += shared.held_before(islice(blocks, full))
            # The last block of each may be partly filled.
            peak = max(peak, (tokens + count * left) // size + count - again)
        return peak


class SharedBlocks:
    """Counts blocks that several sequences hold, sequence by sequence. What a sequence shares is at
    its beginning, so that only that is looked at. Full blocks are shared to the end; one that is
    not is copied by whoever writes to it first."""

    def __init__(self, pool: BlockPool, found: Iterable[int]) -> None:
        self._pool = pool
        self._found = frozenset(found)  # that the one which is about to start would hold too
        self._seen: set[int] = set()

    def held_before(self, blocks: Iterable[int]) -> int:
        """How many of a sequence's full blocks one before it holds."""
        seen, again = self._seen, 0
        for block in blocks:
            if block in seen:
                again += 1
            elif self._pool.is_shared(block) or block in self._found:
                seen.add(block)
            else:
                break
        return again
