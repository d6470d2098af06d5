"""`headrace ps`: this user's running servers on this machine, and the state of each.

Reads their run files (server/start/run_file.py) and asks each; starts, stops and changes none.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import typer

from headrace.cli.options import AsJson
from headrace.cli.tables import show_age, show_table
from headrace.server.start.run_file import Running, running_servers

_TIMEOUT_S = 2.0


def ps(as_json: AsJson = False) -> None:
    """List your running servers: address, model, and when each started."""
    from concurrent.futures import ThreadPoolExecutor

    servers = running_servers()
    with ThreadPoolExecutor(max_workers=8) as pool:
        states = list(pool.map(ask, servers))
    if as_json:
        facts = [_facts(*pair) for pair in zip(servers, states, strict=True)]
        typer.echo(json.dumps(facts, indent=2))
        return
    rows = [
        (str(server.pid), server.url, server.model, state, show_age(server.started_s))
        for server, state in zip(servers, states, strict=True)
    ]
    if rows:
        show_table(("PID", "URL", "MODEL", "STATE", "STARTED"), rows)
    else:
        typer.echo("no server is running; `headrace serve` starts one", err=True)


def ask(server: Running) -> str:
    """ready; starting (the engine is starting or restarting); or not answering."""
    import urllib.error
    import urllib.request

    # Without proxies: the server is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{server.url}/ready", timeout=_TIMEOUT_S):
            return "ready"
    except urllib.error.HTTPError as error:
        with error:
            return "starting" if error.code == 503 else f"answers {error.code}"
    except (OSError, ValueError):
        return "not answering"


def _facts(server: Running, state: str) -> dict[str, Any]:
    started = datetime.fromtimestamp(server.started_s, UTC).isoformat(timespec="seconds")
    facts = asdict(server) | {"started": started.replace("+00:00", "Z"), "state": state}
    del facts["started_s"]
    return facts
