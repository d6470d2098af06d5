"""/fit: whether one of the public models would fit on a GPU, for the page's calculator.

The answer is that of `headrace fit`. Models and GPUs are those of the tables: no file is looked at,
and nothing is fetched. It is work for a processor that also streams answers: for operators, one at
a time.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import msgspec

from headrace.core.errors import ConfigError, HeadraceError, InvalidRequestError, RetryLaterError
from headrace.server.request.call import AnyReply, Call, json_reply
from headrace.server.request.query import read_query
from headrace.server.request.service import Service

SCHEMA = "headrace-fit/1"
Name = Annotated[str, msgspec.Meta(max_length=200)]


class FitQuery(msgspec.Struct):
    model: Name = ""  # empty: the choices
    gpu: Name = ""
    gpus: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    quant: Name = ""  # empty: as the checkpoint is
    kv_dtype: Name = ""
    context: Annotated[int, msgspec.Meta(ge=1, le=100_000_000)] | None = None
    concurrency: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1


async def fit(service: Service, call: Call) -> AnyReply:
    """Whether a public model would fit on a GPU: the ledger, the limits, and what would make it
    fit. Without a model: which models, GPUs and types there are."""
    query = read_query(call, FitQuery)
    asked = msgspec.structs.astuple(query)
    work = partial(_answer if query.model else _choices, query)
    try:
        found = await service.fits.answer(asked, work)
    except RetryLaterError:
        raise
    except HeadraceError as error:
        raise InvalidRequestError(error.cause, error.remedy, param=error.param) from error
    return json_reply(found)


def _answer(query: FitQuery) -> dict[str, Any]:
    from headrace.fits.model import known_model
    from headrace.fits.report import Asked, report_on
    from headrace.hardware.gpus import find_gpu
    from headrace.plan.fit_text import report_facts

    if not query.gpu:
        raise ConfigError("No GPU is named.", "Name one of those that /fit lists.", param="gpu")
    asked = Asked(
        gpu=query.gpu,
        gpus=query.gpus,
        quant=query.quant or None,
        kv_dtype=query.kv_dtype or None,
        context=query.context,
        concurrency=query.concurrency,
    )
    report = report_on(known_model(query.model), find_gpu(query.gpu), asked, [])
    return {"schema": SCHEMA, **report_facts(report)}


def _choices(query: FitQuery) -> dict[str, Any]:
    from headrace.backends.demands import KV_TYPES
    from headrace.hardware.gpus import all_gpus
    from headrace.models.known import all_known
    from headrace.models.precision import PRECISIONS

    models = [{"id": known.id, "precision": known.precision} for known in all_known()]
    gpus = [
        {"name": gpu.name, "memory_bytes": memory}
        for gpu in all_gpus()
        if (memory := gpu.memory_bytes or gpu.nominal_bytes) is not None
    ]
    return {
        "schema": SCHEMA,
        "models": sorted(models, key=lambda each: each["id"].lower()),
        "gpus": gpus,
        "quants": list(PRECISIONS),
        "kv_dtypes": list(KV_TYPES),
    }
