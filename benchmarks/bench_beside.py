"""`headrace bench` beside AIPerf and guidellm: the same endpoint, the same prompts, in turns.

    python benchmarks/bench_beside.py --peers /path/to/venv/bin [--serve | --url URL] [--rounds 5]

Each round every client sends a closed loop of the same shape; the order changes from round to
round, and each turn has prompts of its own, so that no one finds another's in a prefix cache. The
endpoint is a paced one, whose times are known (paced_endpoint.py), or with --serve a `headrace
serve` of the default model on one core; --pin gives clients one core too, the other one. What is
compared: medians of TTFT and TPOT, and output tokens by wall clock, as each client reports them
itself. The output is a Markdown table: medians of the rounds, and how far each peer is from ours.

With --serve there are two columns more, for a client on the same machine may slow the server down:
what the server itself measured while this client ran (means of its own /metrics, warm-up included)
and how much processor time the client took. Where the server's own figures differ between clients,
so must the clients'.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from headrace.bench.prompts import WORDS

HERE = Path(__file__).parent
START_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    ttft_s: float
    tpot_s: float
    tokens_s: float
    is_valid: bool = True  # ours marks a run in which the client was late; others never do
    server_ttft_s: float | None = None  # what the server says of this turn, in the mean
    server_tpot_s: float | None = None
    cpu_s: float = 0.0  # of the client and its children, its start included


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one client is asked to do."""

    url: str
    model: str
    prompts: tuple[str, ...]
    clients: int
    tokens: int
    folder: Path  # for its files

    @property
    def warm_up(self) -> int:
        return 2 * self.clients

    @property
    def requests(self) -> int:
        return len(self.prompts) - self.warm_up


Client = Callable[[Turn], Figures]


def _run(command: list[str], folder: Path, core: int | None, fine: tuple[int, ...] = (0,)) -> None:
    """Where it fails, with the end of what it said."""
    pinned = [] if core is None else ["taskset", "-c", str(core)]
    found = subprocess.run(
        [*pinned, *command], cwd=folder, capture_output=True, text=True, check=False
    )
    if found.returncode not in fine:
        said = (found.stdout + found.stderr)[-1500:]
        raise RuntimeError(f"{Path(command[0]).name} ended with {found.returncode}: {said}")


def headrace(turn: Turn, core: int | None) -> Figures:
    prompts, saved = turn.folder / "prompts.jsonl", turn.folder / "saved.json"
    prompts.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in turn.prompts))
    _run(
        [sys.executable, "-m", "headrace", "bench", turn.url, "--model", turn.model,
         "--prompts", str(prompts), "--output", str(turn.tokens), "--requests", str(turn.requests),
         "--concurrency", str(turn.clients), "--warm-up", str(turn.warm_up), "--save", str(saved)],
        turn.folder, core, (0, 1),
    )  # fmt: skip
    found = json.loads(saved.read_text())
    return Figures(
        ttft_s=found["median_ttft_ms"] / 1e3,
        tpot_s=found["median_tpot_ms"] / 1e3,
        tokens_s=found["output_throughput"],
        is_valid=found["headrace"]["is_valid"],
    )


def aiperf(turn: Turn, core: int | None, peers: Path) -> Figures:
    prompts, out = turn.folder / "prompts.jsonl", turn.folder / "out"
    prompts.write_text("".join(json.dumps({"text": each}) + "\n" for each in turn.prompts))
    _run(
        [str(peers / "aiperf"), "profile", "--model", turn.model, "--url", turn.url,
         "--endpoint-type", "chat", "--streaming", "--concurrency", str(turn.clients),
         "--request-count", str(turn.requests), "--warmup-request-count", str(turn.warm_up),
         "--input-file", str(prompts), "--custom-dataset-type", "single_turn",
         "--output-tokens-mean", str(turn.tokens),
         "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0",
         "--use-server-token-count", "--tokenizer", str(tokenizer(turn.folder)),
         "--artifact-dir", str(out), "--ui", "none"],
        turn.folder, core,
    )  # fmt: skip
    found = json.loads(next(out.rglob("profile_export_aiperf.json")).read_text())
    return Figures(
        ttft_s=found["time_to_first_token"]["p50"] / 1e3,
        tpot_s=found["inter_token_latency"]["p50"] / 1e3,
        tokens_s=found["output_token_throughput"]["avg"],
    )


