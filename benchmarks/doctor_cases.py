"""The cases of doctor_real.py: servers that are wrong on purpose, and healthy ones.

Data only: which engine, which flags, which traffic, and which rule must fire. Nothing is started
here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from doctor_load import Traffic


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    engine: str
    rule: int | None  # that must be found; None: no fault may be
    flags: tuple[str, ...] = ()
    traffic: Traffic | None = None  # None: the server is idle but for the doctor's probes
    after: Traffic | None = None  # where the fix is the clients' own,
    schema: str = ""  # for the probes,
    simpler: str = ""  # and what the clients send instead
    shows: str = "tokens/s"  # what of the traffic: or "TTFT"; of probes, "the longest gap"
    profiled: bool = False  # with --profile
    probes: bool = True


CHAT = Traffic(users=12)
SHARED = Traffic(users=2, shared_words=300, prompt_words=10, answer_tokens=16)
SCHEMAS = Traffic(users=2, answer_tokens=24)


def _of(**more: str) -> dict[str, object]:
    return {
        "type": "object",
        "properties": {"text": {"type": "string", **more}},
        "required": ["text"],
        "additionalProperties": False,
    }


_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_PAIRS = [_LETTERS[i % 26] + _LETTERS[i * 7 % 26] for i in range(200)]
# One of 200 kinds of text, each with two letters of its own somewhere: a mask follows all of them.
KINDS = json.dumps({"anyOf": [_of(pattern=f"^[a-z ]*{pair}[a-z ]{{10,}}$") for pair in _PAIRS]})
# Certain letters at certain distances: masks grow until the engine gives it up.
GIVEN_UP = json.dumps(_of(pattern="^([a-z ]*[aeiou][a-z ]{8}[bcd][a-z ]*){3}$"))
PLAIN = json.dumps(_of())
LONG = Traffic(users=8, prompt_words=40, answer_tokens=96)
LLAMA = ("-c", "16384")
# Its default of 2,048 tokens a step stops all streams while a long prompt is computed, which on two
# cores takes seconds: rule 18 says so, and its fix is what a healthy server has.
PACED = (*LLAMA, "-b", "16")
CASES = (
    Case(name="one place", engine="headrace", rule=4, flags=("--max-sequences", "1")),
    Case(name="starved KV pool", engine="headrace", rule=3, flags=("--kv-tokens", "256")),
    Case(name="prefix cache off", engine="headrace", rule=19, flags=("--no-prefix-cache",)),
    Case(name="slow grammar: 200 alternatives", engine="headrace", rule=34, schema=KINDS,
         simpler=PLAIN),
    Case(name="grammar that is given up", engine="headrace", rule=34, schema=GIVEN_UP,
         simpler=PLAIN),
    Case(name="two places, 12 users, with a profile", engine="headrace", rule=4,
         flags=("--max-sequences", "2"), traffic=CHAT, profiled=True, probes=False),
    Case(name="two places, 12 users", engine="headrace", rule=4, flags=("--max-sequences", "2"),
         traffic=CHAT, probes=False),
    Case(name="healthy, idle", engine="headrace", rule=None),
    Case(name="healthy, busy (4 users)", engine="headrace", rule=None,
         traffic=replace(CHAT, users=4)),
    Case(name="healthy, saturated (96 users)", engine="headrace", rule=None,
         traffic=replace(CHAT, users=96), probes=False),
    Case(name="starved KV pool, 8 users", engine="headrace", rule=3, flags=("--kv-tokens", "384"),
         traffic=LONG, probes=False),
    Case(name="prefix cache off, 2 users, one prefix", engine="headrace", rule=19,
         flags=("--no-prefix-cache",), traffic=SHARED, shows="TTFT"),
    Case(name="two places, with a profile", engine="headrace", rule=4,
         flags=("--max-sequences", "2"), profiled=True),
    Case(name="two places", engine="headrace", rule=4, flags=("--max-sequences", "2")),
    Case(name="slow grammar, 2 users", engine="headrace", rule=34,
         traffic=replace(SCHEMAS, schema=KINDS), after=replace(SCHEMAS, schema=PLAIN),
         probes=False),
    Case(name="one slot", engine="llama.cpp", rule=4, flags=(*LLAMA, "-np", "1")),
    Case(name="one slot, 12 users", engine="llama.cpp", rule=4, flags=(*LLAMA, "-np", "1"),
         traffic=CHAT, probes=False),
    Case(name="steps of 2,048 tokens (its default)", engine="llama.cpp", rule=18,
         flags=(*LLAMA, "-np", "8"), shows="the longest gap"),
    Case(name="healthy, idle", engine="llama.cpp", rule=None, flags=(*PACED, "-np", "8")),
    Case(name="healthy, busy (4 users)", engine="llama.cpp", rule=None,
         flags=(*PACED, "-np", "8"), traffic=replace(CHAT, users=4)),
    Case(name="healthy, saturated (24 users)", engine="llama.cpp", rule=None,
         flags=(*PACED, "-np", "16"), traffic=replace(CHAT, users=24), probes=False),
    Case(name="one place", engine="vllm", rule=4, flags=("--max-num-seqs", "1")),
    Case(name="prefix cache off", engine="vllm", rule=19,
         flags=("--max-num-seqs", "16", "--no-enable-prefix-caching")),
    Case(name="healthy, idle", engine="vllm", rule=None, flags=("--max-num-seqs", "16")),
    Case(name="healthy, saturated (32 users)", engine="vllm", rule=None,
         flags=("--max-num-seqs", "16"), traffic=replace(CHAT, users=32), probes=False),
)  # fmt: skip
