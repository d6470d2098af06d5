"""The CUDA runner on a GPU, in one call: is it right, how long are its steps, what does it take?

    python benchmarks/cuda/runner.py --out $OUT/runner.json [--shape llama-3.1-8b] [--quick]

First tiny decoders of every kind against the reference backend, launched one by one and replayed
from graphs, with and without dependent launches: logprobs must be near, and graphs must give what
launches give. Then steps of a shape with random weights at several batch sizes: the whole step as
the engine sees it (two in flight), the device's part, and what the host spends in submit(). Last
what was predicted of memory beside what torch allocated. The kernels of a step, by operation and
against the GPU's peaks: `headrace profile`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from headrace.backends.cuda import layout  # noqa: E402
from headrace.backends.cuda.backend import CudaBackend  # noqa: E402
from headrace.backends.cuda.runner import CudaRunner, multiprocessors_of  # noqa: E402
from headrace.backends.reference.runner import ReferenceRunner  # noqa: E402
from headrace.core.config import EngineConfig  # noqa: E402
from headrace.core.step import PREVIOUS, DrawParams, RowExtra, StepPlan  # noqa: E402
from headrace.weights.describe import describe_file  # noqa: E402
from headrace.weights.load import find_weights, open_weights  # noqa: E402
from shapes import write_shape  # noqa: E402

GREEDY = DrawParams(temperature=0.0)
BLOCK_TOKENS = 32
BATCHES = (1, 8, 64, 256)


def tiny_models() -> Any:
    path = ROOT / "tests/backends/cuda/tiny.py"
    found = importlib.util.spec_from_file_location("tiny", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def tiny_logprobs(runner: Any, rng: np.random.Generator, vocab: int) -> list[float]:
    """Of a scored prompt beside another sequence, and of what both decode to."""
    tokens = rng.integers(0, vocab, 37).tolist()
    tables = [[1, 2, 3], [4, 5]]
    found: list[float] = []
    for step in range(4):
        plan = StepPlan()
        if not step:
            scored = RowExtra(targets=[*tokens[1:], 0])
            plan.add(1, tokens, 0, tables[0], draw=GREEDY, extra=scored)
            plan.add(2, tokens[:5], 0, tables[1], draw=GREEDY)
        else:
            # Known tokens, so that a draw that differs by rounding does not part the runs.
            for number, start, table in ((1, 37, tables[0]), (2, 5, tables[1])):
                scored = RowExtra(targets=[tokens[step + 1]])
                plan.add(number, [tokens[step]], start + step - 1, table, extra=scored)
        runner.submit(plan)
        for result in runner.collect().extras.values():
            found += result.target_logprobs
    return found


def check(device: torch.device) -> list[dict[str, Any]]:
    tiny = tiny_models()
    rows = []
    limits: dict[str, Any] = {"total_blocks": 16, "max_batch_tokens": 64, "max_sequences": 8}
    for name, spec in tiny.SPECS.items():
        weights = tiny.make_weights(spec, seed=5)
        reference = ReferenceRunner(spec, weights, **limits)
        truth = np.array(tiny_logprobs(reference, np.random.default_rng(1), spec.vocab_size))
        plain: Any = None
        for mode in ("off", "lazy", "start"):
            for dependent in (False, True):
                try:
                    with CudaRunner(
                        spec, weights, **limits, device=device, graphs=mode, dependent=dependent
                    ) as runner:
                        rng = np.random.default_rng(1)
                        found = np.array(tiny_logprobs(runner, rng, spec.vocab_size))
                except Exception as error:
                    rows.append(
                        {
                            "model": name,
                            "graphs": mode,
                            "dependent": dependent,
                            "error": f"{type(error).__name__}: {error}"[:300],
                        }
                    )
                    continue
                plain = found if plain is None else plain
                off = float(np.abs(found - truth).mean())
                same = float(np.abs(found - plain).max())
                good = bool(np.isfinite(found).all()) and off < 0.1 and same < 0.05
                rows.append(
                    {
                        "model": name,
                        "graphs": mode,
                        "dependent": dependent,
                        "good": good,
                        "mean_error": off,
                        "from_launches": same,
                    }
                )
    return rows


class Shape:
    """A shape of random weights, and its runner."""

    def __init__(self, name: str, device: torch.device, **settings: Any) -> None:
        folder = tempfile.mkdtemp()
        file = open_weights(write_shape(name, Path(folder)), "dummy")
        self.spec, refs = describe_file(file, 4096)
        self.weights = find_weights(refs, file)
        self.device = device
        before = torch.cuda.memory_allocated(device)
        began = time.perf_counter()
        self.runner = CudaRunner(
            self.spec,
            self.weights,
            total_blocks=256 * 16,
            block_tokens=BLOCK_TOKENS,
            max_sequences=256,
            max_batch_tokens=8192,
            context_tokens=4096,
            device=device,
            **settings,
        )
        torch.cuda.synchronize(device)
        self.start_s = time.perf_counter() - began
        self.allocated_bytes = torch.cuda.memory_allocated(device) - before

    def memory(self, quantization: str) -> dict[str, Any]:
        sizes = EngineConfig(max_batch_tokens=8192, max_sequences=256).sizes(CudaBackend.defaults)
        shapes = layout.shape_weights(self.weights, quantization)
        processors = multiprocessors_of(self.device)
        predicted = {
            "weights": layout.weight_bytes(shapes),
            "kv_pool": self.runner.kv_bytes,
            "activations": layout.activation_bytes(
                self.spec, shapes, sizes, processors, 8192, 4096
            ),
        }
        total = sum(predicted.values())
        return {
            "predicted": predicted,
            "torch_allocated": self.allocated_bytes,
            "difference": self.allocated_bytes / total - 1,
            "graph_bytes": self.runner.graph_bytes,
        }

    def prefill(self, tokens: int) -> float:
        """Seconds of a first token, the second of two."""
        rng = np.random.default_rng(tokens)
        best = 0.0
        for _ in range(3):
            plan = StepPlan()
            for number, start in enumerate(range(0, tokens, 4000)):
                count = min(4000, tokens - start)
                table = list(range(number * 126, number * 126 + 126))
                ids = rng.integers(0, self.spec.vocab_size, count).tolist()
                plan.add(10**6 + number, ids, 0, table, draw=GREEDY)
            began = time.perf_counter()
            self.runner.submit(plan)
            self.runner.collect()
            best = time.perf_counter() - began
        return best

    def decode(self, batch: int, steps: int = 40, start: int = 160) -> dict[str, float]:
        tables = [list(range(n * 16, n * 16 + 16)) for n in range(batch)]

        def plan(at: int, token: int) -> StepPlan:
            made = StepPlan()
            for n in range(batch):
                made.add(n, [token], at, tables[n], draw=GREEDY)
            return made

        runner, host, device_s = self.runner, [], []
        runner.submit(plan(start, 7))
        for warm in range(5):
            runner.submit(plan(start + 1 + warm, PREVIOUS))
            runner.collect()
        began = time.perf_counter()
        for step in range(steps):
            next_plan = plan(start + 6 + step, PREVIOUS)
            before = time.perf_counter()
            runner.submit(next_plan)
            host.append(time.perf_counter() - before)
            device_s.append(runner.collect().compute_s)
        whole = (time.perf_counter() - began) / steps
        runner.collect()
        return {
            "step_ms": 1e3 * whole,
            "device_ms": 1e3 * float(np.median(device_s)),
            "submit_us": 1e6 * float(np.median(host)),
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--quick", action="store_true", help="checks, and one variant of steps")
    parser.add_argument("--no-check", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda")
    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    if not args.no_check:
        report["checks"] = check(device)
        args.out.write_text(json.dumps(report, indent=1))
    report["steps"] = []
    for dependent in (False,) if args.quick else (False, True):
        try:
            report["steps"].append(_measure(args, device, dependent))
        except Exception as error:
            report["steps"].append({"dependent": dependent, "error": f"{error}"[:500]})
        args.out.write_text(json.dumps(report, indent=1))
        torch.cuda.empty_cache()
    _show(report)


def _measure(args: argparse.Namespace, device: torch.device, dependent: bool) -> dict[str, Any]:
    shape = Shape(args.shape, device, quantization=args.quantization, dependent=dependent)
    found: dict[str, Any] = {"dependent": dependent, "start_s": shape.start_s}
    found["decode"] = {batch: shape.decode(batch) for batch in BATCHES}
    found["prefill_ms"] = {n: 1e3 * shape.prefill(n) for n in (512, 2048, 8000)}
    found["memory"] = shape.memory(args.quantization)
    shape.runner.close()
    return found


def _show(report: dict[str, Any]) -> None:
    for row in report.get("checks", []):
        if not row.get("good"):
            print("WRONG", row)
    good = sum(bool(row.get("good")) for row in report.get("checks", []))
    print(f"{report['gpu']}: {good} of {len(report.get('checks', []))} checks good")
    for found in report["steps"]:
        if "error" in found:
            print("FAILED", found)
            continue
        print(
            f"dependent {found['dependent']}: made in {found['start_s']:.1f} s; "
            f"memory {found['memory']['difference']:+.2%} of predicted, graphs "
            f"{found['memory']['graph_bytes'] >> 20} MiB"
        )
        for batch, row in found["decode"].items():
            print(
                f"  {batch:>4} sequences: step {row['step_ms']:.3f} ms, device "
                f"{row['device_ms']:.3f} ms, submit {row['submit_us']:.0f} us"
            )
        print("  prefill", {n: round(ms, 1) for n, ms in found["prefill_ms"].items()}, "ms")


if __name__ == "__main__":
    main()
