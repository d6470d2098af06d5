"""Every kernel compiled for one architecture, as serving launches it:

    python -m tests.backends.cuda.compile_kernels 90 report.json [--all | --mistakes]

Models of real shapes are run through the backend's own program, with the launches that the GPU in
question would get, over tensors that have shapes and no memory (torch's "meta" device); plans are
drawn from by the runner itself, over small tensors on the CPU. The report says what was compiled,
what failed and which kernels nobody launched. Of kernels that differ in FREE and COUNTS alone one
is compiled, but with --all; with --mistakes those that must fail are. Checks no result: there is
none.
"""

from __future__ import annotations

import ast
import gc
import importlib
import json
import multiprocessing
import os
import pkgutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tests.backends.cuda import mistaken_kernels
from tests.backends.cuda.no_device import Watch, name_of
from tests.backends.cuda.served_shapes import META, MODELS, SERVED, Served
from tests.plans import Draw, Row, plan_of
from triton.runtime.jit import JITFunction

import headrace.backends.cuda as backend
from headrace.backends.cuda import device
from headrace.backends.cuda.attention.plan import attention_windows, work_shape
from headrace.backends.cuda.backend import CudaBackend
from headrace.backends.cuda.kv import KvPool
from headrace.backends.cuda.loading import Loader
from headrace.backends.cuda.products import launches, matrix
from headrace.backends.cuda.products.choice import Choices
from headrace.backends.cuda.products.formats import MatrixFormat
from headrace.backends.cuda.products.matrix import quantize_matrix
from headrace.backends.cuda.products.product import Workspace
from headrace.backends.cuda.program import Program
from headrace.backends.cuda.runner import CudaRunner
from headrace.backends.cuda.step.inputs import StepInputs
from headrace.backends.cuda.step.shapes import logit_rows
from headrace.core.step import PREVIOUS, RunnerLimits, StepPlan
from headrace.models.decoder import DecoderWeights
from headrace.models.spec import ModelSpec
from headrace.weights.describe import describe_file
from headrace.weights.dummy import DummyFolder, DummyTensor
from headrace.weights.load import find_weights
from headrace.weights.weight import Weight

# Of products: a sum with the residual is one more load; how many programs share a tile, and how
# much is asked for ahead, are numbers.
FREE = frozenset({"ADD", "residual"})
COUNTS = frozenset({"PARTS", "PREFETCH"})
SIZES = CudaBackend.defaults
# The GPU of each architecture whose choices are taken, and its multiprocessors.
GPUS = {
    80: ("NVIDIA A100-SXM4-80GB", 108),
    90: ("NVIDIA H200", 132),
    100: ("NVIDIA B200", 148),
}


class ShapeLoader(Loader):
    """Weights without memory."""

    def _noise(self, part: DummyTensor) -> torch.Tensor:
        return torch.empty(part.shape, dtype=self._dtype, device=self._device)


def describe(name: str) -> tuple[ModelSpec, DecoderWeights[Weight]]:
    folder = DummyFolder(Path(name), dict(MODELS[name]))
    spec, refs = describe_file(folder)
    return spec, find_weights(refs, folder)


def serve(architecture: int, served: Served) -> None:
    """All that one step after the other would launch, drawing left out."""
    spec, found = describe(served.model)
    # Whether scales may be halved is seen from their values, of which there are none.
    with mock.patch.object(matrix, "_narrow", lambda scales: scales.to(served.scales)):
        weights = ShapeLoader(META, torch.bfloat16, served.quantization).load(found)
        if served.change is not None:
            weights = weights.map(served.change)
    name, multiprocessors = GPUS[architecture]
    limits = RunnerLimits(
        max_batch_tokens=SIZES.max_batch_tokens,
        max_sequences=SIZES.max_sequences,
        total_blocks=512,
        block_tokens=SIZES.block_tokens,
        context_tokens=spec.context_tokens,
    )
    shape = work_shape(spec, limits.max_sequences, multiprocessors)
    rows = logit_rows(limits.max_batch_tokens, limits.max_sequences)
    inputs = StepInputs(
        limits,
        shape,
        head_dim=spec.attention[0].head_dim,
        windows=attention_windows(spec),
        wanted_rows=rows,
        vocab_size=spec.vocab_size,
        device=META,
    )
    program = Program(
        spec,
        weights,
        KvPool(spec, limits.total_blocks, limits.block_tokens, served.kv_dtype, META),
        inputs,
        shape,
        max_rows=limits.max_batch_tokens,
        logit_rows=rows,
        context_tokens=limits.context_tokens,
        block_tokens=limits.block_tokens,
        dtype=torch.bfloat16,
        device=META,
        choices=Choices.load(name),
        dependent=is_dependent(architecture),
    )
    for longest, step_rows in served.shapes:
        for _ in range(2):  # the second time past Triton's binder, where the code does that
            program.run_body(inputs.shape_of(longest, step_rows))
    if served.heads:
        for bucket in dict.fromkeys(min(count, rows) for _, count in served.shapes):
            program.run_head(bucket, inputs.wanted)


