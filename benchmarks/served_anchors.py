"""What vLLM 0.26.0 served on one NVIDIA H200, as benchmarks/served_gpu.py names its workloads.

The shape of Llama-3.1-8B in bf16 with random weights, streamed over HTTP to 8 client processes;
a tokenizer of 128,256 words. Least and most of several runs, where there were several. How many
requests each client sent is not recorded. Nothing is measured here.
"""

from __future__ import annotations

Range = tuple[float, float]

# By workload and sampling; by figure as served_figures.Figures has them.
VLLM: dict[tuple[str, str], dict[str, Range]] = {
    ("1", "greedy"): {"output_per_s": (200, 204)},
    ("16", "greedy"): {"output_per_s": (2969, 3031)},
    ("64", "greedy"): {"total_per_s": (25100, 25720)},
    ("256", "greedy"): {
        "total_per_s": (33128, 33300),
        "ttft_p50_ms": (1293, 1293),
        "ttft_p95_ms": (2994, 2994),
        "tpot_p50_ms": (27.9, 27.9),
    },
    ("mixed", "greedy"): {"output_per_s": (10058, 10058)},
    ("prefix", "greedy"): {"total_per_s": (261976, 261976), "ttft_p50_ms": (358, 358)},
    ("1", "temperature"): {"output_per_s": (204, 204)},
    ("16", "temperature"): {"output_per_s": (3026, 3026)},
    ("64", "temperature"): {"total_per_s": (25615, 25615)},
    ("256", "temperature"): {"total_per_s": (33669, 33669)},
    ("1", "top_p"): {"output_per_s": (199, 199)},
    ("16", "top_p"): {"output_per_s": (2884, 2884)},
    ("64", "top_p"): {"total_per_s": (24947, 24947)},
    ("256", "top_p"): {"total_per_s": (32739, 32739)},
}


def vllm_figure(workload: str, sampling: str, figure: str) -> float | None:
    """The middle of what was seen."""
    found = VLLM.get((workload, sampling), {}).get(figure)
    return None if found is None else sum(found) / 2
