"""How long one request can hold a server's event loop: every kind of large request, one by one.

    python tests/server/loop_probe.py [CASE ...]

Starts a real server with a beat on its event loop, sends it valid and invalid requests at and
beyond their bounds, and prints for each its status, how long it took and the longest time the loop
stood still meanwhile (with where it stood). Nothing is asserted: a figure for people, as time on a
shared machine decides no test. The processor's time is beside the wall clock's, as others may be
using the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

BEAT_S = 0.002
SHOWN_S = 0.02  # shorter ones are not written down
LIMIT_S = 300.0

Json = dict[str, Any]
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"
BIAS = {str(token): 1 for token in range(600_000)}


def _chat(**fields: object) -> tuple[str, Json]:
    return CHAT, {"messages": MESSAGES, "max_tokens": 2, **fields}


def _complete(**fields: object) -> tuple[str, Json]:
    return COMPLETIONS, {"prompt": "Hi", "max_tokens": 2, **fields}


def _nested(depth: int, width: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return [value] * width


_WORDS = "all work and no play makes a dull text "
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CASES: dict[str, Callable[[], tuple[str, Json]]] = {
    "honest": _chat,
    "ids prompt 4M": lambda: _complete(prompt=[5] * 4_100_000),
    "ids prompt of 2000": lambda: _complete(prompt=[5] * 2_000),
    "1.3M prompts of an id": lambda: _complete(prompt=[[5]] * 1_300_000),
    "128 prompts of 1900": lambda: _complete(prompt=[[5] * 1900] * 128, max_tokens=1),
    "nested lists 120 deep": lambda: _chat(x=_nested(120, 30_000)),
    "1.3M empty objects": lambda: _chat(x=[{}] * 1_300_000),
    "long text 8M": lambda: _complete(prompt=_WORDS * 205_000),
    "long text of 2000 tokens": lambda: _complete(prompt=_WORDS * 200),
    "150k messages": lambda: _chat(messages=MESSAGES * 200_000),
    "1000 messages": lambda: _chat(messages=MESSAGES * 1_000),
    "200k parts": lambda: _chat(
        messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 250_000}]
    ),
    "anthropic 200k blocks": lambda: (
        "/v1/messages",
        {
            "max_tokens": 2,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 250_000}],
        },
    ),
    "anthropic 200k messages": lambda: (
        "/v1/messages",
        {"max_tokens": 2, "messages": MESSAGES * 200_000},
    ),
    "anthropic 200k thinking": lambda: (
        "/v1/messages",
        {
            "max_tokens": 2,
            "messages": [{"role": "user", "content": [{"type": "thinking"}] * 350_000}],
        },
    ),
    "16 stops of 500k": lambda: _chat(stop=["ab" * 250_000] * 16, max_tokens=40),
    "16 stops of 500k, n 16": lambda: _chat(stop=["ab" * 250_000] * 16, n=16, max_tokens=4),
    "4.1M stop ids": lambda: _chat(stop_token_ids=[5] * 4_100_000),
    "4.1M allowed ids, n 16": lambda: _chat(allowed_token_ids=[5] * 4_100_000, n=16, max_tokens=8),
    "vocabulary allowed, n 16": lambda: _chat(
        allowed_token_ids=list(range(49_152)), n=16, max_tokens=64, ignore_eos=True
    ),
    "600k logit_bias": lambda: _chat(logit_bias=BIAS),
    "64 bad words of 120k": lambda: _chat(bad_words=[_WORDS * 3_100] * 64),
    "800k bad words": lambda: _chat(bad_words=["a"] * 1_600_000),
    "2048 inputs of 3.9k": lambda: (EMBEDDINGS, {"input": [_WORDS * 100] * 2048}),
    "2048 inputs of 1900 ids": lambda: (EMBEDDINGS, {"input": [[5] * 1900] * 2048}),
    "1.3M inputs": lambda: (EMBEDDINGS, {"input": ["a"] * 1_300_000}),
    "echo 4000, 20, n 16": lambda: _complete(
        prompt=[5, 6, 7, 8] * 1000, echo=True, logprobs=20, n=16, max_tokens=1
    ),
    "echo 3000, 20, n 16": lambda: _complete(
        prompt=[5, 6, 7, 8] * 750, echo=True, logprobs=20, n=16, max_tokens=1
    ),
    "echo 3000, 20, n 16, stream": lambda: _complete(
        prompt=[5, 6, 7, 8] * 750, echo=True, logprobs=20, n=16, max_tokens=1, stream=True
    ),
    "bias of 16k, n 16": lambda: _chat(
        logit_bias={str(i): 1 for i in range(16_384)}, n=16, max_tokens=32, ignore_eos=True
    ),
    "524k ids in 128 prompts": lambda: _complete(prompt=[[5] * 4_000] * 128, max_tokens=1, n=99),
    "512 inputs of 2k": lambda: (EMBEDDINGS, {"input": [_WORDS * 50] * 512, "timeout_s": 5}),
    "65k texts": lambda: _chat(x=[f"{i}" for i in range(65_000)]),
    "64k keys": lambda: _chat(x={f"{i}": 1 for i in range(65_000)}),
    "8000 messages": lambda: _chat(messages=MESSAGES * 8_000),
    "anthropic 8000 of 900": lambda: (
        "/v1/messages",
        {"max_tokens": 2, "messages": [{"role": "user", "content": "a " * 450}] * 8_000},
    ),
    "64 bad words of 1k": lambda: _chat(bad_words=[_WORDS * 26] * 64),
    "16 stops of 4k, n 16": lambda: _chat(
        stop=["ab" * 2048] * 16, n=16, max_tokens=32, ignore_eos=True
    ),
    "echo 4000, 20, n 16, stream": lambda: _complete(
        prompt=[5, 6, 7, 8] * 1000, echo=True, logprobs=20, n=16, max_tokens=1, stream=True
    ),
    "prompt_logprobs 4000": lambda: _complete(
        prompt=[5, 6, 7, 8] * 1000, prompt_logprobs=20, max_tokens=1
    ),
    "echo 17 x 4000, 20": lambda: _complete(
        prompt=[[5, 6, 7, 8] * 1000] * 17, echo=True, logprobs=20, max_tokens=1
    ),
    "return_token_ids 2000 x 16": lambda: _complete(
        prompt=[5] * 2_000, return_token_ids=True, n=16, max_tokens=1
    ),
    "tokenize 8M": lambda: ("/tokenize", {"prompt": _WORDS * 205_000, "return_token_strs": True}),
    "tokenize 8M one word": lambda: ("/tokenize", {"prompt": "a" * 8_000_000}),
    "detokenize 4M": lambda: ("/detokenize", {"tokens": [5] * 4_100_000}),
    "500k unknown fields": lambda: _chat(**{f"x{i}": 1 for i in range(500_000)}),
    "100k tools": lambda: _chat(tools=[_TOOL] * 90_000),
    "100k tools of other kinds": lambda: _chat(tools=[{"type": "x"}] * 500_000),
    "128 tools of 60k": lambda: _chat(
        tools=[
            {
                "type": "function",
                "function": {
                    "name": f"f{i}",
                    "parameters": {
                        "type": "object",
                        "properties": {f"p{j}": {} for j in range(4000)},
                    },
                },
            }
            for i in range(128)
        ]
    ),
    "tool_choice of 200k": lambda: _chat(
        tools=[_TOOL],
        tool_choice={
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [_TOOL] * 90_000},
        },
    ),
    "1M choices": lambda: _chat(guided_choice=["a"] * 1_600_000),
    "schema of 8M": lambda: _chat(
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {f"x{i}": {} for i in range(600_000)}},
        }
    ),
    "schema of 8M as text": lambda: _chat(guided_json="[" + "1," * 3_900_000 + "1]"),
    "tool call arguments of 8M": lambda: _chat(
        messages=[
            *MESSAGES,
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "type": "function",
                        "id": "a",
                        "function": {
                            "name": "f",
                            "arguments": '{"a": [' + "1," * 3_900_000 + "1]}",
                        },
                    }
                ],
            },
        ]
    ),
    "100k tool calls": lambda: _chat(
        messages=[
            {
                "role": "assistant",
                "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}] * 140_000,
            }
        ]
    ),
    "metadata of 300k": lambda: (
        RESPONSES,
        {"input": "Hi", "max_output_tokens": 2, "metadata": {f"k{i}": "v" for i in range(500_000)}},
    ),
    "include of 1M": lambda: (RESPONSES, {"input": "Hi", "include": ["a"] * 1_900_000}),
    "responses 100k items": lambda: (
        RESPONSES,
        {"input": MESSAGES * 200_000, "max_output_tokens": 2},
    ),
    "responses 8M": lambda: (RESPONSES, {"input": _WORDS * 205_000, "max_output_tokens": 2}),
    "responses 1000 items": lambda: (
        RESPONSES,
        {"input": MESSAGES * 1_000, "max_output_tokens": 2},
    ),
    "responses 100k namespaced": lambda: (
        RESPONSES,
        {
            "input": "Hi",
            "tools": [
                {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}
            ]
            * 90_000,
        },
    ),
    "template kwargs of 1M": lambda: _chat(chat_template_kwargs={"a": [0] * 3_900_000}),
    "documents of 500k": lambda: _chat(documents=[{"a": "b"}] * 700_000),
    "large integers": lambda: _chat(x=[10**18] * 400_000),
    "text of controls 8M": lambda: _chat(
        messages=[{"role": "user", "content": "<|im_end|>" * 800_000}]
    ),
    "text of controls at context": lambda: _chat(
        messages=[{"role": "user", "content": "<|im_end|>" * 1_000}]
    ),
    "200 kB of controls, tokenize": lambda: ("/tokenize", {"prompt": "<|im_end|>" * 20_000}),
    "model name of 8M": lambda: _chat(model="x" * 8_000_000),
    "cache_salt of 8M": lambda: _chat(cache_salt="x" * 8_000_000),
    "user of 8M": lambda: _chat(user="x" * 8_000_000),
    "repeated text 8M, not JSON": lambda: ("raw", {}),
}


# -- the server ------------------------------------------------------------------------------------


class Beat:
    """Runs on the loop; a thread looks where the loop is when it is late."""

    def __init__(self, loop: asyncio.AbstractEventLoop, path: str) -> None:
        self._loop = loop
        self._file = Path(path).open("a", buffering=1)  # noqa: SIM115
        self._thread_id = threading.get_ident()
        self._wall = time.perf_counter()
        self._cpu = time.process_time()
        self._seen: dict[str, float] = {}
        loop.call_soon(self._beat)
        threading.Thread(target=self._watch, daemon=True).start()

    def _beat(self) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        gap, busy = wall - self._wall - BEAT_S, cpu - self._cpu
        if gap > SHOWN_S:
            where = " | ".join(sorted(self._seen, key=self._seen.__getitem__)[-3:])
            self._file.write(json.dumps({"gap": gap, "cpu": busy, "where": where}) + "\n")
        self._seen = {}
        self._wall, self._cpu = wall, cpu
        self._loop.call_later(BEAT_S, self._beat)

    def _watch(self) -> None:
        while True:
            time.sleep(0.005)
            if time.perf_counter() - self._wall < SHOWN_S:
                continue
            frame = sys._current_frames().get(self._thread_id)
            stack = [
                f"{Path(f.filename).name}:{f.lineno}"
                for f in traceback.extract_stack(frame)
                if "headrace" in f.filename
            ]
            key = " > ".join(stack[-2:])
            self._seen[key] = self._seen.get(key, 0.0) + 0.005


def serve(path: str, arguments: list[str]) -> None:
    from headrace.cli.commands import main
    from headrace.server.start import run as serving

    make = serving._new_loop

    def new_loop() -> asyncio.AbstractEventLoop:
        loop = make()
        Beat(loop, path)
        return loop

    serving._new_loop = new_loop
    sys.argv = ["headrace", "serve", *arguments]
    main()


# -- the client ------------------------------------------------------------------------------------


def ask(port: int, path: str, body: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except OSError as error:
        return 0, repr(error).encode()
    finally:
        connection.close()


def wait_ready(port: int) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.1)
    raise SystemExit("the server did not start")


def main(names: list[str]) -> None:
    import socket
    import tempfile

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = Path(tempfile.mkdtemp())
    gaps, log = folder / "gaps", folder / "log"
    gaps.touch()
    settings = ["--port", str(port), "--kv-tokens", "16384", "--log-format", "json"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(gaps), *settings],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_ready(port)
        ask(port, CHAT, json.dumps(_chat()[1]).encode())
        time.sleep(0.5)
        print(
            f"{'case':32} {'MB':>5} {'status':>6} {'took':>7} {'loop held':>10} {'cpu':>7}  where"
        )
        for name, make in CASES.items():
            if names and name not in names:
                continue
            path, sent = make()
            body = json.dumps(sent, separators=(",", ":")).encode()
            if path == "raw":
                path, body = CHAT, b'{"messages": "' + b"a" * 8_000_000
            del sent
            at = gaps.stat().st_size
            began = time.perf_counter()
            status, answer = ask(port, path, body)
            took = time.perf_counter() - began
            time.sleep(0.3)
            with gaps.open() as file:
                file.seek(at)
                found: list[Json] = [json.loads(line) for line in file]
            worst: Json = max(
                found, key=lambda g: g["gap"], default={"gap": 0, "cpu": 0, "where": ""}
            )
            size = len(body) / 1e6
            print(
                f"{name:32} {size:5.1f} {status:6} {took:6.2f}s {worst['gap'] * 1000:7.0f} ms "
                f"{worst['cpu'] * 1000:6.0f}  {worst['where'][:150]}",
                flush=True,
            )
            if status not in (200, 400, 413):
                print("    ", answer[:300])
            if process.poll() is not None:
                raise SystemExit(f"the server ended; its log is {log}")
            if len(answer) > 1000 and status == 400:
                print("     a long error:", len(answer), "bytes")
        peak = Path(f"/proc/{process.pid}/status").read_text()
        print(next(line for line in peak.splitlines() if line.startswith("VmHWM")))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
        print("log:", log, "own peak MB:", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        os.environ["PYTHONUNBUFFERED"] = "1"
        serve(sys.argv[2], sys.argv[3:])
    else:
        main(sys.argv[1:])
