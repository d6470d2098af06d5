"""`headrace run`: one prompt, from an argument and standard input, and its answer.

The answer goes to standard output, alone; everything else to standard error.
"""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli import options
from headrace.cli.asking import agree, note, say
from headrace.cli.flags import with_engine_flags, with_sampling_flags
from headrace.cli.piped import PipedText, bad_prompt, piped_text
from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError, InvalidRequestError
from headrace.core.request import FinishReason, SamplingParams

if TYPE_CHECKING:
    from headrace.cli.answer import Answer
    from headrace.llm import LLM

RUN_MAX_TOKENS = 512
PIPE_WAIT_S = 5.0  # how long to wait for a pipe's first byte when there is a prompt too
_EARLY_S = 0.2  # most pipes have data at once, which can be checked before a model is loaded


@with_engine_flags
@with_sampling_flags
def run(
    ctx: typer.Context,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="Piped input is added after it and an empty line; without a prompt, or with -, "
            "the piped input is the prompt.",
        ),
    ] = None,
    model: options.ModelName = None,
    *,
    params: SamplingParams,
    raw: Annotated[
        bool, typer.Option("--raw", help="No chat template: continue the text.")
    ] = False,
    system: options.System = None,
    stdin: Annotated[
        bool | None,
        typer.Option(
            "--stdin/--no-stdin",
            help="With a prompt: wait for piped input however long it takes, or never read it.  "
            f"[default: read it if it begins within {PIPE_WAIT_S:.0f} s]",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the answer and its statistics as one JSON object.")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print timings and memory to standard error.")
    ] = False,
    offline: options.Offline = False,
    engine: EngineConfig,
) -> None:
    """Answer one prompt."""
    from headrace.cli.answer import encode_messages, fit_params, printable, stream_answer

    if raw and system is not None:
        raise ConfigError(
            "--raw uses no chat template, and --system needs one.", "Drop one of them."
        )
    if ctx.args:
        raise _several_words([prompt or "", *ctx.args])
    text, late = _read_prompt(prompt, stdin)
    if model is None:
        _note_a_models_name(prompt)
    llm = open_llm(model, options.for_one(engine), offline)
    if late is not None:
        text = _with_late(text, late)
    if raw:
        ids = llm.tokenizer.encode(text)
    else:
        opening = [] if system is None else [{"role": "system", "content": system}]
        ids = encode_messages(llm, [*opening, {"role": "user", "content": text}])
    fitted = fit_params(
        params,
        prompt_tokens=len(ids),
        context_tokens=llm.context_tokens,
        default_tokens=RUN_MAX_TOKENS,
    )
    escape = sys.stdout.isatty()

    def write(piece: str) -> None:
        sys.stdout.write(printable(piece) if escape else piece)
        sys.stdout.flush()

    answer = stream_answer(llm, ids, fitted, (lambda piece: None) if as_json else write)
    write(json.dumps(_facts(answer, llm, model), indent=2) + "\n" if as_json else "\n")
    _say_the_rest(answer, llm, is_limited=params.max_tokens is not None, stats=stats)


def open_llm(model: str | None, engine: EngineConfig, offline: bool) -> LLM:
    from headrace.cli.progress import shown_progress
    from headrace.fetch.resolve import resolve_model

    with shown_progress() as progress:
        path = resolve_model(model, offline=offline, progress=progress, accept=agree)
    from headrace.llm import LLM

    with options.named_as_flags(), shown_progress() as progress:
        llm = LLM(str(path), config=engine, offline=offline, progress=progress)
    for text in llm.notes:
        note(text)
    return llm


def _read_prompt(prompt: str | None, stdin: bool | None) -> tuple[str, PipedText | None]:
    """The prompt with the piped input; or the prompt, and a pipe that has sent nothing yet."""
    piped = None if stdin is False and prompt != "-" else piped_text()
    if prompt is None or prompt == "-":
        if piped is None:
            raise bad_prompt("there is no prompt")
        prompt, piped = piped.text(), None
    if not prompt.strip():
        raise bad_prompt("the prompt is empty")
    if piped is None:
        return prompt, None
    if stdin or piped.has_begun(_EARLY_S):
        return _joined(prompt, piped), None
    return prompt, piped


def _with_late(prompt: str, late: PipedText) -> str:
    if late.has_begun(PIPE_WAIT_S):
        return _joined(prompt, late)
    note(
        f"standard input is a pipe that sent nothing for {PIPE_WAIT_S:.0f} s: answering "
        "without it (--stdin waits for it, --no-stdin never reads it)"
    )
    return prompt


def _joined(prompt: str, piped: PipedText) -> str:
    text = piped.text()
    return f"{prompt}\n\n{text}" if text.strip() else prompt


def _note_a_models_name(prompt: str | None) -> None:
    if prompt is None or not _names_a_model(prompt):
        return
    name = shlex.quote(prompt)
    note(f"{name} was used as the prompt; to use that model: headrace run --model {name} PROMPT")


def _names_a_model(text: str) -> bool:
    from pathlib import Path

    from headrace.fetch.catalog import find_entry
    from headrace.fetch.hub import parse_hub_id

    if find_entry(text) is not None or parse_hub_id(text) is not None:
        return True
    return text.endswith(".gguf") and Path(text).expanduser().is_file()


def _several_words(words: list[str]) -> InvalidRequestError:
    if _names_a_model(words[0]):
        rest = shlex.quote(" ".join(words[1:]))
        remedy = f"To use that model: headrace run --model {shlex.quote(words[0])} {rest}"
    else:
        remedy = f"Quote it: headrace run {shlex.quote(' '.join(words))}"
    return InvalidRequestError(
        f"The prompt is {len(words)} arguments, starting with {words[0]!r}; expected one.",
        remedy,
        param="prompt",
    )


def _facts(answer: Answer, llm: LLM, model: str | None) -> dict[str, Any]:
    from headrace.fetch.resolve import name_model

    return {
        "text": answer.text,
        "finish_reason": None if answer.finish_reason is None else answer.finish_reason.value,
        "model": name_model(llm.model_path, model),
        "prompt_tokens": answer.prompt_tokens,
        "answer_tokens": answer.answer_tokens,
        "context_tokens": llm.context_tokens,
        "first_token_s": round(answer.first_token_s, 4),
        "total_s": round(answer.total_s, 4),
        "tokens_per_s": answer.tokens_per_s and round(answer.tokens_per_s, 2),
    }


def _say_the_rest(answer: Answer, llm: LLM, *, is_limited: bool, stats: bool) -> None:
    if answer.finish_reason is FinishReason.LENGTH and not is_limited:
        note(f"the answer is cut at {answer.answer_tokens} tokens; --max-tokens sets the limit")
    if stats:
        say(f"stats: {answer.summary()}")
        if busy := llm.threads_report():
            say(f"computed by {busy}")
        say(llm.memory_report())
