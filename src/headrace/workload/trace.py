"""Recorded requests: CSV (`timestamp,input_length,output_length`) and Mooncake's JSON lines.

CSV: a line of column names, times in seconds; other columns are ignored. Mooncake: one object a
line with `timestamp` (milliseconds), `input_length`, `output_length` and `hash_ids`, one for each
512 tokens of the prompt: equal ids are equal prefixes. Rows with a `session_id` are turns of a
session; where a later one has a `delay` (milliseconds), it comes that long after the answer before
it. Times count from the first request. Knows no texts.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from headrace.core.checks import refusal
from headrace.core.errors import ConfigError, HeadraceError
from headrace.workload.ask import Ask
from headrace.workload.lines import numbered_lines
from headrace.workload.slo import Slo
from headrace.workload.workload import MAX_TOKENS

BLOCK_TOKENS = 512  # of Mooncake's hash ids
COLUMNS = ("timestamp", "input_length", "output_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A workload that was recorded. Seeds change nothing."""

    name: str
    requests: tuple[Ask, ...]
    slo: Slo | None = None

    def asks(self, seed: int = 0, count: int | None = None) -> Iterator[Ask]:
        return islice(iter(self.requests), count)

    def at_rate(self, requests_s: float) -> Trace:
        """With all times between requests scaled; waits within sessions stay."""
        span_s = self.requests[-1].at_s - self.requests[0].at_s
        if not span_s:
            raise ConfigError(
                f"Trace {self.name} has no rate: all its requests come at the same time.",
                "Leave the rate out.",
                param="rate",
            )
        if not 0 < requests_s < math.inf:
            raise refusal(ConfigError, "rate", requests_s, "a number above 0")
        scale = (len(self.requests) - 1) / requests_s / span_s
        moved = (replace(ask, at_s=ask.at_s * scale) for ask in self.requests)
        return replace(self, requests=tuple(moved))


def read_trace(path: Path, *, slo: Slo | None = None, block_tokens: int = BLOCK_TOKENS) -> Trace:
    """Which format it is, its first line says."""
    lines = numbered_lines(path)
    first = next(lines, None)
    if first is None:
        raise ConfigError(
            f"{path} is empty; expected a trace.",
            f"Write a line {','.join(COLUMNS)} and one line a request.",
        )
    if first[1].startswith("{"):
        requests = _mooncake(path, _chain(first, lines), block_tokens)
    else:
        requests = _table(path, first, lines)
    if not requests:
        raise ConfigError(
            f"{path} has column names and no requests; expected at least one.", "Add some."
        )
    return Trace(name=path.name, requests=tuple(requests), slo=slo)


def write_mooncake(asks: Iterable[Ask], path: Path, *, block_tokens: int = BLOCK_TOKENS) -> int:
    """Writes and counts requests. What prompts share is kept in whole blocks."""
    ids: dict[object, int] = {}
    written = 0
    with path.open("w", encoding="utf-8") as file:
        for number, ask in enumerate(asks):
            row: dict[str, Any] = {
                "timestamp": round(ask.at_s * 1e3, 3),
                "input_length": ask.prompt_tokens,
                "output_length": ask.output_tokens,
                "hash_ids": _hash_ids(ask, number, ids, block_tokens),
            }
            if ask.session is not None:
                row["session_id"] = str(ask.session)
            if ask.after_s is not None:
                row["delay"] = round(ask.after_s * 1e3, 3)
            file.write(json.dumps(row) + "\n")
            written += 1
    return written


def _hash_ids(ask: Ask, number: int, ids: dict[object, int], block_tokens: int) -> list[int]:
    """An id stands for a block and everything before it."""
    segments = [*ask.shared, (f"request {number}", ask.prompt_tokens - ask.shared_tokens)]
    found: list[int] = []
    at, used = 0, 0  # segment, tokens of it that are in blocks already
    for first in range(0, ask.prompt_tokens, block_tokens):
        room = min(block_tokens, ask.prompt_tokens - first)
        parts: list[tuple[str, int, int]] = []
        while room:
            name, tokens = segments[at]
            taken = min(room, tokens - used)
            if taken:
                parts.append((name, used, taken))
            room, used = room - taken, used + taken
            if used == tokens:
                at, used = at + 1, 0
        key = (found[-1] if found else None, tuple(parts))
        found.append(ids.setdefault(key, len(ids)))
    return found


