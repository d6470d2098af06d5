"""Attention and rope kernels on a GPU: checks each variant, times it, says how far the floor is.

    PYTHONPATH=src python3 benchmarks/cuda/attention.py [--out FOLDER] [--seconds 150]
        [--cases REGEX]    # of cases' names: 'prefill|fp8', say
    TRITON_INTERPRET=1 python benchmarks/cuda/attention.py --smoke    # no GPU: does it all run?

First every variant is compiled (in several processes: the main one finds them in Triton's cache)
and checked against dense attention in float32 on a mix of odd chunks; one that is wrong is reported
and not timed. Then launches over several layers' keys and values are captured in a CUDA graph
and the median of its replays is taken. Floors: 4.57 TB/s read, 680 TFLOP/s (shared anchors of this
project, measured on an H200). Keys and values that fit into the 60 MB second-level cache are read
from there: those figures are marked `cached`. Writes attention.json; a short table comes last.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.backends.cuda.attention.kernel import AttentionKernel, AttentionWorkspace
from headrace.backends.cuda.attention.plan import (
    FIELDS,
    Tile,
    WorkShape,
    default_tile,
    plan_attention,
)
from headrace.backends.cuda.attention.rope import RopeKernel, rope_table
from headrace.backends.cuda.launch import Launch
from headrace.models.spec import AttentionSpec, RopeSpec

READ_BYTES_PER_S = 4.57e12
FLOPS = 680e12
CACHE_BYTES = 60e6
COMPILE_SECONDS = 45.0
HEAD_DIM = 128
ROPE = RopeSpec(inv_freq=tuple(500000.0 ** (-i / 64) for i in range(64)))
LLAMA_8B = AttentionSpec(
    layer=0, heads=32, kv_heads=8, head_dim=HEAD_DIM, scale=HEAD_DIM**-0.5, rope=ROPE
)
SPECS = {"8B": LLAMA_8B, "0.6B": replace(LLAMA_8B, heads=16)}
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
KV_TYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}

Chunks = list[tuple[int, int]]  # (start, count) of each sequence


@dataclass(frozen=True)
class Variant:
    tile: Tile
    block_tokens: int
    kv_type: str = "bf16"

    @property
    def name(self) -> str:
        t = self.tile
        how = "tma" if t.descriptor else "ptr"
        return (
            f"{t.rows}x{t.keys} w{t.warps} s{t.stages} p{t.programs_per_sm} {how} "
            f"b{self.block_tokens} {self.kv_type}"
        )


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    chunks: Chunks
    small_tile: bool  # decode tiles of 16 rows, or large ones
    kv_type: str = "bf16"


def cases() -> list[Case]:
    def decode(model: str, sequences: int, context: int, kv_type: str = "bf16") -> Case:
        name = f"{model} {sequences}x{context} {kv_type}"
        return Case(name, model, [(context - 1, 1)] * sequences, True, kv_type)

    def prefill(tokens: int, kv_type: str = "bf16") -> Case:
        return Case(f"8B prefill {tokens} {kv_type}", "8B", [(0, tokens)], False, kv_type)

    mixed = [(100 + 25 * i, 1) for i in range(32)] + [(0, 512)]
    return [
        decode("8B", 16, 8192),
        prefill(8192),
        decode("8B", 1, 128),
        decode("8B", 256, 128),
        prefill(512),
        decode("8B", 64, 128),
        decode("8B", 8, 128),
        decode("8B", 64, 4096),
        decode("8B", 1, 8192),
        prefill(2048),
        Case("8B 32 decode + 512", "8B", mixed, False),
        Case("8B 96 after 4000", "8B", [(4000, 96)], False),
        decode("0.6B", 1, 128),
        decode("0.6B", 256, 128),
        decode("8B", 16, 8192, "fp8"),
        decode("8B", 256, 128, "fp8"),
        prefill(2048, "fp8"),
    ]


def variants() -> list[Variant]:
    def variant(
        rows: int, keys: int, warps: int, stages: int, programs: int, how: str, block: int
    ) -> Variant:
        tile = Tile(
            rows=rows,
            keys=keys,
            warps=warps,
            stages=stages,
            programs_per_sm=programs,
            descriptor=how == "tma",
        )
        return Variant(tile, block)

    small = [
        variant(16, 64, 4, 3, 4, "ptr", 64),
        variant(16, 64, 4, 4, 4, "ptr", 64),
        variant(16, 64, 4, 5, 3, "ptr", 64),
        variant(16, 64, 2, 3, 4, "ptr", 64),
        variant(16, 64, 2, 3, 6, "ptr", 64),
        variant(16, 32, 2, 5, 6, "ptr", 64),
        variant(16, 128, 4, 3, 2, "ptr", 64),
        variant(16, 128, 4, 3, 3, "ptr", 64),
        variant(16, 128, 8, 5, 1, "ptr", 64),
    ]
    large = [
        variant(64, 64, 4, 3, 2, "ptr", 64),
        variant(64, 64, 4, 3, 3, "ptr", 64),
        variant(128, 64, 4, 3, 2, "tma", 64),
        variant(128, 128, 8, 3, 1, "ptr", 64),
    ]
    of_fp8 = [*small, large[0], large[3]]
    return small + large + [replace(v, kv_type="fp8") for v in of_fp8]


@cache
def cached_table() -> torch.Tensor:
    return rope_table(ROPE, 8192, DEVICE)


class Step:
    """Tensors of one step: queries, pools of some layers, tables and a work list."""

    def __init__(
        self,
        case: Case,
        variant: Variant,
        layers: int,
        dependent: bool = False,
        prefetch: bool = True,
    ) -> None:
        self.spec = spec = SPECS[case.model]
        tile, block_tokens = variant.tile, variant.block_tokens
        starts = np.array([start for start, _ in case.chunks])
        counts = np.array([count for _, count in case.chunks])
        self.rows = int(counts.sum())
        blocks_of = -(-(starts + counts) // block_tokens)
        self.total_blocks = int(blocks_of.sum())
        width = -(-int(blocks_of.max()) // 16) * 16
        order = np.split(np.random.permutation(self.total_blocks), np.cumsum(blocks_of)[:-1])
        self.tables = torch.zeros((len(starts), width), dtype=torch.int32)
        self.slots = torch.empty(self.rows, dtype=torch.int64)
        row = 0
        for i, blocks in enumerate(torch.from_numpy(part) for part in order):
            self.tables[i, : len(blocks)] = blocks
            at = torch.arange(int(counts[i])) + int(starts[i])
            self.slots[row : row + len(at)] = (
                blocks[at // block_tokens] * block_tokens + at % block_tokens
            )
            row += len(at)
        self.tables, self.slots = self.tables.to(DEVICE), self.slots.to(DEVICE)
        positions = np.concatenate([np.arange(s, s + c) for s, c in case.chunks])
        self.positions = torch.from_numpy(positions.astype(np.int32)).to(DEVICE)
        shape = (layers, 2, self.total_blocks, spec.kv_heads, block_tokens, HEAD_DIM)
        self.kv = torch.empty(shape, dtype=KV_TYPES[case.kv_type], device=DEVICE)
        for layer in self.kv:
            layer.copy_(torch.randn(shape[1:], dtype=torch.bfloat16, device=DEVICE))
        self.qkv = torch.randn((self.rows, spec.qkv_width), device=DEVICE).to(torch.bfloat16)
        self.out = torch.full((self.rows, spec.q_width), math.nan, device=DEVICE).to(torch.bfloat16)
        multiprocessors = (
            torch.cuda.get_device_properties(DEVICE).multi_processor_count if CUDA else 4
        )
        self.work = work = WorkShape(
            kv_heads=spec.kv_heads,
            group=spec.heads // spec.kv_heads,
            multiprocessors=multiprocessors,
            max_sequences=256,
        )
        self.tile, self.capacity = tile, work.capacity(self.rows, tile)
        items = np.zeros((self.capacity, FIELDS), np.int32)
        plan_attention(starts, counts, items, work, tile)
        self.items = torch.from_numpy(items).to(DEVICE)
        self.workspace = AttentionWorkspace(work, HEAD_DIM, DEVICE)
        self.kernel = AttentionKernel(
            spec,
            work,
            block_tokens,
            self.workspace,
            dependent=dependent,
            prefetch=dependent and prefetch,
        )
        self.case, self.block_tokens = case, block_tokens

    def launch(self, layer: int) -> None:
        pool, work = self.kv[layer], self.items
        self.kernel.launch(self.qkv, pool, self.tables, work, self.capacity, self.tile, self.out)

    def turn(self, rope: RopeKernel, layer: int) -> None:
        rope.launch(self.qkv, self.kv[layer], self.positions, self.slots, self.rows)

    def error(self) -> float:
        """Of one launch, against dense attention in float32."""
        self.out.fill_(math.nan)
        self.launch(0)
        wanted, row, spec = [], 0, self.spec
        for i, (start, count) in enumerate(self.case.chunks):
            blocks = self.tables[i, : -(-(start + count) // self.block_tokens)].long()
            kv = self.kv[0][:, blocks].float().transpose(2, 3).flatten(1, 2)[:, : start + count]
            keys, values = kv.repeat_interleave(spec.heads // spec.kv_heads, 2)
            q = self.qkv[row : row + count, : spec.q_width].float().view(count, spec.heads, -1)
            scores = torch.einsum("nhd,mhd->hnm", q, keys) * spec.scale
            at = torch.arange(start, start + count, device=DEVICE)[:, None]
            scores.masked_fill_(torch.arange(start + count, device=DEVICE) > at, -math.inf)
            out = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), values)
            wanted.append(out.reshape(count, -1))
            row += count
        reference = torch.cat(wanted)
        return float((self.out.float() - reference).norm() / reference.norm())

    @property
    def read_bytes(self) -> int:
        """The fewest: each key and value of each sequence once, queries and answers once."""
        keys = sum(start + count for start, count in self.case.chunks)
        kv = 2 * keys * self.spec.kv_width * self.kv.element_size()
        return kv + 2 * self.rows * 2 * self.spec.q_width

    @property
    def flops(self) -> int:
        pairs = sum(count * start + count * (count + 1) // 2 for start, count in self.case.chunks)
        return 4 * pairs * self.spec.q_width


def timed(launches: Sequence[Callable[[], None]], replays: int = 12) -> float:
    """Seconds of one launch: the median replay of a graph of them all."""
    if not CUDA:
        started = time.perf_counter()
        launches[0]()
        return time.perf_counter() - started
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    event: Any = torch.cuda.Event  # untyped in torch
    events = [event(enable_timing=True) for _ in range(2 * replays)]
    for i in range(replays):
        events[2 * i].record()
        graph.replay()
        events[2 * i + 1].record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(events[::2], events[1::2], strict=True)]
    return float(statistics.median(times)) / 1e3 / len(launches)


def host_seconds(launch: Callable[[], None], times: int = 100) -> float:
    """What one launch outside of a graph costs the host."""
    launch()
    started = time.perf_counter()
    for _ in range(times if CUDA else 1):
        launch()
    seconds = (time.perf_counter() - started) / times
    if CUDA:
        torch.cuda.synchronize()
    return seconds


def probe_launches() -> None:
    """Whether launches that skip Triton's own path work here; if not, none does so."""
    step = Step(Case("probe", "8B", [(70, 1), (0, 2)], True), variants()[0], 1)
    first = step.error()
    try:
        second = step.error()
    except Exception as failure:
        print(f"direct launches fail: {type(failure).__name__}: {failure}"[:300])
        second = math.nan
    if not abs(second - first) < 1e-3:
        print(f"direct launches are off: error {first} at first, then {second}")
        Launch.again_direct = False


