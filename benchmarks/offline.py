"""Offline speed of an engine on one machine: steps, prompts, batches, start-up, memory.

    python benchmarks/offline.py --device cuda --shape llama-3.1-8b --out figures.json
    python benchmarks/offline.py --device cuda --quantization fp8 --kv-dtype fp8
    python benchmarks/offline.py --device cpu --shape tiny --workloads decode prefill
    python benchmarks/offline.py --device cuda --model DIR --workloads mixed --budget-s 120
    python benchmarks/offline.py --device cuda --workloads draws    # every filter beside greedy
    python benchmarks/offline.py --device cuda --temperature 0.8 --top-p 0.95

A shape is a model by name with random weights (benchmarks/shapes.py); --model takes a real one.
Everything goes through the engine as a program would use it: scheduler, runner, sampling. Beside a
figure stand vLLM's, the target and the floor on an H200, where they are known. With --out the JSON
is written after every figure, so that a run that is cut short leaves what it has.
Needs numpy and what the device's backend needs; with --model tokenizers too; no other package.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import os
import platform
import pstats
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from headrace.assemble import Assembled, assemble
from headrace.core import collector
from offline_anchors import TARGETS, VLLM, Floors
from offline_workloads import TINY, WORKLOADS, Bench, Figure, Sizes, mixed_lengths
from shapes import SHAPES, write_shape

SAMPLING: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
}
PRECISIONS = {"none": "bf16", "fp8": "fp8", "int8": "int8", "int4": "int4"}


def process_age_s(started_at: float | None) -> float:
    """Since this process was started, imports and all: by the caller's clock, or by the one that
    ps(1) reads."""
    if started_at is not None:
        return time.time() - started_at
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    return up_s - ticks / os.sysconf("SC_CLK_TCK")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu", "reference"])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    what.add_argument("--model", help="a folder or file in the place of a shape")
    parser.add_argument("--quantization", default="none", choices=PRECISIONS)
    parser.add_argument("--kv-dtype", help="how keys and values are kept; default: the device's")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--batches", type=int, nargs="+", help="sequences of `decode`")
    parser.add_argument("--prefills", type=int, nargs="+", help="prompt tokens of `prefill`")
    parser.add_argument("--decode-tokens", type=int, help="tokens a sequence of `decode`")
    for flag, kind in SAMPLING.items():
        parser.add_argument(f"--{flag.replace('_', '-')}", type=kind, help="of every request")
    parser.add_argument("--drawn", type=int, nargs="+", help="sequences of `draws`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget-s", type=float, help="begin no workload after so long")
    parser.add_argument("--gpu-memory", help="as for `headrace serve`")
    parser.add_argument("--batch-invariant", action="store_true", help="as for `headrace serve`")
    parser.add_argument("--max-batch-tokens", type=int)
    parser.add_argument("--max-step-growth", type=float)
    parser.add_argument("--profile", type=Path, help="write what Python spent its time on here")
    parser.add_argument("--threads", type=int, help="of the CPU backend")
    parser.add_argument(
        "--started-at", type=float, help="$(date +%%s.%%N), where /proc can't be trusted"
    )
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    return parser.parse_args(arguments)


def choose_sizes(args: argparse.Namespace) -> Sizes:
    sizes = TINY if args.shape == "tiny" and args.model is None else Sizes()
    changes: dict[str, Any] = {}
    if args.batches:
        changes["batches"] = tuple(args.batches)
    if args.drawn:
        changes["drawn"] = tuple(args.drawn)
    if args.prefills:
        changes["prefills"] = tuple(args.prefills)
    if args.decode_tokens:
        changes["decode_tokens"] = args.decode_tokens
    return replace(sizes, **changes)


def engine_settings(args: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """What `assemble` is asked for."""
    settings: dict[str, Any] = {
        "device": args.device,
        "max_sequences": sizes.most_sequences,
        "max_batch_tokens": args.max_batch_tokens,
        "max_step_growth": args.max_step_growth,
        "kv_dtype": args.kv_dtype,
        "load_format": "dummy" if args.model is None else None,
        "context_tokens": sizes.longest_tokens,
    }
    if args.device == "cuda":
        settings |= {
            "quantization": None if args.quantization == "none" else args.quantization,
            "gpu_memory": args.gpu_memory,
            "batch_invariant": args.batch_invariant,
        }
    else:
        if args.quantization != "none":
            raise SystemExit(f"--quantization {args.quantization} is for --device cuda")
        settings |= {
            "kv_tokens": 2 * sizes.resident_tokens,
            "threads": args.threads,
        }
    return {name: value for name, value in settings.items() if value is not None}


def describe_run(args: argparse.Namespace, assembled: Assembled) -> dict[str, Any]:
    limits = assembled.runner.limits
    report: dict[str, Any] = {
        "model": args.model or args.shape,
        "device": args.device,
        "quantization": args.quantization,
        "sampling": sampling_of(args),
        "kv_dtype": str(assembled.ledger.kv.dtype),
        "python": platform.python_version(),
        "limits": asdict(limits),
        "notes": list(assembled.notes),
        "memory": {},
        "figures": [],
        "left_out": [],
    }
    if torch := sys.modules.get("torch"):
        report["torch"] = torch.__version__
        if torch.cuda.is_available():
            report["gpu"] = torch.cuda.get_device_name()
    if assembled.allocated is not None:
        report["memory"] = {
            row.name: {
                "predicted_bytes": row.predicted_bytes,
                "allocated_bytes": row.allocated_bytes,
            }
            for row in assembled.ledger.compare(assembled.allocated)
        }
    return report


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """Greedy, and whatever was said otherwise."""
    asked = {name: getattr(args, name) for name in SAMPLING}
    return {"temperature": 0} | {name: v for name, v in asked.items() if v is not None}


def floor_of(name: str, floors: Floors, sizes: Sizes) -> float | None:
    """In the figure's own unit."""
    kind, _, rest = name.partition(" ")
    if kind == "decode":
        return 1e3 * floors.step_s(int(rest), sizes.prompt_tokens + sizes.decode_tokens / 2)
    if kind == "long":
        count, tokens = (int(part) for part in rest.split(" x "))
        return 1e3 * floors.step_s(count, tokens + sizes.long_tokens / 2)
    if kind == "prefill":
        return 1e3 * floors.prompt_s(int(rest))
    if kind == "prefix":
        whole = sizes.prefix_tokens + sizes.suffix_tokens
        return 1e3 * floors.prompt_s(whole, sizes.prefix_tokens if rest == "warm" else 0)
    if kind == "mixed":
        lengths = mixed_lengths(sizes)
        return sum(out for _, out in lengths) / floors.batch_s(lengths)
    if kind == "throughput":
        count, tokens, out = sizes.throughput
        return count * (tokens + out) / floors.batch_s([(tokens, out)] * count)
    return None


