"""Every block of README.md and docs/*.md runs as written, in order, as a reader would run it.

A document's shell blocks are one session of a shell, its Python blocks one of Python. A session
lives in a folder that looks like a checkout after `make serve`; `headrace` is on the path once the
document put it there. What can't run here has a stand-in that checks what can be (stand_in.py), or
is listed in NOT_RUN with the reason.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.documents import (
    DOCUMENTS,
    LANGUAGES,
    ROOT,
    Sample,
    blocks_of,
    read_blocks,
    read_samples,
)

STAND_INS = ("docker", "kubectl", "kustomize", "make")
LIMIT_S = 240  # generous: machines are shared; nothing is asserted about it
DEFAULT_PORT = "8000"
KEPT = ("PYTHONPATH", "HEADRACE_CACHE", "XDG_CACHE_HOME")  # of our own variables
# Blocks by their first line -> why they are not run, and which test looks at them instead.
NOT_RUN = {
    "python3 -m venv /opt/headrace && /opt/headrace/bin/pip install .": (
        "writes to /opt and /etc as root: test_the_unit_is_installed_as_its_own_head_says"
    ),
}
# Samples by their command and document -> why their output is not looked for.
NO_SUCH_OUTPUT = {
    ("headrace info", "docs/gpu.md"): "needs a GPU; its words are tests/cli/test_info.py's"
}

_NUMBER = re.compile(r"\d[\d,.]*(?:e-?\d+)?")
_PATH = re.compile(r"(?<![\w.])/[\w./-]+")
_FINGERPRINT = re.compile(r"hr-[0-9a-f]+")
_PYTHON_SESSION = """
import json, sys
namespace = {"__name__": "__main__"}
for place, line, text in json.load(sys.stdin):
    print(place, file=sys.stdout, flush=True)
    exec(compile("\\n" * (line - 1) + text, place, "exec"), namespace)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A folder like a checkout in which everything was set up, and its environment."""

    folder: Path
    environment: dict[str, str]

    def with_venv(self) -> dict[str, str]:
        """As `. .venv/bin/activate` leaves it."""
        path = f"{self.folder}/.venv/bin:{self.environment['PATH']}"
        return {**self.environment, "PATH": path}

    def run(
        self, script: str, typed: str = "", *, activated: bool = True
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", script],
            cwd=self.folder,
            env=self.with_venv() if activated else self.environment,
            input=typed,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Session:
    folder = tmp_path_factory.mktemp("checkout")
    for entry in ROOT.iterdir():
        if not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    venv.create(folder / ".venv", with_pip=False, symlinks=True)
    tools = folder / "tools"
    tools.mkdir()
    for name in STAND_INS:
        write_stand_in(tools / name)
    for name in ("headrace", "pip"):
        write_stand_in(folder / ".venv/bin" / name)
    usual = "/usr/local/bin:/usr/bin:/bin"
    environment = {
        "PATH": f"{tools}:{usual}",
        "HOME": os.environ.get("HOME", "/"),
        "DEFAULT_MODEL": str(default_model_path),
        "REAL_MAKE": shutil.which("make") or "make",
        "REAL_KUBECTL": shutil.which("kubectl") or "",
        "LC_ALL": "C.UTF-8",
        "HEADRACE_OFFLINE": "1",
        **{k: v for k, v in os.environ.items() if k in KEPT},
    }
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    (folder / "notes.txt").write_text("one\n")
    for command in (["init", "-q"], ["add", "notes.txt"], ["commit", "-qm", "notes"]):
        subprocess.run([*git, *command], cwd=folder, check=True, capture_output=True)
    (folder / "notes.txt").write_text("two\n")
    assert shutil.which("headrace", path=environment["PATH"]) is None
    return Session(folder=folder, environment=environment)


def write_stand_in(path: Path) -> None:
    script = Path(__file__).parent / "stand_in.py"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" {path.name} "$@"\n')
    path.chmod(0o755)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    port: str
    started: str  # what it wrote until it was ready


@pytest.fixture(scope="module")
def server(session: Session) -> Iterator[Server]:
    """README's own command, on a port that is free here."""
    (sample,) = [s for s in all_samples() if s.command == "headrace serve"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    log = session.folder / "server.log"
    settings = {"HEADRACE_PORT": port, "REALLY_SERVE": "1", "HEADRACE_LOG_FORMAT": "pretty"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {sample.command}"],
            cwd=session.folder,
            env={**session.with_venv(), **settings},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        end = time.monotonic() + LIMIT_S
        while "Ctrl-C" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=LIMIT_S).close()
        yield Server(port=port, started=log.read_text().replace(port, DEFAULT_PORT))
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def all_samples() -> list[Sample]:
    return [sample for block in blocks_of("console") for sample in read_samples(block)]


def documents_with(language: str) -> list[str]:
    return sorted({block.document for block in blocks_of(language)})


# -- the blocks themselves -------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_says_what_it_is(document: Path) -> None:
    fences = [line for line in document.read_text().splitlines() if line.startswith("```")]
    blocks = read_blocks(document)
    assert len(fences) == 2 * len(blocks)
    for block in blocks:
        assert block.language in LANGUAGES, f"{block.place}: expected a language"
        if block.language != "console":
            assert "\n$ " not in f"\n{block.text}", f"{block.place}: expected ```console"


@pytest.mark.parametrize("document", documents_with("sh"))
def test_shell_blocks_run(document: str, session: Session) -> None:
    lines = ["trap 'echo \"failed in $place\" >&2' ERR"]
    for block in blocks_of("sh", document):
        if block.text.splitlines()[0] not in NOT_RUN:
            lines += [f"place={block.place}", block.text]
    # Other documents are read after README, which said how to come by `headrace`.
    done = session.run("\n".join(lines), activated=document != "README.md")
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert "nanobind" not in done.stderr


@pytest.mark.parametrize("document", documents_with("python"))
def test_python_blocks_run(document: str, session: Session, server: Server) -> None:
    blocks = [
        (block.place, block.line, block.text.replace(f":{DEFAULT_PORT}", f":{server.port}"))
        for block in blocks_of("python", document)
    ]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _PYTHON_SESSION],
        input=json.dumps(blocks),
        cwd=session.folder,
        env={**session.with_venv()},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_what_is_not_run_is_there() -> None:
    first_lines = {block.text.splitlines()[0] for block in blocks_of("sh")}
    assert NOT_RUN.keys() <= first_lines
    commands = {(sample.command, sample.place.partition(":")[0]) for sample in all_samples()}
    assert NO_SUCH_OUTPUT.keys() <= commands