ODD: Chunks = [(0, 37), (1000, 1), (20, 5), (300, 130), (0, 1), (63, 2)]


def check(variant: Variant, model: str = "8B") -> str | float:
    """Its error, or what went wrong: a variant may ask for more than the device has."""
    chunks = ODD if CUDA else [(0, 3), (70, 1)]
    try:
        return Step(Case("odd", model, chunks, True, variant.kv_type), variant, 1).error()
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}".splitlines()[0][:200]


def compile_all(wanted: list[Variant], processes: int) -> list[Variant]:
    """Every variant once, each process its share; they leave the results in Triton's cache. The
    variants whose process did not end in time are left out: a kernel that hangs hangs there."""
    command = [sys.executable, __file__, "--warm"]
    groups = [f"{i}/{processes}" for i in range(processes)]
    started = [subprocess.Popen([*command, group], stderr=subprocess.DEVNULL) for group in groups]
    lost: list[Variant] = []
    until = time.perf_counter() + COMPILE_SECONDS
    for group, process in zip(groups, started, strict=True):
        try:
            process.wait(max(0.1, until - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()
            lost += share_of(wanted, group)
            print(f"did not end in {COMPILE_SECONDS:.0f} s: {[v.name for v in lost]}")
    return [variant for variant in wanted if variant not in lost]


def share_of(wanted: list[Variant], group: str) -> list[Variant]:
    share, of = (int(part) for part in group.split("/"))
    return wanted[share::of]


def time_case(case: Case, variant: Variant, errors: dict[str, Any]) -> dict[str, Any]:
    """Attention alone; time_rope says what it takes with the launch before it."""
    one = Step(case, variant, 1)
    size = one.kv.numel() * one.kv.element_size()
    layers = max(2, min(32, math.ceil(4 * CACHE_BYTES / size))) if CUDA else 1
    step = Step(case, variant, layers)
    launches = [partial(step.launch, layer) for layer in range(layers)]
    seconds = timed(launches * (8 if layers < 4 and len(case.chunks) > 1 else 1))
    floor = max(step.read_bytes / READ_BYTES_PER_S, step.flops / FLOPS)
    return {
        "case": case.name,
        "variant": variant.name,
        "us": seconds * 1e6,
        "floor_us": floor * 1e6,
        "gb_per_s": step.read_bytes / seconds / 1e9,
        "tflops": step.flops / seconds / 1e12,
        "cached": size * layers < 2 * CACHE_BYTES,
        "error": errors[variant.name],
        "tile": asdict(variant.tile),
    }


def time_library(tokens: int) -> list[dict[str, Any]]:
    """What the attention kernels within torch take for the same prefill, keys not in blocks."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.randn(1, 32, tokens, HEAD_DIM, device=DEVICE).bfloat16() for _ in "qkv")
    found = []
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):

        def attend() -> None:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        try:
            with sdpa_kernel(backend):
                seconds = timed([attend] * 4)
        except RuntimeError as failure:
            print(f"{backend.name}: {failure}".splitlines()[0])
            continue
        flops = 4 * tokens * (tokens + 1) // 2 * 32 * HEAD_DIM
        found.append(
            {
                "case": f"8B prefill {tokens} bf16",
                "variant": f"torch {backend.name}",
                "us": seconds * 1e6,
                "floor_us": flops / FLOPS * 1e6,
                "tflops": flops / seconds / 1e12,
            }
        )
    return found


def time_rope(rows: int) -> list[dict[str, Any]]:
    """The rope kernel by warps, and the pair rope + attention with and without early start."""
    case = Case("rope", "8B", [(127, 1)] * rows if rows <= 256 else [(0, rows)], rows <= 256)
    variant = Variant(default_tile(16 if rows <= 256 else 128, HEAD_DIM), 64)
    table = cached_table()
    layers = 8 if CUDA else 1
    found: list[dict[str, Any]] = []
    for warps in (1, 2, 4):
        step = Step(case, variant, layers)
        rope = RopeKernel(step.spec, 64, table, warps=warps)
        seconds = timed([partial(step.turn, rope, layer) for layer in range(layers)])
        moved = 4 * rows * step.spec.qkv_width
        row = {"case": f"8B rope {rows}", "variant": f"w{warps}", "us": seconds * 1e6}
        rates = {"floor_us": moved / READ_BYTES_PER_S * 1e6, "gb_per_s": moved / seconds / 1e9}
        found.append({**row, **rates})
    ways = [("plain launch", False, False)]
    if CUDA:
        ways += [("dependent launch", True, True), ("dependent, no prefetch", True, False)]
    for how, dependent, prefetch in ways:
        step = Step(case, variant, layers, dependent, prefetch)
        rope = RopeKernel(step.spec, 64, table, dependent=dependent)
        pair = [
            launch
            for layer in range(layers)
            for launch in (partial(step.turn, rope, layer), partial(step.launch, layer))
        ]
        name = f"8B rope + attention {rows}"
        row = {"us": timed(pair) * 2e6, "host_us": 2 * host_seconds(pair[1]) * 1e6}
        found.append({"case": name, "variant": how, **row, "error": step.error()})
    return found


def show(results: list[dict[str, Any]], best: int) -> None:
    for name in dict.fromkeys(result["case"] for result in results):
        of = sorted((r for r in results if r["case"] == name), key=lambda r: float(r["us"]))
        floor = f"floor {of[0]['floor_us']:.1f} us" if "floor_us" in of[0] else ""
        cached = ", cached" if of[0].get("cached") else ""
        print(f"{name} ({floor}{cached})")
        for r in of[:best]:
            rates = " ".join(
                f"{r[key]:7.0f} {unit}"
                for key, unit in (("gb_per_s", "GB/s"), ("tflops", "TF/s"))
                if key in r
            )
            host = f"  host {r['host_us']:.1f} us  error {r['error']:.1e}" if "host_us" in r else ""
            print(f"  {r['us']:9.1f} us  {rates}  {r['variant']}{host}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--seconds", type=float, default=150.0, help="no case is begun after these")
    parser.add_argument("--cases", default="", help="those whose name holds this; 'rope' too")
    parser.add_argument("--smoke", action="store_true", help="a case and a few variants, tiny")
    parser.add_argument("--warm", help="i/n: compile this share of the variants and end")
    args = parser.parse_args()
    began = time.perf_counter()
    wanted = variants()
    if args.warm:
        for variant in share_of(wanted, args.warm):
            for model in SPECS if variant.tile.rows == 16 else ("8B",):
                check(variant, model)
        return
    todo = [case for case in cases() if re.search(args.cases, case.name)]
    if args.smoke:
        wanted = [wanted[0], wanted[5], wanted[9], wanted[11], wanted[-3]]
        tiny = [(60, 1), (5, 1)]
        todo = [Case("tiny", "8B", tiny, True), Case("tiny chunk", "8B", [(0, 9)], False)]
    elif CUDA:
        wanted = compile_all(wanted, min(14, os.cpu_count() or 1))
    print(f"compiled after {time.perf_counter() - began:.0f} s")
    torch.manual_seed(time.time_ns() % 2**31)
    probe_launches()
    errors = {variant.name: check(variant) for variant in wanted}
    right = {name for name, e in errors.items() if isinstance(e, float) and e < 1.2e-2}
    for name in errors.keys() - right:
        print(f"not timed: {name}: {errors[name]}")
    good = [variant for variant in wanted if variant.name in right]
    results: list[dict[str, Any]] = []
    if re.search(args.cases, "rope"):
        for rows in (1,) if args.smoke else (1, 64, 256, 8192):
            results += time_rope(rows)
    for case in todo:
        if time.perf_counter() - began > args.seconds:
            print(f"left out: {case.name}")
            continue
        for variant in good:
            if variant.kv_type == case.kv_type and (variant.tile.rows == 16) == case.small_tile:
                results.append(time_case(case, variant, errors))
    args.out.mkdir(parents=True, exist_ok=True)
    written = args.out / "attention.json"
    written.write_text(json.dumps({"errors": errors, "results": results}, indent=1))
    if CUDA:  # last: what others' kernels do to a capture that fails is not known
        results += [row for tokens in (2048, 8192) for row in time_library(tokens)]
        written.write_text(json.dumps({"errors": errors, "results": results}, indent=1))
    show(results, 4)
    print(
        f"{len(good)} of {len(wanted)} variants right; {time.perf_counter() - began:.0f} s in all"
    )


if __name__ == "__main__":
    main()
