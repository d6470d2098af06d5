"""Five workloads by name, with objectives: chat, rag, code, batch, agent.

Where the project's sources give a figure it is theirs: chat's objective and agent's TPOT, code's
lengths, its shared prefix of 400 tokens and its first token within 100 ms, rag's long prompts with
short answers, and a first token after more than a second that "feels laggy". All other lengths are
choices of ours, so that a name means the same thing everywhere; docs/workload.md says which. A real
decision should use a trace of one's own.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from headrace.core.errors import ConfigError
from headrace.workload.arrivals import ClosedLoop, OpenLoop
from headrace.workload.distribution import Exponential, Lognormal, Uniform
from headrace.workload.slo import Slo
from headrace.workload.workload import Lengths, Synthetic

_CHAT = Synthetic(
    name="chat",
    prompts=Lengths(Lognormal(200, 1.0), least=8, most=4096),
    outputs=Lengths(Lognormal(250, 0.8), least=8, most=2048),
    arrivals=OpenLoop(rate_s=0.25),
    prefixes=1,
    prefix_tokens=200,
    turns=Lengths(Uniform(1, 7), most=7),
    follow_ups=Lengths(Lognormal(80, 1.0), least=4, most=2048),
    waits=Exponential(20.0),
    context_tokens=16_384,
    slo=Slo(ttft_s=0.5, tpot_s=0.05),
)
_RAG = Synthetic(
    name="rag",
    prompts=Lengths(Lognormal(3000, 0.5), least=256, most=16_000),
    outputs=Lengths(Lognormal(200, 0.6), least=8, most=1024),
    arrivals=OpenLoop(rate_s=1.0),
    prefixes=1,
    prefix_tokens=300,
    context_tokens=32_768,
    slo=Slo(ttft_s=1.0, tpot_s=0.05),
)
_CODE = Synthetic(
    name="code",
    prompts=Lengths(Lognormal(512, 0.8), least=16, most=8192),
    outputs=Lengths(Lognormal(256, 0.8), least=4, most=2048),
    arrivals=OpenLoop(rate_s=1.0, cv=1.5),
    prefixes=1,
    prefix_tokens=400,
    context_tokens=16_384,
    slo=Slo(ttft_s=0.1, tpot_s=0.05),
)
_BATCH = Synthetic(
    name="batch",
    prompts=Lengths(Lognormal(1500, 0.8), least=64, most=16_000),
    outputs=Lengths(Lognormal(400, 0.6), least=16, most=4096),
    arrivals=ClosedLoop(clients=64),
    context_tokens=32_768,
)
_AGENT = Synthetic(
    name="agent",
    prompts=Lengths(Lognormal(500, 0.8), least=32, most=8192),
    outputs=Lengths(Lognormal(150, 0.8), least=8, most=2048),
    arrivals=OpenLoop(rate_s=0.1),
    prefixes=1,
    prefix_tokens=1500,  # a system prompt with the tools' descriptions
    turns=Lengths(Uniform(5, 15), most=15),
    follow_ups=Lengths(Lognormal(600, 1.2), least=8, most=8192),  # a tool's result
    waits=Exponential(2.0),  # the tool works
    context_tokens=65_536,
    slo=Slo(ttft_s=1.0, tpot_s=0.1),
)

NAMED: Mapping[str, Synthetic] = {one.name: one for one in (_CHAT, _RAG, _CODE, _BATCH, _AGENT)}


def find_workload(name: str) -> Synthetic:
    if name not in NAMED:
        near = difflib.get_close_matches(name.lower(), NAMED, n=1)
        raise ConfigError(
            f"workload is {name[:40]!r}; expected one of {', '.join(NAMED)}.",
            f"Did you mean {near[0]}?" if near else "Choose one, or give lengths or a trace.",
            param="workload",
        )
    return NAMED[name]