def tokenizer(folder: Path) -> Path:
    """Of words, in Hugging Face's form. AIPerf does not start without one, although the endpoint's
    counts are used."""
    made = folder / "tokenizer"
    made.mkdir()
    vocabulary = {word: number for number, word in enumerate(("<unk>", *dict.fromkeys(WORDS)))}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    whole = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"},
             "model": model}  # fmt: skip
    (made / "tokenizer.json").write_text(json.dumps(whole))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    return made


def guidellm(turn: Turn, core: int | None, peers: Path) -> Figures:
    """Its `time_per_output_token` includes TTFT; its `inter_token_latency` is what others call
    TPOT."""
    prompts, saved = turn.folder / "prompts.jsonl", turn.folder / "saved.json"
    rows = ({"prompt": each, "output_tokens_count": turn.tokens} for each in turn.prompts)
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _run(
        [str(peers / "guidellm"), "run",
         "--backend", f"kind=openai_http,target={turn.url},model={turn.model}",
         "--profile", json.dumps({"kind": "concurrent", "streams": turn.clients,
                                  "warmup": {"mode": "requests", "value": turn.warm_up}}),
         "--constraint", f"kind=max_requests,count={len(turn.prompts)}",
         "--data", f"kind=json_file,path={prompts}",
         "--output", f"kind=json,path={saved}", "--disable-console"],
        turn.folder, core,
    )  # fmt: skip
    metrics = json.loads(saved.read_text())["benchmarks"][0]["metrics"]

    def of(name: str) -> dict[str, float]:
        found: dict[str, float] = metrics[name]["successful"]
        return found

    return Figures(
        ttft_s=of("time_to_first_token_ms")["median"] / 1e3,
        tpot_s=of("inter_token_latency_ms")["median"] / 1e3,
        tokens_s=of("output_tokens_per_second")["mean"],
    )


def texts(count: int, words: int, random: Random) -> tuple[str, ...]:
    return tuple(" ".join(random.choices(WORDS, k=words)) for _ in range(count))


