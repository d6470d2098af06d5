"""What served engines are asked for: workloads and ways to sample, as the bytes of HTTP requests.

Prompts are token ids, so that they are as long as is said; every answer is as long as was asked.
Each request is made from its number alone, so that every process can make its own. Knows no server.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offline_workloads import DRAWS, FLAT, Sizes, mixed_lengths

Length = tuple[int, int]  # least and most


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    name: str
    clients: int
    waves: int  # requests of each client, one after the other
    prompt_tokens: Length
    output_tokens: Length
    shared_tokens: int = 0  # at the beginning of every prompt, the same for all

    @property
    def requests(self) -> int:
        return self.clients * self.waves

    def lengths(self) -> list[Length]:
        """(prompt, output) of each request."""
        if self.prompt_tokens[0] == self.prompt_tokens[1]:
            return [(self.prompt_tokens[0], self.output_tokens[0])] * self.requests
        assert self.prompt_tokens == self.output_tokens, "mixed_lengths has one range for both"
        return mixed_lengths(replace(Sizes(), mixed=(self.requests, *self.prompt_tokens)))

    def shortened(self, output_tokens: int, prompt_tokens: int | None = None) -> Workload:
        """One wave with short answers, and prompts as long as ever or shorter: to warm up with."""
        tokens_in = prompt_tokens or self.prompt_tokens[1]
        return replace(
            self,
            waves=1,
            prompt_tokens=(tokens_in, tokens_in),
            output_tokens=(min(output_tokens, self.output_tokens[1]),) * 2,
            shared_tokens=min(self.shared_tokens, tokens_in // 2 if prompt_tokens else tokens_in),
        )


def fixed(name: str, clients: int, waves: int, tokens_in: int, tokens_out: int) -> Workload:
    return Workload(
        name=name,
        clients=clients,
        waves=waves,
        prompt_tokens=(tokens_in, tokens_in),
        output_tokens=(tokens_out, tokens_out),
    )


# As the last section of ANCHORS has them; waves are ours.
WORKLOADS: dict[str, Workload] = {
    each.name: each
    for each in (
        fixed("1", 1, 8, 128, 128),
        fixed("16", 16, 4, 128, 256),
        fixed("64", 64, 4, 512, 128),
        fixed("256", 256, 4, 512, 128),
        Workload(
            name="mixed",
            clients=256,
            waves=1,
            prompt_tokens=(100, 1024),
            output_tokens=(100, 1024),
        ),
        replace(fixed("prefix", 64, 4, 4100, 64), shared_tokens=4000),
    )
}

# An answer to it goes on for as long as it may, mostly inside of strings, where most of the
# vocabulary is allowed: what a mask costs, at its widest.
_LONG_LIST = {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 1500}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    **DRAWS,
    "json": FLAT | {"guided_json": _LONG_LIST},
}
BLEND = "blend"  # every request another one of those below, in turn
BLENDED = ("greedy", "temperature", "top_p", "top_k", "min_p", "penalties")


@dataclass(frozen=True, slots=True)
class Request:
    parts: tuple[bytes, ...]  # what is sent; many share the last one
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of a workload, small enough to be told to every process."""

    workload: Workload
    sampling: str
    vocabulary: Length  # ids of prompts: from, to
    seed: str  # of this run: prompts that nobody has seen
    model: str | None = None

    def requests_of(self, client: int) -> list[Request]:
        """Those that one client sends, in their order."""
        lengths = self.workload.lengths()
        shared = self._ids("shared", self.workload.shared_tokens)
        found = []
        for number in range(client, self.workload.requests, self.workload.clients):
            tokens_in, tokens_out = lengths[number]
            own = self._ids(f"{self.seed} {number}", tokens_in - len(shared))
            found.append(encode(shared + own, tokens_out, self._how(number), self.model))
        return found

    def _ids(self, seed: str, count: int) -> list[int]:
        return random.Random(seed).choices(range(*self.vocabulary), k=count)

    def _how(self, number: int) -> bytes:
        name = BLENDED[number % len(BLENDED)] if self.sampling == BLEND else self.sampling
        return encode_fields(SETTINGS[name])


def encode_fields(fields: Mapping[str, Any]) -> bytes:
    """Of a JSON object, without its braces. top_p is said, lest a model bring its own."""
    return json.dumps({"top_p": 1.0, **fields}, separators=(",", ":"))[1:-1].encode()


def encode(prompt: Sequence[int], output_tokens: int, how: bytes, model: str | None) -> Request:
    """A streamed completion over a connection that is used again."""
    fields: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if model is not None:
        fields["model"] = model
    body = json.dumps(fields, separators=(",", ":"))[:-1].encode() + b"," + how + b"}"
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return Request((head.encode(), body), output_tokens)
