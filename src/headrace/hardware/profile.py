"""A machine as it was measured: its ceilings, a model's step times, and what serving adds to them.

`headrace calibrate` writes one as JSON (docs/calibrate.md has the schema); fit, plan and
simulate read it. Times are in seconds, of steps the mean, of others the median; `spread` is half
of the range between the quartiles, divided by the median. Knows the file's form; neither how it was
measured nor what it is used for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from headrace.core.errors import ConfigError, HeadraceError

FORMAT, VERSION = "headrace profile", 2
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A step as the runner computes it: `decode_rows` sequences that decode one token each after
    `context_tokens`, and one prompt of which `prompt_tokens` are computed after `prompt_start`."""

    decode_rows: int
    context_tokens: int
    prompt_tokens: int
    prompt_start: int
    draws: bool  # whether the prompt draws a token; rows that decode always do
    seconds: float
    spread: float
    repetitions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRate:
    """What the backend's own kernels reach in one operation of a step with so many rows."""

    operation: str
    rows: int
    multiplies_s: float
    bytes_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Of the machine, a second. Bandwidth is by number of threads, or of the "gpu"; multiply-adds
    are by type, as hardware's tables name it: int8, fp32, bf16, fp8."""

    read_bytes_s: Mapping[str, float]
    multiplies_s: Mapping[str, float]
    products: tuple[ProductRate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """What the engine takes for a step in which so many sequences decode, beside computing it."""

    decode_rows: int
    schedule_s: float
    commit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTime:
    """So many streams at once, through the running server. A step's parts are means by the server's
    own counters; the others are medians over runs in turn with the same steps without a server."""

    streams: int
    schedule_s: float
    compute_s: float  # sampling included
    commit_s: float
    publish_s: float
    token_s: float  # mean time from one text of a stream to the next, while all of them decode
    alone_s: float  # a step of as many rows after as many tokens, without a server
    added_s: float  # the median difference of the two in one round; 0 if it is negative
    spread: float  # of token_s
    repetitions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """Requests one at a time, whose prompts the prefix cache has but for the last token: the time
    to the first token, and a step of one row after as many tokens, alone and in turn."""

    prompt_tokens: int
    ttft_s: float
    alone_s: float
    added_s: float  # the median difference of the two, taken one after the other
    busy_s: float  # processor time that the HTTP process took for one of these requests
    spread: float  # of ttft_s
    repetitions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What the way through the server adds."""

    streams: tuple[StreamTime, ...]
    first_tokens: tuple[FirstToken, ...]
    round_trip_s: float  # of a request that reaches no engine
    # What one more of many requests that come at once adds to the time until all have begun; 0:
    # not measured.
    burst_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """As core.step.RunnerLimits."""

    max_batch_tokens: int
    max_sequences: int
    total_blocks: int
    block_tokens: int
    context_tokens: int
    steps_in_flight: int
    max_step_growth: float
    padded_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    headrace: str  # version
    date: str  # UTC, ISO 8601
    machine: Mapping[str, Any]  # facts: processor, kernel path, threads, memory
    model: Mapping[str, Any]  # name, fingerprint and dimensions
    limits: Limits
    steps: tuple[StepTime, ...]
    host: tuple[HostTime, ...] = ()
    ceilings: Ceilings | None = None  # None: this device's are not measured
    serving: Serving | None = None  # None: not measured
    is_complete: bool = True  # False: it was stopped before its end
    notes: tuple[str, ...] = field(default=())

    def save(self, path: Path) -> None:
        """Whole or not at all: a half-written file would be read as a bad one."""
        made = {"format": FORMAT, "version": VERSION, **asdict(self)}
        part = path.with_name(f".{path.name}.part")
        part.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        part.replace(path)


def load_profile(path: Path) -> Profile:
    try:
        read = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read: {error.strerror or error}.",
            "Run headrace calibrate --out with this path.",
            param="profile",
        ) from None
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"no JSON ({error})") from None
    if not isinstance(read, dict) or read.pop("format", None) != FORMAT:
        raise _bad(path, f'no object with "format": "{FORMAT}"')
    version = read.pop("version", None)
    if version != VERSION:
        raise ConfigError(
            f"{path} has version {version!r} of the profile's format; this Headrace reads "
            f"{VERSION}.",
            "Run headrace calibrate again.",
            param="profile",
        )
    try:
        profile = _made(Profile, read, "profile")
    except ValueError as error:
        raise _bad(path, str(error)) from None
    if not any(step.decode_rows for step in profile.steps):
        raise _bad(path, "no step that decodes")
    return profile


def _bad(path: Path, what: str) -> HeadraceError:
    return ConfigError(
        f"{path} is no profile that can be used: {what}.",
        "Run headrace calibrate again.",
        param="profile",
    )


def _made(kind: type[T], value: Any, place: str) -> T:
    """A dataclass from a JSON object, each field by its type."""
    if not isinstance(value, dict):
        raise ValueError(f"{place} is not an object")
    hints = get_type_hints(kind)
    known = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(value.keys() - known):
        raise ValueError(f"{place} has an unknown field, {unknown[0]}")
    read = {name: _value(hints[name], one, f"{place}.{name}") for name, one in value.items()}
    try:
        return kind(**read)
    except TypeError:
        missing = sorted(known - value.keys())
        raise ValueError(f"{place} lacks {', '.join(missing)}") from None


def _value(hint: Any, value: Any, place: str) -> Any:
    origin, inside = get_origin(hint), get_args(hint)
    if origin is UnionType:
        if value is None:
            return None
        return _value(next(one for one in inside if one is not NoneType), value, place)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{place} is not a list")
        return tuple(_value(inside[0], one, f"{place}[{at}]") for at, one in enumerate(value))
    if origin is not None:  # a mapping
        if not isinstance(value, dict):
            raise ValueError(f"{place} is not an object")
        if inside[1] is Any:
            return value
        return {name: _value(inside[1], one, f"{place}.{name}") for name, one in value.items()}
    if hint in (bool, str):
        if not isinstance(value, hint):
            raise ValueError(f"{place} is {value!r}, not a {hint.__name__}")
        return value
    if hint in (int, float):
        is_right = isinstance(value, int if hint is int else (int, float))
        if isinstance(value, bool) or not is_right or not 0 <= value < math.inf:
            raise ValueError(f"{place} is {value!r}, not a number that is 0 or more")
        return value
    return _made(hint, value, place)
