"""The router beside others: the same streams to the same two paced endpoints, in turns.

    python benchmarks/routed_peers.py --sglang ENV/bin/python --litellm ENV/bin/litellm --nginx PATH

Each of them stands in front of the same endpoints (paced_endpoint.py) on a port of its own; turns
of all alternate, straight to the endpoints too, with one client. What is not given is left out.
nginx is configured for streams (keep-alive upstream, no buffering, least_conn), sglang-router has
its default policy, LiteLLM one process and its default strategy. Measured are first tokens, tokens
a second between the start and the end of a turn, and the CPU time of each with its children. Each
client's first answer in a turn opens connections, and is not counted for first tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from routed import _ROUTE, HERE, Client, Seen, cpu_s, milliseconds

_TOKEN = b'" word"'


class PeerClient(Client):
    """Counts tokens by their text: not every proxy passes an endpoint's own fields on."""

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        seen = self._seen
        text = self._tail + data
        count = text.count(_TOKEN)
        if count:
            if seen.start_s <= now_s < seen.end_s:
                seen.tokens += count
            if self._is_first:
                self._is_first = False
                if self._is_warm:
                    seen.first_s.append(now_s - self._asked_s)
        if text.endswith(b"0\r\n\r\n"):
            seen.answers += 1
            self._is_warm = True
            if now_s < seen.end_s:
                self._ask()
            else:
                self._finish()
            return
        # Without the tokens that were counted; what is left may be the beginning of another.
        self._tail = text[max(text.rfind(_TOKEN) + len(_TOKEN) if count else 0, len(text) - 8) :]


@dataclass
class Peer:
    name: str
    ports: list[int]
    process: subprocess.Popen[bytes] | None = None

    def cpu_s(self) -> float:
        """With its children's: workers."""
        if self.process is None:
            return 0.0
        pids, at = [self.process.pid], 0
        while at < len(pids):
            for task in Path(f"/proc/{pids[at]}/task").glob("*/children"):
                pids += map(int, task.read_text().split())
            at += 1
        return sum(map(cpu_s, pids))


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def nginx_words(nginx: str, folder: Path, port: int, ports: list[int]) -> list[str]:
    servers = " ".join(f"server 127.0.0.1:{each};" for each in ports)
    (folder / "nginx.conf").write_text(
        f"""daemon off; pid {folder}/nginx.pid; error_log stderr; worker_processes auto;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {folder}/a; proxy_temp_path {folder}/b;
  fastcgi_temp_path {folder}/c; uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
  upstream replicas {{ least_conn; {servers} keepalive 512; }}
  server {{
    listen 127.0.0.1:{port} backlog=2048; keepalive_requests 100000;
    location / {{ proxy_pass http://replicas; proxy_http_version 1.1; proxy_buffering off;
      proxy_set_header Connection ""; proxy_set_header Host $host; client_max_body_size 8m; }}
  }}
}}
"""
    )
    return [nginx, "-c", str(folder / "nginx.conf"), "-p", str(folder)]


def litellm_words(
    litellm: str, folder: Path, port: int, ports: list[int], model: str = "paced"
) -> list[str]:
    deployments = [
        {
            "model_name": model,
            "litellm_params": {
                "model": f"openai/{model}",
                "api_base": f"http://127.0.0.1:{each}/v1",
                "api_key": "none",
            },
        }
        for each in ports
    ]
    path = folder / "litellm.yaml"  # JSON is YAML
    # Without a key for clients it starts only when told so; the others have none either.
    settings = {"dangerously_permit_weak_or_unset_master_key": True}
    path.write_text(json.dumps({"model_list": deployments, "general_settings": settings}))
    return [litellm, "--config", str(path), "--host", "127.0.0.1", "--port", str(port)]


