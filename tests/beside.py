"""The whole suite in two processes: what interprets GPU kernels on one processor, beside the rest.

    python tests/beside.py [ARGUMENTS OF PYTEST]      # make test

Those tests take a quarter of the suite's time, on one thread, and wait for nothing; most of the
others wait for servers. They run at a low priority: they get what the others leave, and change
nothing for them but the time in all. `python -m pytest` is the same tests one after the other.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BESIDE = "tests/backends/cuda"
NICE = ["nice", "-n", "5"] if sys.platform != "win32" else []


def main() -> int:
    pytest = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    with tempfile.TemporaryFile() as said:
        # Its cache would be written over by the other's; and it may have to wait for its turn.
        command = [*NICE, *pytest, "-p", "no:cacheprovider", "--timeout", "900", BESIDE]
        beside = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)
        try:
            rest = subprocess.run([*pytest, "--ignore", BESIDE], cwd=ROOT, check=False).returncode
            status = beside.wait()
        finally:
            beside.kill()  # Ctrl-C, or it has ended
            beside.wait()
        said.seek(0)
        sys.stdout.flush()
        sys.stdout.buffer.write(said.read())
        sys.stdout.flush()
    print(f"{BESIDE}: {status}, all others: {rest} (0 is good)")
    return rest or status


if __name__ == "__main__":
    sys.exit(main())
