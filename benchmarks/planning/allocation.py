"""The ledger against what is really allocated: a dozen shapes with made-up weights, each in a
process of its own.

    python benchmarks/planning/allocation.py --device cpu|cuda [--json FILE] [--only NAME ...]

Predicted is the ledger that `headrace fit` and `headrace serve` show, without its estimates
(runtime and graphs). Allocated is measured from outside the backend: on the CPU by how much the
process's private data grew (VmData of /proc/self/status: what was mapped, touched or not), on a GPU
by torch's allocator. A row fails above 2% (CPU) or 1% (CUDA). Needs numpy and, for CUDA, torch.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "src"))  # where it is not installed

from headrace.backends.registry import find_backend  # noqa: E402
from headrace.core.config import Device, EngineConfig  # noqa: E402
from headrace.models.known import find_known  # noqa: E402
from headrace.models.spec import ModelSpec  # noqa: E402
from headrace.plan.sizing import size_pool  # noqa: E402
from headrace.weights.dummy import DummyTensor  # noqa: E402
from headrace.weights.shaped import shaped_weights  # noqa: E402
from headrace.weights.weight import Weight  # noqa: E402

MOST_OFF = {"cpu": 0.02, "cuda": 0.01}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A public model with fewer layers, or all of them, and how it is served."""

    model: str
    layers: int | None = None
    context: int = 2048
    kv_tokens: int = 8192
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def spec(self) -> ModelSpec:
        whole = find_known(self.model).spec
        some = whole.attention if self.layers is None else whole.attention[: self.layers]
        return replace(whole, attention=some)


def _shapes(*rows: tuple[Any, ...]) -> dict[str, Shape]:
    return {
        name: Shape(
            model=model, layers=layers, context=context, kv_tokens=kv, settings=tuple(more.items())
        )
        for name, model, layers, context, kv, more in rows
    }


SHAPES = {
    "cpu": _shapes(
        ("smollm2-135m", "smollm2-135m", None, 4096, 16384, {}),
        ("qwen3-0.6b", "qwen3-0.6b", None, 4096, 16384, {}),
        ("qwen3-0.6b-f32", "qwen3-0.6b", 14, 2048, 16384, {"kv_dtype": "f32"}),
        ("qwen3-0.6b-int8", "qwen3-0.6b", 14, 8192, 65536, {"kv_dtype": "int8"}),
        ("llama-3.2-1b", "llama-3.2-1b", 8, 2048, 8192, {}),
        ("llama-3.2-1b-long", "llama-3.2-1b", 4, 32768, 65536, {}),
        ("llama-3.1-8b", "llama-3.1-8b", 2, 4096, 32768, {}),
        ("llama-3.1-8b-batch", "llama-3.1-8b", 1, 2048, 8192, {"max_batch_tokens": 2048}),
        ("llama-2-7b", "llama-2-7b", 3, 4096, 8192, {}),
        ("mistral-7b", "mistral-7b-v0.1", 3, 4096, 16384, {}),
        ("qwen2.5-7b", "qwen2.5-7b", 1, 4096, 65536, {}),
        ("qwen2.5-0.5b", "qwen2.5-0.5b", None, 2048, 16384, {}),
        ("gemma-2-2b", "gemma-2-2b", 4, 4096, 16384, {}),
    ),
    "cuda": _shapes(
        ("qwen3-0.6b", "qwen3-0.6b", None, 8192, 65536, {}),
        ("qwen3-0.6b-int4", "qwen3-0.6b", None, 8192, 65536, {"quantization": "int4"}),
        ("llama-3.2-1b", "llama-3.2-1b", None, 8192, 131072, {}),
        ("llama-3.2-1b-fp8", "llama-3.2-1b", None, 8192, 131072, {"quantization": "fp8"}),
        ("llama-3.1-8b", "llama-3.1-8b", None, 8192, 131072, {}),
        ("llama-3.1-8b-fp8", "llama-3.1-8b", None, 8192, 262144, {"quantization": "fp8"}),
        ("llama-3.1-8b-int8", "llama-3.1-8b", None, 8192, 131072, {"quantization": "int8"}),
        ("llama-3.1-8b-int4", "llama-3.1-8b", None, 8192, 131072, {"quantization": "int4"}),
        ("llama-3.1-8b-kv8", "llama-3.1-8b", None, 131072, 262144, {"kv_dtype": "fp8"}),
        ("llama-3.1-8b-small", "llama-3.1-8b", None, 4096, 8192,
         {"max_batch_tokens": 512, "max_sequences": 16}),
        ("llama-2-7b", "llama-2-7b", None, 4096, 65536, {}),
        ("qwen2.5-7b", "qwen2.5-7b", None, 8192, 131072, {}),
        ("gemma-2-9b", "gemma-2-9b", None, 8192, 65536, {}),
        ("mistral-7b", "mistral-7b-v0.1", None, 8192, 131072, {}),
    ),
}  # fmt: skip


