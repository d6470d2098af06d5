"""Runs every engine over the same work, taking turns, and writes one table and one JSON.

    PYTHONPATH=benchmarks python -m peers.run [--engines headrace llama.cpp openvino vllm]
        [--workloads "decode 1" ...] [--rounds 3] [--requests 32] [--threads 2]
        [--table FILE.md] [--json FILE.json]

Installs what is missing first. Orders and reports; how an engine is asked is its adapter's affair.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from headrace.fetch.resolve import resolve_model
from peers import environments
from peers.clients import Load, run_clients
from peers.conversation import Conversation, PeerFailure
from peers.environments import Environment
from peers.report import Results, render_markdown, to_json
from peers.workloads import (
    CONTENDERS,
    OUTPUT_TOKENS,
    THREADS,
    WORKLOADS,
    Contender,
    Workload,
    file_name,
    make_prompts,
    rotate,
    takes_part,
    warm_prompt,
)

LOAD_TIMEOUT_S = 300.0
SAMPLE_TIMEOUT_S = 300.0
RESTARTS = 2  # of an adapter that died, in a group of rows


class Crew:
    """The adapters of one group of rows, each started when it is first asked."""

    def __init__(
        self, installed: dict[str, Environment | PeerFailure], threads: int, results: Results
    ) -> None:
        self._installed, self._threads, self._results = installed, threads, results
        self._talks: dict[Contender, Conversation] = {}
        self._deaths: dict[Contender, list[str]] = {}

    def ask(self, contender: Contender, op: str, **arguments: Any) -> dict[str, Any]:
        for other in self._talks.values():
            other.pause()
        talk = self._talks.get(contender) or self._start(contender)
        talk.resume()
        try:
            return talk.ask(op, SAMPLE_TIMEOUT_S, **arguments)
        except PeerFailure as failure:
            if not talk.alive:
                self._bury(contender, failure)
            raise

    def _start(self, contender: Contender) -> Conversation:
        found = self._installed[contender.engine]
        if isinstance(found, PeerFailure):
            raise found
        deaths = self._deaths.get(contender, [])
        if len(deaths) > RESTARTS:
            raise PeerFailure(f"given up after {RESTARTS} restarts: {deaths[-1]}")
        talk = self._talks[contender] = Conversation(found.python, found.module, found.env)
        model = environments.models_folder() / file_name(contender.format)
        try:
            answer = talk.ask("load", LOAD_TIMEOUT_S, model=str(model), threads=self._threads)
        except PeerFailure as failure:
            self._bury(contender, failure)
            raise
        self._results.notes[contender.engine] = str(answer.get("note", ""))
        return talk

    def _bury(self, contender: Contender, failure: PeerFailure) -> None:
        self._talks.pop(contender).close()
        self._deaths.setdefault(contender, []).append(str(failure))

    def close(self) -> None:
        for talk in self._talks.values():
            talk.close()


def take_sample(
    crew: Crew, contender: Contender, workload: Workload, round_number: int, requests: int
) -> float:
    seed = f"{workload.name} {round_number}"
    if workload.kind == "prefill":
        answer = crew.ask(contender, "prefill", tokens=workload.prompt_tokens, seed=seed)
        return float(answer["value"])
    if workload.kind == "decode":
        context = workload.prompt_tokens
        answer = crew.ask(
            contender, "decode", sequences=workload.sequences, context=context, seed=seed
        )
        return float(answer["value"])
    load = _run_load(crew, contender, workload, round_number, requests)
    if workload.kind == "first_token":
        return statistics.median(load.first_token_s) * 1000
    return load.tokens / load.taken_s


def _run_load(
    crew: Crew, contender: Contender, workload: Workload, round_number: int, requests: int
) -> Load:
    if workload.kind == "first_token":
        requests = 5
    work: dict[str, Any] = {
        "warm": warm_prompt(workload, round_number),
        "prompts": make_prompts(workload, requests, round_number),
        "clients": workload.sequences,
        "output_tokens": OUTPUT_TOKENS if workload.kind == "served" else 2,
    }
    if contender.engine == "openvino":
        answer = crew.ask(contender, "closed_loop", **work)
        return Load(**answer)
    server = crew.ask(contender, "serve")
    try:
        return run_clients(server["port"], server.get("model"), timeout_s=SAMPLE_TIMEOUT_S, **work)
    except (OSError, RuntimeError, ValueError, TimeoutError) as error:
        raise PeerFailure(f"{type(error).__name__}: {error}") from error


def install(engines: list[str]) -> dict[str, Environment | PeerFailure]:
    installed: dict[str, Environment | PeerFailure] = {}
    for engine in engines:
        say(f"{engine}: installing, where it is not yet")
        try:
            installed[engine] = environments.PREPARE[engine]()
        except PeerFailure as failure:
            say(f"{engine}: {failure}")
            installed[engine] = failure
    return installed


def run_group(
    crew: Crew,
    workloads: list[Workload],
    contenders: list[Contender],
    options: Any,
    results: Results,
) -> None:
    for round_number in range(options.rounds):
        for workload in workloads:
            taking = [who for who in contenders if takes_part(who, workload)]
            for who in taking:  # the table's columns, in this order whoever begins
                results.cell(workload, who)
            for who in rotate(taking, round_number):
                cell = results.cell(workload, who)
                try:
                    value = take_sample(crew, who, workload, round_number, options.requests)
                except PeerFailure as failure:
                    cell.failures.append(str(failure))
                    say(f"round {round_number + 1}, {workload.name}, {who.name}: {failure}")
                else:
                    cell.samples.append(value)
                    shown = f"{value:.1f} {workload.unit}"
                    say(f"round {round_number + 1}, {workload.name}, {who.name}: {shown}")


def describe_machine(threads: int) -> str:
    model = platform.processor()
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        named = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = named[0].partition(":")[2].strip() if named else model
    load = f"{os.getloadavg()[0]:.1f}"
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    return f"{model}, {threads} threads for each engine, load {load} at the start, {when} UTC."


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [workload.name for workload in WORKLOADS]
    engines = list(environments.PREPARE)
    parser.add_argument("--engines", nargs="+", default=engines, choices=engines)
    parser.add_argument("--workloads", nargs="+", default=names, choices=names, metavar="ROW")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32, help="of a served row, in each round")
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--table", type=Path, help="the Markdown table; printed as well")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    options = read_options()
    machine = describe_machine(options.threads)
    workloads = [workload for workload in WORKLOADS if workload.name in options.workloads]
    groups = list(dict.fromkeys(workload.group for workload in workloads))
    installed = install(options.engines)
    chosen = {
        group: [who for who in CONTENDERS[group] if who.engine in options.engines]
        for group in groups
    }
    formats = sorted({who.format for group in chosen.values() for who in group})
    environments.make_model_files(resolve_model(None), formats)
    results = Results()
    began = time.monotonic()
    for group in groups:
        crew = Crew(installed, options.threads, results)
        try:
            rows = [workload for workload in workloads if workload.group == group]
            run_group(crew, rows, chosen[group], options, results)
        finally:
            crew.close()
    say(f"measured in {(time.monotonic() - began) / 60:.1f} min")
    heading = f"Medians of {options.rounds} rounds (least-most)"
    table = render_markdown(results, workloads, heading, machine)
    print(table)
    if options.table:
        options.table.write_text(table)
    if options.json:
        report = to_json(results, workloads, machine, options.rounds)
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