class Report:
    """Collects figures, writes them as they come and shows them beside what is known."""

    def __init__(
        self, args: argparse.Namespace, assembled: Assembled, sizes: Sizes, start_up_s: float
    ) -> None:
        self._args = args
        self._sizes = sizes
        self.content = describe_run(args, assembled)
        precision = PRECISIONS[args.quantization]
        self._key = (args.shape if args.model is None else "", precision)
        kv_bytes = 1 if self.content["kv_dtype"] == "fp8" else 2
        is_known = args.device == "cuda"
        self._floors = Floors(assembled.spec, precision, kv_bytes) if is_known else None
        self.add(Figure("start-up", "s", start_up_s, [start_up_s]))

    def add(self, figure: Figure, busy: float | None = None) -> None:
        """`busy`: the share of the last round in which the device computed."""
        row: dict[str, Any] = asdict(figure) | {"busy": busy}
        if self._floors is not None:
            row["vllm"] = VLLM.get(self._key, {}).get(figure.name)
            row["target"] = TARGETS.get(self._key, {}).get(figure.name)
            row["floor"] = floor_of(figure.name, self._floors, self._sizes)
        self.content["figures"].append(row)
        print(
            f"{figure.name:16} {figure.value:10.4g} {figure.unit} {figure.note}",
            file=sys.stderr,
            flush=True,
        )
        self.write()

    def leave_out(self, name: str) -> None:
        self.content["left_out"].append(name)
        self.write()

    def write(self) -> None:
        if self._args.out is not None:
            self._args.out.write_text(json.dumps(self.content, indent=2) + "\n")

    def table(self) -> str:
        content = self.content
        lines = [
            f"{content['model']} on {content.get('gpu', content['device'])}, quantization "
            f"{content['quantization']}, KV {content['kv_dtype']}, "
            + ", ".join(f"{name} {value}" for name, value in content["sampling"].items()),
            f"{'':16} {'median':>9} {'':8} {'spread':>17} {'vLLM':>9} {'target':>9} {'floor':>9}"
            "  busy",
        ]
        for row in content["figures"]:
            spread = f"{min(row['samples']):.4g} to {max(row['samples']):.4g}"
            known = " ".join(f"{_show(row.get(k)):>9}" for k in ("vllm", "target", "floor"))
            lines.append(
                f"{row['name']:16} {_show(row['value']):>9} {row['unit']:8} {spread:>17} {known}"
                f"  {_busy(row)}  {row['note']}{_verdict(row)}".rstrip()
            )
        for name, row in content["memory"].items():
            more = row["allocated_bytes"] / max(1, row["predicted_bytes"]) - 1
            lines.append(
                f"{name:16} {row['allocated_bytes'] / 1e9:9.3f} GB       predicted "
                f"{row['predicted_bytes'] / 1e9:.3f} GB ({more:+.1%})"
            )
        if content["left_out"]:
            lines.append(f"left out, for lack of time: {', '.join(content['left_out'])}")
        return "\n".join(lines)


