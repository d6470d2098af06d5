"""What each engine does with a model that does not fit: refuse, hold fewer sequences, or spill
layers into the host's memory, and the speed that is left.

What engines do is from their sources and from users' logs, named beside each answer; the arithmetic
is ours: bytes on each side over its bandwidth. Knows no GPU's name.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.sizes import show_bytes
from headrace.plan.fit import Fit

REFUSES, STARTS, SPILLS = "refuses", "starts", "spills"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAnswer:
    engine: str
    does: str  # REFUSES, STARTS or SPILLS
    words: str
    source: str
    layers_on_gpu: int | None = None  # of an engine that spills
    tokens_per_s: float | None = None  # of one stream, at most


def engine_answers(
    fit: Fit, *, bandwidth_bytes_s: float | None, host_bandwidth_bytes_s: float | None
) -> list[EngineAnswer]:
    """For a ledger that does not fit. Bandwidths that are not known leave the speed out."""
    left = fit.budget_bytes - fit.demand.fixed_bytes(fit.context_tokens)
    each = fit.demand.each_bytes(fit.context_tokens)
    spilled = _spilled(fit, bandwidth_bytes_s, host_bandwidth_bytes_s)
    return [
        _headrace(fit, left, each),
        _vllm(fit, left, each),
        _sglang(fit, left, each),
        *(_spills(fit, name, source, *spilled) for name, source in _SPILLING),
    ]


_SPILLING = (
    ("llama.cpp", "llama-server --help: --fit is on by default and lowers what was not set"),
    ("Ollama", "`ollama ps` shows a share of CPU and GPU where a model is split"),
)


def _headrace(fit: Fit, left: int, each: int) -> EngineAnswer:
    does = REFUSES
    if fit.demand.tp > 1 or fit.demand.stages > 1:
        words = "does not divide a model among GPUs"
    elif left >= each:
        words, does = _holds(fit), STARTS
    else:
        words = "stops at start with this ledger and the flags that would work; it never spills"
    return EngineAnswer(engine="Headrace", does=does, words=words, source="plan/sizing.py")


def _vllm(fit: Fit, left: int, each: int) -> EngineAnswer:
    if left >= each:
        return EngineAnswer(
            engine="vLLM",
            does=STARTS,
            words=_holds(fit),
            source="vllm#25350",
        )
    if left <= 0:
        return EngineAnswer(
            engine="vLLM",
            does=REFUSES,
            words='stops while loading, or with "No available memory for the cache blocks"',
            source="vllm#6689",
        )
    return EngineAnswer(
        engine="vLLM",
        does=REFUSES,
        words=f"stops: \"To serve at least one request with the model's max seq len "
        f'({fit.context_tokens}), ({each / 2**30:.2f} GiB KV cache is needed"',
        source="vllm#34076",
    )


def _sglang(fit: Fit, left: int, each: int) -> EngineAnswer:
    if left > 0:
        # It takes what its profile leaves, which may be less than one context.
        tokens = left // fit.ledger.kv.bytes_per_token
        words = f"takes the {tokens:,} tokens that are left, less than one context"
        words = _holds(fit) if left >= each else words
        return EngineAnswer(engine="SGLang", does=STARTS, words=words, source="sglang#7691")
    return EngineAnswer(
        engine="SGLang",
        does=REFUSES,
        words='stops: "Not enough memory. Please try to increase --mem-fraction-static"',
        source="sglang#4330",
    )


def _holds(fit: Fit) -> str:
    count = fit.most_sequences
    return (
        f"starts and holds {count:,} of {fit.concurrency:,} sequences at full context; others wait "
        "or are computed again"
    )


def _spilled(
    fit: Fit, bandwidth_bytes_s: float | None, host_bandwidth_bytes_s: float | None
) -> tuple[int, int, float | None]:
    """(layers on GPUs, bytes on the host, tokens per second of one stream). Engines that spill give
    each GPU layers of its own, and a stream reads one after the other: with several GPUs there is
    more room, and no more bandwidth."""
    tp, stages, layers = fit.demand.tp, fit.demand.stages, fit.demand.spec.layers
    parts = dict(fit.demand.weights.parts)
    outside = parts.get("embedding", 0) + parts.get("output", 0)
    pool = fit.ledger.kv_pool_bytes + fit.state_bytes + fit.draft_bytes
    here = fit.demand.here.layers
    each = (fit.demand.weights.bytes - outside + pool) / here  # a layer's KV goes with it
    room = fit.budget_bytes - (fit.total_bytes - here * each)
    on_gpu = max(0, min(layers, stages * int(room / each)))
    work, one = fit.demand.work, fit.demand.each_bytes(fit.context_tokens) * layers / here
    read = tp * (work.token_read_bytes + one)
    share = (layers - on_gpu) / layers
    speed = None
    if bandwidth_bytes_s and host_bandwidth_bytes_s:
        seconds = read * (1 - share) / bandwidth_bytes_s + read * share / host_bandwidth_bytes_s
        speed = 1 / seconds
    return on_gpu, int((layers - on_gpu) * each * tp), speed


def _spills(
    fit: Fit, name: str, source: str, on_gpu: int, host_bytes: int, speed: float | None
) -> EngineAnswer:
    several = fit.demand.tp * fit.demand.stages > 1
    layers, where = fit.demand.spec.layers, "the GPUs" if several else "the GPU"
    words = f"keeps {on_gpu} of {layers} layers on {where} and {show_bytes(host_bytes)} on the host"
    if speed is not None:
        words += f": one stream at most {speed:,.1f} tokens/s"
    return EngineAnswer(
        engine=name,
        does=SPILLS,
        words=words,
        source=source,
        layers_on_gpu=on_gpu,
        tokens_per_s=speed,
    )
