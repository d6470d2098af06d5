"""An engine process that does as it is told: for tests of whoever watches one.

    python scripted_engine.py WHAT FD

Speaks the real wire protocol and computes nothing. WHAT is one of
    serve         answers every request with the prompt's tokens, then an end
    die-at-start  ends with 7 before it is ready
    broken        says that it can't start
    die-on-add    ends with 9 when a request comes, having answered none
    hang-on-add   stops making progress when a request comes, but goes on beating
    slow-on-add   makes progress for five seconds before it answers
    silent        is ready and never beats
    garbled       answers every request with columns of different lengths
    confused      as serve, with tokens and starts of requests that nobody sent between
"""

from __future__ import annotations

import socket
import sys
import time

from headrace.core.request import FinishReason
from headrace.server.link import wire
from headrace.server.link.engine_process import Link


def answer(link: Link, number: int, prompt: list[int]) -> None:
    for token in prompt:
        link.send(wire.Tokens([number], [0], [token], [0.0], [None]))
    link.send(wire.Tokens([number], [0], [-1], [0.0], [FinishReason.LENGTH]))


def run(what: str, link: Link) -> int:
    while not any(isinstance(m, wire.Configure) for m in link.receive(1.0)):
        pass
    if what == "die-at-start":
        return 7
    if what == "broken":
        link.send(wire.Broken("The model is a teapot.", "Choose another.", ""))
        return 2
    link.send(
        wire.Ready(
            context_tokens=100,
            max_sequences=4,
            total_blocks=10,
            block_tokens=16,
            ledger_bytes={},
            notes=[],
            pid=0,
            backend={},
        )
    )
    turns, hung = 0, False
    while not link.closed:
        for message in link.receive(0.02):
            if isinstance(message, wire.Shutdown):
                return 0
            if not isinstance(message, wire.Add):
                continue
            if what == "die-on-add":
                return 9
            if what == "slow-on-add":
                for turn in range(100):
                    link.send(wire.Beat(progress=10**6 + turn))
                    time.sleep(0.05)
            if what == "garbled":
                columns = wire.Tokens([message.number], [0], [5], [0.0], [None])
                columns.token_ids.append(6)
                link.send(columns)
                continue
            if what == "confused":
                strangers = [message.number + 1, 2**40]
                columns = wire.Tokens(
                    strangers, [0, 0], [5, 6], [0.0, 0.0], [None, FinishReason.STOP]
                )
                columns.started.extend((number, 0.0, 0) for number in strangers)
                link.send(columns)
                link.send(wire.Refused(2**40, 400, "Nobody asked.", "", None))
            hung = hung or what == "hang-on-add"
            if not hung:
                answer(link, message.number, message.request.prompt_token_ids)
        turns += not hung
        if what != "silent":
            link.send(wire.Beat(progress=turns))
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], Link(socket.socket(fileno=int(sys.argv[2])))))
