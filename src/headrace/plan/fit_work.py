"""What computing a token takes at least, on one GPU: floors of TTFT and TPOT, and shares.

Bytes over bandwidth and operations over rate, whichever is longer. Real steps are slower: launches,
imperfect kernels, communication. Knows a model's shapes and a GPU's two numbers; no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.models.layers import Mixer
from headrace.models.matrices import Part, layer_matrices
from headrace.models.mixing import mixing
from headrace.models.precision import share
from headrace.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A model's work for one token on one of `tp` GPUs: values of matrices that are multiplied, and
    bytes of weights that are read."""

    attention_values: float  # projections, and recurrent mixers
    mlp_values: float  # and the experts that a token uses, shared ones and the router
    output_values: float
    read_bytes: float  # by a step of many tokens: every expert
    token_read_bytes: float  # by a step of one token: its own experts
    mixers: tuple[tuple[Mixer, float], ...]  # of tokens, and how many layers have each, over tp
    part_values: Mapping[str, float]  # of the weights on this GPU, all experts

    @property
    def token_flops(self) -> float:
        """Matrix products of one token that is decoded."""
        return 2 * (self.attention_values + self.mlp_values + self.output_values)

    @property
    def shares(self) -> dict[str, float]:
        """Of a decoded token's matrix products, without attention's scores."""
        whole = self.token_flops / 2
        return {
            "mlp": self.mlp_values / whole,
            "attention": self.attention_values / whole,
            "output": self.output_values / whole,
        }

    def prompt_flops(self, tokens: int) -> float:
        """All products of a prompt; logits of its last token only."""
        products = 2 * (tokens * (self.attention_values + self.mlp_values) + self.output_values)
        return products + self._mixing_flops(tokens, 0)

    def key_flops(self, context_tokens: int) -> float:
        """Scores and sums of one token that sees so many."""
        return self._mixing_flops(1, context_tokens - 1)

    def _mixing_flops(self, tokens: int, start: int) -> float:
        return sum(layers * mixing(mixer, tokens, start, 2).flops for mixer, layers in self.mixers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """The shortest times that the GPU's bandwidth and rate allow."""

    ttft_s: float  # of a prompt of `prompt_tokens` alone
    prompt_tokens: int
    tpot_s: float  # at the concurrency asked for, all sequences at full context
    one_tpot_s: float  # of a sequence alone
    is_bandwidth: bool  # the time per token at that concurrency is bound by bandwidth, not by rate
    ridge_sequences: int  # from so many sequences on, products take longer than reading the weights


def floors(
    work: Work,
    *,
    bandwidth_bytes_s: float,
    flops_s: float,
    prompt_tokens: int,
    context_tokens: int,
    concurrency: int,
    sequence_bytes: int,
    stages: int = 1,
) -> Floors:
    """`sequence_bytes`: keys and values of a sequence at full context, which each token reads. Of
    several stages, each works on a part of the sequences, or of a prompt, while others work on the
    rest; a token passes them all."""
    together = -(-concurrency // stages)

    def read_s(count: int) -> float:
        weights = work.token_read_bytes if count == 1 else work.read_bytes
        return (weights + count * sequence_bytes) / bandwidth_bytes_s

    def compute_s(count: int) -> float:
        return count * (work.token_flops + work.key_flops(context_tokens)) / flops_s

    prompt_s = work.prompt_flops(prompt_tokens) / flops_s / stages
    prompt = max(prompt_s, work.read_bytes / bandwidth_bytes_s)
    ridge = stages * work.read_bytes / bandwidth_bytes_s * flops_s / work.token_flops
    return Floors(
        ttft_s=prompt,
        prompt_tokens=prompt_tokens,
        tpot_s=max(read_s(together), compute_s(together)),
        one_tpot_s=max(read_s(1), compute_s(1)),
        is_bandwidth=read_s(together) >= compute_s(together),
        ridge_sequences=max(1, round(ridge)),
    )


def work_of(spec: ModelSpec, bytes_of_part: dict[str, float], *, tp: int = 1) -> Work:
    """`bytes_of_part`: of the weights on one GPU. Each does what `tp` GPUs can't divide."""
    values: Counter[str] = Counter()
    active: Counter[str] = Counter()  # of the experts: what one token uses
    for layer, times in Counter(spec.layer_specs).items():
        for matrix in layer_matrices(layer, spec.hidden_size):
            rows, columns = share(matrix, tp)
            copies = matrix.copies
            values[matrix.part] += times * copies * rows * columns
            if layer.experts is not None and matrix.part is Part.EXPERTS:
                copies = layer.experts.active
            active[matrix.part] += times * copies * rows * columns
    mixers = Counter(layer.mixer for layer in spec.layer_specs if layer.mixer is not None)
    output = spec.vocab_size * spec.hidden_size
    whole = sum(bytes_of_part.values())
    if not spec.tied_embeddings:  # a tied table is read as the output layer
        whole -= bytes_of_part.get("embedding", 0)
    experts = bytes_of_part.get("experts", 0)
    used = active[Part.EXPERTS] / values[Part.EXPERTS] if values[Part.EXPERTS] else 1.0
    mlp = active[Part.MLP] + active[Part.EXPERTS] + active[Part.ROUTER]
    return Work(
        attention_values=active[Part.ATTENTION],
        mlp_values=mlp,
        output_values=output / tp,
        read_bytes=whole,
        token_read_bytes=whole - experts * (1 - used),
        mixers=tuple((mixer, layers / tp) for mixer, layers in mixers.items()),
        part_values={
            "embedding": output / tp,
            **({} if spec.tied_embeddings else {"output": output / tp}),
            **values,
        },
    )