def measure(device: str, shape: Shape) -> dict[str, Any]:
    """One shape, in this process."""
    spec, weights = shape.spec, shaped_weights(shape.spec)
    if device == "cpu":  # drawing numbers would take minutes, and their values change no size
        weights = weights.map(lambda role, weight: constant(weight))
    config = EngineConfig(
        device=Device(device),
        threads=1 if device == "cpu" else None,
        context_tokens=shape.context,
        kv_tokens=shape.kv_tokens,
        graphs="off",  # type: ignore[arg-type]
        **dict(shape.settings),
    )
    backend = find_backend(Device(device))
    backend.check(config)
    sizing = size_pool(backend.footprint(spec, weights, config), config)
    ledger = sizing.ledger
    predicted = ledger.weights_bytes + ledger.kv_pool_bytes + ledger.activations_bytes
    if device == "cpu":  # random embeddings are in memory, where a real model's are in its file
        predicted += 2 * spec.vocab_size * spec.hidden_size
    before = allocated_bytes(device)
    runner, parts = backend.load(spec, weights, sizing, config, lambda tensor: None)
    allocated = allocated_bytes(device) - before
    assert parts is not None
    found = {
        "predicted_bytes": predicted,
        "allocated_bytes": allocated,
        "difference": allocated / predicted - 1,
        "rows": {
            row.name: {
                "predicted_bytes": row.predicted_bytes,
                "allocated_bytes": row.allocated_bytes,
                "difference": row.share,
            }
            for row in ledger.compare(parts)
        },
    }
    runner.close()
    return found


def constant(weight: Weight) -> Weight:
    parts = tuple(replace(p, std=0.0) for p in weight.parts if isinstance(p, DummyTensor))
    return replace(weight, parts=parts)


def allocated_bytes(device: str) -> int:
    gc.collect()
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return next(
        int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData")
    )


def warm_up(device: str) -> None:
    """What the first use of a library allocates is the runtime's, not the model's."""
    if device == "cuda":
        import torch

        torch.zeros(1, device="cuda")
    # A GEMM library's first call, the native module's tables, numpy's generators.
    part = DummyTensor("warm", (64, 64), 0)
    from headrace.weights.dequantize import dequantize

    dequantize(part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=list(SHAPES), required=True)
    parser.add_argument("--json", type=Path, help="write every row here")
    parser.add_argument("--only", nargs="+", help="these shapes")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        warm_up(args.device)
        print(json.dumps(measure(args.device, SHAPES[args.device][args.one])))
        return
    found = {}
    print(f"{'shape':<20}{'predicted':>12}{'allocated':>12}{'off':>9}   weights, KV, activations")
    for name in args.only or SHAPES[args.device]:
        call = [sys.executable, __file__, "--device", args.device, "--one", name]
        done = subprocess.run(call, stdout=subprocess.PIPE, text=True, check=True)
        row = found[name] = json.loads(done.stdout.splitlines()[-1])
        rows = (row["rows"][part] for part in ("weights", "KV pool", "activations"))
        each = ", ".join(f"{part['difference']:+.2%}" for part in rows)
        print(
            f"{name:<20}{row['predicted_bytes'] / 2**20:>8,.0f} MiB"
            f"{row['allocated_bytes'] / 2**20:>8,.0f} MiB{row['difference']:>+9.2%}   {each}",
            flush=True,
        )
    worst = max(abs(row["difference"]) for row in found.values())
    limit = MOST_OFF[args.device]
    print(f"{len(found)} shapes, at most {worst:.2%} off (target: {limit:.0%})")
    if args.json:
        args.json.write_text(json.dumps({"device": args.device, "shapes": found}, indent=2) + "\n")
    sys.exit(0 if worst <= limit else 1)


if __name__ == "__main__":
    main()
