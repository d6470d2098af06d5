"""The `headrace` command: arguments in, a call, text out. Decides nothing about models.

Answers go to standard output and everything else to standard error. Whatever is heavy is imported
inside the command that needs it, so that `headrace --help` answers at once.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from headrace.cli.flags import SectionedCommand, with_engine_flags
from headrace.cli.models import models_app
from headrace.cli.serve import serve
from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError, HeadraceError, InvalidRequestError, OfflineError

if TYPE_CHECKING:
    from headrace.core.request import SamplingParams
    from headrace.llm import LLM

RUN_MAX_TOKENS = 512
DEFAULT_TEMPERATURE, DEFAULT_TOP_P = 0.7, 0.95  # of models that the catalog does not know
EXIT_UNEXPECTED, EXIT_INTERRUPT, EXIT_PIPE = 1, 130, 141

ModelName = Annotated[
    str | None,
    typer.Option("--model", "-m", help="A catalog name, a GGUF file, a folder, a hub id."),
]
ModelArgument = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="As --model; default: smollm2.")
]
MaxTokens = Annotated[int | None, typer.Option(help="Longest answer.", show_default=False)]
Temperature = Annotated[
    float | None, typer.Option(help="0 is greedy; default: what suits the model.")
]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest, up to this probability.")]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest; 0 keeps all.")]
MinP = Annotated[
    float, typer.Option(help="Drop what is less likely than this times the likeliest.")
]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="End at this text; may be given again.")]
System = Annotated[str | None, typer.Option(help="The system prompt.")]
Backend = Annotated[
    Literal["auto", "cpu", "reference"],
    typer.Option(help="reference: slow and exact; auto: what --device says."),
]
Offline = Annotated[bool, typer.Option("--offline", help="Fetch nothing.")]


class _Group(TyperGroup):
    """Turns deliberate errors into two lines and an exit status, for every command."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except HeadraceError as error:
            _print_error(error.cause, error.remedy, error.detail)
            if _debug():
                raise
            raise typer.Exit(error.exit_status) from error
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPT) from None
        except BrokenPipeError:
            # The reader has left. Nothing more may reach standard output, not even at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(EXIT_PIPE) from None


app = typer.Typer(
    cls=_Group,
    name="headrace",
    help="Runs language models: one answer, a chat, a server, or the facts about them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)
app.command(cls=SectionedCommand)(serve)
app.add_typer(models_app, name="models", invoke_without_command=True)


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:  # a terminal that has no emoji shows "?" rather than failing
            reconfigure(errors="replace")
    try:
        app()
    except Exception as error:
        if _debug():
            raise
        _print_error(
            f"unexpected {type(error).__name__}: {error}",
            "HEADRACE_DEBUG=1 shows where it happened; please report it.",
        )
        sys.exit(EXIT_UNEXPECTED)


def _debug() -> bool:
    return os.environ.get("HEADRACE_DEBUG", "") not in ("", "0")


def _print_error(cause: str, remedy: str, detail: str = "") -> None:
    typer.echo(f"error: {cause}", err=True)
    for line in detail.splitlines():
        typer.echo(f"  {line}", err=True)
    if remedy:
        typer.echo(f"  try: {remedy}", err=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        from headrace.core.version import headrace_version

        typer.echo(f"headrace {headrace_version()}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


@app.command()
@with_engine_flags
def run(
    prompt: Annotated[
        str | None, typer.Argument(help='"-", or nothing while input is piped: standard input.')
    ] = None,
    model: ModelName = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="No chat template: continue the text.")
    ] = False,
    system: System = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Timings and memory, on standard error.")
    ] = False,
    backend: Backend = "auto",
    offline: Offline = False,
    *,
    engine: EngineConfig,
) -> None:
    """Answer one prompt."""
    from headrace.cli.answer import encode_messages, fit_params, printable, stream_answer
    from headrace.core.request import FinishReason

    if raw and system is not None:
        raise ConfigError("--raw takes no chat template, and --system needs one.", "Drop one.")
    params = _sampling(model, max_tokens, temperature, top_p, top_k, min_p, seed, stop)
    text = _read_prompt(prompt)
    llm = _open_llm(model, backend, engine, offline)
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

    answer = stream_answer(llm, ids, fitted, write)
    write("\n")
    if answer.finish_reason is FinishReason.LENGTH and max_tokens is None:
        held = f"{answer.answer_tokens} tokens; --max-tokens sets the limit"
        typer.echo(f"note: the answer is cut at {held}", err=True)
    if stats:
        typer.echo(f"stats: {answer.summary()}", err=True)
        typer.echo(llm.memory_report(), err=True)


