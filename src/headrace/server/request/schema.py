"""The fields that clients may send, by endpoint: OpenAI's, and additions of vLLM and llama.cpp.
Fields of other servers that have no effect here are in inert.py.

Types only: a field's range is checked where it is used (core/request.py). Parameters of sampling
are not listed: they are added from the table (sampling_fields.py). The OpenAPI description is made
from these structs. `None` means not sent, or sent as null.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.core.sampling import Taken
from headrace.server.request.sampling_fields import takes_sampling
from headrace.server.request.structured import IGNORED_STRUCTURED, StructuredFields

JsonObject = dict[str, Any]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: the counts so far with every chunk
    include_obfuscation: bool | None = None  # OpenAI's padding, which is never sent here


@takes_sampling(Taken.COMPLETIONS)
class SamplingFields(StructuredFields, kw_only=True, forbid_unknown_fields=True):
    """The fields that chat and plain completions share, besides the sampling parameters."""

    model: str | None = None
    max_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # Not OpenAI's: named as vLLM's.
    spaces_between_special_tokens: bool | None = None  # there are no such spaces here
    truncate_prompt_tokens: int | None = None  # number of tokens to keep; -1: as many as fit
    truncation_side: Literal["left", "right"] | None = None  # where to cut; default: left
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout_s: float | None = None
    speculate: str | None = None  # ours: who guesses tokens (core/drafter.py)
    # llama.cpp's names.
    n_predict: int | None = None  # max_tokens
    repeat_penalty: float | None = None  # repetition_penalty
    cache_prompt: bool | None = None  # false: a prefix cache of its own


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    messages: list[JsonObject]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    functions: list[JsonObject] | None = (
        None  # functions and function_call are the old tools and tool_choice: refused
    )
    function_call: str | JsonObject | None = None
    # Not OpenAI's: named as vLLM's.
    chat_template_kwargs: JsonObject | None = None
    documents: list[JsonObject] | None = None  # for templates that support them
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[str | int | list[int]]  # a text, texts, token ids, or lists of them
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None  # vLLM's: whether a text gets a bos token


class EmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    input: str | list[str | int | list[int]]  # a text, texts, token ids, or lists of them
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    # Not OpenAI's.
    priority: int | None = None
    timeout_s: float | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Of vLLM's API: either a prompt, or messages as in a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[JsonObject] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    documents: list[JsonObject] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    tools: list[JsonObject] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int]


# OpenAI's own fields that do nothing here: ignored, with a warning to the client.
IGNORED: dict[type[msgspec.Struct], frozenset[str]] = {
    ChatRequest: frozenset(
        {
            *("store", "metadata", "service_tier", "modalities", "audio", "prediction"),
            *("reasoning_effort", "verbosity", "web_search_options", "prompt_cache_key"),
            *("safety_identifier", "prompt_cache_retention"),
            *("prompt_cache_options", "moderation"),
            *IGNORED_STRUCTURED,
        }
    ),
    CompletionRequest: IGNORED_STRUCTURED,
}
