"""What every answer must look like, whatever was asked: the fuzzer's invariants of one answer.

Gives short sentences about what is wrong, the same for the same fault, so that findings can be
counted. Knows OpenAI's and Anthropic's shapes; what a server as a whole must keep to is
fuzz_requests.py's.
"""

from __future__ import annotations

import json
from typing import Any

import attack_wire
from attack_wire import Answer
from fuzz_bodies import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from fuzz_cases import Case

_ENDINGS = {
    RESPONSES: {"response.completed", "response.incomplete", "response.failed", "error"},
    MESSAGES: {"message_stop", "error"},
}
_FINISHES = {"stop", "length", "tool_calls", "content_filter"}
# Said by the connection, before anybody knows which endpoint was meant.
_EARLY = (400, 403, 408, 413, 431, 503)


def check(case: Case, answer: Answer) -> list[str]:
    """What is wrong with it."""
    found = []
    status = answer.status
    if not answer.is_whole:
        found.append(f"the answer ends before its end (status {status})")
    if status >= 500 and status != 503:
        found.append(f"status {status}: {_message(answer)[:80]}")
    if status in (429, 503) and not answer.headers.get("retry-after", "").isdigit():
        found.append(f"status {status} without Retry-After")
    if "x-request-id" not in answer.headers:
        found.append(f"status {status} without x-request-id")
    if case.method == "HEAD":
        return found
    if status >= 400:
        found += _check_error(case, answer)
    elif answer.is_stream:
        found += _check_stream(case, answer)
    elif answer.headers.get("content-type", "").startswith("application/json"):
        found += _check_whole(case, answer)
    return found


def _message(answer: Answer) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return repr(answer.body[:80])


def _check_error(case: Case, answer: Answer) -> list[str]:
    try:
        said = answer.json()
    except ValueError:
        return [f"status {answer.status} with a body that is not JSON"]
    is_anthropic = case.path.startswith(MESSAGES) and case.family != "look"
    if is_anthropic and _is_error(said, ("type", "message")) and said.get("type") == "error":
        return []
    if is_anthropic and not (not case.is_http and answer.status in _EARLY):
        return [f"status {answer.status} is not in Anthropic's shape"]
    if not _is_error(said, ("message", "type", "param", "code")):
        return [f"status {answer.status} is not in OpenAI's shape"]
    return []


def _is_error(said: Any, names: tuple[str, ...]) -> bool:
    error = said.get("error") if isinstance(said, dict) else None
    if not isinstance(error, dict) or not all(name in error for name in names):
        return False
    return all(isinstance(error[name], str) and error[name] for name in ("message", "type"))


def _check_stream(case: Case, answer: Answer) -> list[str]:
    events = attack_wire.read_events(answer.body)
    if events.rest:
        return ["a stream ends within an event"]
    if not events.data:
        return ["a stream without an event"]
    found = []
    for data in events.data:
        if data == "[DONE]":
            continue
        try:
            said = json.loads(data)
        except ValueError:
            return ["an event of a stream is not JSON"]
        error = said.get("error") if isinstance(said, dict) else None
        if isinstance(error, dict) and error.get("status", 503) not in (*range(500), 503):
            found.append(f"a stream ends with {error['status']}: {error.get('message')}"[:120])
    if case.path in _ENDINGS:
        if events.names[-1] not in _ENDINGS[case.path]:
            found.append(f"a stream ends with the event {events.names[-1]!r}")
    elif events.data[-1] != "[DONE]" and '"error"' not in events.data[-1]:
        found.append("a stream ends without [DONE] or an error")
    return found


def _check_whole(case: Case, answer: Answer) -> list[str]:
    try:
        said = answer.json()
    except ValueError:
        return ["an answer that is not JSON"]
    if case.body is None or case.path not in (CHAT, COMPLETIONS):
        return []
    choices = said.get("choices")
    if not isinstance(choices, list):
        return ["an answer without choices"]
    found = []
    prompts = case.body.get("prompt")
    count = 1
    if isinstance(prompts, list) and not isinstance(prompts[0], int):
        count = len(prompts)
    wanted = count * (case.body.get("n") or 1)
    if len(choices) != wanted:
        found.append("another number of choices than was asked for")
    if any(choice.get("finish_reason") not in _FINISHES for choice in choices):
        found.append("a choice without a finish_reason that clients know")
    allowed = _sent_choices(case)
    if allowed and not case.body.get("echo"):
        for choice in choices:
            text = choice["text"] if case.path == COMPLETIONS else choice["message"]["content"]
            cut = choice["finish_reason"] != "stop" or "stop" in case.body
            cut = cut or case.body.get("skip_special_tokens") is False
            cut = cut or bool(case.body.get("stop_token_ids"))
            if not cut and text not in allowed:
                found.append(f"an answer that is none of guided_choice: {text!r}"[:120])
    return found


def _sent_choices(case: Case) -> list[str]:
    """As they were sent: what a case writes for itself may be an escape for something else."""
    try:
        sent = json.loads(case.data.partition(b"\r\n\r\n")[2])
    except ValueError:  # in chunks, or not JSON as Python has it
        return []
    return sent.get("guided_choice") or [] if isinstance(sent, dict) else []
