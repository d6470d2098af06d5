"""Drawing on a GPU: checks every filter against the reference, and says what each costs.

    PYTHONPATH=src python3 benchmarks/cuda/draws.py [--out draws.json] [--rows 1 16 64 256]
    TRITON_INTERPRET=1 python benchmarks/cuda/draws.py --smoke    # no GPU: does it all run?

Rows of 128,256 logits of four kinds (flat as random weights give them, peaked, falling off like a
language's words, rounded so that thousands are equal). First a token of each is drawn and compared
with the reference's. Then the launches of a step of draws are captured in a graph, and the median
of its replays is taken, beside the ones that only find the likeliest tokens; the kernels of a few
are timed one by one. Exits with 1 if a token was another one.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.backends.cuda.draws import draw_kernels as kernels
from headrace.backends.cuda.draws.sampling import Sampler
from headrace.backends.cuda.draws.wanted import Wanted
from headrace.backends.reference.sampling import draw
from headrace.core.step import DrawParams, FlatBias, RowExtra, StepPlan

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
HISTORY = 500  # tokens of a penalized sequence
REPLAYS = 20
EDGE = 3e-7

WAYS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_p": {"top_p": 0.95},
    "top_p 0.5": {"top_p": 0.5},
    "top_p 0.999": {"top_p": 0.999},
    "top_k": {"top_k": 50},
    "top_k 5000": {"top_k": 5000},
    "top_k 40000": {"top_k": 40000},
    "top_k, top_p": {"top_k": 5000, "top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "min_p, top_p": {"min_p": 0.01, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "mask": {"mask": b"\x5a"},
    "bias": {"bias": {5: 2.0, 77: -100.0}, "banned": [9, 10]},
    "hot": {"temperature": 50.0, "top_p": 0.9},
    "typical": {"typical_p": 0.9, "top_p": 0.95},
}
TIMED = [
    "temperature", "top_p", "top_k", "top_k 5000", "top_k, top_p", "min_p", "penalties", "mask",
]  # fmt: skip
KINDS = ["flat", "peaked", "words", "equal"]


def make_rows(kind: str, rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    maker = torch.Generator(DEVICE).manual_seed(seed)
    noise = torch.randn((rows, vocab), generator=maker, device=DEVICE)
    if kind == "flat":
        return noise * 1.28
    if kind == "peaked":
        return noise * 10.0
    if kind == "equal":
        return torch.round(noise * 8) / 8
    order = torch.rand((rows, vocab), generator=maker, device=DEVICE).argsort(1)
    return -1.1 * torch.log(order + 1.0) + 0.3 * noise


def make_plan(way: str, rows: int, vocab: int, seed: int = 0) -> StepPlan:
    rng = np.random.default_rng(seed)
    asked: dict[str, Any] = {"temperature": 0.8} | WAYS[way]
    limits = {name: asked.pop(name) for name in ("banned", "mask") if name in asked}
    if "mask" in limits:
        limits["mask"] = limits["mask"] * (vocab // 8)
    if "bias" in asked:
        asked["bias"] = FlatBias(asked["bias"])
    params = DrawParams(**asked)
    plan = StepPlan()
    for number in range(rows):
        said = rng.integers(0, vocab, HISTORY).tolist()
        extra = RowExtra(**limits, history=said, prompt_tokens=HISTORY // 2)
        uniform = float(rng.random())
        plan.add(number, [said[-1]], HISTORY - 1, [0], 0, params, uniform, extra)
    return plan


class Case:
    """Rows of one kind, drawn from in one way."""

    def __init__(self, kind: str, way: str, rows: int, vocab: int, seed: int = 0) -> None:
        self.plan = make_plan(way, rows, vocab, seed)
        self.logits = make_rows(kind, rows, vocab, seed)
        self.sampler = Sampler(rows, rows, rows, vocab, DEVICE)
        self._zeros = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        self._wanted = Wanted(self.plan)
        self.likeliest()
        self.is_adjusted = self.sampler.prepare_draws(
            self._wanted, self.logits, self._zeros, self._zeros
        )

    def how(self, row: int) -> tuple[DrawParams, RowExtra]:
        params = self.plan.draws[row]
        assert params is not None
        return params, self.plan.extras[row]

    def likeliest(self) -> None:
        self.sampler.launch(self.logits)

    def draws(self) -> None:
        self.sampler.launch(self.logits)
        if self.is_adjusted:
            self.sampler.prepare_draws(self._wanted, self.logits, self._zeros, self._zeros)
        self.sampler.launch_draws(self.logits, self.is_adjusted)

    def whole(self) -> None:
        """What a graph holds."""
        self.sampler.launch(self.logits)
        self.sampler.launch_draws(self.logits, self.is_adjusted)


def check(rows: int, vocab: int) -> list[str]:
    """What differs from the reference."""
    wrong = []
    for kind in KINDS:
        for way in WAYS:
            case = Case(kind, way, rows, vocab, seed=len(way))
            case.sampler.results.fill_(-(2**31))
            case.draws()
            found = case.sampler.tokens.tolist()
            logprobs = case.sampler.logprobs.tolist()
            searched = (case.sampler._drawing._work.states[:, 0] == 4).sum().item()
            host = case.logits.cpu().numpy()
            bad = edge = 0
            for number, (token, logprob) in enumerate(zip(found, logprobs, strict=True)):
                at, how = case.plan.uniforms[number], case.how(number)
                expected, expected_logprob = draw(host[number], how[0], at, how[1])
                if token == expected:
                    bad += not math.isclose(logprob, expected_logprob, abs_tol=1e-4)
                elif token in neighbours(host[number], at, *how):
                    edge += 1
                else:
                    bad += 1
            line = f"{kind:7} {way:13} {rows - bad - edge} of {rows} as the reference"
            print(f"{line}, {edge} on the edge, {searched} searched", flush=True)
            if bad:
                wrong.append(line)
    return wrong


def neighbours(
    row: NDArray[np.float32], uniform: float, params: DrawParams, extra: RowExtra
) -> set[int]:
    """What the reference draws a hair's breadth to either side: weights are float32 here."""
    moved = [min(max(0.0, u), 1 - 1e-16) for u in (uniform - EDGE, uniform + EDGE)]
    return {draw(row, params, u, extra)[0] for u in moved}


