"""`headrace serve --replicas N`: shares the machine out, and starts the replicas and their router.

The model was found and checked before (cli/serve.py). Knows settings; replicas/ does the rest.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.core.settings import Settings
from headrace.fetch.verify import Checked
from headrace.replicas.shares import Share, share_out
from headrace.server.edge.listen import is_loopback


def shares_of(settings: Settings) -> tuple[Share, ...]:
    from headrace.replicas.machine import look_at_machine

    engine = settings.engine
    if engine.rank_address is not None:
        raise ConfigError(
            "rank_address is given with replicas: all replicas would wait at the same address for "
            "ranks of other hosts.",
            "Leave out --replicas, and put headrace route in front of several such servers.",
            param="rank_address",
        )
    return share_out(
        look_at_machine(engine),
        settings.server.replicas or 1,
        threads=engine.threads,
        ranks=engine.ranks,
    )


def serve_several(
    settings: Settings,
    shares: tuple[Share, ...],
    path: Path,
    checked: Checked | None,
    sock: socket.socket,
    admin: socket.socket | None,
    began_s: float,
    *,
    offline: bool,
) -> int:
    from headrace.replicas.announce import Announcer
    from headrace.replicas.release import Release
    from headrace.replicas.run import Plan, serve_replicas
    from headrace.server.access.keys_file import read_keys
    from headrace.server.access.operators import operator_warnings
    from headrace.server.edge.browsers import browser_warnings

    server = settings.server
    keys, warnings = read_keys(server)
    warnings += browser_warnings(server, has_keys=len(keys) > 0)
    warnings += operator_warnings(server, keys)
    if not len(keys) and not is_loopback(server.host):
        warnings.append(
            f"{server.host} can be reached from other machines, and there is no "
            "authentication: set --api-key or --api-keys-file"
        )
    announcer = Announcer(server.log_format, began_s)
    for warning in warnings:
        announcer.note(warning)
    release = Release(
        number=1,
        path=str(path),
        typed=settings.model,
        server=server,
        engine=replace(settings.engine, verify=False),  # verified already
        checked=checked or Checked(),
    )
    plan = Plan(
        release=release,
        config=server,
        shares=shares,
        keys=keys,
        announcer=announcer,
        origins=settings.origins,
        offline=offline,
    )
    return serve_replicas(plan, sock, admin)
