"""What is asked of every engine: the rows of the table, who competes in them, and their prompts.

Standard library only: the adapters read it inside each engine's own environment. Knows no engine
beyond its name, and measures nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal["prefill", "decode", "served", "first_token"]
Group = Literal["4-bit", "8-bit", "1B shape"]

THREADS = 2
CONTEXT_TOKENS = 128  # before the decoded ones
DECODE_STEPS = 32
OUTPUT_TOKENS = 64  # of a served request
CLIENTS = 16
PREFIX_TOKENS, OWN_TOKENS = 400, 47  # of a served prompt that shares its beginning
# Ids that every engine has, and that are no control tokens of the default model.
FIRST_TOKEN, LAST_TOKEN = 100, 49_000
MAX_SEQUENCES = 32


@dataclass(frozen=True, slots=True)
class Workload:
    """A row of the table."""

    name: str
    group: Group
    kind: Kind
    sequences: int = 1  # decoded at once, or clients
    prompt_tokens: int = CONTEXT_TOKENS
    prefix_tokens: int = 0  # shared by all prompts, and seen before
    target: float = 0.0  # ratio to the best peer that issue 5 asks for

    @property
    def lower_is_better(self) -> bool:
        return self.kind == "first_token"

    @property
    def unit(self) -> str:
        return "ms" if self.lower_is_better else "tokens/s"


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine with the weights it is given."""

    engine: str
    format: str  # q4_1, q4_0, q8_0: a GGUF of that name; float32: a folder of safetensors

    @property
    def name(self) -> str:
        return f"{self.engine} {self.format}"


WORKLOADS = (
    Workload("prefill 512", "4-bit", "prefill", prompt_tokens=512, target=2.0),
    Workload("decode 1", "4-bit", "decode", 1, target=2.0),
    Workload("decode 4", "4-bit", "decode", 4, target=3.0),
    Workload("decode 16", "4-bit", "decode", 16, target=3.0),
    Workload("decode 32", "4-bit", "decode", 32, target=3.5),
    Workload("served own 16", "4-bit", "served", CLIENTS, target=2.5),
    Workload(
        "served shared 16",
        "4-bit",
        "served",
        CLIENTS,
        prompt_tokens=PREFIX_TOKENS + OWN_TOKENS,
        prefix_tokens=PREFIX_TOKENS,
        target=2.5,
    ),
    Workload("first token 1", "4-bit", "first_token", 1, target=0.6),
    Workload("8-bit decode 1", "8-bit", "decode", 1, target=1.7),
    Workload("8-bit decode 16", "8-bit", "decode", 16, target=2.5),
    Workload("1B prefill 512", "1B shape", "prefill", prompt_tokens=512, target=2.0),
    Workload("1B decode 1", "1B shape", "decode", 1, target=1.5),
    Workload("1B decode 16", "1B shape", "decode", 16, target=3.0),
)

# The first of a group is what the others are compared with.
CONTENDERS: dict[Group, tuple[Contender, ...]] = {
    "4-bit": (
        Contender("headrace", "q4_1"),
        Contender("headrace", "q4_0"),
        Contender("llama.cpp", "q4_1"),
        Contender("llama.cpp", "q4_0"),
        Contender("openvino", "q4_1"),
        Contender("openvino", "q4_0"),
        Contender("vllm", "float32"),
    ),
    "8-bit": (
        Contender("headrace", "q8_0"),
        Contender("llama.cpp", "q8_0"),
        Contender("openvino", "q8_0"),
    ),
    "1B shape": (
        Contender("headrace", "1b-q4_0"),
        Contender("llama.cpp", "1b-q4_0"),
        Contender("openvino", "1b-q4_0"),
    ),
}

# Served rows take minutes: an engine takes part with the weights that suit it best.
SERVED_FORMATS = {"headrace": "q4_1", "llama.cpp": "q4_0", "openvino": "q4_0", "vllm": "float32"}


def file_name(format_name: str) -> str:
    """Of the weights in the folder of models."""
    return f"model-{format_name}" + ("" if format_name == "float32" else ".gguf")


def takes_part(contender: Contender, workload: Workload) -> bool:
    if contender not in CONTENDERS[workload.group]:
        return False
    if workload.kind in ("served", "first_token"):
        return SERVED_FORMATS[contender.engine] == contender.format
    return True


def make_prompt(tokens: int, seed: str) -> list[int]:
    """The same for every engine; nobody's cache has seen it unless the seed comes again."""
    chooser = random.Random(seed)
    return [chooser.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(tokens)]


def make_prompts(workload: Workload, requests: int, round_number: int) -> list[list[int]]:
    """Prompts of a served round. The shared beginning is a round's own as well, so that an engine
    finds it in its cache because it was sent before this round's clock began, and not because of
    an earlier round."""
    prefix = make_prompt(workload.prefix_tokens, f"{workload.name} prefix {round_number}")
    own = workload.prompt_tokens - workload.prefix_tokens
    return [
        prefix + make_prompt(own, f"{workload.name} {round_number} {number}")
        for number in range(requests)
    ]


def warm_prompt(workload: Workload, round_number: int) -> list[int]:
    """What is sent before the clock begins: the shared beginning, where there is one."""
    prefix = make_prompt(workload.prefix_tokens, f"{workload.name} prefix {round_number}")
    own = workload.prompt_tokens - workload.prefix_tokens
    return prefix + make_prompt(own, f"{workload.name} {round_number} warm")


def rotate(contenders: list[Contender], round_number: int) -> list[Contender]:
    """Each round begins with another one: nobody always has the cold or the hot machine."""
    if not contenders:
        return []
    at = round_number % len(contenders)
    return contenders[at:] + contenders[:at]