def replay_us(launch: Callable[[], None]) -> float:
    """The median of replays of a graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        launch()
        graph.capture_end()
        times = []
        for _ in range(REPLAYS):
            first, last = _event(), _event()
            first.record()
            graph.replay()
            last.record()
            last.synchronize()
            times.append(1e3 * first.elapsed_time(last))
    return float(statistics.median(times))


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def by_kernel(launch: Callable[[], None]) -> dict[str, float]:
    """Microseconds of each kernel, the mean of some launches."""
    from torch.profiler import ProfilerActivity, profile

    launch()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(5):
            launch()
        torch.cuda.synchronize()
    return {
        event.key: event.self_device_time_total / event.count
        for event in found.key_averages()
        if event.self_device_time_total
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--checked-rows", type=int, default=12)
    parser.add_argument("--warps", nargs="*", default=[], help="kernel=warps to try as well")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if args.smoke:
        args.vocab, args.checked_rows = 300, 2
    report: dict[str, Any] = {"times": [], "kernels": {}}
    wrong = check(args.checked_rows, args.vocab)
    if CUDA:
        print(f"{'us':22}" + "".join(f"{rows:>9}" for rows in args.rows))
        for kind in KINDS[:3]:
            for way in ["likeliest", *TIMED]:
                line = f"{kind + ' ' + way:22}"
                for rows in args.rows:
                    case = Case(kind, "top_p" if way == "likeliest" else way, rows, args.vocab)
                    launch = case.likeliest if way == "likeliest" else case.whole
                    taken = replay_us(launch)
                    report["times"].append({"kind": kind, "way": way, "rows": rows, "us": taken})
                    line += f"{taken:9.1f}"
                print(line, flush=True)
        for rows in args.rows:
            for way in ("top_p", "top_k, top_p", "penalties"):
                case = Case("flat", way, rows, args.vocab)
                found = by_kernel(case.draws)
                report["kernels"][f"{way} {rows}"] = found
                print(way, rows, {k[:28]: round(v, 1) for k, v in found.items()}, flush=True)
        for change in args.warps:
            name, _, warps = change.partition("=")
            before, kernels.WARPS[name] = kernels.WARPS[name], int(warps)
            for rows in args.rows:
                found = by_kernel(Case("flat", "top_p", rows, args.vocab).draws)
                own = {k: v for k, v in found.items() if name in k}
                print(f"{change} at {rows}: {own}", flush=True)
            kernels.WARPS[name] = before
    if args.out is not None:
        args.out.write_text(json.dumps(report | {"wrong": wrong}, indent=2) + "\n")
    if wrong:
        sys.exit("\n".join(["not as the reference:", *wrong]))


if __name__ == "__main__":
    main()