def test_the_unit_is_installed_as_its_own_head_says() -> None:
    (block,) = [b for b in blocks_of("sh", "docs/deploy.md") if "systemctl" in b.text]
    unit = (ROOT / "deploy/headrace.service").read_text()
    for line in block.text.splitlines():
        command = line.partition("  #")[0].rstrip()
        assert f"#   {command}\n" in unit or command.startswith("systemd-analyze"), command
    assert "ExecStart=/opt/headrace/bin/headrace serve" in unit
    for path in re.findall(r"deploy/\S+", block.text):
        assert (ROOT / path).exists()


def test_nobody_is_told_to_install_what_no_index_has() -> None:
    places = [*DOCUMENTS, *(ROOT / "src").rglob("*.py"), *(ROOT / "deploy").rglob("*.*")]
    wrong = [
        str(path.relative_to(ROOT))
        for path in places
        if re.search(r"pip install '?headrace", path.read_text(encoding="utf-8"))
    ]
    assert wrong == []


# -- samples with their output ---------------------------------------------------------------------


def skeleton(line: str) -> str:
    """A line without what differs from machine to machine."""
    line = _FINGERPRINT.sub("hr-#", _PATH.sub("/…", line))
    return " ".join(_NUMBER.sub("#", line).split())


def label(line: str) -> str:
    """What stands before a value: in columns, the first."""
    return skeleton(re.split(r"(?<=\S)\s{2,}", line, maxsplit=1)[0])


def missing(sample: Sample, output: str, part: str) -> list[str]:
    cut = label if part == "labels" else skeleton
    found = {cut(line) for line in output.splitlines()}
    wanted = [line for line in sample.output if line.strip() not in ("", "...")]
    return [line for line in wanted if cut(line) not in found]


def samples_but_servers() -> list[Sample]:
    return [sample for sample in all_samples() if sample.command != "headrace serve"]


@pytest.mark.parametrize("sample", samples_but_servers(), ids=lambda sample: sample.place)
def test_a_sample_is_what_the_program_does(sample: Sample, session: Session) -> None:
    if sample.typed:
        check_conversation(sample, session)
        return
    done = session.run(sample.command)
    output = done.stdout + done.stderr
    fails = any(line.startswith("error:") for line in sample.output)
    assert (done.returncode != 0) == fails, output
    if (sample.command, sample.place.partition(":")[0]) not in NO_SUCH_OUTPUT:
        part = "labels" if sample.command == "headrace info" else "all"
        assert missing(sample, output, part) == [], output


def check_conversation(sample: Sample, session: Session) -> None:
    """Nobody types Ctrl-C here, and another processor may say other words: what is looked at is
    what the commands answer."""
    commands = [line for line in sample.typed if line.startswith("/")]
    assert commands
    done = session.run(sample.command, "\n".join(["Hi.", *commands]) + "\n")
    assert done.returncode == 0, done.stderr
    said = [s for s in map(skeleton, (done.stdout + done.stderr).splitlines()) if "--max" not in s]
    answers = [line for line in map(skeleton, sample.output) if line in said]
    assert len(answers) >= len(commands), f"{answers} of {said}"


def test_a_server_starts_as_shown(server: Server) -> None:
    (sample,) = [s for s in all_samples() if s.command == "headrace serve"]
    shown = {label(line) for line in server.started.splitlines()}
    absent = [line for line in sample.output if line.strip() and label(line) not in shown]
    assert absent == [], server.started
    # And the line that it says to try is good.
    (tried,) = [line.strip() for line in server.started.splitlines() if "curl http" in line]
    body = re.search(r"-d '(.*)'$", tried)
    assert body is not None
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/chat/completions",
        json.dumps({**json.loads(body[1]), "max_tokens": 2}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        assert json.load(answer)["choices"]
