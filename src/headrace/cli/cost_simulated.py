"""`headrace cost --model`: the rate of one replica by simulating it, where none was measured.

Flags in, a rate out; the search is search/replica_rate.py's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.core.errors import ConfigError

if TYPE_CHECKING:
    from headrace.search.machine import Space

PROCESSES = 2


def simulated_rate(
    *,
    model: str,
    gpu: str | None,
    gpus: int,
    input_tokens: float | None,
    output_tokens: float | None,
    workload: str | None,
    quant: str | None,
    kv_dtype: str | None,
    slo: str | None,
) -> tuple[float, float, str]:
    """Output tokens/s of a replica, the share of its input that its prefix cache held, a note."""
    from headrace.cli.plan_asked import Asked, question_of, space_of
    from headrace.search.machine import Machines
    from headrace.search.replica_rate import replica_rate

    if gpu is None:
        raise ConfigError(
            "--model was given without --gpu: how fast it is depends on the GPU.",
            "Name one that `headrace gpus` lists, as in --gpu h200-sxm.",
            param="gpu",
        )
    asked = Asked(
        models=(model,),
        rps=1.0,
        input=_whole(input_tokens),
        output=_whole(output_tokens),
        workload=workload,
        slo=slo,
        gpus=(gpu,),
        quants=() if quant is None else (quant,),
        kv_dtypes=() if kv_dtype is None else (kv_dtype,),
        tps=(gpus,),
    )
    question, _ = question_of(asked)
    space, _ = space_of(asked, question)
    if quant is None:  # as its checkpoint is: a cost is of one deployment, not of a search
        space = _only_own(space)
    found = replica_rate(Machines(space, question), question, PROCESSES)
    return found.output_tokens_s, found.cached_share, found.note


def _whole(tokens: float | None) -> str | None:
    return None if tokens is None else str(max(1, round(tokens)))


def _only_own(space: Space) -> Space:
    models = tuple(replace(model, precisions=(model.precision,)) for model in space.models)
    return replace(space, models=models)
