"""Rolling restart and rolling change: one replica after the other, while the others answer.

What is new is looked at before anything stops. If its first process does not start, the old one
comes back and nothing has changed; if a later one does not, those that changed go back too. One
roll at a time. Knows slots; no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from headrace.core.errors import HeadraceError
from headrace.replicas import messages
from headrace.replicas.child import Child
from headrace.replicas.release import Release, for_replicas
from headrace.replicas.slot import Common, Slot

OTHERS_S = 30.0  # to wait for another replica to take requests before one is taken out
LOOK_S = 0.02

log = logging.getLogger(__name__)


class RollError(HeadraceError):
    """It can't begin, or did not go through."""

    status = 409


@dataclass(slots=True, kw_only=True)
class Progress:
    """What GET /replicas shows of the last roll."""

    wanted: str  # the model
    total: int
    done: int = 0
    state: str = "looking"  # rolling, done, failed, back (where it was)
    replica: int | None = None  # that is out now
    error: str | None = None
    began_s: float = field(default_factory=time.time)
    ended_s: float | None = None

    def facts(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}


class Roller:
    def __init__(self, slots: Sequence[Slot], common: Common, release: Release) -> None:
        self._slots, self._common = slots, common
        self.release = release
        self.progress: Progress | None = None
        self._rolling: asyncio.Task[None] | None = None

    @property
    def is_rolling(self) -> bool:
        return self._rolling is not None and not self._rolling.done()

    def check(self) -> None:
        """Raises where a roll can't begin now."""
        if self.is_rolling:
            assert self.progress is not None
            raise RollError(
                f"A rolling change is under way: {self.progress.done} of {self.progress.total} "
                "replicas are done.",
                "Wait for its end: GET /replicas shows it.",
            )
        if late := [slot.number for slot in self._slots if not slot.is_kept]:
            raise RollError(f"Replica {late[0]} is still starting.", "Try again shortly.")
        if len(self._slots) < 2:
            raise RollError(
                "There is one replica, and nobody would answer while it restarts.",
                "Start with --replicas 2 or more, or stop the server and start it again.",
            )

    async def begin(self, release: Release | None = None) -> Progress:
        """Looks at the new release, if there is one, and raises its error; the rest happens after
        this has returned."""
        self.check()
        wanted = release or self.release
        progress = self.progress = Progress(wanted=wanted.shown, total=len(self._slots))
        looking = asyncio.create_task(self._look(wanted, progress)) if release else None
        if looking is not None:
            self._rolling = looking  # type: ignore[assignment]  # no other roll meanwhile
            wanted = await looking
        progress.state = "rolling"
        self._rolling = asyncio.create_task(self._roll(wanted, progress))
        return progress

    async def stop(self) -> None:
        if self._rolling is not None and not self._rolling.done():
            self._rolling.cancel()
            await asyncio.wait({self._rolling})

    # -- inside ----------------------------------------------------------------------------------

    async def _look(self, wanted: Release, progress: Progress) -> Release:
        """The release with its model's path; raises what its start would raise."""
        try:
            found = await look(wanted, self._slots[0], self._common)
        except HeadraceError as error:
            self._end(progress, "failed", error.cause)
            raise
        except asyncio.CancelledError:
            self._end(progress, "failed", "whoever asked has left")
            raise
        names = tuple(dict.fromkeys(self._names()))
        is_other = found.path != self.release.path
        return replace(
            wanted,
            path=found.path,
            checked=found.checked,
            keeps_names=names if is_other else self.release.keeps_names,
        )

    def _names(self) -> list[str]:
        """What clients call the model now."""
        return [
            *(slot.facts.model for slot in self._slots if slot.facts is not None),
            *self.release.keeps_names,
        ]

    async def _roll(self, wanted: Release, progress: Progress) -> None:
        changed: list[Slot] = []
        try:
            for slot in self._ordered():
                progress.replica = slot.number
                await self._one(slot, wanted)
                changed.append(slot)
                progress.done += 1
                log.info(
                    "replica %d of %d is new",
                    *(progress.done, progress.total),
                    extra={"event": "replica_rolled", "slot": slot.number},
                )
        except HeadraceError as error:
            log.error("the rolling change failed: %s", error.cause, extra={"event": "roll_failed"})
            await self._back(changed, wanted)
            self._end(progress, "failed", error.cause)
            return
        except asyncio.CancelledError:
            self._end(progress, "failed", "the server is shutting down")
            raise
        self.release = wanted
        self._end(progress, "done")
        took_s = (progress.ended_s or 0) - progress.began_s
        log.info("all replicas are new after %.2f s", took_s, extra={"event": "rolled"})

    def _ordered(self) -> list[Slot]:
        """Those that do not answer first: nobody misses them."""
        return sorted(self._slots, key=lambda slot: slot.takes_requests)

    async def _one(self, slot: Slot, wanted: Release) -> None:
        old = slot.release or self.release
        await self._wait_for_others(slot)
        log.info("replica %d is taken out", slot.number, extra={"event": "replica_drained"})
        await slot.take_out()
        try:
            await slot.start(wanted)
        except HeadraceError:
            slot.release = old
            try:
                await slot.start(old)
            except HeadraceError as error:
                log.error("replica %d does not come back: %s", slot.number, error.cause)
            raise
        finally:
            slot.keep()

    async def _wait_for_others(self, slot: Slot) -> None:
        if not slot.takes_requests:
            return
        end_s = time.monotonic() + OTHERS_S
        while not any(other.takes_requests for other in self._slots if other is not slot):
            if time.monotonic() > end_s:
                raise RollError(
                    f"Replica {slot.number} is the only one that takes requests.",
                    "GET /replicas says what is wrong with the others.",
                )
            await asyncio.sleep(LOOK_S)

    async def _back(self, changed: Sequence[Slot], wanted: Release) -> None:
        """Those that have the new release get the old one again. A plain restart has none."""
        if wanted is self.release:
            return
        for slot in changed:
            try:
                await self._one(slot, self.release)
            except HeadraceError as error:
                log.error("replica %d does not go back: %s", slot.number, error.cause)

    def _end(self, progress: Progress, state: str, error: str | None = None) -> None:
        progress.state, progress.error = state, error
        progress.replica, progress.ended_s = None, time.time()


async def look(wanted: Release, slot: Slot, common: Common) -> messages.Fits:
    """Everything of a start but loading, in a process of its own. Raises StartError."""
    begin = messages.Begin(
        number=0,
        socket=-1,
        path="",
        typed=wanted.typed,
        server=for_replicas(wanted.server),
        engine=replace(
            wanted.engine,
            threads=slot.share.threads or wanted.engine.threads,
            memory_share=slot.share.memory_bytes,
        ),
        internal=common.internal,
        weights={},
        origins={},
        cpus=slot.share.cpus,
        offline=common.offline,
    )
    child = await Child.start(begin, gpus=slot.share.gpus)
    try:
        found = await asyncio.shield(child.begun)
    finally:
        await child.stop(1.0)
    assert isinstance(found, messages.Fits)
    return found
