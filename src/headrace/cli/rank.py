"""`headrace rank ADDRESS [MODEL]`: gives this host's share of a model to an engine on another host.

Starts the rank's process, and starts it again when its engine has ended: an engine that is
restarted finds its ranks. Loads nothing itself.
"""

from __future__ import annotations

import subprocess
import time
from typing import Annotated

import typer

from headrace.core.children import child_environment, python_command
from headrace.core.errors import HeadraceError

AGAIN_S = 1.0  # between two attempts to reach an engine
REFUSED = 2  # see rank_process.py


class NotJoinedError(HeadraceError):
    """The engine refused this rank, or this rank the engine."""

    exit_status = 2


def rank(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="The engine's --rank-address: HOST:PORT.")
    ],
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="The same model that it serves.")
    ] = None,
) -> None:
    """Compute some layers of a model for an engine on another host.

    The engine is started with --pipeline-parallel and --rank-address, and waits for its other
    stages: one `headrace rank` for each rank of each of them. HEADRACE_RANK_KEY has the same secret
    on every host. Ctrl-C ends it; without that it waits for the engine to come back.
    """
    from headrace.fetch.resolve import resolve_model
    from headrace.parallel.meeting import parse_address, read_key

    parse_address(address)
    read_key()
    path = resolve_model(model)
    command = [*python_command("headrace.rank_process"), address, str(path)]
    typer.echo(f"waiting for the engine at {address}; Ctrl-C ends this rank", err=True)
    process = None
    try:
        while True:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=child_environment())
            status = process.wait()
            if status == REFUSED:
                raise NotJoinedError(
                    "This rank can't compute with that engine.", "The line above says why."
                )
            if status == 0:
                typer.echo("the engine has ended; waiting for the next", err=True)
            time.sleep(AGAIN_S)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    finally:
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