def _show(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _busy(row: dict[str, Any]) -> str:
    return "    " if row.get("busy") is None else f"{row['busy']:4.0%}"


def _verdict(row: dict[str, Any]) -> str:
    """How the figure stands to its target, as a share of the target."""
    if row.get("target") is None:
        return ""
    better = row["value"] / row["target"] - 1
    better = better if row["unit"] == "tokens/s" else -better
    return "met" if better >= 0 else f"short by {-better:.1%}"


@contextlib.contextmanager
def profiled(path: Path | None, name: str) -> Iterator[None]:
    """With a path: appends the functions that a workload spent most time in."""
    if path is None:
        yield
        return
    profile = cProfile.Profile()
    with profile:
        yield
    with path.open("a") as file:
        file.write(f"== {name}\n")
        pstats.Stats(profile, stream=file).sort_stats("tottime").print_stats(28)


def measure(args: argparse.Namespace, model: str) -> Report:
    sizes = choose_sizes(args)
    assembled = assemble(model, offline=True, **engine_settings(args, sizes))
    collector.settle()  # as the engine process of a server does
    start_up_s = process_age_s(args.started_at)
    try:
        began = time.perf_counter()
        report = Report(args, assembled, sizes, start_up_s)

        def is_late() -> bool:
            return args.budget_s is not None and time.perf_counter() - began > args.budget_s

        bench = Bench(
            assembled.engine,
            assembled.spec.vocab_size,
            rounds=args.rounds,
            is_late=is_late,
            sampling=sampling_of(args),
        )
        for name in args.workloads:
            if is_late():
                report.leave_out(name)
                continue
            with collector.rarely(), profiled(args.profile, name):
                for figure in WORKLOADS[name](bench, sizes):
                    report.add(figure, bench.busy)
        return report
    finally:
        assembled.close()
        collector.unsettle()


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    if args.model is not None:
        report = measure(args, args.model)
    else:
        with tempfile.TemporaryDirectory() as folder:
            report = measure(args, str(write_shape(args.shape, Path(folder))))
    print(report.table())


if __name__ == "__main__":
    main()