def is_dependent(architecture: int) -> bool:
    """Whether a kernel may begin before the last has ended: the backend asks for that on every GPU,
    and device.py may say from which capability on there is such a thing."""
    least = getattr(device, "DEPENDENT_CAPABILITY", device.LEAST_CAPABILITY)
    return divmod(architecture, 10) >= least


class WholeRunner(CudaRunner):
    """The runner with the launches that it has on a GPU, without one."""

    architecture = 0

    def _record(self, dtype: torch.dtype, choices: Choices | None, dependent: bool) -> None:
        super()._record(dtype, choices, is_dependent(self.architecture))


def draw(architecture: int, vocab_size: int, max_sequences: int) -> None:
    """Plans through the runner: every way to draw, score and embed."""
    spec, weights = describe("smollm2-135m")
    rope = replace(spec.attention[0].rope, interleaved=True)  # as the default model's file has it
    attention = tuple(replace(each, rope=rope) for each in spec.attention)
    spec = replace(spec, vocab_size=vocab_size, attention=attention)
    table = DummyTensor("embed", (vocab_size, spec.hidden_size), 1)
    weights = replace(weights, embed=Weight(parts=(table,)), head=Weight(parts=(table,)))
    WholeRunner.architecture = architecture
    runner = WholeRunner(
        spec,
        weights,
        total_blocks=64,
        block_tokens=SIZES.block_tokens,
        max_batch_tokens=256,
        max_sequences=max_sequences,
        device=torch.device("cpu"),
        choices=Choices.load(GPUS[architecture][0]),
    )
    with runner:
        for plan in _plans(vocab_size, max_sequences):
            runner.submit(plan)
            runner.collect()


