"""What processes of ours import, and what they are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.core.children import child_environment, python_command

SOURCE = Path(__file__).parents[2] / "src"


def run_child(module: str, cwd: Path, variables: dict[str, str]) -> str:
    done = subprocess.run(
        python_command(module),
        cwd=cwd,
        env=child_environment(variables),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout + done.stderr


def test_a_planted_module_is_not_imported(tmp_path: Path) -> None:
    for name in ("msgspec", "socket", "headrace"):
        (tmp_path / f"{name}.py").write_text("print('PLANTED')\n")
    # The engine process reads the number of its socket, and there is none.
    said = run_child("headrace.server.link.engine_process", tmp_path, {"PYTHONPATH": str(SOURCE)})
    assert "PLANTED" not in said
    assert "IndexError" in said


@pytest.mark.parametrize("given", [f"{SOURCE}{os.pathsep}", f"{os.pathsep}{SOURCE}"])
def test_an_empty_part_of_pythonpath_is_not_the_current_folder(tmp_path: Path, given: str) -> None:
    (tmp_path / "planted_module.py").write_text("print('PLANTED')\n")
    assert "PLANTED" not in run_child("planted_module", tmp_path, {"PYTHONPATH": given})
    assert child_environment({"PYTHONPATH": given})["PYTHONPATH"] == str(SOURCE)


def test_a_relative_pythonpath_means_the_same_wherever_a_child_runs() -> None:
    relative = os.path.relpath(SOURCE)
    assert child_environment({"PYTHONPATH": relative})["PYTHONPATH"] == str(SOURCE)


def test_secrets_stay_and_what_an_engine_needs_goes_on() -> None:
    secrets = {
        "HEADRACE_API_KEY": "sk-1",
        "HEADRACE_METRICS_KEY": "sk-2",
        "HEADRACE_API_KEYS_FILE": "/etc/keys.toml",
        "NVIDIA_API_KEY": "nv",
        "HF_TOKEN": "hf",
        "AWS_SECRET_ACCESS_KEY": "aws",
        "CUDA_REGISTRY_PASSWORD": "p",
        "PIP_INDEX_URL": "https://user:password@index.example",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=x",
        "DATABASE_URL": "postgres://",
    }
    needed = {
        "PATH": "/bin",
        "HOME": "/root",
        "LC_ALL": "C.UTF-8",
        "OMP_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "1",
        "TRITON_CACHE_DIR": "/tmp/t",
        "HEADRACE_CACHE": "/models",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    assert child_environment(secrets | needed) == needed


def test_what_this_interpreter_leaves_aside_a_child_leaves_aside_too() -> None:
    code = "from headrace.core.children import python_command; print(python_command('x')[1:-2])"
    command = [sys.executable, "-I", "-c", f"import sys; sys.path.append({str(SOURCE)!r}); {code}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == ["-P", "-E", "-s"]


def test_a_package_found_by_way_of_the_current_folder_is_found_by_children(tmp_path: Path) -> None:
    """`cd src && python -m headrace`: not installed, and not on PYTHONPATH either."""
    code = "from headrace.core.children import child_environment as e; print(e({})['PYTHONPATH'])"
    command = [sys.executable, "-c", code]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=SOURCE, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == str(SOURCE)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_a_child_ends_with_a_parent_that_was_killed() -> None:
    script = (
        "import subprocess, sys, time; from headrace.core.children import end_with_parent;"
        "made = subprocess.Popen(['sleep', '600'], preexec_fn=end_with_parent);"
        "print(made.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until_s = time.monotonic() + 30
    while _is_running(child):
        assert time.monotonic() < until_s, "the child still runs"
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"