@app.command()
@with_engine_flags
def chat(
    model: ModelArgument = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    system: System = None,
    backend: Backend = "auto",
    offline: Offline = False,
    *,
    engine: EngineConfig,
) -> None:
    """Talk with a model; /help lists what can be typed."""
    from headrace.cli.chat import ChatSession

    params = _sampling(model, max_tokens, temperature, top_p, top_k, min_p, seed, stop)
    llm = _open_llm(model, backend, engine, offline)
    if sys.stdin.isatty():
        import contextlib

        with contextlib.suppress(ImportError):  # Windows has none
            import readline  # noqa: F401  gives input() line editing and history
    ChatSession(llm, params, system=system).run()


@app.command()
def info(
    model: ModelArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="What the model would take in memory.")
    ] = False,
) -> None:
    """Version, machine, threads, memory, the GPU and a model. Fetches and loads nothing."""
    from headrace.cli import info as facts_of
    from headrace.models.resolve import resolve_model

    facts = {
        "headrace": facts_of.installation_facts(),
        "machine": facts_of.machine_facts(),
        "gpu": facts_of.gpu_facts(),
    }
    found = None
    try:
        path = resolve_model(model, offline=True)
        facts["model"] = facts_of.model_facts(path)
        found = facts_of.memory_ledger(path) if ledger else None
    except OfflineError as error:
        if model is not None:
            raise
        facts["model"] = {"status": error.cause}
    if as_json:
        import json

        if found is not None:
            facts["ledger"] = found.facts()
        typer.echo(json.dumps(facts, indent=2))
        return
    lines = facts_of.shown_lines(facts)
    if found is not None:
        lines += ["ledger", *(f"  {line}" for line in found.render().splitlines())]
    typer.echo("\n".join(lines))


def _sampling(
    model: str | None,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int,
    min_p: float,
    seed: int | None,
    stop: list[str] | None,
) -> SamplingParams:
    """Checked before anything is fetched or loaded. What is not given is what suits the model."""
    from headrace.core.request import SamplingParams
    from headrace.models.catalog import DEFAULT_NAME, find_entry

    entry = find_entry(model or DEFAULT_NAME)
    if temperature is None:
        temperature = entry.temperature if entry else DEFAULT_TEMPERATURE
    if top_p is None:
        top_p = entry.top_p if entry else DEFAULT_TOP_P
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        max_tokens=max_tokens,
        seed=seed,
        stop=stop or (),
    )


def _read_prompt(prompt: str | None) -> str:
    if prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise _bad_prompt(f"standard input is not UTF-8 (byte {error.start})") from error
    if prompt is None:
        raise _bad_prompt("there is no prompt")
    if not prompt.strip():
        raise _bad_prompt("the prompt is empty")
    return prompt


def _bad_prompt(cause: str) -> HeadraceError:
    return InvalidRequestError(
        f"{cause[0].upper()}{cause[1:]}; expected some text.",
        'Give it as `headrace run "..."`, or pipe UTF-8 text in.',
        param="prompt",
    )


def _open_llm(
    model: str | None,
    backend: Literal["auto", "cpu", "reference"],
    engine: EngineConfig,
    offline: bool,
) -> LLM:
    from headrace.cli.progress import shown_progress
    from headrace.models.resolve import resolve_model

    with shown_progress() as progress:
        path = resolve_model(model, offline=offline, progress=progress)
    from headrace.llm import LLM

    llm = LLM(str(path), backend=backend, config=engine, offline=offline)
    for note in llm.notes:
        typer.echo(f"note: {note}", err=True)
    return llm
