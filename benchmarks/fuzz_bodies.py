"""Bodies of requests for the fuzzer: good ones of every endpoint, and what becomes of them when
fields are changed, joined, left out, or the text itself is broken.

What is asked for stays small (a few tokens, few answers), so that it is the reading of a request
that is tried, not patience. Knows the endpoints' fields; not how bytes are sent.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import fuzz_grammars
import fuzz_values
from fuzz_values import text

Chooser = random.Random
Body = dict[str, Any]

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT, EMBEDDINGS = "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"

STORED_ID = "resp_" + "0" * 32  # stands for an answer that was really stored; of the same length
MOST_TOKENS = 8  # of an answer
LENGTHS = {
    CHAT: ("max_tokens", "max_completion_tokens", "n_predict"),
    COMPLETIONS: ("max_tokens", "n_predict"),
    RESPONSES: ("max_output_tokens",),
    MESSAGES: ("max_tokens",),
}
_MOST_CONTEXT = 1 << 20  # no context is longer: what asks for more is refused anyway


_RAW = re.compile(f'"{fuzz_values.RAW_MARK}' + r'((?:[^"\\]|\\.)*)"')


# -- good ones -------------------------------------------------------------------------------------


def _turns(chooser: Chooser) -> list[Body]:
    found: list[Body] = []
    if chooser.random() < 0.2:
        found.append({"role": chooser.choice(("system", "developer")), "content": "Be brief."})
    for _ in range(chooser.choice((0, 0, 0, 1, 2))):
        found.append({"role": "user", "content": text(chooser, 10)})
        found.append({"role": "assistant", "content": text(chooser, 10)})
    content: Any = " ".join(chooser.choices(fuzz_values.WORDS, k=3))
    if chooser.random() < 0.2:
        content = [{"type": "text", "text": content}, {"type": "text", "text": text(chooser)}]
    return [*found, {"role": "user", "content": content}]


def _tool_turns(chooser: Chooser) -> list[Body]:
    call = {"id": "c1", "type": "function", "function": {"name": "f0", "arguments": "{}"}}
    if chooser.random() < 0.3:
        call["function"] = fuzz_values.anything(chooser)
    return [
        {"role": "user", "content": "Do it."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": text(chooser)},
    ]


def _sampling(chooser: Chooser) -> Body:
    """Good values of some fields, in any combination."""
    makers: dict[str, Callable[[], Any]] = {
        "temperature": lambda: chooser.choice((0, 0.7, 1.3, 2)),
        "top_p": lambda: chooser.choice((0.1, 0.9, 1)),
        "top_k": lambda: chooser.choice((-1, 0, 1, 40, 10**6)),
        "min_p": lambda: chooser.choice((0, 0.05, 1)),
        "typical_p": lambda: chooser.choice((0.2, 1)),
        "seed": lambda: chooser.choice((0, 7, -1, 2**63 - 1)),
        "n": lambda: chooser.choice((1, 2, 2, 3, 3, 16)),
        "stop": lambda: chooser.choice(("the", ["a", " b"], ["日"], ["x"] * 16, "\n")),
        "stop_token_ids": lambda: chooser.choice(([], [2], list(range(100)))),
        "bad_words": lambda: chooser.choice((["the"], [" a", "b"], ["word"] * 64)),
        "allowed_token_ids": lambda: chooser.choice(([5], list(range(200, 260)), [0, 49151])),
        "logit_bias": lambda: chooser.choice(({"5": 100}, {"5": -100, "6": 1.5}, {})),
        "presence_penalty": lambda: chooser.choice((-2, 0.5, 2)),
        "frequency_penalty": lambda: chooser.choice((-2, 0.5, 2)),
        "repetition_penalty": lambda: chooser.choice((0.5, 1.1, 100)),
        "ignore_eos": lambda: True,
        "min_tokens": lambda: chooser.choice((0, 1)),
        "skip_special_tokens": lambda: False,
        "include_stop_str_in_output": lambda: True,
        "return_token_ids": lambda: True,
        "prompt_logprobs": lambda: chooser.choice((0, 1, 20)),
        "truncate_prompt_tokens": lambda: chooser.choice((-1, 1, 5)),
        "cache_salt": lambda: text(chooser, 5),
        "cache_prompt": lambda: False,
        "priority": lambda: chooser.choice((-5, 0, 5)),
        "timeout_s": lambda: chooser.choice((0.01, 5, 30)),
        "request_id": lambda: text(chooser, 6),
    }
    names = chooser.sample(list(makers), chooser.choice((0, 1, 2, 3, 6)))
    return {name: makers[name]() for name in names}


def _streamed(chooser: Chooser, body: Body, with_options: bool = True) -> None:
    if chooser.random() < 0.3:
        body["stream"] = True
        if with_options and chooser.random() < 0.3:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}


def chat(chooser: Chooser, with_hostile: bool) -> Body:
    body: Body = {"messages": _turns(chooser), "max_tokens": chooser.choice((1, 1, 2, 3))}
    body |= _sampling(chooser)
    kind = chooser.random()
    if kind < 0.25:
        body |= fuzz_grammars.asked(chooser, with_hostile=with_hostile)
    elif kind < 0.4:
        body |= fuzz_grammars.tools(chooser)
        if chooser.random() < 0.3:
            body["messages"] = _tool_turns(chooser)
    if chooser.random() < 0.2:
        body["logprobs"] = True
        body["top_logprobs"] = chooser.choice((0, 1, 20))
    _streamed(chooser, body)
    return body


def completion(chooser: Chooser, with_hostile: bool) -> Body:
    prompts = ("a mill", "x", ["a", "b"], [5, 6, 7], [[5], [6, 7]], "", ["x"] * 5)
    body: Body = {"prompt": chooser.choice(prompts), "max_tokens": chooser.choice((1, 2))}
    body |= _sampling(chooser)
    if chooser.random() < 0.2:
        body |= fuzz_grammars.asked(chooser, with_hostile=with_hostile)
    for name, value in (("echo", True), ("logprobs", 5), ("best_of", 4), ("logprobs", 20)):
        if chooser.random() < 0.15:
            body[name] = value
    if body.get("echo") and chooser.random() < 0.3:
        body["max_tokens"] = 0
    _streamed(chooser, body)
    return body


def response(chooser: Chooser, with_hostile: bool) -> Body:
    items: list[Body] = [{"type": "message", "role": "user", "content": "Hi"}]
    body: Body = {
        "input": chooser.choice(("Hi", items, [{"role": "user", "content": "A mill?"}])),
        "max_output_tokens": chooser.choice((1, 2)),
    }
    if chooser.random() < 0.3:
        body["previous_response_id"] = STORED_ID
    if chooser.random() < 0.3:
        body["store"] = chooser.random() < 0.5
    if chooser.random() < 0.2:
        body["include"] = ["message.output_text.logprobs"]
    if chooser.random() < 0.2:
        schema = chooser.choice(fuzz_grammars.SCHEMAS)
        body["text"] = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    if chooser.random() < 0.2:
        body["tools"] = [
            {"type": "function", "name": f"f{place}", "parameters": schema}
            for place, schema in enumerate(chooser.sample(fuzz_grammars.SCHEMAS, 2))
        ]
    _streamed(chooser, body, with_options=False)
    return body


def message(chooser: Chooser, with_hostile: bool) -> Body:
    blocks = [{"type": "text", "text": "A mill?"}]
    content = chooser.choice(("Hi", blocks))
    body: Body = {
        "max_tokens": chooser.choice((1, 2)),
        "messages": [{"role": "user", "content": content}],
    }
    if chooser.random() < 0.3:
        body["system"] = chooser.choice(("Be brief.", [{"type": "text", "text": "Be brief."}]))
    if chooser.random() < 0.2:
        schema = chooser.choice(fuzz_grammars.SCHEMAS)
        body["tools"] = [{"name": "f0", "input_schema": schema}]
        body["tool_choice"] = {"type": chooser.choice(("auto", "any", "none"))}
    if chooser.random() < 0.2:
        body["stop_sequences"] = chooser.choice((["a"], ["the", "\n"]))
    _streamed(chooser, body, with_options=False)
    return body


def count(chooser: Chooser, with_hostile: bool) -> Body:
    body = message(chooser, with_hostile)
    return {name: body[name] for name in ("messages", "system", "tools") if name in body}


def embedding(chooser: Chooser, with_hostile: bool) -> Body:
    body: Body = {"input": chooser.choice(("a", ["a", "b"], [5, 6], [[5], [6]], ["x"] * 5))}
    if chooser.random() < 0.3:
        body["encoding_format"] = chooser.choice(("float", "base64"))
    return body


def tokenize(chooser: Chooser, with_hostile: bool) -> Body:
    if chooser.random() < 0.5:
        return {"prompt": text(chooser), "return_token_strs": chooser.random() < 0.5}
    return {"messages": _turns(chooser)}


def detokenize(chooser: Chooser, with_hostile: bool) -> Body:
    return {"tokens": [chooser.randrange(49152) for _ in range(chooser.randrange(5))]}


GOOD: dict[str, Callable[[Chooser, bool], Body]] = {
    CHAT: chat,
    COMPLETIONS: completion,
    RESPONSES: response,
    MESSAGES: message,
    COUNT: count,
    EMBEDDINGS: embedding,
    TOKENIZE: tokenize,
    DETOKENIZE: detokenize,
}


# -- small enough ----------------------------------------------------------------------------------


def tame(path: str, body: Body) -> Body:
    """The same, asking for no more work than a fuzzer has time for: what would be answered is
    short. What would be refused stays as it is."""
    lengths = [name for name in LENGTHS.get(path, ()) if body.get(name) is not None]
    for name in lengths:
        value = body[name]
        if type(value) is int and (MOST_TOKENS < value <= _MOST_CONTEXT or value in (-1, -2)):
            body[name] = MOST_TOKENS
        elif type(value) is int and path == MESSAGES and value > MOST_TOKENS:
            body[name] = MOST_TOKENS  # there more than the context holds is no mistake
    if not lengths and path in LENGTHS and path != MESSAGES:
        body[LENGTHS[path][0]] = 2
    prompts = body.get("prompt")
    if isinstance(prompts, list) and len(prompts) > 16 and not isinstance(prompts[0], int):
        for name in ("n", "best_of"):
            if isinstance(body.get(name), int):
                body[name] = 1
    return body


def spoil(path: str, body: Body) -> None:
    """Refused late: after it was read, rendered and tokenized, and before any of it is computed. So
    thousands of fields can be tried in the time of a few answers."""
    if path in LENGTHS and path != MESSAGES:
        for name in LENGTHS[path]:
            body.pop(name, None)
        body[LENGTHS[path][0]] = 2_000_000  # no context holds it
    elif path == EMBEDDINGS:
        body["dimensions"] = 1
    elif path == MESSAGES:
        body["model"] = "none"


# -- as text ---------------------------------------------------------------------------------------


def encode(body: Any) -> bytes:
    """As JSON, lone surrogates, NaN and raw parts too."""
    out = json.dumps(body)
    if fuzz_values.RAW_MARK in out:
        out = _RAW.sub(lambda found: str(json.loads(f'"{found[1]}"')), out)
    return out.encode("utf-8", "surrogatepass")


def break_text(chooser: Chooser, body: bytes) -> bytes:
    """JSON no more, or only just."""
    kind = chooser.randrange(14)
    place = chooser.randrange(len(body) + 1)
    if kind == 0:
        return body[:place]
    if kind == 1:
        return body + chooser.choice((b"\0", b"}", b" ", b"\n" * 1000, b'{"a":1}', b","))
    if kind == 2:
        return b"\xef\xbb\xbf" + body
    if kind == 3:  # a key twice: the last one counts, or none
        return body.replace(b"{", b'{"max_tokens":"x","model":5,"stream":false,', 1)
    if kind == 4:
        return body.replace(b"{", b'{"messages":[],"prompt":"","input":"",', 1)
    if kind == 5 and body:
        place = min(place, len(body) - 1)
        return body[:place] + bytes([body[place] ^ (1 << chooser.randrange(8))]) + body[place + 1 :]
    if kind == 6:
        return body[:place] + chooser.randbytes(chooser.randrange(1, 9)) + body[place:]
    if kind == 7:
        return body.decode("utf-8", "replace").encode(chooser.choice(("utf-16", "utf-32")))
    if kind == 8:
        return chooser.choice(
            (b"", b"null", b"[]", b"1", b'"a"', b"{}", b"[" * 5000, b'{"a":' * 999)
        )
    if kind == 9:
        return b"[" + body + b"]"
    if kind == 10:
        return body.replace(b",", b" \t\r\n , " * chooser.choice((1, 50)), 3)
    if kind == 11:
        return body.replace(b'"', b"'")
    if kind == 12:
        return body.replace(b"a", b"\xff\xfe", 1)
    return body[:place] + body[chooser.randrange(len(body) + 1) :]