@contextmanager
def endpoint(asked: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Its URL and model."""
    if asked.url:
        yield asked.url, _model(asked.url)
        return
    command = [sys.executable, str(HERE / "paced_endpoint.py"), "--port", str(asked.port),
               "--first", str(asked.first), "--gap", str(asked.gap)]  # fmt: skip
    if asked.serve:
        command = [sys.executable, "-m", "headrace", "serve", "--port", str(asked.port),
                   "--threads", "1", "--log-level", "error"]  # fmt: skip
    url = f"http://127.0.0.1:{asked.port}"
    server = subprocess.Popen(["taskset", "-c", "0", *command], stdout=subprocess.DEVNULL)
    try:
        yield url, _model(url)
    finally:
        server.terminate()
        server.wait()


def _model(url: str) -> str:
    until_s = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
                return str(json.load(answer)["data"][0]["id"])
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.2)


def clients_of(asked: argparse.Namespace) -> dict[str, Client]:
    core = max(os.sched_getaffinity(0)) if asked.pin else None
    found: dict[str, Client] = {"headrace": lambda turn: headrace(turn, core)}
    peers: Path | None = asked.peers
    if peers is not None and (peers / "aiperf").exists():
        found["AIPerf"] = lambda turn: aiperf(turn, core, peers)
    if peers is not None and (peers / "guidellm").exists():
        found["guidellm"] = lambda turn: guidellm(turn, core, peers)
    return found


_OWN = ("headrace:time_to_first_token_seconds", "headrace:request_time_per_output_token_seconds")


def watched(client: Client, turn: Turn, is_served: bool) -> Figures:
    """The client's figures, with what the server and the processor say about its turn."""
    before = _sums(turn.url) if is_served else {}
    began_s = _children_s()
    found = client(turn)
    cpu_s = _children_s() - began_s
    if not is_served:
        return replace(found, cpu_s=cpu_s)
    after = _sums(turn.url)
    ttft_s, tpot_s = (
        (after[f"{name}_sum"] - before.get(f"{name}_sum", 0.0))
        / (after[f"{name}_count"] - before.get(f"{name}_count", 0.0))
        for name in _OWN
    )
    return replace(found, cpu_s=cpu_s, server_ttft_s=ttft_s, server_tpot_s=tpot_s)


def _sums(url: str) -> dict[str, float]:
    """Sums and counts of the server's histograms, over all of their labels."""
    found: dict[str, float] = {}
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            name = line.split("{")[0].split(" ")[0]
            if name.removesuffix("_sum").removesuffix("_count") in _OWN:
                found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


def _children_s() -> float:
    """Processor time of children that have ended; the server has not."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(asked: argparse.Namespace) -> tuple[dict[str, list[Figures]], list[dict[str, float]]]:
    """By client, and what the paced endpoint says about itself."""
    random = Random(asked.seed)
    clients = clients_of(asked)
    rounds: dict[str, list[Figures]] = {name: [] for name in clients}
    truth = []
    with endpoint(asked) as (url, model), tempfile.TemporaryDirectory() as folder:
        for number in range(asked.rounds):
            order = [*clients]
            order = order[number % len(order) :] + order[: number % len(order)]
            for name in order:
                place = Path(folder) / f"{number} {name}"
                place.mkdir()
                turn = Turn(
                    url=url, model=model, clients=asked.clients, tokens=asked.tokens, folder=place,
                    prompts=texts(asked.requests + 2 * asked.clients, asked.words, random),
                )  # fmt: skip
                rounds[name].append(watched(clients[name], turn, asked.serve))
                print(f"{number} {name}: {rounds[name][-1]}", file=sys.stderr, flush=True)
                if not asked.url and not asked.serve:
                    with urllib.request.urlopen(f"{url}/timings", timeout=5) as answer:
                        truth.append(json.load(answer))
    return rounds, truth


def table(rounds: dict[str, list[Figures]], truth: list[dict[str, float]]) -> Iterator[str]:
    ours = _middle(rounds["headrace"])
    is_served = rounds["headrace"][0].server_tpot_s is not None
    more = " the server's own TTFT, TPOT | client's CPU, s |" if is_served else ""
    yield f"| client | TTFT, ms | TPOT, ms | output tokens/s | from ours |{more}"
    yield "|---|---|---|---|---|" + ("---|---|" if is_served else "")
    for name, values in rounds.items():
        cells = [
            _spread([one.ttft_s * 1e3 for one in values]),
            _spread([one.tpot_s * 1e3 for one in values]),
            _spread([one.tokens_s for one in values]),
        ]
        middle = _middle(values)
        cells.append("" if name == "headrace" else ", ".join(
            f"{theirs / own - 1:+.1%}" for theirs, own in zip(middle, ours, strict=True)
        ))  # fmt: skip
        if is_served:
            own = [[(one.server_ttft_s or 0.0) * 1e3 for one in values],
                   [(one.server_tpot_s or 0.0) * 1e3 for one in values]]  # fmt: skip
            cells += [", ".join(_spread(part) for part in own),
                      f"{statistics.median(one.cpu_s for one in values):.0f}"]  # fmt: skip
        invalid = sum(not one.is_valid for one in values)
        shown = f"{name} ({invalid} rounds invalid)" if invalid else name
        yield f"| {shown} | {' | '.join(cells)} |"
    if truth:
        ttft_s = statistics.median(one["ttft_s"] for one in truth)
        tpot_s = statistics.median(one["tpot_s"] for one in truth)
        yield f"| what the endpoint did | {ttft_s * 1e3:,.2f} | {tpot_s * 1e3:,.2f} | | |"


def _spread(part: list[float]) -> str:
    return f"{statistics.median(part):,.2f} ({min(part):,.2f} to {max(part):,.2f})"


def _middle(values: list[Figures]) -> tuple[float, float, float]:
    return (
        statistics.median(one.ttft_s for one in values),
        statistics.median(one.tpot_s for one in values),
        statistics.median(one.tokens_s for one in values),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=Path, help="the folder of aiperf and guidellm")
    parser.add_argument("--url", help="an endpoint that is there already")
    parser.add_argument("--serve", action="store_true", help="headrace serve, on one core")
    parser.add_argument("--pin", action="store_true", help="clients have one core, the last")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--first", type=float, default=0.1, help="seconds, of the paced endpoint")
    parser.add_argument("--gap", type=float, default=0.02, help="seconds, of the paced endpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--words", type=int, default=100, help="of a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    rounds, truth = measure(asked)
    print(f"{os.cpu_count()} cores, load {load:.1f} before the start; {asked.rounds} rounds of "
          f"{asked.requests} requests, {asked.clients} at once, {asked.words} words in, "
          f"{asked.tokens} tokens out\n")  # fmt: skip
    print("\n".join(table(rounds, truth)))


if __name__ == "__main__":
    main()
