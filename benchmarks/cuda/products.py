"""Every product of a step on the GPU at hand: checked against float64, timed over the candidate
launches inside CUDA graphs, and all products of a step with the fastest of each.

    PYTHONPATH=src python benchmarks/cuda/products.py [--formats bf16,fp8] [--limit-s 280]
    PYTHONPATH=src python benchmarks/cuda/products.py --formats int8,fp8_block

Writes $OUT/products.json (all figures) and $OUT/choices.json (the winners, as choice.py reads
them). Needs torch, Triton and numpy only. Candidates are compiled and checked by several processes
first: compiled kernels reach this one through Triton's cache.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import torch
from candidates import candidates, save  # type: ignore[import-not-found]
from measure import copy_of, graph_seconds, time_launches  # type: ignore[import-not-found]

from headrace.backends.cuda.products.choice import (
    MEASURED_ROWS,
    Choices,
    KernelChoice,
    key_of,
)
from headrace.backends.cuda.products.formats import MatrixFormat
from headrace.backends.cuda.products.matrix import (
    Matrix,
    dense_matrix,
    dequantize_matrix,
    int4_matrix,
    quantize_matrix,
)
from headrace.backends.cuda.products.product import Norm, Product, Workspace
from headrace.models.spec import Activation

READ_BYTES_A_SECOND = 4.57e12  # measured on this kind of device
L2_BYTES = 60 << 20
FORMATS = (
    MatrixFormat.BF16,
    MatrixFormat.FP8,
    MatrixFormat.INT4,
    MatrixFormat.INT8,
)  # fp8_block: only when asked for
TOLERANCE = {
    MatrixFormat.BF16: 0.01,
    MatrixFormat.FP8: 0.06,
    MatrixFormat.FP8_BLOCK: 0.06,
    MatrixFormat.INT4: 0.015,
    MatrixFormat.INT8: 0.02,
}
EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """One product of a model's layer."""

    name: str
    outputs: int
    columns: int
    norm: bool = False
    gated: bool = False
    add: bool = False
    logits: bool = False  # float32 out, once a step

    @property
    def kind(self) -> tuple[bool, bool, bool, bool]:
        return self.norm, self.gated, self.add, self.logits


@dataclass(frozen=True)
class Model:
    name: str
    layers: int
    shapes: tuple[Shape, ...]


MODELS = (
    Model(
        "8B",
        32,
        (
            Shape("qkv", 6144, 4096, norm=True),
            Shape("o", 4096, 4096, add=True),
            Shape("gate_up", 28672, 4096, norm=True, gated=True),
            Shape("down", 4096, 14336, add=True),
            Shape("head", 128256, 4096, norm=True, logits=True),
        ),
    ),
    Model(
        "0.6B",
        28,
        (
            Shape("qkv", 4096, 1024, norm=True),
            Shape("o", 1024, 2048, add=True),
            Shape("gate_up", 6144, 1024, norm=True, gated=True),
            Shape("down", 1024, 3072, add=True),
            Shape("head", 151936, 1024, norm=True, logits=True),
        ),
    ),
)


def models_of(format: MatrixFormat) -> tuple[Model, ...]:
    return MODELS if format is MatrixFormat.BF16 else MODELS[:1]


def format_of(shape: Shape, format: MatrixFormat) -> MatrixFormat:
    """Output layers stay bf16 beside INT4 and INT8, as in the checkpoints."""
    return MatrixFormat.BF16 if shape.logits and format is not MatrixFormat.FP8 else format


def make_matrix(shape: Shape, format: MatrixFormat) -> Matrix:
    values = torch.randn(shape.outputs, shape.columns, device="cuda") / shape.columns**0.5
    if format.dense:
        return dense_matrix(values, "cuda", gated=shape.gated)
    if format is MatrixFormat.INT4:  # with zero points: what AWQ checkpoints have
        codes = torch.randint(0, 16, values.shape, dtype=torch.uint8, device="cuda")
        groups = shape.columns // 128
        scales = torch.rand(shape.outputs, groups, device="cuda").half() * 0.01 + 0.005
        zeros = torch.randint(4, 12, scales.shape, dtype=torch.uint8, device="cuda")
        return int4_matrix(codes, scales, "cuda", zeros=zeros, gated=shape.gated)
    return quantize_matrix(values, "cuda", format, gated=shape.gated)


