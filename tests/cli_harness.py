"""The command line with a stand-in for the model, in a process of its own or at a terminal. The
fixtures `model`, `fake` and `invoke` of conftest.py belong to it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

from typer.testing import Result

from headrace.cli.chat import ChatSession
from headrace.core.request import SamplingParams

FAKE = Path(__file__).with_name("fake_llm.py")
SOURCE = Path(__file__).parents[1] / "src"

# What the console script does, with the stand-in put where the real LLM would be.
DRIVER = f"""
import fcntl, importlib.util, os, sys, termios
spec = importlib.util.spec_from_file_location("headrace.llm", {str(FAKE)!r})
sys.modules["headrace.llm"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
if os.environ.get("CONTROLLING"):
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that ^C typed at this terminal is ours
from headrace.cli.commands import main
sys.argv[0] = "headrace"
main()
"""


Invoke = Callable[..., Result]


def start(
    *arguments: str, terminal: int | None = None, **variables: str
) -> subprocess.Popen[bytes]:
    """The command in a process of its own, over pipes or at a terminal."""
    stream = subprocess.PIPE if terminal is None else terminal
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, *arguments],
        stdin=stream,
        stdout=stream,
        stderr=stream,
        env=os.environ | {"PYTHONPATH": str(SOURCE)} | variables,
        start_new_session=terminal is not None,
    )


class Terminal(StringIO):
    """Text that comes from, or goes to, a terminal as far as anyone can tell."""

    def isatty(self) -> bool:
        return True


def converse(
    fake: ModuleType, lines: list[str], *, context: int = 100, **options: Any
) -> tuple[str, str]:
    """What a user at a terminal sees: the answers, and all else."""
    out, notes = Terminal(), StringIO()
    session = ChatSession(
        fake.LLM(context_tokens=context),
        SamplingParams(max_tokens=None),
        source=Terminal("".join(line + "\n" for line in lines)),
        out=out,
        notes=notes,
        **options,
    )
    session.run()
    return out.getvalue(), notes.getvalue()
