"""/tokenize, /detokenize and /tokenizer_info, as in vLLM: a text or a chat to token ids, token ids
to text, and the tokenizer's configuration for clients.

Nothing here uses the engine.
"""

from __future__ import annotations

from headrace.core.errors import InvalidRequestError
from headrace.server.request.body import read_struct
from headrace.server.request.call import AnyReply, Call, json_reply
from headrace.server.request.prompts import check_messages, encode_chat, encode_text, off_loop
from headrace.server.request.sampling import check_model
from headrace.server.request.schema import DetokenizeRequest, TokenizeRequest
from headrace.server.request.service import Service
from headrace.server.request.truncation import truncation_of
from headrace.server.tools.kinds import callable_tools
from headrace.server.tools.plan import plan_tools
from headrace.text import check_ids


async def tokenize(service: Service, call: Call) -> AnyReply:
    """A prompt as /v1/completions would see it, or messages as /v1/chat/completions would."""
    sent = await read_struct(call, TokenizeRequest)
    check_model(service, sent.model)
    if (sent.prompt is None) == (sent.messages is None):
        raise InvalidRequestError(
            "Expected either prompt or messages.", "Send one of them.", param="prompt"
        )
    # No other bound here: clients may want to know how long a text is.
    truncation = None
    if sent.truncate_prompt_tokens is not None:
        truncation = truncation_of(sent, service.context_tokens)
    if sent.messages is not None:
        check_messages(sent.messages)
        use = plan_tools(
            service.model.tokenizer,
            sent.messages,
            tools=callable_tools(call, sent.tools),
            max_bytes=service.config.max_schema_bytes,
        )
        ids = await encode_chat(
            service, use.messages, use.template_tools, sent, call.body_bytes, truncation
        )
    else:
        add_bos = sent.add_special_tokens is not False
        ids = await encode_text(service, sent.prompt or "", add_bos=add_bos, truncation=truncation)
    tokenizer = service.model.tokenizer
    context = service.context_tokens
    return await off_loop(
        len(ids),
        lambda: json_reply(
            {
                "count": len(ids),
                "max_model_len": context,
                "tokens": ids,
                "token_strs": [*map(tokenizer.piece, ids)] if sent.return_token_strs else None,
            }
        ),
    )


async def detokenize(service: Service, call: Call) -> AnyReply:
    """Control tokens are shown as they are spelled."""
    sent = await read_struct(call, DetokenizeRequest)
    check_model(service, sent.model)
    check_ids("tokens", sent.tokens, service.model.vocab_size)
    tokenizer = service.model.tokenizer
    return await off_loop(
        len(sent.tokens),
        lambda: json_reply({"prompt": tokenizer.decode(sent.tokens, skip_special=False)}),
    )


async def tokenizer_info(service: Service, call: Call) -> AnyReply:
    """The chat template and the tokens that it uses, named as in a hub's tokenizer_config.json."""
    tokenizer, facts = service.model.tokenizer, service.supervisor.facts

    def piece(token_id: int | None) -> str | None:
        return None if token_id is None else tokenizer.piece(token_id)

    return json_reply(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",  # the class that loads it there
            "model_max_length": None if facts is None else facts.context_tokens,
            "vocab_size": tokenizer.vocab_size,
            "bos_token": piece(tokenizer.bos_id),
            "eos_token": piece(tokenizer.eos_id),
            "pad_token": piece(tokenizer.pad_id),
            "eos_token_ids": sorted(tokenizer.eos_ids),
            "chat_template": tokenizer.chat_template,
        }
    )
