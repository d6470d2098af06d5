"""Launches chosen by what a whole decode step takes, not by what a product takes alone.

    python benchmarks/cuda/steps.py --shape llama-3.1-8b --rows 1 32 --out $OUT/choices.json
    python benchmarks/cuda/steps.py --quantization fp8 --kv-dtype fp8 --rows 1 8 64 --out ...

In a step a product begins while the one before it still runs, and finds its own weights partly
asked for: what is fastest by itself (products.py) need not be so here. One matrix after the other,
each launch worth timing takes the place of the present one; what makes the step faster twice stays.
The table can be merged into headrace/backends/cuda/products/choices.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from triton.runtime.errors import OutOfResources

sys.path.insert(0, str(Path(__file__).parent))

from candidates import candidates, save  # type: ignore[import-not-found]
from runner import Shape  # type: ignore[import-not-found]

from headrace.backends.cuda.products.choice import (
    Choices,
    KernelChoice,
    bucket_of,
    key_of,
)
from headrace.backends.cuda.products.matrix import Matrix
from headrace.backends.cuda.products.product import Product
from headrace.backends.cuda.program import find_matrices

STEPS = 30
GAIN = 0.998  # of the time before, to be worth a change: less is noise


class Steps:
    """A runner whose launches can be exchanged."""

    def __init__(self, shape: str, quantization: str, kv_dtype: str) -> None:
        device = torch.device("cuda")
        settings = {"quantization": quantization, "kv_dtype": kv_dtype, "dependent": True}
        self._shape = Shape(shape, device, **settings)
        runner = self._shape.runner
        self._graphs, self._workspace = runner._graphs, runner._program._products
        self.matrices = _distinct(find_matrices(runner._weights))

    @property
    def choices(self) -> Choices:
        choices: Choices = self._workspace.choices
        return choices

    @choices.setter
    def choices(self, choices: Choices) -> None:
        torch.cuda.synchronize()
        self._workspace.choices = choices
        self._graphs.forget()

    def step_s(self, rows: int) -> float:
        """The better of two runs, captured anew."""
        runs: list[dict[str, float]] = [self._shape.decode(rows, steps=STEPS) for _ in range(2)]
        return min(run["step_ms"] for run in runs) / 1e3


def _distinct(matrices: list[Matrix]) -> list[Matrix]:
    """One of each shape, the largest first: it has the most to gain."""
    found = {(m.format, m.rows, m.columns): m for m in matrices}
    return sorted(found.values(), key=lambda m: -m.data.nbytes)


def improve(steps: Steps, rows: int, until_s: float) -> dict[str, KernelChoice]:
    """What was changed, by key."""
    changed: dict[str, KernelChoice] = {}
    bucket = bucket_of(rows)
    assert bucket is not None
    steps.choices = steps.choices
    best_s = first_s = steps.step_s(rows)
    for matrix in steps.matrices:
        key = key_of(matrix.format, matrix.rows, matrix.columns, bucket)
        for launch in candidates(matrix.format, matrix.rows, matrix.columns, bucket):
            before = steps.choices
            if launch == before.launch(matrix, rows):
                continue
            if time.monotonic() > until_s:
                print(f"{rows} rows: out of time at {key}", flush=True)
                return changed
            try:
                steps.choices = before.replaced({key: launch})
                took_s = steps.step_s(rows)
                if took_s < GAIN * best_s:  # once more, beside the old one
                    steps.choices = before
                    old_s = steps.step_s(rows)
                    steps.choices = before.replaced({key: launch})
                    took_s = max(took_s, steps.step_s(rows))
                    best_s = min(best_s, old_s)
            except (OutOfResources, RuntimeError) as error:
                print(f"{key}: {launch} failed: {error}"[:200], flush=True)
                took_s = float("inf")
            if took_s < GAIN * best_s:
                print(
                    f"{key}: {best_s * 1e3:.3f} -> {took_s * 1e3:.3f} ms with {launch}", flush=True
                )
                best_s, changed[key] = took_s, launch
            else:
                steps.choices = before
    print(f"{rows} rows: {first_s * 1e3:.3f} ms before, {best_s * 1e3:.3f} after", flush=True)
    return changed


def _without_memory(
    self: Product,
    x: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    rows: int,
) -> None:
    self.run(self._workspace.choices.launch(self.matrix, rows), x, out, residual, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--kv-dtype", default="bf16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--limit-s", type=float, default=120.0, help="for each number of rows")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    Product.__call__ = _without_memory  # type: ignore[method-assign]
    steps = Steps(args.shape, args.quantization, args.kv_dtype)
    for rows in args.rows:
        changed = improve(steps, rows, time.monotonic() + args.limit_s)
        save(torch.cuda.get_device_name(), changed, args.out)


if __name__ == "__main__":
    main()
