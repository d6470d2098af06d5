"""Runs a client that is a program, and reads what the server counted meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import pytest

PROGRAM_LIMIT_S = 900


def run_program(
    command: Sequence[str | Path],
    folder: Path,
    variables: Mapping[str, str],
    *,
    input: str = "",
    expect: int = 0,
) -> str:
    """Standard output, of a program that must end with `expect`. With it, its children end."""
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=folder,
        env=dict(variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(input, PROGRAM_LIMIT_S)
        ended = f"ended with {process.returncode}, not {expect}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        ended = f"did not end within {PROGRAM_LIMIT_S} s"
    if process.returncode != expect:
        name = Path(command[0]).name
        pytest.fail(f"{name} {ended}\n{out[-6000:]}\n{err[-6000:]}", pytrace=False)
    return out


def counted(base_url: str, *names: str) -> dict[str, float]:
    """The sums, over all labels, of these metrics of a server."""
    sums = dict.fromkeys(names, 0.0)
    for line in httpx.get(f"{base_url}/metrics").text.splitlines():
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        if name in sums:
            sums[name] += float(rest.rsplit(" ", 1)[-1])
    return sums
