"""Headrace served on a GPU under load: rates and times, sampled beside greedy, and beside vLLM's.

    python benchmarks/served_gpu.py --sampling greedy temperature top_p --json served.json
    python benchmarks/served_gpu.py --workloads 64 256 mixed --sampling greedy penalties blend
    python benchmarks/served_gpu.py --device cpu --model smollm2 --clients 1 4 --requests 8

Starts `headrace serve`, by default with the shape of Llama-3.1-8B and random weights, and streams
completions to clients in 8 processes: 1, 16, 64 and 256 clients, mixed lengths, a shared prefix.
Every workload is run in every way to sample, one after the other in one server's life, and all of
that again each round, so that ratios are of the same minutes. Before the first round each is run
once with short answers, which is not counted. Random weights give flat distributions; the settings
called `peaked` have a temperature that makes the others of them. A request that fails, or brings
another number of tokens than was asked for, fails the run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from headrace.fetch.resolve import resolve_model
from headrace.weights.describe import describe_file
from headrace.weights.load import open_weights
from peers.adapter import HttpServer, free_port
from served_figures import Figures, Row, figures_of, make_row, markdown
from served_load import LoadFailure, Processes
from served_workloads import BLEND, SETTINGS, WORKLOADS, Job, Length, Workload, fixed
from shapes import SHAPES, write_shape

WARM_TOKENS = 16
# The anchors are of this one; a ratio to them says nothing of another.
ANCHORED = "llama-3.1-8b"
# Ours wait for as many as there are clients; all the rest is what a server does by default.
SERVE_FLAGS = ("--max-waiting-requests", "2048", "--max-waiting-tokens", "4000000")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--shape", default=ANCHORED, choices=SHAPES)
    what.add_argument("--model", help="a real one in the place of a shape")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--clients", type=int, nargs="+", help="in the place of the workloads")
    parser.add_argument("--requests", type=int, default=64, help="of --clients, all together")
    parser.add_argument("--input-tokens", type=int, default=128, help="of --clients")
    parser.add_argument("--output-tokens", type=int, default=64, help="of --clients")
    parser.add_argument("--sampling", nargs="+", default=["greedy"], choices=[*SETTINGS, BLEND])
    parser.add_argument("--waves", type=int, help="requests of each client of the workloads")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget-s", type=float, help="begin no run after so long")
    parser.add_argument("--processes", type=int, default=8, help="that clients run in")
    parser.add_argument("--serve-flags", default="", help='more flags, as in "--graphs lazy"')
    parser.add_argument("--log", type=Path, help="keep here what the server prints")
    parser.add_argument("--json", type=Path, help="written after every run")
    parser.add_argument("--table", type=Path, help="write the Markdown table here too")
    return parser.parse_args(arguments)


def chosen_workloads(options: argparse.Namespace) -> list[Workload]:
    if options.clients:
        return [
            fixed(
                str(clients),
                clients,
                max(1, options.requests // clients),
                options.input_tokens,
                options.output_tokens,
            )
            for clients in options.clients
        ]
    found = [WORKLOADS[name] for name in options.workloads]
    return [replace(w, waves=options.waves) for w in found] if options.waves else found


def shape_folder(name: str) -> Path:
    """Made once: its tokenizer takes a second to write."""
    folder = Path(tempfile.gettempdir()) / f"headrace-shape-{name}"
    if not (folder / "tokenizer.json").exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            write_shape(name, Path(made), whole_vocabulary=True)
            folder.mkdir(exist_ok=True)
            for file in sorted(Path(made).iterdir()):  # config.json before tokenizer.json
                file.replace(folder / file.name)
    return folder


def find_model(options: argparse.Namespace) -> tuple[list[str], Length]:
    """What a server is told, and the ids that prompts are made of."""
    if options.model is None:
        size = SHAPES[options.shape]["vocab_size"]
        assert isinstance(size, int)
        return [str(shape_folder(options.shape)), "--load-format", "dummy"], (256, size)
    path = resolve_model(options.model)
    with open_weights(path) as file:
        return [options.model], (100, describe_file(file)[0].vocab_size)


def start_server(options: argparse.Namespace, model: Sequence[str]) -> HttpServer:
    port = free_port()
    run = "from headrace.cli.commands import main; main()"
    command = [sys.executable, "-c", run, "serve", *model, "--device", options.device]
    command += ["--port", str(port), "--log-level", "warning", *SERVE_FLAGS]
    return HttpServer(
        [*command, *shlex.split(options.serve_flags)], port, "/ready", log=options.log
    )


class Report:
    """Figures as they come, by workload and way to sample."""

    def __init__(self, options: argparse.Namespace, start_up_s: float) -> None:
        self._options = options
        self._start_up_s = start_up_s
        self.runs: dict[tuple[str, str], list[Figures]] = {}
        self.failure: str | None = None

    def add(self, workload: Workload, sampling: str, figures: Figures) -> None:
        self.runs.setdefault((workload.name, sampling), []).append(figures)
        print(
            f"{workload.name:8} {sampling:18} {figures.output_per_s:9,.1f} out tok/s  "
            f"{figures.total_per_s:10,.1f} tok/s  TTFT {figures.ttft_p50_ms:7.1f} "
            f"{figures.ttft_p95_ms:7.1f} ms  TPOT {figures.tpot_p50_ms:6.2f} "
            f"{figures.tpot_p95_ms:6.2f} ms",
            flush=True,
        )
        self.write()

    def rows(self) -> list[Row]:
        options = self._options
        names = [workload.name for workload in chosen_workloads(options)]
        return [
            make_row(name, sampling, self.runs[name, sampling], self.runs.get((name, "greedy"), []))
            for name in names
            for sampling in options.sampling
            if (name, sampling) in self.runs
        ]

    @property
    def _has_anchors(self) -> bool:
        options = self._options
        return options.device == "cuda" and not options.model and options.shape == ANCHORED

    def table(self) -> str:
        return markdown(self.rows(), with_anchors=self._has_anchors and not self._options.clients)

    def content(self) -> dict[str, Any]:
        options = self._options
        return {
            "model": options.model or options.shape,
            "device": options.device,
            "serve_flags": options.serve_flags,
            "processes": options.processes,
            "start_up_s": self._start_up_s,
            "workloads": [asdict(workload) for workload in chosen_workloads(options)],
            "failure": self.failure,
            "rows": [
                {
                    **{"workload": row.workload, "sampling": row.sampling},
                    **{"median": asdict(row.figures), "of_greedy": row.of_greedy},
                    "of_vllm": row.of_vllm() if self._has_anchors else {},
                    "runs": [asdict(run) for run in row.runs],
                }
                for row in self.rows()
            ],
        }

    def write(self) -> None:
        if self._options.json:
            self._options.json.write_text(json.dumps(self.content(), indent=2) + "\n")


def plan(options: argparse.Namespace) -> Iterator[tuple[int, Workload, str]]:
    """What is run, in this order; round 0 warms up."""
    for number in range(options.rounds + 1):
        for workload in chosen_workloads(options):
            for place in range(len(options.sampling)):
                # Another one first every time: whoever comes first may have it better or worse.
                yield number, workload, options.sampling[(place + number) % len(options.sampling)]


def load(
    options: argparse.Namespace, processes: Processes, report: Report, vocabulary: Length
) -> None:
    began = time.perf_counter()
    for number, workload, sampling in plan(options):
        if options.budget_s is not None and time.perf_counter() - began > options.budget_s:
            print(f"time is up in round {number}, before {workload.name} {sampling}", flush=True)
            return
        # What prompts need warmed is warm after the first way to sample.
        is_first = sampling == options.sampling[0]
        asked = (
            workload
            if number
            else workload.shortened(WARM_TOKENS, None if is_first else WARM_TOKENS)
        )
        job = Job(
            workload=asked,
            sampling=sampling,
            vocabulary=vocabulary,
            seed=f"{number} {workload.name} {sampling}",
        )
        timings = processes.run(job)
        if number:
            prompt_tokens = sum(tokens for tokens, _ in asked.lengths())
            report.add(workload, sampling, figures_of(timings, prompt_tokens))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    model, vocabulary = find_model(options)
    began = time.perf_counter()
    server = start_server(options, model)
    report = Report(options, time.perf_counter() - began)
    print(f"server ready after {time.perf_counter() - began:.1f} s", flush=True)
    processes = Processes(server.port, options.processes)
    try:
        load(options, processes, report, vocabulary)
    except LoadFailure as error:
        report.failure = str(error)
    finally:
        processes.close()
        server.stop()
    report.write()
    if report.runs:
        print(report.table())
        if options.table:
            options.table.write_text(report.table() + "\n")
    if report.failure is not None:
        print(f"FAILED: {report.failure}", file=sys.stderr, flush=True)
    return 1 if report.failure is not None or not report.runs else 0


if __name__ == "__main__":
    sys.exit(main())