def _plans(vocab_size: int, max_sequences: int) -> Iterator[StepPlan]:
    history = [5, 9, 5, 7]
    draws = [
        Draw(temperature=0.0),
        Draw(temperature=0.8, uniform=0.5),
        Draw(temperature=1.0, top_k=40, top_p=0.9, min_p=0.05, uniform=0.3),
        Draw(temperature=1.0, typical_p=0.5, uniform=0.3),
        Draw(
            temperature=0.7,
            repetition_penalty=1.2,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            history=history,
            prompt_tokens=2,
            bias={3: 1.5},
            banned=[4],
            uniform=0.9,
        ),
        Draw(temperature=0.0, allowed=[1, 2, 3]),
        Draw(temperature=1.0, mask=bytes([255]) * (vocab_size // 8), uniform=0.1),
    ]
    scored = list(range(23))
    for count in (1, max_sequences):
        chosen = [draws[n % len(draws)] for n in range(1, count + 1)]
        yield plan_of(
            *[
                Row(sequence_id=n, token_ids=history, start=0, block_table=[n], draw=chosen[n])
                for n in range(count)
            ]
        )
        yield plan_of(
            *[
                Row(
                    sequence_id=n,
                    token_ids=[PREVIOUS],
                    start=len(history),
                    block_table=[n],
                    draw=chosen[n],
                    top_logprobs=n % 3,
                )
                for n in range(count)
            ],
            copies=[(0, 60)],
        )
        for pool in (False, True):  # more rows of logits than exist at one time, and others
            yield plan_of(
                *[
                    Row(
                        sequence_id=100,
                        token_ids=scored,
                        start=0,
                        block_table=[50],
                        targets=None if pool else scored,
                        top_logprobs=0 if pool else 2,
                        pool=pool,
                    )
                ]
            )


def launch_by_hand(architecture: int) -> None:
    """What no model above comes to: only a table that a user measured would have INT8 widened for
    the library."""
    pdl = is_dependent(architecture)
    int8 = quantize_matrix(torch.empty((4096, 4096), device=META), META, MatrixFormat.INT8)
    launches.widen(int8, Workspace([int8], max_rows=512, device=META, pdl=pdl))


Scenes = dict[str, Callable[[], None]]  # by name, what is to be run


def scenes(architecture: int) -> list[Scenes]:
    """Each of the list is for one process."""
    has_fp8 = divmod(architecture, 10) >= device.FP8_CAPABILITY
    models: dict[str, Scenes] = {}
    for served in SERVED:
        if has_fp8 or not served.needs_fp8:
            model = models.setdefault(served.model, {})
            model[f"{len(model)}: {served}"] = partial(serve, architecture, served)
    rest: Scenes = {"launches by hand": partial(launch_by_hand, architecture)}
    for vocab_size, max_sequences in ((128256, 32), (32003, 5)):
        name = f"drawing from {vocab_size} tokens, {max_sequences} sequences"
        rest[name] = partial(draw, architecture, vocab_size, max_sequences)
    return [*models.values(), rest]


def launched_kernels() -> set[str]:
    """Every kernel that Python launches: not those that only other kernels call."""
    found: dict[str, Any] = {}
    called: set[str] = set()
    for module in pkgutil.walk_packages(backend.__path__, backend.__name__ + "."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, JITFunction) and value.fn.__module__.startswith(backend.__name__):
                found[name_of(value)] = value
    for value in found.values():
        for node in ast.walk(value.parse()):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                other = value.fn.__globals__.get(node.func.id)
                if isinstance(other, JITFunction):
                    called.add(name_of(other))
    return {name for name in found if name not in called or name.endswith("_kernel")}


_watches: list[Watch] = []  # the process's own


def _begin(architecture: int, everything: bool) -> None:
    torch.set_num_threads(1)
    gc.disable()  # a process does not live long
    alike = {} if everything else {"free": FREE, "counts": COUNTS}
    _watches.append(Watch(architecture, **alike))


def _compile(todo: Scenes) -> dict[str, Any]:
    """In one of several processes; what one compiled, others find in Triton's cache."""
    (watch,) = _watches
    watch.forget()
    seconds: dict[str, float] = {}
    for name, run in todo.items():
        print(name, flush=True)  # the last of them, if the compiler itself should crash
        start = time.perf_counter()
        try:
            with torch.inference_mode():
                run()
        except Exception as error:
            watch.fail(name, error)
            traceback.print_exc()
        seconds[name] = round(time.perf_counter() - start, 1)
    return {
        "compiled": watch.compiled,
        "bound": watch.bound,
        "failures": watch.failures,
        "direct_launches": watch.direct_launches,
        "seconds": seconds,
    }


def _count(parts: list[dict[str, Any]], what: str) -> dict[str, int]:
    """How many different ones of each kernel."""
    found: dict[str, set[Any]] = {}
    for part in parts:
        for name, made in part[what].items():
            found.setdefault(name, set()).update(made)
    return {name: len(made) for name, made in sorted(found.items())}


def main(architecture: int, report: Path, *flags: str) -> None:
    todo = [mistaken_kernels.SCENES] if "--mistakes" in flags else scenes(architecture)
    # What torch imports with the first tensor of this kind: once, not in every process.
    torch.stack([torch.empty((2, 2), device=META) @ torch.empty((2, 2), device=META)])
    with ProcessPoolExecutor(
        len(os.sched_getaffinity(0)),
        multiprocessing.get_context("fork"),
        initializer=_begin,
        initargs=(architecture, "--all" in flags),
    ) as pool:
        parts = list(pool.map(_compile, todo))
    compiled = _count(parts, "compiled")
    failures = list(dict.fromkeys(failure for part in parts for failure in part["failures"]))
    seen = compiled.keys() | {failure.split("(")[0] for failure in failures}
    found = {
        "compiled": compiled,
        "bound": _count(parts, "bound"),
        "failures": failures,
        "never_launched": sorted(launched_kernels() - seen),
        "direct_launches": sum(part["direct_launches"] for part in parts),
        "seconds": {name: took for part in parts for name, took in part["seconds"].items()},
    }
    report.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
