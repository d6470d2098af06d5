"""A real engine process whose runner loses its device once: for tests of what follows.

    python losing_engine.py HAPPENED FD

Everything is the server's own but the runner: the reference one, which raises what the CUDA runner
raises after so many steps, unless the file HAPPENED says that an engine before this one has.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from headrace.backends.reference import runner as runner_module
from headrace.core.errors import DeviceLostError
from headrace.core.step import StepResult
from headrace.server.link.engine_process import EngineProcess, Link

GOOD_STEPS = 2
HAPPENED = Path(sys.argv[1])


class LosingRunner(runner_module.ReferenceRunner):
    steps = 0

    def collect(self) -> StepResult:
        self.steps += 1
        if self.steps > GOOD_STEPS and not HAPPENED.exists():
            HAPPENED.touch()
            raise DeviceLostError("The GPU failed: an illegal address.", "Start the engine anew.")
        return super().collect()


if __name__ == "__main__":
    runner_module.ReferenceRunner = LosingRunner  # type: ignore[misc]
    sys.exit(EngineProcess(Link(socket.socket(fileno=int(sys.argv[2])))).run())
