"""The `headrace` command: arguments in, a call, text out. Decides nothing about models.

Answers go to standard output and everything else to standard error. Heavy modules are imported
inside the command that needs them, so that `headrace --help` answers at once.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from headrace.cli import options
from headrace.cli.batch import batch
from headrace.cli.bench import bench_app
from headrace.cli.calibrate import calibrate
from headrace.cli.cost import cost
from headrace.cli.doctor import doctor_app
from headrace.cli.fit import fit
from headrace.cli.flags import SectionedCommand, with_engine_flags, with_sampling_flags
from headrace.cli.foreign import ForeignCommand
from headrace.cli.gpus import gpus
from headrace.cli.models import (
    models_app,
    models_ls,
    models_pull,
    models_rm,
    models_show,
    models_verify,
)
from headrace.cli.options import ModelArgument, ModelName, one_model
from headrace.cli.plan import plan
from headrace.cli.planning_words import PlanningCommand
from headrace.cli.profile import profile
from headrace.cli.ps import ps
from headrace.cli.ray import ray
from headrace.cli.restart import restart
from headrace.cli.route import route
from headrace.cli.run import open_llm, run
from headrace.cli.serve import serve
from headrace.cli.simulate import simulate
from headrace.core.config import EngineConfig
from headrace.core.disk import disk_full, is_full
from headrace.core.errors import HeadraceError, OfflineError
from headrace.core.request import SamplingParams
from headrace.core.terminal import paint

EXIT_UNEXPECTED, EXIT_INTERRUPT, EXIT_PIPE = 1, 130, 141


class _Group(TyperGroup):
    """Turns Headrace's own errors into two lines and an exit status, for every command."""

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
            _close_output()  # whatever read our output has closed it
            raise typer.Exit(EXIT_PIPE) from None
        except OSError as error:
            if not is_full(error) or _debug():
                raise
            full = disk_full(error.filename or _output_path())
            _close_output()
            _print_error(full.cause, full.remedy)
            raise typer.Exit(full.exit_status) from error


app = typer.Typer(
    cls=_Group,
    name="headrace",
    help="Runs language models: one answer, a chat, a server, or the facts about them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# A prompt that was not quoted arrives as extra words: `run` says what to do about them.
app.command(cls=ForeignCommand, context_settings={"allow_extra_args": True})(run)


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if (
            reconfigure is not None
        ):  # a terminal that can't show a character shows "?" instead of failing
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
    lines = [f"{paint('error:', 'bold red', sys.stderr)} {cause}"]
    lines += [f"  {line}" for line in detail.splitlines()]
    if remedy:
        lines.append(f"  {paint('try:', 'cyan', sys.stderr)} {remedy}")
    with contextlib.suppress(OSError):  # the disk behind standard error may be full too
        typer.echo("\n".join(lines), err=True)


def _close_output() -> None:
    """Nothing more may reach standard output, not even what is still buffered at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _output_path() -> str | None:
    """The file that standard output goes to, if it is one and the system says which."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = sys.stdout.fileno()
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return os.readlink(f"/proc/self/fd/{descriptor}")
    return None


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


@app.command(cls=ForeignCommand)
@with_engine_flags
@with_sampling_flags
def chat(
    name: ModelArgument = None,
    model: ModelName = None,
    *,
    params: SamplingParams,
    system: options.System = None,
    no_history: Annotated[
        bool, typer.Option("--no-history", help="Do not keep a history of what is typed.")
    ] = False,
    offline: options.Offline = False,
    engine: EngineConfig,
) -> None:
    """Talk with a model; /help lists what can be typed."""
    from headrace.cli.chat import ChatSession
    from headrace.cli.history import History, history_path

    model = one_model(name, model)
    llm = open_llm(model, options.for_one(engine), offline)
    history = None if no_history else History(history_path())
    ChatSession(llm, params, system=system, history=history).run()


app.command(cls=SectionedCommand)(serve)
app.command()(route)
app.command()(restart)
app.command()(ray)
app.command()(ps)
app.command()(batch)
app.add_typer(models_app, name="models", invoke_without_command=True)
app.command("ls")(models_ls)
app.command("pull")(models_pull)
app.command("show")(models_show)
app.command("rm")(models_rm)
app.command("verify")(models_verify)
app.command()(gpus)
app.command(cls=PlanningCommand)(fit)
app.command(cls=PlanningCommand)(plan)
app.command(cls=PlanningCommand)(cost)
app.command()(calibrate)
app.command()(profile)
app.command(cls=PlanningCommand)(simulate)
app.add_typer(bench_app, name="bench")
app.add_typer(doctor_app, name="doctor")


@app.command()
def info(
    name: ModelArgument = None,
    model: ModelName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="Show how much memory the model would need.")
    ] = False,
) -> None:
    """Version, machine, threads, memory, the GPU and a model. Fetches and loads nothing."""
    from headrace.cli import info as facts_of
    from headrace.fetch.resolve import resolve_model

    model = one_model(name, model)
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
