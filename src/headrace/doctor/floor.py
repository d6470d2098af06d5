"""The ledger's floor for an endpoint whose model and GPU are known: what rules compare with.

Uses the same arithmetic as `headrace fit`. A model that is not known by name, or a GPU without a
bandwidth in the table, gives None: no rule guesses it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from headrace.backends.demands import Setup, demand_on_gpu
from headrace.core.errors import HeadraceError
from headrace.doctor.observation import Floor
from headrace.hardware.gpus import Gpu
from headrace.models.known import find_known
from headrace.models.precision import PRECISIONS
from headrace.plan.fit_work import Work, floors, work_of

_CONTEXT_TOKENS = 256  # about what the probes' short answers hold
# Of a GGUF file's name: what its weights are kept in.
_FORMAT = re.compile(r"[-._](?:i?q\d\w*|bf16|f16|f32)$", re.IGNORECASE)
_SMS = 108  # where the table does not have them; only buffers depend on it


def row_ratio(model: str | None) -> float | None:
    """Matrix products of a token that is decoded over those of a prompt's token: the output layer
    is there for the last token of a prompt alone."""
    work = _work(model)
    if work is None:
        return None
    inner = work.attention_values + work.mlp_values
    return (inner + work.output_values) / inner


def long_ratio(model: str | None, prompts: tuple[int, int]) -> float | None:
    """Operations of a token in the longer of two prompts over those in the shorter one."""
    work = _work(model)
    if work is None:
        return None
    medium, long = (work.prompt_flops(tokens) / tokens for tokens in prompts)
    return long / medium


def _work(model: str | None) -> Work | None:
    try:
        return work_of(find_known(base_name(model or "")).spec, {})
    except HeadraceError:
        return None


def base_name(model: str) -> str:
    """A model by the name that an endpoint gives it: an id as it is; of a path to a file its name,
    without the format."""
    name = model.replace("\\", "/").rpartition("/models/")[2]
    file = name.rpartition("/")[2]
    is_file = file.lower().endswith(".gguf")
    return _FORMAT.sub("", file[: -len(".gguf")]) if is_file else name


def floor_of(
    model: str | None, gpu: Gpu | None, config: Mapping[str, object], prompts: tuple[int, int]
) -> Floor | None:
    """`prompts`: tokens of the probes' medium and long prompts."""
    if model is None or gpu is None or gpu.bandwidth_bytes_s is None or gpu.memory_bytes is None:
        return None
    rate = gpu.flops.get("bf16") or gpu.flops.get("fp16")
    if rate is None:
        return None
    try:
        known = find_known(base_name(model))
        told = str(config.get("quantization") or known.precision).lower()
        precision = told if told in PRECISIONS else known.precision
        ranks = config.get("tensor_parallel")
        tp = ranks if isinstance(ranks, int) and ranks > 1 else 1
        sms = gpu.sms or _SMS
        demand = demand_on_gpu(known.spec, Setup(precision=precision, tp=tp), multiprocessors=sms)
        narrow = demand_on_gpu(known.spec, Setup(precision="fp8", tp=tp), multiprocessors=sms)
    except HeadraceError:
        return None
    found = floors(
        demand.work,
        bandwidth_bytes_s=gpu.bandwidth_bytes_s,
        flops_s=rate,
        prompt_tokens=prompts[1],
        context_tokens=_CONTEXT_TOKENS,
        concurrency=1,
        sequence_bytes=demand.sequence_bytes(demand.held_tokens(_CONTEXT_TOKENS)),
    )
    medium, long = (demand.work.prompt_flops(tokens) / tokens for tokens in prompts)
    return Floor(
        tpot_s=found.one_tpot_s,
        weight_bytes=demand.weights.bytes * tp,
        memory_bytes=gpu.memory_bytes,
        source=f"{known.id} in {precision} on {gpu.name}" + (f", {tp} ranks" if tp > 1 else ""),
        narrower_ratio=demand.weights.bytes / narrow.weights.bytes,
        long_ratio=long / medium,
    )
