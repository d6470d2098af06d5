"""The side that answers: fetches the blocks of a prompt from an engine that computes prompts.

The engine's loop calls `fetch` for a request before it adds it to the engine, and `turn` between
steps, which puts blocks that have come into the prefix cache and returns requests that are ready to
be added. A request is ready when all its blocks have come, or when anything at all went wrong:
what is missing is then computed here, and the answer is the same. Each fetch has a thread, which
speaks frames and checks them; a step never waits for a socket. Bounded: in fetches at one time, and
in bytes that have come and were not taken. Knows the engine and frames; no HTTP.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from dataclasses import replace

from headrace.core.request import GenerateRequest
from headrace.engine.loop import Engine
from headrace.engine.prefix import block_keys
from headrace.server.handover import frames, session
from headrace.server.handover.counts import HandoverCounts
from headrace.server.handover.frames import Cause, End, HandoverError, Kind, Wanted
from headrace.server.handover.receiving import PIECES, Fetch, Piece, Receiving
from headrace.server.handover.session import Peer
from headrace.server.handover.shared import IS_SUPPORTED, Slots
from headrace.server.handover.waking import Waker

MAX_FETCHES = 16  # at one time; more are computed here
PIECE_BYTES = 4 << 20  # of a frame or a slot, unless one block is larger
SILENCE_S = 5.0  # a giver that lives says so 25 times in this time
TURN_BYTES = 8 << 20  # taken between two steps, beyond the first piece
AVOID_S = 2.0  # a peer that failed is not asked: each request would wait for it in vain
PEERS_FAULTS = frozenset(
    {
        *(Cause.UNREACHABLE, Cause.KEY, Cause.VERSION, Cause.FINGERPRINT),
        *(Cause.FRAME, Cause.CHECKSUM, Cause.BLOCKS, Cause.TIMEOUT, Cause.CUT),
    }
)

log = logging.getLogger(__name__)


class Taker:
    def __init__(
        self,
        engine: Engine,
        *,
        secret: bytes,
        fingerprint: str,
        least_tokens: int,
        patience_s: float,
        shares: bool = True,
    ) -> None:
        assert engine.moves is not None
        self._engine = engine
        self._secret, self._fingerprint = secret, fingerprint
        self._block_tokens = engine.blocks.block_tokens
        self._block_bytes = engine.moves.block_bytes
        self._least_blocks = max(1, -(-least_tokens // self._block_tokens))
        self._piece_blocks = min(frames.MAX_PIECE_BLOCKS, max(1, PIECE_BYTES // self._block_bytes))
        self._patience_s = patience_s
        self._shares = shares and IS_SUPPORTED
        self.counts = HandoverCounts()
        self.waker = Waker()  # the loop's
        self._fetches: dict[str, Fetch] = {}
        self._avoided: dict[Peer, float] = {}  # until when
        self._work: queue.SimpleQueue[Fetch | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = 0  # threads that wait for work
        self._slots: list[Slots] = []  # not in use
        self._lock = threading.Lock()

    # -- the loop's part -------------------------------------------------------------------------

    def fetch(self, request: GenerateRequest, peer: Peer) -> bool:
        """Whether the request waits for its blocks. If not, it is to be added now."""
        params = request.params
        if request.embed or params.prompt_logprobs is not None:
            return False  # they need every token computed here
        size = self._block_tokens
        whole = (len(request.prompt_token_ids) - 1) // size  # the last token is computed here
        if whole < self._least_blocks:
            return self._skip()
        keys = block_keys(request.prompt_token_ids[: whole * size], request.cache_salt, size)
        find = self._engine.blocks.find
        first = next((at for at, key in enumerate(keys) if find(key) is None), whole)
        if whole - first < self._least_blocks:
            return self._skip()
        if len(self._fetches) >= MAX_FETCHES:
            self.counts.refused(Cause.BUSY)
            return False
        if self._avoided.get(peer, 0.0) > time.monotonic():
            self.counts.refused(Cause.AVOIDED)
            return False
        fetch = Fetch(request, peer, keys, first)
        self._fetches[request.request_id] = fetch
        self._start(fetch)
        return True

    def _skip(self) -> bool:
        self.counts.skipped += 1
        return False

    def forget(self, request_id: str) -> None:
        """Nobody waits for this request any more."""
        if (fetch := self._fetches.pop(request_id, None)) is not None:
            self._leave(fetch)
            self._put_slots(fetch)

    def turn(self) -> list[GenerateRequest]:
        """Between two steps: takes blocks that have come; returns requests to be added now."""
        self.waker.clear()
        ready: list[GenerateRequest] = []
        budget = TURN_BYTES
        for fetch in list(self._fetches.values()):
            budget -= self._take(fetch, budget)
            is_late = time.monotonic() - fetch.began_s > self._patience_s
            if fetch.failure is not None or is_late or fetch.is_over:
                del self._fetches[fetch.request.request_id]
                ready.append(self._ready(fetch, is_late=is_late))
        return ready

    @property
    def is_busy(self) -> bool:
        return bool(self._fetches)

    def _take(self, fetch: Fetch, budget: int) -> int:
        taken = 0
        while fetch.arrived and (taken < budget or not taken) and fetch.failure is None:
            piece = fetch.arrived.popleft()
            end = piece.first + piece.count
            size = self._block_bytes
            contents = {
                key: piece.data[at * size : (at + 1) * size]
                for at, key in enumerate(fetch.keys[piece.first : end])
            }
            fetch.taken = self._engine.adopt(fetch.keys[:end], contents)
            del contents
            taken += len(piece.data)
            if fetch.taken < end:
                fetch.failure = Cause.NO_ROOM  # or the blocks before were evicted meanwhile
            self._give_back(fetch, piece)
        return taken

    def _give_back(self, fetch: Fetch, piece: Piece) -> None:
        piece.data.release()
        if piece.buffer is not None:
            fetch.buffers.append(piece.buffer)
        fetch.room.release()
        if piece.slot is not None and fetch.wire is not None and fetch.end is None:
            with contextlib.suppress(HandoverError):  # its thread finds out
                # A few bytes, which never wait: the socket has room for all that there can be.
                fetch.wire.send(Kind.FREED, frames.pack_freed(piece.slot))

    def _ready(self, fetch: Fetch, *, is_late: bool) -> GenerateRequest:
        seconds = time.monotonic() - fetch.began_s
        end = fetch.end
        if fetch.failure is not None:
            end = End(fetch.failure)
        elif end is None and is_late:
            end = End(Cause.TIMEOUT, f"not whole within {self._patience_s:g} s")
        if not fetch.is_over:
            self._leave(fetch)
        self._put_slots(fetch)
        blocks = fetch.taken - fetch.first
        self.counts.blocks += max(0, blocks)
        self.counts.done(end, max(0, blocks) * self._block_bytes, seconds)
        if end is not None and end.cause is not None:
            if end.cause in PEERS_FAULTS:
                self._avoid(fetch.peer)
            log.info(
                "%d of %d blocks of request %s came from %s; the rest is computed here: %s",
                blocks,
                len(fetch.keys) - fetch.first,
                fetch.request.request_id,
                fetch.peer,
                end.text or end.cause,
                extra={"event": "handover_failed", "cause": str(end.cause)},
            )
        request = fetch.request
        if request.timeout_s is None:
            return request
        return replace(request, timeout_s=max(0.001, request.timeout_s - seconds))

    def _avoid(self, peer: Peer) -> None:
        now_s = time.monotonic()
        self._avoided = {each: s for each, s in self._avoided.items() if s > now_s}
        self._avoided[peer] = now_s + AVOID_S

    def _leave(self, fetch: Fetch) -> None:
        fetch.is_left = True
        fetch.room.release()  # its thread may wait for room
        if (wire := fetch.wire) is not None:
            wire.shut()

    def close(self) -> None:
        for fetch in self._fetches.values():
            self._leave(fetch)
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        for slots in self._slots:
            slots.close()
        self.waker.close()

    # -- threads ---------------------------------------------------------------------------------

    def _start(self, fetch: Fetch) -> None:
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                thread = threading.Thread(target=self._run, name="headrace-take", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._work.put(fetch)

    def _run(self) -> None:
        while (fetch := self._work.get()) is not None:
            end = End(Cause.CUT, "an unexpected error")
            try:
                end = self._pull(fetch)
            except HandoverError as error:
                end = End(error.cause, str(error))
            except Exception:
                log.exception("a hand-over failed")
            finally:
                with self._lock:
                    self._idle += 1
                fetch.end = end
                self.waker.wake()

    def _pull(self, fetch: Fetch) -> End:
        wire = fetch.wire = session.connect(fetch.peer, shares=self._shares)
        try:
            if fetch.is_left:
                raise HandoverError(Cause.CUT, "nobody waits for it")
            prove = session.greet(wire, self._secret)
            slots = fetch.slots = self._take_slots() if wire.is_unix else None
            wanted = self._wanted(fetch, slots)
            session.ask(wire, prove, wanted, None if slots is None else slots.descriptor)
            wire.socket.settimeout(SILENCE_S)
            return Receiving(fetch, wanted, wire, slots, self.waker.wake).run()
        finally:
            wire.close()
            if fetch.is_left:
                self._put_slots(fetch)

    def _wanted(self, fetch: Fetch, slots: Slots | None) -> Wanted:
        request = fetch.request
        count = len(fetch.keys) * self._block_tokens
        return Wanted(
            fingerprint=self._fingerprint,
            block_tokens=self._block_tokens,
            block_bytes=self._block_bytes,
            salt=request.cache_salt,
            priority=request.priority,
            first_block=fetch.first,
            piece_blocks=self._piece_blocks,
            slots=0 if slots is None else slots.count,
            tokens=frames.pack_tokens(request.prompt_token_ids[:count]),
        )

    def _take_slots(self) -> Slots | None:
        with self._lock:
            if self._slots:
                return self._slots.pop()
        try:
            return Slots.make(PIECES, self._piece_blocks * self._block_bytes)
        except OSError as error:
            log.warning("no shared memory for a hand-over: %s", error.strerror)
            return None

    def _put_slots(self, fetch: Fetch) -> None:
        """For the next fetch, if the giver has ended and will not write to them any more."""
        with self._lock:
            slots, fetch.slots = fetch.slots, None
            if slots is not None and fetch.is_over and fetch.has_said_end:
                self._slots.append(slots)
            elif slots is not None:
                slots.close()
