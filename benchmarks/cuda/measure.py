"""How long products take on this device, inside a graph as they are served.

Times what it is given over several copies of a weight, so that none is found in the cache;
decides nothing beyond which of them was fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import median

import torch
from triton.runtime.errors import OutOfResources

from headrace.backends.cuda.products.choice import KernelChoice
from headrace.backends.cuda.products.matrix import Matrix
from headrace.backends.cuda.products.product import Product

REPEATS = 7


def graph_seconds(work: Callable[[], None], repeats: int = REPEATS) -> float:
    """The median time of a replay of `work`, captured."""
    work()  # compiled and loaded before the capture, which must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times)


def copy_of(matrix: Matrix) -> Matrix:
    """The same weight in other memory."""
    scales = None if matrix.scales is None else matrix.scales.clone()
    factors = None if matrix.factors is None else matrix.factors.clone()
    return replace(matrix, data=matrix.data.clone(), scales=scales, factors=factors)


def time_launches(
    products: Sequence[Product],
    launches: Iterable[KernelChoice],
    x: torch.Tensor,
    out: torch.Tensor,
    rows: int,
) -> dict[KernelChoice, float]:
    """Seconds of one product with each launch that the device can do; `products` differ in their
    memory only."""
    residual = out if products[0].add else None
    times: dict[KernelChoice, float] = {}
    for launch in launches:

        def work(launch: KernelChoice = launch) -> None:
            for product in products:
                product.run(launch, x, out, residual, rows)

        try:
            times[launch] = graph_seconds(work) / len(products)
        except (OutOfResources, RuntimeError):
            continue  # too much shared memory or too many registers; the library has no such one
    return times