def make_product(shape: Shape, matrix: Matrix, workspace: Workspace) -> Product:
    weight = torch.rand(shape.columns, device="cuda") + 0.5
    return Product(
        matrix,
        workspace,
        norm=Norm(weight, EPS) if shape.norm else None,
        activation=Activation.SILU if shape.gated else None,
        add=shape.add,
    )


def make_rows(shape: Shape, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x and a poisoned out."""
    width = shape.outputs // 2 if shape.gated else shape.outputs
    dtype = torch.float32 if shape.logits else torch.bfloat16
    x = torch.randn(rows, shape.columns, device="cuda").to(torch.bfloat16)
    return x, torch.full((rows, width), torch.nan, device="cuda", dtype=dtype)


# --- checking, in processes of their own


@dataclass(frozen=True)
class Case:
    shape: Shape
    format: MatrixFormat
    rows: int
    launch: KernelChoice
    pdl: bool = True


@cache
def small_matrix(shape: Shape, format: MatrixFormat) -> Matrix:
    return make_matrix(shape, format)


def check(case: Case) -> tuple[Case, float, str]:
    """The relative error against float64; a launch that the device can't do has none."""
    shape = case.shape
    matrix = small_matrix(shape, case.format)
    workspace = Workspace([matrix], max_rows=512, device="cuda", pdl=case.pdl)
    product = make_product(shape, matrix, workspace)
    x, out = make_rows(shape, case.rows)
    residual = torch.randn_like(out) if shape.add else None
    if residual is not None:
        out.copy_(residual)
    try:
        product.run(case.launch, x, out, out if shape.add else None, case.rows)
        torch.cuda.synchronize()
    except Exception as failure:
        return case, 0.0, f"{type(failure).__name__}: {failure}"[:160]
    want = reference(product, x, shape)
    if residual is not None:
        want += residual.double()
    error = ((out.double() - want).norm() / want.norm()).item()
    return case, error, "" if error < TOLERANCE[case.format] else "wrong"


def reference(product: Product, x: torch.Tensor, shape: Shape) -> torch.Tensor:
    rows = x.double()
    if product.norm is not None:
        rows *= torch.rsqrt(rows.square().mean(1, keepdim=True) + EPS)
        rows *= product.norm.weight.double()
    sums = rows @ dequantize_matrix(product.matrix).double().T
    if shape.gated:
        sums = torch.nn.functional.silu(sums[:, 0::2]) * sums[:, 1::2]
    return sums


def small_cases(formats: Sequence[MatrixFormat]) -> list[Case]:
    """Each kernel that will be timed, once, on a shape of its kind that is soon checked. Its
    outputs end inside a tile of 64 or more; all sizes are multiples of 16, as those that will be
    timed are, or the kernels compiled here would not be theirs."""
    found: dict[Case, None] = {}
    for format, shape in ((f, s) for f in formats for model in models_of(f) for s in model.shapes):
        small, real = Shape("small", 416, 2048, *shape.kind), format_of(shape, format)
        for rows in MEASURED_ROWS if real in formats else ():
            for launch in candidates(real, shape.outputs, shape.columns, rows):
                found[Case(small, real, rows, launch)] = None
    return list(found)


def check_all(formats: Sequence[MatrixFormat]) -> list[dict[str, object]]:
    cases = small_cases(formats)
    workers = min(14, os.cpu_count() or 1)
    failures = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for done in as_completed(pool.submit(check, case) for case in cases):
            try:
                case, error, message = done.result()
            except BrokenProcessPool:
                print("CHECK a process died: what it and the others had left is unchecked")
                break
            if message:
                print(f"CHECK {case.format} {case.shape.kind} rows {case.rows}: {message} {error}")
                print(f"      {case.launch}")
                failures.append(asdict(case) | {"error": error, "message": message})
    print(f"{len(cases)} kernels checked, {len(failures)} failed")
    return failures


# --- timing


def copies_for(matrix: Matrix) -> int:
    """So many that a round trip leaves nothing of a weight in the cache."""
    return max(2, min(32, -(-4 * L2_BYTES // matrix.bytes)))


def time_shape(
    shape: Shape, format: MatrixFormat, banned: set[tuple[object, ...]], deadline: float
) -> dict[int, dict[KernelChoice, float]]:
    matrix = make_matrix(shape, format)
    matrices = [matrix, *(copy_of(matrix) for _ in range(copies_for(matrix) - 1))]
    workspace = Workspace(matrices[:1], max_rows=512, device="cuda", pdl=True)
    products = [make_product(shape, one, workspace) for one in matrices]
    times = {}
    for rows in MEASURED_ROWS:
        if time.monotonic() > deadline:
            break
        x, out = make_rows(shape, rows)
        out.zero_()
        launches = [
            one
            for one in candidates(format, shape.outputs, shape.columns, rows)
            if (format, shape.kind, one) not in banned
        ]
        if found := time_launches(products, launches, x, out, rows):
            times[rows] = found
    return times


class Step:
    """All products of a step, with distinct weights a layer."""

    def __init__(self, model: Model, format: MatrixFormat, choices: Choices) -> None:
        made = {s.name: make_matrix(s, format_of(s, format)) for s in model.shapes}
        self._workspace = Workspace(
            made.values(), max_rows=MEASURED_ROWS[-1], device="cuda", choices=choices
        )
        self._rows = {s.name: make_rows(s, MEASURED_ROWS[-1]) for s in model.shapes}
        *layer, head = model.shapes
        self._chain = [
            (s.name, make_product(s, copy_of(made[s.name]), self._workspace))
            for s in layer * model.layers
        ]
        self._chain.append((head.name, make_product(head, made[head.name], self._workspace)))

    def seconds(self, rows: int, pdl: bool, choices: Choices | None = None) -> float:
        self._workspace.pdl = pdl
        choices = choices or self._workspace.choices
        for _, out in self._rows.values():
            out.zero_()

        def work() -> None:
            for name, product in self._chain:
                x, out = self._rows[name]
                launch = choices.launch(product.matrix, rows)
                product.run(launch, x, out, out if product.add else None, rows)

        return float(graph_seconds(work))


def step_bytes(model: Model, format: MatrixFormat) -> float:
    item = {
        MatrixFormat.BF16: 2.0,
        MatrixFormat.FP8: 1.0,
        MatrixFormat.FP8_BLOCK: 1.0 + 4 / 128,
        MatrixFormat.INT8: 1.0,
        MatrixFormat.INT4: 0.5 + 4 / 128,
    }
    return sum(
        item[format_of(s, format)] * s.outputs * s.columns * (1 if s.logits else model.layers)
        for s in model.shapes
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--limit-s", type=float, default=280.0)
    arguments = parser.parse_args()
    formats = [MatrixFormat(name) for name in arguments.formats.split(",")]
    deadline = time.monotonic() + arguments.limit_s
    out = Path(os.environ.get("OUT", "."))
    started = time.monotonic()
    failures = check_all(formats)
    checked_s = time.monotonic() - started
    banned: set[tuple[object, ...]] = {
        (one["format"], Shape(**one["shape"]).kind, KernelChoice(**one["launch"]))  # type: ignore[arg-type]
        for one in failures
    }
    winners: dict[str, KernelChoice] = {}
    figures: list[dict[str, object]] = []
    for format in formats:
        for model in models_of(format):
            for shape in model.shapes:
                real = format_of(shape, format)
                if real not in formats or key_of(real, shape.outputs, shape.columns, 1) in winners:
                    continue  # the output layer, with its own format
                for rows, times in time_shape(shape, real, banned, deadline - 40).items():
                    key = key_of(real, shape.outputs, shape.columns, rows)
                    winners[key] = min(times, key=times.__getitem__)
                    figures.append(
                        {"key": key, "name": f"{model.name} {shape.name}"}
                        | {"times": [asdict(one) | {"s": s} for one, s in times.items()]}
                    )
    measured_s = time.monotonic() - started - checked_s
    device = torch.cuda.get_device_name()
    steps = time_steps(formats, winners, deadline)
    save(device, winners, out / "choices.json")
    (out / "products.json").write_text(
        json.dumps({"device": device, "failures": failures, "figures": figures, "steps": steps})
    )
    print_shapes(figures)
    print_steps(steps)
    print(f"checks {checked_s:.0f} s, timing {measured_s:.0f} s")


def time_steps(
    formats: Sequence[MatrixFormat], winners: dict[str, KernelChoice], deadline: float
) -> list[dict[str, object]]:
    """Of INT4 also with kernels that let the next one start late: which is better shows only in a
    step, where kernels of different sizes follow each other. The better ones become winners."""
    steps: list[dict[str, object]] = []
    shipped = Choices.load(torch.cuda.get_device_name())
    for format in formats:
        for model in models_of(format):
            torch.cuda.empty_cache()
            whole = Step(model, format, shipped.replaced(winners))
            floor = step_bytes(model, format) / READ_BYTES_A_SECOND
            for rows in MEASURED_ROWS:
                if time.monotonic() > deadline:
                    return steps
                on = whole.seconds(rows, pdl=True)
                # Kernels of their own: few, or compiling them would take the time there is.
                compared = format is MatrixFormat.BF16 and rows in (1, 16)
                off = whole.seconds(rows, pdl=False) if compared else None
                late_s = None
                if format is MatrixFormat.INT4 and rows <= 64:
                    late = late_winners(model, winners, rows)
                    late_s = whole.seconds(rows, pdl=True, choices=shipped.replaced(winners | late))
                    if late_s < on:
                        winners.update(late)
                steps.append(
                    {"model": model.name, "format": format, "rows": rows, "s": on}
                    | {"without_pdl_s": off, "late_s": late_s, "floor_s": floor}
                )
            del whole
    return steps


def late_winners(
    model: Model, winners: dict[str, KernelChoice], rows: int
) -> dict[str, KernelChoice]:
    keys = (key_of(MatrixFormat.INT4, s.outputs, s.columns, rows) for s in model.shapes)
    return {key: replace(winners[key], late=True) for key in keys if key in winners}


def print_shapes(figures: list[dict[str, object]]) -> None:
    for figure in figures:
        times = figure["times"]
        assert isinstance(times, list)
        format, shape, rows = str(figure["key"]).split(":")
        if rows not in ("1", "16", "64", "256"):
            continue
        best = min(times, key=lambda one: one["s"])
        library = [one["s"] * 1e6 for one in times if one["kernel"] == "library"]
        outputs, columns = (int(n) for n in shape.split("x"))
        item = {"bf16": 2.0, "int4": 0.5 + 4 / 128}.get(format, 1.0)
        rate = item * outputs * columns / best["s"] / 1e12
        tile = (
            f"{best['kernel']} {best['block_m']}x{best['block_n']}x{best['block_k']}"
            f"/{best['parts']} w{best['warps']} s{best['stages']}"
            f"{' swap' if best['swap'] else ''}{' norm' if best['fuse_norm'] else ''}"
        )
        name = str(figure["name"])
        print(
            f"{name:13} {format:5} rows {rows:>3}: {best['s'] * 1e6:7.1f} us {rate:5.2f} TB/s"
            f" {tile}" + "".join(f"; library {s:.1f}" for s in library)
        )


def print_steps(steps: list[dict[str, object]]) -> None:
    print("model format rows   ms a step  without PDL  late    floor (bytes alone)")
    for step in steps:
        names = ("s", "without_pdl_s", "late_s", "floor_s")
        times = [f"{float(str(step[n])) * 1e3:8.3f}" if step[n] else "       -" for n in names]
        print(f"{step['model']:5} {step['format']:6} {step['rows']:>4}  ", *times, sep="  ")


if __name__ == "__main__":
    main()
