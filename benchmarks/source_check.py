"""Whether a source folder is what Python will import: for scripts that compare two builds.

An editable install, such as this project's own .venv, is found before PYTHONPATH: a server "of the
build before" would be one of the build after, and the comparison worth nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def check_source(source: Path) -> None:
    """Ends the program unless headrace is imported from this folder."""
    found = subprocess.run(
        [sys.executable, "-P", "-c", "import headrace; print(headrace.__file__)"],
        env={**os.environ, "PYTHONPATH": str(source.resolve())},
        capture_output=True,
        text=True,
        check=False,
    )
    path = found.stdout.strip()
    if not path or not Path(path).resolve().is_relative_to(source.resolve()):
        raise SystemExit(
            f"{sys.executable} imports headrace from {path or 'nowhere'}, not from {source}: an "
            "editable install comes first. Run this with a Python that has Headrace's "
            "dependencies and not Headrace itself."
        )
