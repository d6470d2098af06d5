"""The comparison with other clients: its table, and the endpoint whose times are known."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random

from bench_beside import Figures, table, texts, tokenizer
from headrace.bench.run import Stop
from headrace.bench.session import Asked, Session
from headrace.client.connection import parse_address
from headrace.workload.arrivals import ClosedLoop
from headrace.workload.workload import Synthetic, fixed
from paced_endpoint import Paced, Sent, timings


def test_the_table_says_how_far_peers_are_from_ours() -> None:
    ours = [Figures(ttft_s=0.1, tpot_s=0.02, tokens_s=100.0 + n) for n in range(3)]
    late = Figures(ttft_s=0.2, tpot_s=0.02, tokens_s=90.0, is_valid=False)
    theirs = [Figures(ttft_s=0.101, tpot_s=0.01, tokens_s=101.0)]
    rows = list(
        table({"headrace": [*ours, late], "peer": theirs}, [{"ttft_s": 0.1, "tpot_s": 0.02}])
    )
    assert rows[2].startswith("| headrace (1 rounds invalid) | 100.00 (100.00 to 200.00) |")
    assert rows[3].endswith("| +1.0%, -50.0%, +0.5% |")
    assert rows[4] == "| what the endpoint did | 100.00 | 20.00 | | |"


def test_a_turn_has_prompts_of_its_own_and_a_tokenizer_of_words(tmp_path: Path) -> None:
    random = Random(0)
    assert not {*texts(20, 50, random)} & {*texts(20, 50, random)}
    made = json.loads((tokenizer(tmp_path) / "tokenizer.json").read_text())
    assert made["model"]["vocab"]["time"] == 1


def test_the_paced_endpoint_is_measured_as_what_it_did() -> None:
    """Whatever this machine does meanwhile: no client sees a token before it was sent, and all see
    as many."""

    async def work() -> tuple[dict[str, float], list[float], int]:
        paced = Paced(0.0, 0.0)
        server = await asyncio.start_server(paced.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        session = Session(Asked(address=parse_address(f":{port}")))
        await session.open()
        workload = Synthetic(prompts=fixed(20), outputs=fixed(5), arrivals=ClosedLoop(clients=2))
        summary = await session.measure(workload, Stop(requests=6))
        session.close()
        server.close()
        ttfts = sorted(one.service_ttft_s for one in summary.good)
        return paced._about("/timings"), ttfts, summary.output_tokens

    truth, ttfts, tokens = asyncio.run(work())
    assert (truth["answers"], tokens) == (6, 30)
    assert ttfts[-1] >= truth["ttft_s"]


def test_timings_leave_out_the_questions_of_a_client() -> None:
    sent = [Sent(1.0, [1.1, 1.2, 1.4]), Sent(0.0, [0.1, 0.2])]
    found = timings(sent)
    assert found["answers"] == 1
    assert abs(found["tpot_s"] - 0.15) < 1e-9
    assert timings([]) == {"answers": 0}