def sglang_words(python: str, port: int, ports: list[int]) -> list[str]:
    urls = [f"http://127.0.0.1:{each}" for each in ports]
    words = [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    words += ["--port", str(port), "--prometheus-port", str(free_port())]
    return [*words, "--worker-urls", *urls]


def route_words(port: int, ports: list[int]) -> list[str]:
    return [
        *(sys.executable, "-c", _ROUTE, "route", *(f":{each}" for each in ports)),
        *("--port", str(port)),
    ]


@contextlib.contextmanager
def peers(asked: argparse.Namespace) -> Iterator[list[Peer]]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def start(words: list[str], log: str) -> subprocess.Popen[bytes]:
            file = stack.enter_context((folder / log).open("wb"))
            one = subprocess.Popen(words, stdout=file, stderr=file, env=environment)
            stack.callback(one.wait)
            stack.callback(one.terminate)
            return one

        ports = []
        for _ in range(2):
            words = [sys.executable, str(HERE / "paced_endpoint.py")]
            words += ["--first", str(asked.first), "--gap", str(asked.gap)]
            endpoint = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment)
            stack.callback(endpoint.wait)
            stack.callback(endpoint.terminate)
            assert endpoint.stdout is not None
            ports.append(int(endpoint.stdout.readline()))
        found = [Peer("direct", ports)]
        wanted = {"headrace route": route_words}
        if asked.nginx:
            wanted["nginx"] = lambda port, ports: nginx_words(asked.nginx, folder, port, ports)
        if asked.sglang:
            wanted["sglang-router"] = partial(sglang_words, asked.sglang)
        if asked.litellm:
            wanted["LiteLLM"] = lambda port, ports: litellm_words(
                asked.litellm, folder, port, ports
            )
        for name, words_of in wanted.items():
            port = free_port()
            process = start(words_of(port, ports), name)
            _await_answer(name, port, process, folder / name)
            found.append(Peer(name, [port], process))
        yield found


def _await_answer(name: str, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    body = json.dumps(_words("hello", 1)).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", body, {"Content-Type": "application/json"}
    )
    end_s, why = time.monotonic() + 90, ""
    while time.monotonic() < end_s and process.poll() is None:
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                if _TOKEN in answer.read():
                    return
        except OSError as error:
            why = str(error)
        time.sleep(0.3)
    raise SystemExit(f"{name} does not answer: {why}\n{log.read_text()[-2000:]}")


def _words(text: str, tokens: int) -> dict[str, object]:
    prompt = {"role": "user", "content": text}
    return {"model": "paced", "messages": [prompt], "max_tokens": tokens, "stream": True}


async def turn(ports: list[int], streams: int, seconds: float, tokens: int) -> Seen:
    seen = Seen()
    loop = asyncio.get_running_loop()
    clients = []
    for number in range(streams):
        body = json.dumps(_words(f"{number} " + "word " * 200, tokens)).encode()
        make = partial(PeerClient, seen, body)
        _, client = await loop.create_connection(make, "127.0.0.1", ports[number % len(ports)])
        clients.append(client)
        await asyncio.sleep(0.004)
    seen.start_s = time.perf_counter()
    seen.end_s = seen.start_s + seconds
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds + 20):
            await asyncio.gather(*(client.done for client in clients))
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--gap", type=float, default=0.05, help="seconds between tokens")
    parser.add_argument("--first", type=float, default=0.1, help="seconds to the first token")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=8.0, help="of one turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--sglang", help="a Python that has sglang-router")
    parser.add_argument("--litellm", help="the program litellm")
    parser.add_argument("--nginx", help="the program nginx")
    asked = parser.parse_args()
    import uvloop

    firsts: dict[str, list[tuple[float, float]]] = {}
    rates: dict[str, list[float]] = {}
    with peers(asked) as all_of_them:
        for _ in range(asked.turns):
            for peer in all_of_them:
                before_s, began_s = peer.cpu_s(), time.perf_counter()
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    seen = runner.run(turn(peer.ports, asked.streams, asked.seconds, asked.tokens))
                used = (peer.cpu_s() - before_s) / (time.perf_counter() - began_s)
                first = milliseconds(seen.first_s or [float("nan")])
                rate = seen.tokens / asked.seconds
                firsts.setdefault(peer.name, []).append(first)
                rates.setdefault(peer.name, []).append(rate)
                print(
                    f"{peer.name:15} {seen.answers} answers, {seen.failed} failed; first token "
                    f"{first[0]:.2f} / {first[1]:.2f} ms; {rate:,.0f} tokens/s; CPU {used:.0%}",
                    flush=True,
                )
    print("\nmedians of turns: first token p50 / p99 (ms), tokens/s, of direct")
    for name, found in firsts.items():
        p50, p99 = (statistics.median(values) for values in zip(*found, strict=True))
        rate = statistics.median(rates[name])
        share = rate / statistics.median(rates["direct"])
        print(f"{name:15} {p50:.2f} / {p99:.2f}  {rate:,.0f}  {share:.4f}")


if __name__ == "__main__":
    main()
