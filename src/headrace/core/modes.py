"""`serve --mode`: for each kind of traffic, the settings that suit it where nothing else was said.

A preset loses to the file, to variables and to flags; `serve --dry-run` shows what it set. Only
settings whose effect follows from what they are: how much longer prompts may make a step, who goes
first, and how long a queue may be. Knows names and values; docs/configuration.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Mode(StrEnum):
    CHAT = "chat"
    RAG = "rag"
    CODE = "code"
    BATCH = "batch"
    AGENT = "agent"


PRESETS: Mapping[Mode, Mapping[str, object]] = {
    # People read along: tokens come at an even pace, and who would wait long is told at once.
    Mode.CHAT: {"policy": "fcfs", "max_step_growth": 2.0, "max_waiting_requests": 64},
    # Long prompts, short answers: prompts may take more of a step, short ones go first, and a queue
    # of few requests has many tokens.
    Mode.RAG: {"policy": "shortest", "max_step_growth": 6.0, "max_waiting_tokens": 2_097_152},
    # An editor waits: a completion that comes late is of no use to anyone.
    Mode.CODE: {
        "policy": "shortest",
        "max_step_growth": 2.0,
        "max_waiting_requests": 32,
        "timeout_s": 20.0,
    },
    # Nobody waits: whatever keeps the batch full, and a queue that takes all that comes.
    Mode.BATCH: {
        "policy": "fcfs",
        "max_step_growth": 1000.0,
        "max_waiting_requests": 8192,
        "max_waiting_tokens": 67_108_864,
    },
    # Many turns with tools in between: an agent's next turn must not be refused, and long
    # conversations continue by previous_response_id.
    Mode.AGENT: {
        "policy": "fcfs",
        "max_step_growth": 4.0,
        "max_waiting_tokens": 2_097_152,
        "max_stored_responses": 10_000,
        "max_stored": "256MiB",
    },
}
