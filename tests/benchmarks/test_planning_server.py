"""The comparison of simulator and server: errors, tables, and a load that keeps its times."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.profiles import profile

from headrace.simulate.profiled import setup_of
from headrace.simulate.report import Report
from headrace.simulate.serve import serve
from headrace.simulate.served import Served
from headrace.workload.arrivals import OpenLoop
from headrace.workload.ask import Ask
from headrace.workload.workload import Synthetic, fixed
from planning.cases import CASES, Compared, compare, compared, markdown
from planning.load import Load
from planning.server import simulated


def report(ttft_s: float, tpot_s: float) -> Report:
    served = []
    for number in range(40):
        ask = Ask(at_s=float(number), prompt_tokens=10, output_tokens=11)
        one = Served(ask=ask, arrival_s=float(number), tokens=11)
        one.started_s = one.first_s = number + ttft_s
        one.end_s = one.first_s + 10 * tpot_s
        served.append(one)
    return Report(served=tuple(served))


def test_errors_are_of_medians_and_stand_beside_the_servers_spread() -> None:
    real = [report(0.1, 0.02), report(0.11, 0.02), report(0.12, 0.03)]
    rows = {row.measure: row for row in compare("a case", real, report(0.121, 0.02))}
    assert rows["TTFT p50"].error == pytest.approx(0.1)
    assert rows["TTFT p50"].spread == pytest.approx(0.01 / 0.11)
    assert not rows["TTFT p50"].is_within
    assert rows["TPOT p50"].error == pytest.approx(0.0)
    assert rows["TPOT p99"].spread == pytest.approx(0.25)
    assert rows["tokens/s"].is_within
    text = markdown(list(rows.values()), ["a note"])
    assert "| a case | " in text
    assert "110.0 ms ±9.1%, **+10.0%**" in text
    assert "- TTFT p50: 0 of 1 within 6.0%" in text
    assert text.endswith("- a note\n")


def test_saturation_is_a_row_of_its_own() -> None:
    row = compared("saturation", "saturation", [4.0], 4.1, 0.05)
    assert row.is_within
    other = Compared(case="b", measure="tokens/s", served=9.0, spread=0, simulated=9, target=0.1)
    assert "| saturation |  | 4 ±0.0%, +2.5% |" in markdown([other, row], [])


def test_no_case_is_one_that_was_calibrated_with_and_all_can_be_drawn() -> None:
    assert len({case.name for case in CASES}) == len(CASES) == 14
    for case in CASES:
        workload = case.workload if case.load is None else case.workload.at_rate(2.0)
        assert len(list(workload.asks(0, case.requests))) == case.requests


def test_a_simulated_run_begins_warm_and_has_only_its_own_requests() -> None:
    asks = list(CASES[5].workload.at_rate(3.0).asks(0, 30))
    found = simulated(asks, profile())
    assert [one.ask.prompt_tokens for one in found.served] == [128] * 30
    cold = serve(asks, setup_of(profile()))
    assert found.output_tokens_s == pytest.approx(cold.output_tokens_s, rel=0.1)


class Completions:
    """Answers at once with the tokens that were asked for, and keeps the prompts."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
                asked = json.loads(await reader.readexactly(length))
                self.prompts.append(asked["prompt"])
                writer.write(self._answer(asked["max_tokens"], "return_token_ids" in asked))
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    def _answer(self, tokens: int, wants_ids: bool) -> bytes:
        events = []
        for token in range(tokens):
            ids = f',"token_ids":[{7000 + token}]' if wants_ids else ""
            events.append(f'data: {{"choices":[{{"text":"a"{ids}}}]}}\n\n')
        events.append(f'data: {{"usage":{{"completion_tokens":{tokens}}}}}\n\ndata: [DONE]\n\n')
        chunks = (f"{len(one):x}\r\n{one}\r\n" for one in events)
        head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        return (head + "".join(chunks) + "0\r\n\r\n").encode()


def run(asks: list[Ask]) -> tuple[list[Served], list[list[int]]]:
    async def both() -> list[Served]:
        server = await asyncio.start_server(completions.serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await Load(port, range(100, 200), "salt").run(asks)

    completions = Completions()
    return asyncio.run(both()), completions.prompts


def test_a_load_sends_every_request_and_turns_begin_with_what_was_said() -> None:
    workload = Synthetic(
        prompts=fixed(20), outputs=fixed(4), arrivals=OpenLoop(rate_s=200.0),
        prefixes=1, prefix_tokens=16, turns=fixed(2), follow_ups=fixed(5),
    )  # fmt: skip
    asks = list(workload.asks(0, 8))
    served, prompts = run(asks)
    assert len(served) == 8
    assert all(one.is_done and one.tokens == 4 for one in served)
    firsts = [prompt for prompt in prompts if len(prompt) == 36]
    seconds = [prompt for prompt in prompts if len(prompt) == 36 + 4 + 5]
    assert len(firsts) == len(seconds) == 4
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in firsts}) == 4
    said = list(range(7000, 7004))
    assert sorted(prompt[:40] for prompt in seconds) == sorted(one + said for one in firsts)
    assert all(one.arrival_s >= one.ask.at_s for one in served)
