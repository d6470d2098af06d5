"""Kernels of steps from a trace of torch's profiler (Chrome's format): when each ran, and for what.

A kernel has the correlation id of the call that launched it; that call lies inside the range of an
instruction, which gives the kernel its instruction. All kernels of a CUDA graph have the id of the
graph's launch, so they get theirs from the same step launched one by one: kernels of the same name
are in the same order.
Without a GPU there are no kernels, and the ranges of the instructions stand for them.

Times on the device and ranges on the host are of one clock. Knows the trace's form; no torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

STEP, INSTRUCTION = "headrace step", "headrace instruction "
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_CALLS = frozenset({"cuda_runtime", "cuda_driver"})

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRun:
    name: str
    began_s: float  # since its step began
    ended_s: float
    # What it adds to the step: a kernel may begin while the one before it still runs.
    seconds: float
    instruction: int | None = None  # its number; None: not known


@dataclass(frozen=True, slots=True)
class _Range:
    began: float
    ended: float
    name: str


def read_steps(trace: Mapping[str, Any]) -> list[list[KernelRun]]:
    """The kernels of each step, in the order in which they ended."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    ranges = sorted(_ranges(events), key=lambda each: each.began)
    steps = [each for each in ranges if each.name == STEP]
    inner = [each for each in ranges if each.name.startswith(INSTRUCTION)]
    ran = [event for event in events if event.get("cat") in _ON_DEVICE]
    if not ran:
        return [[_stand_in(step, each) for each in inner if _holds(step, each)] for step in steps]
    calls = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in _CALLS and "correlation" in event.get("args", {})
    }
    begins = [each.began for each in inner]

    def instruction_of(event: Event) -> int | None:
        called = calls.get(event.get("args", {}).get("correlation"))
        at = -1 if called is None else bisect_right(begins, called) - 1
        if at < 0 or called is None or called > inner[at].ended:
            return None
        return int(inner[at].name.removeprefix(INSTRUCTION))

    found: list[list[KernelRun]] = [[] for _ in steps]
    starts = [each.began for each in steps]
    for event in sorted(ran, key=lambda each: (each["ts"] + each["dur"], each["ts"])):
        at = bisect_right(starts, event["ts"]) - 1
        if at < 0:
            continue  # before the first step: what fills the blocks
        began_s = (event["ts"] - starts[at]) / 1e6
        ended_s = began_s + event["dur"] / 1e6
        before_s = found[at][-1].ended_s if found[at] else 0.0
        run = KernelRun(
            name=str(event["name"]),
            began_s=began_s,
            ended_s=ended_s,
            seconds=ended_s - max(began_s, min(before_s, ended_s)),
            instruction=instruction_of(event),
        )
        found[at].append(run)
    return found


def named_as(steps: Iterable[Sequence[KernelRun]], known: Sequence[KernelRun]) -> bool:
    """Whether all these steps have the kernels of `known`, as often."""
    names = Counter(run.name for run in known)
    return all(Counter(run.name for run in step) == names for step in steps)


def with_instructions(step: Sequence[KernelRun], known: Sequence[KernelRun]) -> list[KernelRun]:
    """The step's kernels with the instructions of another step's: the third kernel of a name has
    that of the third there. (Among all kernels the order may differ: with dependent launches a
    short kernel can end before the one that it follows.)"""
    waiting: dict[str, deque[int | None]] = defaultdict(deque)
    for like in known:
        waiting[like.name].append(like.instruction)
    return [replace(run, instruction=waiting[run.name].popleft()) for run in step]


def _ranges(events: Iterable[Event]) -> Iterable[_Range]:
    for event in events:
        name = str(event.get("name", ""))
        is_ours = name == STEP or name.startswith(INSTRUCTION)
        if is_ours and event.get("cat") == "user_annotation":
            yield _Range(event["ts"], event["ts"] + event["dur"], name)


def _holds(step: _Range, each: _Range) -> bool:
    return step.began <= each.began and each.ended <= step.ended


def _stand_in(step: _Range, each: _Range) -> KernelRun:
    return KernelRun(
        name="launch",
        began_s=(each.began - step.began) / 1e6,
        ended_s=(each.ended - step.began) / 1e6,
        seconds=(each.ended - each.began) / 1e6,
        instruction=int(each.name.removeprefix(INSTRUCTION)),
    )
