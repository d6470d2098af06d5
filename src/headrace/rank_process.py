"""One of the ranks that compute a model together with the engine's process, which leads.

    python -m headrace.rank_process FD                      # of the same host
    python -m headrace.rank_process ADDRESS MODEL           # of another: cli/rank.py starts it

Opens the model, loads its share, and follows the plans that come through the connection. Ends with
it. Knows no requests: only what is to be computed.
"""

from __future__ import annotations

import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from headrace.assemble import plan_share
from headrace.backends.registry import find_backend
from headrace.core.errors import ConfigError, HeadraceError
from headrace.parallel.channel import Channel, Loaded, Refused, Size, Start
from headrace.parallel.leader import follow
from headrace.parallel.meeting import knock
from headrace.parallel.team import end_with_parent, size_of, with_size
from headrace.weights.describe import describe_file
from headrace.weights.load import OpenFile, open_weights
from headrace.weights.model_hash import hash_model

REFUSED = 2  # exit status: trying again would not help


def run(connection: Connection[Any, Any], model_path: Path | None = None) -> int:
    channel = Channel(connection)
    try:
        start = channel.receive(Start)
    except (EOFError, OSError):
        return 1
    try:
        backend = find_backend(start.device)  # the leading rank has checked it
        path = model_path if start.model_path is None else Path(start.model_path)
        assert path is not None
        with open_weights(path, start.config.load_format) as file:
            _check_model(file, path, start)
            spec, weights, sizing = plan_share(file, backend, start.config, start.rank)
            channel.send(size_of(sizing))
            size = channel.receive(Size)
            ranks = backend.join(start.config, start.rank, start.meeting)
            sizing = with_size(sizing, size)
            runner, _ = backend.load(spec, weights, sizing, start.config, lambda _: None, ranks)
            channel.send(Loaded())
            follow(runner, channel)
            runner.close()
            ranks.close()
    except HeadraceError as error:
        channel.send(Refused(cause=error.cause, remedy=error.remedy, detail=error.detail or ""))
        if model_path is not None:
            print(f"error: {error.cause}\n  try: {error.remedy}", file=sys.stderr)
        return REFUSED
    except (EOFError, OSError):  # the engine's process is gone
        return 1
    return 0


def _check_model(file: OpenFile, path: Path, start: Start) -> None:
    whole, _ = describe_file(file, start.config.context_tokens)
    if hash_model(file, whole) != start.model_hash:
        raise ConfigError(
            f"{path.name} is another model than the leading rank's.",
            "Give every rank the same files.",
        )


def main() -> int:
    # The engine's process decides when to stop: a Ctrl-C on the terminal reaches all of them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
    if len(sys.argv) == 2:
        return run(Connection(int(sys.argv[1])))
    address, model = sys.argv[1:]
    try:
        connection = knock(address)
    except HeadraceError as error:
        print(f"error: {error.cause}\n  try: {error.remedy}", file=sys.stderr)
        return REFUSED
    except OSError:  # not there yet, or no more
        return 1
    print(f"joined {address}", file=sys.stderr)
    return run(connection, Path(model))


if __name__ == "__main__":
    sys.exit(main())