def _chain(first: tuple[int, str], rest: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield first
    yield from rest


def _wrong(path: Path, line: int, what: str, remedy: str = "") -> HeadraceError:
    return ConfigError(f"{path}, line {line}: {what}", remedy or "Correct this line.")


def _table(path: Path, first: tuple[int, str], lines: Iterator[tuple[int, str]]) -> list[Ask]:
    names = [name.strip().lower() for name in next(csv.reader([first[1]]))]
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise _wrong(
            path,
            first[0],
            f"no column {missing[0]}; expected the names {','.join(COLUMNS)}, found "
            f"{first[1][:80]!r}.",
            f"Begin the file with the line {','.join(COLUMNS)}.",
        )
    places = [names.index(name) for name in COLUMNS]
    found: list[Ask] = []
    origin_s: float | None = None
    for number, line in lines:
        cells = next(csv.reader([line]))
        if len(cells) <= max(places):
            raise _wrong(path, number, f"{len(cells)} values; expected {len(names)}.")
        at_s, prompt, output = (_number(path, number, names[p], cells[p]) for p in places)
        origin_s = at_s if origin_s is None else origin_s
        found.append(
            Ask(
                at_s=_later(path, number, at_s - origin_s, found),
                prompt_tokens=_tokens(path, number, "input_length", prompt),
                output_tokens=_tokens(path, number, "output_length", output),
            )
        )
    return found


def _mooncake(path: Path, lines: Iterator[tuple[int, str]], block_tokens: int) -> list[Ask]:
    found: list[Ask] = []
    sessions: dict[str, tuple[int, int]] = {}  # id -> number, turns so far
    origin_s: float | None = None
    for number, line in lines:
        row = _row(path, number, line)
        prompt, output = (
            _tokens(path, number, name, _number(path, number, name, row.get(name)))
            for name in COLUMNS[1:]
        )
        session, turn, after_s = None, 0, None
        if row.get("session_id") is not None:
            key = str(row["session_id"])
            session, turn = sessions.get(key, (len(sessions), 0))
            sessions[key] = session, turn + 1
            if turn and row.get("delay") is not None:
                after_s = _number(path, number, "delay", row["delay"]) / 1e3
        if row.get("timestamp") is None and after_s is not None:
            at_s = found[-1].at_s if found else 0.0
        else:
            at_s = _number(path, number, "timestamp", row.get("timestamp")) / 1e3
            origin_s = at_s if origin_s is None else origin_s
            at_s = _later(path, number, at_s - origin_s, found)
        found.append(
            Ask(
                at_s=at_s,
                prompt_tokens=prompt,
                output_tokens=output,
                shared=_blocks(path, number, row.get("hash_ids"), prompt, block_tokens),
                session=session,
                turn=turn,
                after_s=after_s,
            )
        )
    return found


def _row(path: Path, number: int, line: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _wrong(path, number, f"not JSON ({error}).") from None
    if not isinstance(row, dict):
        raise _wrong(path, number, "not an object; expected {...} with timestamp and lengths.")
    return row


def _blocks(
    path: Path, number: int, ids: Any, prompt_tokens: int, block_tokens: int
) -> tuple[tuple[str, int], ...]:
    if ids is None:
        return ()
    if not isinstance(ids, list) or not all(type(one) in (int, str) for one in ids):
        raise _wrong(path, number, "hash_ids is no list of numbers.")
    most = -(-prompt_tokens // block_tokens)
    if len(ids) > most:
        raise _wrong(
            path,
            number,
            f"{len(ids)} hash_ids for {prompt_tokens} tokens; expected at most {most} blocks of "
            f"{block_tokens} tokens.",
            "Correct this line, or the number of tokens in a block.",
        )
    return tuple(
        (f"block {one}", min(block_tokens, prompt_tokens - place * block_tokens))
        for place, one in enumerate(ids)
    )


def _number(path: Path, line: int, name: str, value: Any) -> float:
    if value is None or value == "":
        raise _wrong(path, line, f"no {name}.", "Give every request its time and both lengths.")
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise _wrong(path, line, f"{name} is {str(value)[:40]!r}; expected a number.")
    if number < 0:
        raise _wrong(path, line, f"{name} is {number:g}; expected 0 or more.")
    return number


def _tokens(path: Path, line: int, name: str, value: float) -> int:
    if value != int(value) or not 1 <= value <= MAX_TOKENS:
        raise _wrong(
            path, line, f"{name} is {value:g}; expected a whole number from 1 to {MAX_TOKENS:,}."
        )
    return int(value)


def _later(path: Path, line: int, at_s: float, found: list[Ask]) -> float:
    if found and at_s < found[-1].at_s:
        raise _wrong(
            path,
            line,
            f"its timestamp is {found[-1].at_s - at_s:g} s before that of the request above it.",
            "Sort the trace by its timestamps.",
        )
    return at_s
