"""Fields of other servers that do nothing here, with the values that turn them off.

A client that turns off a feature which does not exist here gets no warning. One that turns it on
gets a warning or a refusal (`--unknown-fields`). Knows names and values; fields that have an effect
are in schema.py.
"""

from __future__ import annotations

from typing import Any

# vLLM's, on every endpoint.
_VLLM: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),  # on chats: the template writes them all
    "best_of": (1,),  # of chats
    "chat_template": (),
    "chat_template_content_format": ("auto",),
    "early_stopping": (False,),
    "echo": (False,),  # of chats
    "ec_transfer_params": ({},),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "include_reasoning": (True, False),  # there is no reasoning to leave out
    "kv_transfer_params": ({},),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "normalize": (True,),
    "prompt_embeds": ([],),
    "return_assistant_tokens_mask": (False,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "session_id": (),
    "thinking_token_budget": (),
    "use_activation": (True,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    # Of structured_outputs.
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False, True),
    "disable_fallback": (False, True),
    "structural_tag": (),
    "whitespace_pattern": (),
}
# llama.cpp's.
_LLAMA_CPP: dict[str, tuple[Any, ...]] = {
    "adaptive_target": (-1,),
    "backend_sampling": (False,),
    "dry_allowed_length": (2,),
    "dry_base": (1.75,),
    "dry_multiplier": (0,),
    "dry_penalty_last_n": (-1,),
    "dry_sequence_breakers": ([],),
    "dynatemp_exponent": (1,),
    "dynatemp_range": (0,),
    "grammar_lazy": (False,),
    "id_slot": (-1,),
    "lora": ([],),
    "min_keep": (0,),
    "mirostat": (0,),
    "mirostat_eta": (0.1,),
    "mirostat_tau": (5,),
    "n_cache_reuse": (0,),
    "n_indent": (0,),
    "n_keep": (0, -1),  # nothing is ever dropped
    "n_probs": (0,),
    "parse_tool_calls": (True,),
    "penalize_nl": (False,),
    "post_sampling_probs": (False,),
    "reasoning_budget_tokens": (-1,),
    "reasoning_format": ("none", "auto"),
    "repeat_last_n": (-1,),  # the whole context, as it is here
    "response_fields": ([],),
    "return_progress": (False,),
    "return_tokens": (False,),
    "samplers": ([],),
    "sse_ping_interval": (-1, 0),
    "t_max_predict_ms": (0, -1),
    "tfs_z": (1,),
    "timings_per_token": (False,),
    "top_n_sigma": (-1, 0),
    "verbose": (False,),
    "xtc_probability": (0,),
    "xtc_threshold": (0.1,),
}
OTHERS = {**_VLLM, **_LLAMA_CPP}

# OpenAI's own fields that are ignored (schema.IGNORED), with values that ask for nothing.
_OPENAI: dict[str, tuple[Any, ...]] = {
    "audio": ({},),
    "context_management": ([],),
    "include": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "prediction": ({},),
    "reasoning": ({}, {"effort": "none"}),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
}
_OFF = {**OTHERS, **_OPENAI}


def is_off(name: str, value: object) -> bool:
    """Whether an inert field has a value that turns it off."""
    if value is None:
        return True
    # JSON's true is not 1.
    return any(
        value == off and isinstance(value, bool) == isinstance(off, bool)
        for off in _OFF.get(name, ())
    )
