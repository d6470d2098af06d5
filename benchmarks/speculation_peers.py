"""Speculation of Headrace and of llama.cpp on one file and the same prompts, served, in turns.

    python benchmarks/speculation_peers.py --llama-server PATH [--prompts 3] [--rounds 3]
        [--spec NAME="--spec-type ngram-mod --spec-ngram-mod-n-match 8" ...]

Each engine is served twice and more: plain, and with each kind of speculation. llama.cpp's are its
ngram-mod and ngram-simple as they are set, and both with shorter matches and drafts, which suit
answers of a few hundred tokens better. Prompts go to every server as the same token ids, greedily
and with the same most tokens, one request at a time; each was sent once before for a single token,
so its prompt is in the cache and what is timed is the answer. A round asks all servers prompt by
prompt, so that a machine that changes its speed is unfair to none, and begins with another server
each time. Our servers get another cache_salt in each round, so that they don't find the answers of
the round before; llama.cpp's ngram-mod keeps what it has seen. Besides tokens a second it counts
how many answers are those of the same engine's plain server: speculation should change none.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.assemble import read_tokenizer
from headrace.fetch.resolve import resolve_model
from headrace.tokenizer.tokenizer import Tokenizer
from headrace.weights.load import open_weights
from peers.adapter import HttpServer, free_port
from speculation_workloads import WORKLOADS, Workload

# Turns made of answers would be other prompts for each engine; grammars are written differently.
NAMES = ("code edit", "JSON echo", "chat")

SPECS = {
    "ngram-mod": "--spec-type ngram-mod",
    "ngram-simple": "--spec-type ngram-simple",
    "ngram-mod, short": "--spec-type ngram-mod --spec-ngram-mod-n-match 8 "
    "--spec-ngram-mod-n-min 2 --spec-ngram-mod-n-max 16",
    "ngram-simple, short": "--spec-type ngram-simple --spec-ngram-simple-size-n 4 "
    "--spec-ngram-simple-size-m 16",
}


@dataclass(slots=True)
class Contender:
    engine: str
    kind: str  # of speculation; "plain": none
    server: HttpServer
    rates: dict[str, list[float]] = field(default_factory=dict)  # by workload, tokens/s of rounds
    answers: dict[tuple[str, int], str] = field(default_factory=dict)
    changed: int = 0  # answers that differ between rounds

    @property
    def name(self) -> str:
        return f"{self.engine} {self.kind}"


def ask(port: int, prompt: list[int], max_tokens: int, salt: str) -> tuple[str, int, float]:
    body = {
        "cache_salt": salt,
        "model": "m",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": False,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    began_s = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as reply:
        found: dict[str, Any] = json.load(reply)
    seconds = time.perf_counter() - began_s
    return found["choices"][0]["text"], found["usage"]["completion_tokens"], seconds


def start(args: argparse.Namespace, model: Path, open_: ExitStack) -> list[Contender]:
    threads = str(args.threads)

    def serve(engine: str, kind: str, command: list[str], ready: str) -> Contender:
        port = free_port()
        server = HttpServer([*command, "--port", str(port)], port, ready)
        open_.callback(server.stop)
        return Contender(engine, kind, server)

    ours = [sys.executable, "-P", "-c", "from headrace.cli.commands import main; main()", "serve"]
    ours += [str(model), "--served-model-name", "m", "--threads", threads, "--kv-tokens", "16384"]
    theirs = [str(args.llama_server), "-m", str(model), "-t", threads, "-tb", threads]
    theirs += ["-fa", "on", "-np", "1", "-c", "8192"]
    found = [
        serve("headrace", kind, [*ours, "--speculate", setting], "/ready")
        for kind, setting in (("plain", "off"), ("auto", "auto"))
    ]
    found.append(serve("llama.cpp", "plain", theirs, "/health"))
    for kind, flags in args.spec.items():
        found.append(serve("llama.cpp", kind, [*theirs, *shlex.split(flags)], "/health"))
    return found


def measure(args: argparse.Namespace, contenders: list[Contender], tokenizer: Tokenizer) -> None:
    chosen = [each for each in WORKLOADS if each.name in args.workload]
    prompts = {each.name: _prompts(each, args.prompts, tokenizer) for each in chosen}
    for at in range(args.rounds):
        for workload in chosen:
            took = {each.name: [0.0, 0] for each in contenders}
            for number, prompt in enumerate(prompts[workload.name]):
                first = (at + number) % len(contenders)
                for each in contenders[first:] + contenders[:first]:
                    port, salt = each.server.port, f"{at} {number}"
                    ask(port, prompt, 1, salt)
                    text, tokens, seconds = ask(port, prompt, workload.answer_tokens, salt)
                    took[each.name][0] += seconds
                    took[each.name][1] += tokens
                    before = each.answers.setdefault((workload.name, number), text)
                    each.changed += before != text
            for each in contenders:
                whole_s, whole = took[each.name]
                each.rates.setdefault(workload.name, []).append(whole / whole_s)
        print(f"round {at + 1} of {args.rounds}", flush=True)


def _prompts(workload: Workload, count: int, tokenizer: Tokenizer) -> list[list[int]]:
    return [
        tokenizer.encode_template(workload.conversation(stream).turns[0](""))
        for stream in range(count)
    ]


def rows_of(contenders: list[Contender]) -> list[dict[str, Any]]:
    plain = {each.engine: each for each in contenders if each.kind == "plain"}
    rows = []
    for each in contenders:
        base = plain[each.engine]
        for workload, rates in each.rates.items():
            answers = {at: text for at, text in each.answers.items() if at[0] == workload}
            same = sum(base.answers[at] == text for at, text in answers.items())
            gains = [own / theirs for own, theirs in zip(rates, base.rates[workload], strict=True)]
            rows.append(
                {
                    "engine": each.engine,
                    "speculation": each.kind,
                    "workload": workload,
                    "tokens_s": statistics.median(rates),
                    "rates": rates,
                    "gain": statistics.median(gains),
                    "same_as_plain": same,
                    "answers": len(answers),
                    "changed_between_rounds": each.changed,
                }
            )
    return rows


def _spec(text: str) -> tuple[str, str]:
    name, is_given, flags = text.partition("=")
    if not is_given:
        raise argparse.ArgumentTypeError(f"{text!r}; expected NAME=FLAGS")
    return name, flags


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--model", help="a GGUF file or a catalog name; the default model if none")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=3, help="of each workload")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workload", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--spec", nargs="+", type=_spec, help="NAME=FLAGS of llama-server")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.spec = dict(args.spec) if args.spec else SPECS
    model = resolve_model(args.model)
    tokenizer = read_tokenizer(open_weights(model))
    with ExitStack() as open_:
        contenders = start(args, model, open_)
        measure(args, contenders, tokenizer)
    rows = rows_of(contenders)
    for row in rows:
        print(
            f"{row['workload']:<10} {row['engine']:<10} {row['speculation']:<20}"
            f"{row['tokens_s']:8.1f} tokens/s ({min(row['rates']):.0f}-{max(row['rates']):.0f}) "
            f"{row['gain']:6.2f}×  "
            f"{row['same_as_plain']} of {row['answers']} answers as its plain server's"
        )
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
