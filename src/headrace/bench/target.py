"""The endpoint that is measured: its model, which fields it takes, how long prompts come out.

Before a run it is asked a few small questions: with fields that make answers of a known length, and
with fewer where it refuses them; then a short and a long prompt, whose usage tells how many tokens
a word takes, and one with a system message. Nothing of this is measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.bench.prompts import Message, Scale, Writer, flat, scale_of
from headrace.client.answer import Answer, Failure, message_of
from headrace.client.connection import Connections, Unreachable, request_bytes, unreachable
from headrace.core.errors import ConfigError
from headrace.workload.ask import Ask

_PREPARE_S = 60.0
_SHORT, _LONG = 24, 216  # words
# From the most exact to the plainest. Hosted endpoints refuse what they do not know.
_VARIANTS: tuple[Mapping[str, Any], ...] = (
    {"ignore_eos": True, "temperature": 0},
    {"temperature": 0},
    {},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    model: str
    path: str  # of the endpoint, such as /v1/chat/completions
    limit_name: str = "max_tokens"  # or max_completion_tokens
    fields: Mapping[str, Any] = field(default_factory=dict)
    has_usage: bool = True
    scale: Scale = field(default_factory=Scale)
    key: str | None = None

    @property
    def is_exact(self) -> bool:
        """Answers have exactly the asked number of tokens."""
        return "ignore_eos" in self.fields

    def body(self, messages: list[Message], tokens: int) -> bytes:
        prompt: dict[str, Any] = (
            {"messages": messages}
            if self.path.endswith("chat/completions")
            else {"prompt": flat(messages)}
        )
        usage = {"stream_options": {"include_usage": True}} if self.has_usage else {}
        return json.dumps(
            {"model": self.model, **prompt, self.limit_name: tokens, **self.fields}
            | {"stream": True, **usage}
        ).encode()


async def find_model(connections: Connections, key: str | None) -> str:
    status, body = await connections.get("/v1/models", key, _PREPARE_S)
    url = connections.address.url
    if status in (401, 403):
        raise Unreachable(
            f"{url} refuses the key ({status}): {message_of(body).rstrip('.')}.",
            "Give the name of the variable that holds the key: --key-variable NAME.",
        )
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise Unreachable(
            f"{url}/v1/models answered {status} without a model: {message_of(body)[:80]!r}.",
            "Give the model's name by --model, or the URL of an OpenAI-compatible server.",
        ) from None


async def find_target(
    connections: Connections,
    *,
    model: str | None,
    path: str,
    key: str | None,
    extra: Mapping[str, Any],
    salt: str,
    writes_prompts: bool = True,
    on_answer: Callable[[Answer], None] = lambda answer: None,
) -> Target:
    """Tries what the endpoint takes. Raises with its own words where it takes nothing. How many
    tokens a word has is asked only where prompts are to be written."""
    name = model or await find_model(connections, key)
    writer = Writer(Scale(), f"{salt} prepare")
    answer = Answer()
    for variant in _VARIANTS:
        for limit_name in ("max_tokens", "max_completion_tokens"):
            for has_usage in (True, False):
                target = Target(
                    model=name,
                    path=path,
                    limit_name=limit_name,
                    fields={**variant, **extra},
                    has_usage=has_usage,
                    key=key,
                )
                answer = await ask(connections, target, writer, _SHORT)
                on_answer(answer)
                if answer.failure is None and not writes_prompts:
                    return target
                if answer.failure is None:
                    return await _scaled(connections, target, writer, answer, on_answer)
                if not _is_about_fields(answer):
                    raise _useless(connections, path, answer)
    raise _useless(connections, path, answer)


def _is_about_fields(answer: Answer) -> bool:
    return answer.failure is Failure.HTTP and answer.detail[:3] in ("400", "422")


async def _scaled(
    connections: Connections,
    target: Target,
    writer: Writer,
    short: Answer,
    on_answer: Callable[[Answer], None],
) -> Target:
    if short.prompt_tokens is None:
        return target
    long = await ask(connections, target, writer, _LONG)
    system = await ask(connections, target, writer, _LONG, system=_SHORT)
    on_answer(long)
    on_answer(system)
    if long.failure is not None or long.prompt_tokens is None:
        return target
    found = scale_of(
        (_SHORT, short.prompt_tokens),
        (_LONG, long.prompt_tokens),
        None if system.prompt_tokens is None else (_LONG, system.prompt_tokens),
    )
    return replace(target, scale=found)


async def ask(
    connections: Connections, target: Target, writer: Writer, words: int, *, system: int = 0
) -> Answer:
    """One small request of so many words, some of them in a system message."""
    shared = (("prefix 0", system),) if system else ()
    wanted = Ask(at_s=0.0, prompt_tokens=words, output_tokens=2, shared=shared)
    messages = writer.messages(wanted, words + system, {})
    try:
        one = await connections.take()
    except OSError as error:
        raise unreachable(connections.address, error) from None
    answer = Answer()
    body = target.body(messages, 2)
    await one.ask(
        request_bytes(connections.address, target.path, body, target.key), answer, _PREPARE_S
    )
    connections.give(one)
    return answer


def _useless(connections: Connections, path: str, answer: Answer) -> Unreachable:
    url = f"{connections.address.url}{path}"
    remedies = {
        Failure.REDIRECT: "Give that URL: redirects are not followed.",
        Failure.NO_STREAM: "Give the URL of a server that streams answers.",
        Failure.RATE_LIMITED: "Wait, or ask for a higher limit.",
    }
    remedy = remedies.get(answer.failure or Failure.HTTP, "Look at the server's log.")
    if answer.detail[:3] in ("401", "403"):
        remedy = "Give the name of the variable that holds the key: --key-variable NAME."
    elif answer.detail[:3] == "404":
        remedy = "Check the URL and --model; --api completions asks the other endpoint."
    return Unreachable(f"{url}: {answer.failure}: {answer.detail.rstrip('.')}.", remedy)


def check_extra(text: str) -> dict[str, Any]:
    """Fields that the user adds to each request, as JSON."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra is not JSON: {error}.", 'Such as {"top_p": 0.9}.') from None
    if not isinstance(found, dict):
        raise ConfigError("--extra is no JSON object.", 'Such as {"top_p": 0.9}.')
    return found
