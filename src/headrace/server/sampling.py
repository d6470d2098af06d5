"""A request's sampling fields as SamplingParams, with the server's bounds and the model's habits.

Knows names and ranges; no endpoint.
"""

from __future__ import annotations

from typing import Any

from headrace.core.errors import InvalidRequestError, ModelNotFoundError
from headrace.core.request import MAX_SEED, SamplingParams
from headrace.server.schema import SamplingFields
from headrace.server.service import Service

# Sent under the same name, and with the same meaning.
_SAME = (
    *("n", "seed", "frequency_penalty", "presence_penalty", "top_k", "min_p", "typical_p"),
    *("repetition_penalty", "min_tokens", "stop_token_ids", "bad_words", "allowed_token_ids"),
    *("ignore_eos", "stop"),
)

MAX_COUNT = 2**31 - 1  # of anything counted: far beyond every context, and fit for any integer


def check_model(service: Service, name: str | None) -> None:
    if name is not None and name != service.model.name:
        raise ModelNotFoundError(
            f"The model {name[:100]!r} is not served here; expected {service.model.name!r}.",
            "GET /v1/models lists what is served.",
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
    """Refuses with `param` what the server's bounds, or what is possible at all, do not allow."""
    check_model(service, sent.model)
    config, model = service.config, service.model
    check_most("n", sent.n, config.max_n)
    check_most("best_of", best_of, config.max_n, flag="max-n")
    check_most(logprobs_param, logprobs, config.max_logprobs, flag="max-logprobs")
    if logprobs is not None and logprobs < 0:
        raise InvalidRequestError(
            f"{logprobs_param} is {logprobs}; expected 0 to {config.max_logprobs}.",
            "Correct it, or leave it out.",
            param=logprobs_param,
        )
    if isinstance(sent.stop, list):
        check_most("stop", len(sent.stop), config.max_stop)
    for name in ("top_k", "min_tokens", "priority"):
        check_count(name, getattr(sent, name))
    check_count("max_tokens", max_tokens)
    fields: dict[str, Any] = {
        name: value for name in _SAME if (value := getattr(sent, name)) is not None
    }
    if sent.seed is not None and -(2**63) <= sent.seed < 0:
        fields["seed"] = sent.seed & MAX_SEED  # OpenAI's are signed
    return SamplingParams(
        temperature=sent.temperature,
        top_p=sent.top_p,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        best_of=best_of,
        logit_bias=_logit_bias(sent.logit_bias or {}),
        **fields,
    ).settled(model.habits)


def check_count(param: str, found: int | None) -> None:
    if found is not None and abs(found) > MAX_COUNT:
        raise InvalidRequestError(
            f"{param} is {found}; expected at most {MAX_COUNT} either way.",
            "Change it.",
            param=param,
        )


def check_most(param: str, found: int | None, most: int, *, flag: str = "") -> None:
    if found is not None and found > most:
        raise InvalidRequestError(
            f"{param} is {found}; this server takes at most {most}.",
            f"Lower it, or start the server with --{flag or f'max-{param}'}.",
            param=param,
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
