"""Prompts of a wanted length as text, for endpoints whose tokenizer is not at hand.

A prompt is words; how many tokens a word takes, and what a chat template adds, is learned from the
endpoint's own usage (`Scale`). Each segment of a workload is the same text wherever its name is the
same, so that prefixes are shared exactly where the workload says so; what belongs to one request
alone begins with a word of its own, so that random prompts never share a prefix by chance.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

from headrace.core.errors import ConfigError
from headrace.workload.ask import Ask, question_name
from headrace.workload.lines import numbered_lines

# Short and common: most tokenizers have each, with the space before it, as one token.
_TEXT = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government number
night point home water room mother area money story fact month lot right study book eye job word
business issue side kind head house service friend father power hour game line end member law
car city community name president team minute idea kid body information back parent face others
level office door health person art war history party result change morning reason research girl
guy moment air teacher force education foot boy age policy music market sense nation plan
college interest death experience effect use class control field development role effort rate
heart drug show leader light voice wife police mind price report decision son view relationship
town road arm difference value building action season model position society
"""
WORDS = tuple(_TEXT.split())
Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A prompt of n words has about `fixed + each * n` tokens. A chat template adds another number
    to a prompt that brings its own system message."""

    fixed: float = 0.0
    each: float = 1.0
    fixed_with_system: float = 0.0

    def words(self, tokens: float, fixed: float = 0.0) -> int:
        return max(1, round((tokens - fixed) / self.each))


def scale_of(
    short: tuple[int, int], long: tuple[int, int], with_system: tuple[int, int] | None = None
) -> Scale:
    """From prompts: (words, tokens) of each. `with_system` has a system message."""
    each = (long[1] - short[1]) / (long[0] - short[0])
    if each <= 0:
        raise ConfigError(
            f"The endpoint counts {short[1]} tokens for {short[0]} words and {long[1]} for "
            f"{long[0]}; expected more tokens for more words.",
            "Give prompts by --prompts.",
        )
    fixed = max(0.0, short[1] - each * short[0])
    if with_system is None:
        return Scale(fixed=fixed, each=each, fixed_with_system=fixed)
    other = max(0.0, with_system[1] - each * with_system[0])
    return Scale(fixed=fixed, each=each, fixed_with_system=other)


class Writer:
    """Messages of each request. `salt` makes a run's prompts others than those of any other run."""

    def __init__(self, scale: Scale, salt: str) -> None:
        self._scale = scale
        self._salt = salt

    def messages(self, ask: Ask, number: int, answers: Mapping[str, str]) -> list[Message]:
        """`answers` are what the endpoint said in earlier turns, by ask.answer_name."""
        found: list[Message] = []
        for name, tokens in ask.shared:
            if name.endswith(" answer"):
                text = answers.get(name) or self.text(name, tokens)
                found.append({"role": "assistant", "content": text})
                continue
            text = self.text(name, tokens, 0.0 if found else self._fixed(ask))
            if name.startswith("prefix "):
                found.append({"role": "system", "content": text})
            elif found and found[-1]["role"] == "user":
                found[-1]["content"] += f" {text}"
            else:
                found.append({"role": "user", "content": text})
        own = ask.prompt_tokens - ask.shared_tokens
        name = f"request {number}"
        if ask.session is not None:
            name = question_name(ask.session, ask.turn)
        text = self.text(name, own, 0.0 if found else self._fixed(ask)) if own > 0 else ""
        if found and found[-1]["role"] == "user":
            found[-1]["content"] = f"{found[-1]['content']} {text}".rstrip()
        else:
            found.append({"role": "user", "content": text or "Go on."})
        return found

    def _fixed(self, ask: Ask) -> float:
        has_system = bool(ask.shared) and ask.shared[0][0].startswith("prefix ")
        return self._scale.fixed_with_system if has_system else self._scale.fixed

    def text(self, name: str, tokens: int, fixed: float = 0.0) -> str:
        """The same name gives the same words, and a longer text begins with a shorter one's."""
        count = self._scale.words(tokens, fixed)
        random = Random(f"{self._salt} {name}")
        own = _own_words(f"{self._salt} {name}")
        return " ".join([*own, *random.choices(WORDS, k=max(0, count - len(own)))][:count])


def _own_words(name: str) -> list[str]:
    """Four words that only this name has, as far as 27 bits go."""
    digest = int.from_bytes(sha256(name.encode()).digest()[:8], "big")
    found = []
    for _ in range(4):
        digest, place = divmod(digest, len(WORDS))
        found.append(WORDS[place])
    return found


def flat(messages: Sequence[Message]) -> str:
    """For an endpoint that takes a plain prompt."""
    return "\n".join(message["content"] for message in messages)


def read_prompts(path: Path) -> list[list[Message]]:
    """Lines of text, or of JSON objects with `prompt` or `messages` (also within `body`, as in
    OpenAI's batch files)."""
    found: list[list[Message]] = []
    for number, line in numbered_lines(path):
        if line.lstrip().startswith("{"):
            found.append(_row(path, number, line))
        else:
            found.append([{"role": "user", "content": line}])
    if not found:
        raise ConfigError(f"{path} has no prompts; expected one a line.", "Add some.")
    return found


def _row(path: Path, number: int, line: str) -> list[Message]:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{path}, line {number}: not JSON ({error}).") from None
    row = row.get("body", row)
    messages, prompt = row.get("messages"), row.get("prompt")
    if isinstance(messages, list) and messages:
        return messages
    if isinstance(prompt, str) and prompt:
        return [{"role": "user", "content": prompt}]
    raise ConfigError(
        f"{path}, line {number}: neither messages nor a prompt.",
        'Write {"prompt": "..."} or {"messages": [...]} in each line.',
    )
