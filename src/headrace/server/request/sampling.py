"""A request's sampling fields as SamplingParams, with the server's bounds and the model's default
sampling values.

Knows names and ranges; no endpoint.
"""

from __future__ import annotations

import secrets
from typing import Any

from headrace.core import bounds
from headrace.core.checks import check_value
from headrace.core.errors import BoundError, InvalidRequestError, ModelNotFoundError
from headrace.core.request import MAX_SEED, ONCE, SamplingParams
from headrace.core.sampling import Taken
from headrace.server.request.sampling_fields import sampling_fields
from headrace.server.request.schema import SamplingFields
from headrace.server.request.service import Service


def check_model(service: Service, name: str | None) -> None:
    if name is not None and not service.model.answers_to(name):
        expected = " or ".join(map(repr, service.model.names))
        raise ModelNotFoundError(
            f"The model {name[:100]!r} is not served here; expected {expected}.",
            "GET /v1/models lists the models served.",
            param="model",
        )


def check_stream_options(sent: SamplingFields) -> None:
    if sent.stream_options is not None and not sent.stream:
        raise InvalidRequestError(
            "stream_options is given without stream.", "Set stream to true.", param="stream_options"
        )


def sampling_params(
    service: Service,
    sent: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    logprobs_param: str = "logprobs",
    best_of: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Raises, with `param`, for values beyond the server's bounds or invalid combinations."""
    check_model(service, sent.model)
    config, model = service.config, service.model
    fields = sampling_fields(sent, Taken.COMPLETIONS)
    check_most("n", fields.get("n"), config.max_n)
    check_most("best_of", best_of, config.max_n, flag="max-n")
    for param, count in ((logprobs_param, logprobs), ("prompt_logprobs", sent.prompt_logprobs)):
        check_most(param, count, config.max_logprobs, flag="max-logprobs")
        check_value(SamplingParams, "logprobs", count, param=param)
    if sent.prompt_logprobs and sent.stream:
        raise InvalidRequestError(
            "prompt_logprobs is given with stream; it is only supported without.",
            "Leave out one of the two.",
            param="prompt_logprobs",
        )
    if isinstance(stop := fields.get("stop"), list):
        check_most("stop", len(stop), config.max_stop)
    # Before they are processed; each of them is checked where the request is made.
    allowed = fields.get("allowed_token_ids", ())
    bounds.ALLOWED_TOKENS.check("allowed_token_ids", len(allowed), most=model.vocab_size)
    bounds.BIASED_TOKENS.check("logit_bias", len(sent.logit_bias or ()))
    if sent.repeat_penalty is not None:
        fields["repetition_penalty"] = one_number(sent, "repetition_penalty", "repeat_penalty")[1]
    if -(2**63) <= fields.get("seed", 0) < 0:
        fields["seed"] &= MAX_SEED  # OpenAI's seeds are signed
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        best_of=best_of,
        logit_bias=_logit_bias(sent.logit_bias or {}),
        **fields,
    ).settled(model.sampling_defaults)


def one_number(sent: SamplingFields, *names: str) -> tuple[str, Any]:
    """For fields with several names: the name that was sent, and its value."""
    found = [(name, value) for name in names if (value := getattr(sent, name)) is not None]
    if not found:
        return names[0], None
    for name, value in found[1:]:
        if value != found[0][1]:
            raise InvalidRequestError(
                f"{found[0][0]} is {found[0][1]} and {name} is {value}; expected one number.",
                f"Send only {names[0]}: both mean the same.",
                param=found[0][0],
            )
    return found[0]


def asked_tokens(sent: SamplingFields, *names: str) -> tuple[str, int | None]:
    """The max_tokens that was sent, under any of its names (llama.cpp's too), and that name; None
    where none was."""
    if sent.n_predict in (-1, -2):  # llama.cpp's words for "to the end of the context"
        sent.n_predict = None
    name, asked = one_number(sent, *names, "n_predict")
    if name != "max_tokens":  # max_tokens has a special value with `echo`
        check_value(SamplingParams, "max_tokens", asked, param=name)
    return name, asked


def cache_salt_of(sent: SamplingFields) -> str:
    """The salt under which prefixes are shared. A unique salt turns sharing off: no cached prefix
    is found, and none is left for others."""
    return ONCE + secrets.token_hex(16) if sent.cache_prompt is False else sent.cache_salt or ""


def check_most(param: str, found: int | None, most: int, *, flag: str = "") -> None:
    """Checks a bound that the server's operator can change."""
    if found is not None and found > most:
        name = flag or f"max-{param}"
        raise BoundError(
            f"{param} is {found}; this server takes at most {most}.",
            f"Lower it, or start the server with --{name}.",
            param=param,
            bound=name.removeprefix("max-").replace("-", "_"),
        )


def _logit_bias(sent: dict[str, float]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for token, value in sent.items():
        if not token.isascii() or not token.isdigit() or len(token) > 9:
            raise InvalidRequestError(
                f"logit_bias has the key {token[:40]!r}; expected token ids as digits.",
                "POST /tokenize gives the ids of a text.",
                param="logit_bias",
            )
        bias[int(token)] = value
    return bias
