"""The host's time by part: the tool runs without a GPU, and its parts make up the whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


def test_parts_make_up_the_whole(tmp_path: Path) -> None:
    out = tmp_path / "host.json"
    # A process of its own: whether Triton interprets kernels is settled when it is imported.
    command = [sys.executable, str(ROOT / "benchmarks/host_time.py"), "--sequences", "3", "70"]
    command += ["--steps", "4", "--no-mixed", "--out", str(out)]
    folders = [str(ROOT / "src"), *sys.path]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "decode 70: 4 steps" in done.stdout
    found = json.loads(out.read_text())["workloads"]
    assert found.keys() == {"decode 3", "decode 70"}
    for workload in found.values():
        assert workload["steps"] == 4
        means = {name: row["mean_us"] for name, row in workload["parts"].items()}
        whole = means.pop("host, in all")
        for left_out in ("wait for the device", "of these: collector"):
            means.pop(left_out, None)
        assert sum(means.values()) == pytest.approx(whole)
        assert {"schedule", "commit", "submit: inputs", "collect: results"} <= means.keys()
        assert all(mean > 0 for mean in means.values())
