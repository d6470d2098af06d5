"""One of the ranks that compute a model together with the engine's process, which leads.

    python -m headrace.rank_process FD

Opens the model, loads its share, and follows the plans that come through the connection. Ends with
it. Knows no requests: only what is to be computed.
"""

from __future__ import annotations

import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from headrace.assemble import plan_share
from headrace.backends.registry import find_backend
from headrace.core.errors import HeadraceError
from headrace.parallel.leader import follow
from headrace.parallel.team import Loaded, Refused, Size, Start, end_with_parent
from headrace.weights.load import open_weights


def run(connection: Connection[Any, Any]) -> int:
    start: Start = connection.recv()
    try:
        backend = find_backend(start.device)  # the first rank has checked it
        with open_weights(start.model_path, start.config.load_format) as file:
            spec, weights, sizing = plan_share(file, backend, start.config, start.rank)
            connection.send(Size.of(sizing))
            size: Size = connection.recv()
            ranks = backend.join(start.config, start.rank, start.meeting)
            sizing = size.put_in(sizing)
            runner, _ = backend.load(spec, weights, sizing, start.config, lambda _: None, ranks)
            connection.send(Loaded())
            follow(runner, connection)
            runner.close()
            ranks.close()
    except HeadraceError as error:
        connection.send(Refused(cause=error.cause, remedy=error.remedy, detail=error.detail or ""))
        return 2
    except (EOFError, OSError):  # the engine's process is gone
        return 1
    return 0


def main() -> int:
    end_with_parent()
    # The engine's process decides when to stop: a Ctrl-C on the terminal reaches all of them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return run(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())
