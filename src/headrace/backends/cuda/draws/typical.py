"""Locally typical sampling (step 8 of backends/reference/sampling.py), which sorts whole rows.

The one filter without its own kernels, because few requests use it. It drops tokens from rows of
logits, after applying top_k and min_p; later steps draw from what is left. Knows rows.
"""

from __future__ import annotations

import torch

from headrace.backends.cuda.draws.drawing import LEAST_WEIGHT


def keep_typical(rows: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
    """float32 logits [n, vocab], -infinity where a token is dropped. `asked` is float64 [n, 5]:
    temperature (0 keeps all), top_p, min_p, typical_p, top_k."""
    vocab = rows.shape[1]
    logits, order = torch.sort(rows, dim=1, descending=True, stable=True)
    logits = logits.double()
    temperature, min_p, mass, top_k = asked[:, 0:1], asked[:, 2:3], asked[:, 3:4], asked[:, 4:5]
    first = logits[:, :1]
    weights = torch.exp((logits - first) / torch.where(temperature > 0, temperature, 1.0))
    ranks = torch.arange(vocab, device=rows.device)
    inside = weights >= min_p.clamp(min=LEAST_WEIGHT)
    inside &= ranks < torch.where(top_k > 0, top_k, vocab)
    weights = torch.where(inside, weights, 0.0)
    apart = torch.where(inside, logits - first, 0.0)
    mean = first + (weights * apart).sum(1, keepdim=True) / weights.sum(1, keepdim=True)
    distance = torch.where(inside, (logits - mean).abs(), torch.inf)
    nearest = distance.argsort(dim=1, stable=True)
    sums = weights.gather(1, nearest).cumsum(1)
    end = torch.searchsorted(sums, mass * sums[:, -1:], right=False)
    kept = torch.zeros_like(inside).scatter_(1, nearest, ranks <= end) & inside
    kept = torch.zeros_like(kept).scatter_(1, order, kept)
    kept |= (temperature == 0) | (first == -torch.inf) | (first == torch.inf)
    return torch.where(kept, rows, -torch.inf)
