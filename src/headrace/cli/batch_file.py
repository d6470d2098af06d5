"""OpenAI's batch files: requests as JSON lines in, answers as JSON lines out.

A line in is {"custom_id", "method": "POST", "url", "body"}; a line out is {"id", "custom_id",
"response": {"status_code", "request_id", "body"}, "error"}. Knows the format; sends nothing.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_LINE_BYTES = 8 << 20  # the server's own bound of a body
_SHOWN = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What a file holds, read once before anything is sent."""

    requests: int
    models: tuple[str, ...]  # named by its bodies, in order


def requests_of(path: Path) -> Iterator[BatchRequest]:
    """One at a time: a file may be larger than memory. Raises for a line that is none."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _read(line, f"{path}:{number}")
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read: {error.strerror or error}.", "Give a file of JSON lines."
        ) from None


def outline_of(path: Path) -> Outline:
    """Checks every line, and that no custom_id comes twice."""
    seen: set[str] = set()
    models: dict[str, None] = {}
    for request in requests_of(path):
        if request.custom_id in seen:
            raise ConfigError(
                f"{path} has the custom_id {request.custom_id[:_SHOWN]!r} twice.",
                "Each answer is found by it: give each request its own.",
            )
        seen.add(request.custom_id)
        if isinstance(request.body.get("model"), str):
            models[request.body["model"]] = None
    if not seen:
        raise ConfigError(f"{path} has no requests.", "Give a file of JSON lines.")
    return Outline(requests=len(seen), models=tuple(models))


def done_before(path: Path) -> set[str]:
    """The custom_ids that an earlier run has answered. A last line that was cut off when that run
    was killed is removed, so that new ones begin where it began."""
    if not path.exists():
        return set()
    done: set[str] = set()
    whole = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            try:
                found = json.loads(line)
                done.add(found["custom_id"])
                _ = found["response"]
            except (ValueError, KeyError, TypeError):
                raise ConfigError(
                    f"{path}:{number} is no line of a batch's output.",
                    "Give another output file: this one is not overwritten.",
                ) from None
    if whole < path.stat().st_size:
        os.truncate(path, whole)
    return done


def line_of(request: BatchRequest, status: int, request_id: str, body: Any) -> bytes:
    """An answer as OpenAI writes it."""
    answer = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": request.custom_id,
        "response": {"status_code": status, "request_id": request_id, "body": body},
        "error": None,
    }
    return json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def _read(line: bytes, place: str) -> BatchRequest:
    if len(line) > MAX_LINE_BYTES:
        raise _bad(place, f"it has {len(line):,} bytes; at most {MAX_LINE_BYTES:,} are read")
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _bad(place, f"it is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise _bad(place, "it is not an object")
    custom_id, url, body = found.get("custom_id"), found.get("url"), found.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise _bad(place, "custom_id is not a text")
    if found.get("method", "POST") != "POST":
        raise _bad(place, f"method is {str(found['method'])[:_SHOWN]!r}; expected POST")
    if url not in URLS:
        raise _bad(place, f"url is {str(url)[:_SHOWN]!r}; expected one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise _bad(place, "body is not an object")
    if body.get("stream"):
        raise _bad(place, "its body asks for a stream, which a batch can't hold")
    return BatchRequest(custom_id=custom_id, url=url, body=body)


def _bad(place: str, why: str) -> ConfigError:
    return ConfigError(
        f"{place} is no request of a batch: {why}.",
        'Write {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {…}}.',
    )
