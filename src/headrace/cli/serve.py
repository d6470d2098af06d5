"""`headrace serve`: merges and checks the settings, then starts the server or does a dry run.

Reads the environment, the file and the flags; core/settings.py decides which of them wins, and
server/ has the server. Nothing heavy is imported before the port is known to be free.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.flags import with_settings_flags
from headrace.cli.options import ModelArgument, ModelName, one_model
from headrace.core.config import LoadFormat
from headrace.core.errors import ConfigError
from headrace.core.server_config import LogFormat
from headrace.core.settings import Settings, resolve_settings
from headrace.core.settings_file import find_file, read_settings_file
from headrace.hardware.profile import load_profile
from headrace.hardware.this_machine import measured_machine
from headrace.workload.slo import parse_slo

log = logging.getLogger(__name__)


@with_settings_flags
def serve(
    name: ModelArgument = None,
    model: ModelName = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A TOML file of settings; default: ./headrace.toml, else "
            "~/.config/headrace/headrace.toml, if it exists."
        ),
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Fetch nothing.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print settings, memory and fingerprint; fetch and load nothing."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --dry-run: print one JSON object.")
    ] = False,
    *,
    given: dict[str, Any],
) -> None:
    """Serve a model over HTTP with an OpenAI-compatible API.

    Every setting below can also be given in headrace.toml (max_body in [server]) and as an
    environment variable (HEADRACE_MAX_BODY). A flag wins over a variable, and a variable over the
    file. Exits with 0 after a normal stop, 2 for settings that can't work, 3 if the engine can't be
    kept alive.
    """
    began_s = time.perf_counter()
    flags = {**given, "model": one_model(name, model)}
    settings = read_settings({n: v for n, v in flags.items() if v is not None}, config)
    if as_json and not dry_run:
        raise ConfigError("--json is for --dry-run.", "Add --dry-run, or drop --json.")
    if dry_run:
        from headrace.cli.dry_run import show_dry_run

        show_dry_run(settings, as_json=as_json)
        return
    raise typer.Exit(_serve(settings, offline, began_s))


def read_settings(flags: dict[str, Any], chosen: Path | None) -> Settings:
    variables = dict(os.environ)
    if chosen is None and variables.get("HEADRACE_CONFIG"):
        chosen = Path(variables["HEADRACE_CONFIG"])
    path = find_file(chosen, Path.cwd(), variables)
    settings = resolve_settings(
        flags, variables, None if path is None else read_settings_file(path)
    )
    if settings.server.slo is not None:
        parse_slo(settings.server.slo)  # refused here, before anything is fetched or loaded
    if settings.server.profile is not None:
        measured_machine(load_profile(Path(settings.server.profile)))
    return settings


def _serve(settings: Settings, offline: bool, began_s: float) -> int:
    from headrace.server.edge.listen import bind, bind_admin
    from headrace.server.start.banner import StartUp

    server = settings.server
    shares = None
    if server.replicas is not None:  # refused here, before anything is fetched or loaded
        from headrace.cli.serve_replicas import shares_of

        shares = shares_of(settings)
    with (
        bind(server.host, server.port) as sock,
        bind_admin(server) or contextlib.nullcontext() as admin,
    ):
        from headrace.cli.asking import agree
        from headrace.cli.progress import shown_progress
        from headrace.fetch.resolve import name_model, resolve_model
        from headrace.fetch.verify import check_model

        start_up = StartUp(settings.server.log_format, began_s)
        resolving_s = time.perf_counter()
        as_log = server.log_format is LogFormat.JSON
        if as_log:  # set up early: a log reader expects every line in this format
            from headrace.server.observe.logs import set_up_logging

            set_up_logging(server.log_level, server.log_format, show_content=server.log_content)
        with shown_progress(log.info if as_log else None) as progress:
            path = resolve_model(settings.model, offline=offline, progress=progress, accept=agree)
            checked = (
                None
                if settings.engine.load_format is LoadFormat.DUMMY
                else check_model(path, again=settings.engine.verify, progress=progress)
            )
        resolved_s = time.perf_counter()
        from headrace.server.observe.logs import set_up_logging

        set_up_logging(server.log_level, server.log_format, show_content=server.log_content)
        start_up.phase("model", resolved_s - resolving_s, str(path))
        if shares is not None:
            from headrace.cli.serve_replicas import serve_several

            return serve_several(
                settings, shares, path, checked, sock, admin, began_s, offline=offline
            )
        from headrace.server.start.run import serve as serve_model

        return serve_model(
            path,
            name_model(path, settings.model),
            settings.server,
            replace(settings.engine, verify=False),  # already verified here; the engine is told so
            typed=settings.model,
            sock=sock,
            admin=admin,
            start_up=start_up,
            checked=checked,
            origins=settings.origins,
        )
