"""The side that computes prompts for others: listens, and sends blocks as they become full.

Each engine that asks has a connection and a thread here, which speaks frames; the engine's loop
calls `turn` between steps, which adds what was asked for to the engine as a request of one token,
and copies out blocks that are full. A step never waits for a socket. Bounded: in connections, and
in bytes that were copied and not sent. Knows the engine and frames; no HTTP.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections import deque

from headrace.core.errors import HeadraceError
from headrace.core.request import GenerateRequest, SampledToken, SamplingParams
from headrace.engine.loop import Engine
from headrace.engine.prefix import block_keys
from headrace.server.handover import frames, session
from headrace.server.handover.counts import HandoverCounts
from headrace.server.handover.frames import Cause, End, HandoverError, Kind, Wanted
from headrace.server.handover.sending import Job, Sending
from headrace.server.handover.shared import Slots
from headrace.server.handover.waking import Waker

MAX_CONNECTIONS = 64
TURN_BYTES = 32 << 20  # copied between two steps, beyond the first piece
COPIED_BYTES = 256 << 20  # of all hand-overs, that were copied and not sent
BACKLOG = 64

log = logging.getLogger(__name__)


class Giver:
    def __init__(
        self,
        engine: Engine,
        *,
        secret: bytes,
        fingerprint: str,
        vocab_size: int,
        host: str,
        port: int,
    ) -> None:
        assert engine.moves is not None
        self._engine = engine
        self._block_bytes = engine.moves.block_bytes
        self._block_tokens = engine.blocks.block_tokens
        self._secret, self._fingerprint = secret, fingerprint
        self._vocab_size = vocab_size
        self.counts = HandoverCounts()
        self.waker = Waker()  # the loop's
        self._arrived: deque[Job] = deque()
        self._jobs: dict[str, Job] = {}  # of the loop
        self._unsent: set[Job] = set()  # that have a connection
        self._open = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._connections: dict[session.Wire, threading.Thread] = {}
        self._lock = threading.Lock()
        self._numbers = 0
        self._is_closing = False
        self._listeners = _listen(host, port)
        self.port: int = self._listeners[0].getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="headrace-give", daemon=True)
        self._thread.start()

    # -- the loop's part -------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        return bool(self._jobs or self._arrived)

    def turn(self) -> None:
        """Between two steps."""
        self.waker.clear()
        while self._arrived:
            job = self._arrived.popleft()
            self._jobs[job.request_id] = job
        budget = min(TURN_BYTES, COPIED_BYTES - self._copied_bytes())
        for job in list(self._jobs.values()):
            if job.is_left or self._is_closing:
                self._drop(job)
                continue
            budget -= self._copy(job, budget)
            if job.end is not None:
                self._drop(job)

    def heard(self, tokens: list[SampledToken]) -> None:
        """What a step returned: a request that has its token is computed."""
        for token in tokens:
            if token.finish_reason is not None and (job := self._jobs.get(token.request_id)):
                job.is_computed = True
                self.waker.wake()  # there may be no other step

    def _add(self, job: Job) -> None:
        job.is_added = True
        wanted = job.wanted
        try:
            self._engine.add(
                GenerateRequest(
                    request_id=job.request_id,
                    prompt_token_ids=wanted.token_ids,
                    params=SamplingParams(max_tokens=1, temperature=0.0),
                    cache_salt=wanted.salt,
                    priority=wanted.priority,
                )
            )
        except HeadraceError as error:
            job.finish(Cause.REFUSED, error.cause)

    def _copied_bytes(self) -> int:
        with self._lock:
            blocks = sum(len(keys) for job in self._unsent for _, keys, _ in list(job.pieces))
        return blocks * self._block_bytes

    def _copy(self, job: Job, budget: int) -> int:
        """Copies blocks that are full, as far as there is room: at least a piece where a job has
        none. Returns their bytes."""
        copied = 0
        while job.has_room and (copied < budget or not job.pieces):
            wanted = job.keys[job.next_block : job.next_block + job.wanted.piece_blocks]
            found = self._engine.read_cached(wanted)
            if not found:
                self._is_missing(job)
                break
            keys, contents = [key for key, _ in found], [content for _, content in found]
            job.pieces.append((job.next_block, keys, contents))
            job.next_block += len(found)
            copied += len(found) * self._block_bytes
            if job.next_block == len(job.keys):
                job.finish(None)
        if copied:
            job.waker.wake()
        return copied

    def _is_missing(self, job: Job) -> None:
        """The next block is not in the cache."""
        if not job.is_added:
            self._add(job)
        elif job.is_computed:
            job.finish(Cause.EVICTED, "the pool had no room to keep them")

    def _drop(self, job: Job) -> None:
        del self._jobs[job.request_id]
        if job.is_added and not job.is_computed:
            self._engine.cancel(job.request_id)
        job.finish(Cause.CUT, "the engine stops")

    # -- threads ---------------------------------------------------------------------------------

    def _accept(self) -> None:
        poll = select.poll()
        by_number = {each.fileno(): each for each in self._listeners}
        for each in by_number:
            poll.register(each, select.POLLIN)
        while not self._is_closing:
            for number, _ in poll.poll(100):
                try:
                    sock, _ = by_number[number].accept()
                except OSError as error:
                    if not self._is_closing:
                        log.warning("a hand-over's connection failed: %s", error)
                        time.sleep(0.05)  # no descriptors are left, perhaps
                    continue
                self._serve(session.Wire(sock))
        for listener in self._listeners:
            listener.close()

    def _serve(self, wire: session.Wire) -> None:
        if not self._open.acquire(blocking=False):
            self.counts.refused(Cause.BUSY)
            wire.close()
            return
        thread = threading.Thread(
            target=self._give, args=(wire,), name="headrace-give-one", daemon=True
        )
        with self._lock:
            self._connections[wire] = thread
        thread.start()

    def _give(self, wire: session.Wire) -> None:
        """A whole connection, in a thread of its own."""
        began_s = time.monotonic()
        job: Job | None = None
        try:
            wanted, descriptor = session.answer(wire, self._secret)
            slots = None
            if descriptor is not None:
                slots = Slots.open(
                    descriptor, wanted.slots, wanted.piece_blocks * wanted.block_bytes
                )
            try:
                self._check(wanted, slots)
                job = self._job(wanted)
                sent = Sending(wire, job, slots, self.waker).run()
                self.counts.done(job.end, sent, time.monotonic() - began_s)
            finally:
                if slots is not None:
                    slots.close()
        except HandoverError as error:
            self.counts.refused(error.cause)
            level = logging.WARNING if error.cause is Cause.KEY else logging.DEBUG
            log.log(level, "a hand-over to another engine failed: %s", error)
            _say_end(wire, error)
        except Exception:
            log.exception("a hand-over to another engine failed")
        finally:
            if job is not None:
                with self._lock:
                    self._unsent.discard(job)
                job.is_left = True
                self.waker.wake()
                job.waker.close()
            with self._lock:
                del self._connections[wire]
            wire.close()
            self._open.release()

    def _check(self, wanted: Wanted, slots: Slots | None) -> None:
        if wanted.fingerprint != self._fingerprint:
            raise HandoverError(
                Cause.FINGERPRINT,
                f"the other engine is {wanted.fingerprint}; this one is {self._fingerprint}",
            )
        own = (self._block_tokens, self._block_bytes)
        if (wanted.block_tokens, wanted.block_bytes) != own:
            raise HandoverError(Cause.FINGERPRINT, "blocks of another size")
        tokens = wanted.token_ids
        if min(tokens) < 0 or max(tokens) >= self._vocab_size:
            raise HandoverError(Cause.FRAME, "tokens that the model does not have")
        if (slots is None) != (wanted.slots == 0):
            raise HandoverError(Cause.FRAME, "slots without shared memory, or the reverse")

    def _job(self, wanted: Wanted) -> Job:
        keys = block_keys(wanted.token_ids, wanted.salt, wanted.block_tokens)
        with self._lock:
            self._numbers += 1
            job = Job(wanted, keys, self._numbers)
            self._unsent.add(job)
        self._arrived.append(job)
        self.waker.wake()
        return job

    def close(self) -> None:
        """Ends all connections. The loop does not call `turn` any more."""
        self._is_closing = True
        for job in list(self._jobs.values()):
            job.finish(Cause.CUT, "the engine stops")
        self._thread.join()
        with self._lock:
            threads = list(self._connections.values())
            for wire in self._connections:
                wire.shut()
        for thread in threads:
            thread.join()
        self.waker.close()


def _say_end(wire: session.Wire, error: HandoverError) -> None:
    with contextlib.suppress(HandoverError):  # nobody is there
        wire.send(Kind.END, frames.pack_end(End(error.cause, str(error))))


def _listen(host: str, port: int) -> list[socket.socket]:
    """TCP, and a Unix socket for askers on this machine where there are such."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    name = session.unix_name(listener.getsockname()[1])
    if name is None:
        return [listener]
    beside = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        beside.bind(name)
        beside.listen(BACKLOG)
    except OSError as error:
        log.warning("no shared memory for hand-overs: %s", error.strerror)
        beside.close()
        return [listener]
    return [listener, beside]
