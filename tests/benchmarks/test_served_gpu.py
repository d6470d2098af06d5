"""The load that a served GPU is measured with: its requests, its clients, its figures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.tokenizer.folder_vocabulary import read_folder_vocabulary
from headrace.tokenizer.tokenizer import Tokenizer
from offline_workloads import Sizes, mixed_lengths
from served_anchors import VLLM, vllm_figure
from served_figures import Figures, figures_of, make_row, markdown, percentile
from served_gpu import main, parse, plan
from served_load import LoadFailure, Timing, run_clients
from served_workloads import BLEND, BLENDED, SETTINGS, WORKLOADS, Job, Request, fixed
from shapes import SHAPES, write_shape

# Figures


def test_percentiles_lie_between_the_nearest_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 10.0], 0.95) == pytest.approx(9.5)
    assert percentile([7.0], 0.95) == 7.0


def test_figures_count_from_the_first_request_to_the_last_token() -> None:
    timings = [Timing(10.0, 10.5, 11.5, 11), Timing(11.0, 11.1, 14.0, 30)]
    found = figures_of(timings, prompt_tokens=59)
    assert found.output_per_s == pytest.approx(41 / 4)
    assert found.total_per_s == pytest.approx(100 / 4)
    assert found.ttft_p50_ms == pytest.approx(300)
    assert found.tpot_p50_ms == pytest.approx((100 + 100) / 2)


def test_a_token_alone_has_no_time_between_tokens() -> None:
    assert figures_of([Timing(0.0, 1.0, 1.0, 1)], 4).tpot_p95_ms == 0.0


def rates(*values: float) -> list[Figures]:
    return [Figures(value, 2 * value, 100.0, 200.0, 10.0, 20.0) for value in values]


def test_ratios_are_of_the_same_round() -> None:
    row = make_row("64", "top_p", rates(50, 200, 95), rates(100, 200, 100))
    assert row.of_greedy == pytest.approx(0.95)
    assert make_row("64", "top_p", rates(50), []).of_greedy is None


def test_the_table_has_ratios_to_vllm_only_where_they_mean_something() -> None:
    row = make_row("256", "greedy", rates(16607), rates(16607))
    shown = markdown([row], with_anchors=True)
    assert (
        "| 256 | greedy | 16,607 | 33,214 | 100 (0.08x) / 200 (0.07x) | 10 (0.36x) / 20 | " in shown
    )
    assert shown.endswith("| 1.00x | 1.00x |")
    assert markdown([row], with_anchors=False).endswith("| 1.00x |  |")


def test_anchors_name_workloads_settings_and_figures_that_there_are() -> None:
    for (workload, sampling), found in VLLM.items():
        assert workload in WORKLOADS
        assert sampling in SETTINGS
        assert found.keys() <= set(Figures.__slots__)
    assert vllm_figure("1", "greedy", "output_per_s") == 202
    assert vllm_figure("1", "min_p", "output_per_s") is None


# Requests


def bodies(job: Job) -> list[list[dict[str, Any]]]:
    """By client, as a server would read them."""
    found = []
    for client in range(job.workload.clients):
        requests = job.requests_of(client)
        for request in requests:
            head, body = request.parts
            assert f"Content-Length: {len(body)}\r\n".encode() in head
            assert json.loads(body)["max_tokens"] == request.output_tokens
        found.append([json.loads(request.parts[1]) for request in requests])
    return found


def job(name: str, sampling: str, **changes: Any) -> Job:
    workload = replace(WORKLOADS[name], **changes)
    return Job(workload=workload, sampling=sampling, vocabulary=(256, 512), seed="a")


def test_every_request_is_as_long_as_its_workload_says_and_new() -> None:
    asked = bodies(job("16", "top_p"))
    prompts = [tuple(body["prompt"]) for client in asked for body in client]
    assert [len(client) for client in asked] == [4] * 16
    assert {len(prompt) for prompt in prompts} == {128}
    assert len(set(prompts)) == 64
    assert all(256 <= token < 512 for token in prompts[0])
    first = asked[0][0]
    assert (first["temperature"], first["top_p"], first["ignore_eos"]) == (0.8, 0.95, True)
    assert first["stream_options"] == {"include_usage": True}
    again = replace(job("16", "top_p"), seed="b")
    assert bodies(again)[0][0]["prompt"] != first["prompt"]
    assert bodies(job("16", "greedy"))[0][0]["prompt"] == first["prompt"]


def test_mixed_lengths_are_those_of_the_offline_workload() -> None:
    asked = bodies(job("mixed", "greedy"))
    lengths = [(len(client[0]["prompt"]), client[0]["max_tokens"]) for client in asked]
    assert lengths == mixed_lengths(Sizes())


def test_a_shared_prefix_is_shared_by_all_and_by_every_run() -> None:
    small = {"clients": 3, "waves": 2, "prompt_tokens": (20, 20), "shared_tokens": 15}
    first = job("prefix", "greedy", **small)
    prompts = [
        b["prompt"] for run in (first, replace(first, seed="b")) for c in bodies(run) for b in c
    ]
    assert len({tuple(prompt[:15]) for prompt in prompts}) == 1
    assert len({tuple(prompt[15:]) for prompt in prompts}) == 12


def test_a_blend_takes_its_settings_in_turn() -> None:
    asked = bodies(job("16", BLEND))
    assert asked[1][0]["temperature"] == SETTINGS[BLENDED[1]]["temperature"]
    assert asked[3][0]["top_k"] == SETTINGS["top_k"]["top_k"]


def test_warming_up_is_one_short_wave() -> None:
    short = WORKLOADS["mixed"].shortened(16)
    assert short.requests == 256
    assert short.lengths() == [(1024, 16)] * 256
    shorter = WORKLOADS["prefix"].shortened(16, 16)
    assert shorter.lengths() == [(16, 16)] * 64
    assert shorter.shared_tokens == 8
    assert WORKLOADS["prefix"].shortened(16).shared_tokens == 4000


def test_rounds_begin_with_another_setting_each() -> None:
    options = parse(["--clients", "2", "--sampling", "greedy", "top_p", "--rounds", "2"])
    order = [(number, sampling) for number, _, sampling in plan(options)]
    greedy_first, top_p_first = ["greedy", "top_p"], ["top_p", "greedy"]
    assert [sampling for _, sampling in order] == greedy_first + top_p_first + greedy_first
    assert [number for number, _ in order] == [0, 0, 1, 1, 2, 2]


def test_every_id_of_a_shape_with_its_whole_vocabulary_has_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(
        read_folder_vocabulary(write_shape("tiny", tmp_path, whole_vocabulary=True))
    )
    size = SHAPES["tiny"]["vocab_size"]
    assert isinstance(size, int)
    texts = [tokenizer.decode([token]) for token in range(size)]
    assert all(texts)
    assert len(set(texts[256:])) == size - 256
    assert texts[256:260] == [" a", " b", " c", " d"]


# Clients

Answer = Callable[[dict[str, Any]], list[bytes]]
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str) -> bytes:
    return chunk(b'data: {"choices":[{"index":0,"text":%b}]}\n\n' % json.dumps(text).encode())


def ending(tokens: int) -> bytes:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d}}\n\n' % tokens
    return chunk(usage + b"data: [DONE]\n\n") + b"0\r\n\r\n"


def good(body: dict[str, Any]) -> list[bytes]:
    """An empty text first, a quote inside of one, and an end that comes in two packets."""
    words = [event('w"'), *[event(" w")] * (body["max_tokens"] - 1)]
    last = ending(body["max_tokens"])
    return [HEAD, event(""), *words, last[:-3], last[-3:]]


def ask(answer: Answer, clients: int = 3, waves: int = 2) -> list[Timing]:
    """Over real sockets; a packet is a write of its own."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            size = int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0])
            for packet in answer(json.loads(await reader.readexactly(size))):
                writer.write(packet)
                await writer.drain()
                await asyncio.sleep(0.002)

    handlers: list[asyncio.Task[Any] | None] = []

    async def quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await serve(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async def run() -> list[Timing]:
        server = await asyncio.start_server(quietly, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        workload = fixed("x", clients, waves, 4, 5)
        asked = Job(workload=workload, sampling="greedy", vocabulary=(0, 9), seed="")
        requests: list[list[Request]] = [asked.requests_of(client) for client in range(clients)]
        async with server:
            try:
                return await run_clients(port, requests)
            finally:
                await asyncio.gather(*(task for task in handlers if task is not None))

    return asyncio.run(run())


def test_clients_time_the_first_text_and_the_last() -> None:
    timings = ask(good)
    assert [timing.tokens for timing in timings] == [5] * 6
    for timing in timings:
        assert timing.first_s - timing.began_s >= 0.003  # not at the headers, nor at an empty text
        assert timing.last_s - timing.first_s >= 0.006


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda body: [b"HTTP/1.1 429 No\r\n\r\n", b'{"error": "full"}'], "429 No.*full"),
        (lambda body: [HEAD, event("w"), ending(4)], "4 tokens came; asked for 5"),
        (
            lambda body: [HEAD, event("w"), chunk(b'data: {"error": "dead"}\n\n') + b"0\r\n\r\n"],
            "dead",
        ),
        (lambda body: [HEAD, ending(5)], "the stream ended with"),
    ],
)
def test_what_is_no_answer_is_counted_and_raised(answer: Answer, said: str) -> None:
    with pytest.raises(LoadFailure, match=f"2 of 2 clients failed.*{said}"):
        ask(answer, clients=2)


def test_a_server_that_leaves_is_a_failure() -> None:
    def leave(body: dict[str, Any]) -> list[bytes]:
        raise ConnectionError

    with pytest.raises(LoadFailure, match="closed the connection"):
        ask(leave, clients=1)


# All of it


def test_a_small_shape_is_served_and_measured(tmp_path: Path) -> None:
    out = tmp_path / "served.json"
    arguments = ["--device", "cpu", "--shape", "tiny", "--clients", "1", "3", "--requests", "6"]
    arguments += ["--input-tokens", "20", "--output-tokens", "8", "--rounds", "1"]
    arguments += ["--processes", "2", "--sampling", "greedy", "top_p", "json"]
    assert main([*arguments, "--json", str(out), "--serve-flags", "--threads 1"]) == 0
    found = json.loads(out.read_text())
    assert found["failure"] is None
    assert [(row["workload"], row["sampling"]) for row in found["rows"]] == [
        (clients, sampling) for clients in "13" for sampling in ("greedy", "top_p", "json")
    ]
    for row in found["rows"]:
        assert row["median"]["output_per_s"] > 0
        assert row["of_vllm"] == {}
    assert found["rows"][0]["of_greedy"] == 1
