"""`headrace serve` as a user meets it: what it says, what it refuses, and that both are true."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from headrace.cli.commands import app
from headrace.cli.ps import ask
from headrace.core.settings import all_settings
from headrace.server.start.run_file import running_servers

MAIN = "import sys; sys.argv[0] = 'headrace'; from headrace.cli.commands import main; main()"
SMALL = ("--kv-tokens", "4096")  # a pool that a shared machine has
LIMIT_S = 60.0

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """The command in this process, in an empty folder and with no settings but what is given."""
    monkeypatch.chdir(tmp_path)
    for name in ("HEADRACE_DEBUG", "HEADRACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))

    def call(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["serve", *arguments])

    return call


class Command:
    """`headrace serve` in a process of its own."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self._began_s = time.monotonic()
        self.said: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-c", MAIN, "serve", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"HEADRACE_OFFLINE": "1"} | variables,
        )

    def read_until(self, pattern: str) -> re.Match[str]:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line.rstrip("\n"))
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"{pattern!r} was never said:\n" + "\n".join(self.said))

    def end(self, number: int | None = None) -> int:
        """Its exit status; after a signal, where one is given."""
        if number is not None:
            self.process.send_signal(number)
        assert self.process.stderr is not None
        self.said += self.process.stderr.read().splitlines()
        return self.process.wait(LIMIT_S)

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(children.read_text().split()[0])


@pytest.fixture
def start(default_model_path: Path) -> Iterator[Callable[..., Command]]:
    started: list[Command] = []

    def call(*arguments: str, **variables: str) -> Command:
        started.append(Command(*arguments, **variables))
        return started[-1]

    yield call
    for command in started:
        if command.process.poll() is None:
            command.process.kill()
            command.process.wait()
        assert command.process.stderr is not None
        command.process.stderr.close()


# -- a dry run -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("default_model_path")
def test_a_dry_run_shows_settings_memory_and_fingerprint(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "headrace.toml").write_text("[server]\nport = 0\nmax_n = 3\n")
    monkeypatch.setenv("HEADRACE_MAX_STOP", "5")
    monkeypatch.setenv("HEADRACE_API_KEY", "tops3cret")
    result = invoke("--dry-run", *SMALL)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    for name, value, origin in (
        ("max_n", "3", "headrace.toml:3"),
        ("max_stop", "5", "HEADRACE_MAX_STOP"),
        ("kv_tokens", "4096", "--kv-tokens"),
        ("api_key", "***", "HEADRACE_API_KEY"),
        ("max_batch_tokens", "512", "default"),
        ("speculate", "auto", "default"),  # the CPU backend's
    ):
        assert any(line.split() == [name, value, origin] for line in lines), result.stdout
    assert "  KV pool        90.0 MiB   4,096 tokens in 256 blocks of 16" in lines
    assert "  answers        37.5 MiB   past ones, to guess tokens from: at most" in lines
    assert any(re.fullmatch("fingerprint hr-[0-9a-f]{12}", line) for line in lines)
    assert "tops3cret" not in result.output


@pytest.mark.usefixtures("default_model_path")
def test_a_dry_run_as_json(invoke: Invoke) -> None:
    result = invoke("--dry-run", "--json", "--port", "0", "--log-content", *SMALL)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert set(report["settings"]) == {setting.name for setting in all_settings()}
    assert report["settings"]["log_content"] == {"value": True, "origin": "--log-content"}
    assert report["ledger"]["kv_tokens"] == 4096
    assert report["identity"]["settings"]["kv_tokens"] == 4096
    assert report["model"]["layers"] == 30
    assert report["notes"]  # the pool is smaller than the model's context
    assert "error" not in report


@pytest.mark.usefixtures("default_model_path")
def test_a_dry_run_of_ranks_shows_the_ledger_of_each_stage(invoke: Invoke) -> None:
    asked = ["--device", "reference", "--pipeline-parallel", "4", "--kv-tokens", "4096"]
    result = invoke("--dry-run", "--json", *asked)
    report = json.loads(result.stdout)
    last, *others = report["ranks"]
    assert [each["stage"] for each in report["ranks"]] == [4, 3, 2, 1]
    assert last["ledger"] == {k: v for k, v in report["ledger"].items() if k != "shown"}
    pools = [each["ledger"]["kv_pool_bytes"] for each in report["ranks"]]
    assert [pool // 4096 // (2 * 3 * 64 * 4) for pool in pools] == [7, 8, 8, 7]  # layers
    assert last["ledger"]["weights_bytes"] > others[0]["ledger"]["weights_bytes"]  # output layer
    assert "each of ranks 3 (stage 1): " in invoke("--dry-run", *asked).stdout


def test_a_dry_run_of_what_does_not_fit(invoke: Invoke) -> None:
    asked = ("--kv-memory", "20MiB", "--context-tokens", "8192")
    result = invoke("--dry-run", *asked)
    assert result.exit_code == 2
    assert re.search(r"kv_memory +20971520 +--kv-memory", result.stdout)  # first what was asked
    assert "A context of 8,192 tokens needs a KV pool of 180.0 MiB" in result.stderr
    assert "weights        92.1 MiB" in result.stderr
    assert "Set --kv-memory 180MiB, or --context-tokens 896." in result.stderr
    report = json.loads(invoke("--dry-run", "--json", *asked).stdout)
    assert "needs a KV pool of 180.0 MiB" in report["error"]["cause"]


def test_a_dry_run_fetches_nothing(invoke: Invoke, empty_cache: Path) -> None:
    result = invoke("--dry-run")
    assert result.exit_code == 2
    assert "is not in the cache" in result.stderr
    assert not empty_cache.exists()


# -- refusals --------------------------------------------------------------------------------------


def test_settings_that_can_not_be(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, expected in (
        (("--port", "70000"), "port is 70000; expected 0 to 65535 (set by --port)"),
        (("--config", "none.toml"), "The settings file none.toml can't be read"),
        (("--json",), "--json is for --dry-run"),
        (("--host", "999.0.0.1"), "host is '999.0.0.1', which is not a valid address"),
        (("--host", "192.0.2.7"), "Can't listen on 192.0.2.7 port 8000: Cannot assign"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2, result.output
        assert expected in result.stderr
        assert "\n  try: " in result.stderr
    (tmp_path / "headrace.toml").write_text("[server]\nprot = 1\n")
    result = invoke()
    assert result.exit_code == 2
    assert "headrace.toml:2: unknown setting 'prot' in [server]" in result.stderr
    assert "Did you mean port?" in result.stderr
    (tmp_path / "headrace.toml").unlink()
    monkeypatch.setenv("HEADRACE_MAX_BATCH_TOKEN", "1")
    result = invoke()
    assert result.exit_code == 2
    assert "Did you mean HEADRACE_MAX_BATCH_TOKENS?" in result.stderr


def test_a_port_that_is_taken_is_said_before_anything_is_looked_for(invoke: Invoke) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result = invoke("./no-such-model.gguf", "--port", str(port))
        assert result.exit_code == 2
        assert f"Port {port} of 127.0.0.1 is taken" in result.stderr
        assert "no-such-model" not in result.stderr
        named = re.search(r"--port (\d+)", result.stderr)
        assert named is not None
        with socket.socket() as free:
            free.bind(("127.0.0.1", int(named[1])))
        # A dry run only mentions it: the server that runs there may be this one.
        shown = invoke("./no-such-model.gguf", "--port", str(port), "--dry-run")
        assert f"note: port {port} of 127.0.0.1 is taken" in shown.stdout


def test_help_has_a_section_for_each_config(invoke: Invoke) -> None:
    shown = invoke("--help").stdout
    headings = [line for line in shown.splitlines() if line and not line.startswith(" ")]
    assert headings[1:] == ["Arguments:", "Options:", "Server:", "Engine:"]
    for setting in all_settings():
        assert setting.name == "model" or re.search(rf"{setting.flag}\b", shown)


# -- a server --------------------------------------------------------------------------------------


def test_it_starts_says_so_answers_and_stops(start: Callable[..., Command], invoke: Invoke) -> None:
    command = start("--port", "0", *SMALL, HEADRACE_API_KEY="k3y")
    command.read_until(r"^ready after [\d.]+ s$")
    url = command.read_until(r"URL +(\S+)/v1$")[1]
    pasted = command.read_until(r"^  (curl .*)$")[1]
    # Anywhere in a line: the engine process writes its own lines to the same place meanwhile.
    phases = re.findall(r"  (\w+) +[\d.]+ s\b", "\n".join(command.said))
    assert set(phases) >= {"model", "code", "tokenizer", "weights", "http"}
    assert re.search(r"  engine ready in [\d.]+ s \(pid \d+\)", "\n".join(command.said))
    [noted] = [each for each in running_servers() if each.pid == command.process.pid]
    assert (noted.url, noted.model, noted.has_keys) == (url, "smollm2-135m-instruct", True)
    assert ask(noted) == "ready"
    assert "k3y" not in "\n".join(command.said)
    assert any(line.startswith("note: ") for line in command.said)  # a context cut to the pool
    answer = _paste(pasted, HEADRACE_API_KEY="k3y")
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"]
    shown = httpx.get(f"{url}/version", headers={"authorization": "Bearer k3y"}).json()
    assert shown["config"]["server"]["api_key"] == "***"
    assert (shown["config"]["engine"]["kv_tokens"], shown["kv_tokens"]) == (4096, 4096)
    # What became of settings that were not set.
    assert shown["config"]["engine"]["max_step_growth"] is None
    assert shown["max_step_growth"] == 2.0
    assert shown["max_batch_tokens"] > 0
    assert any(shown["fingerprint"] in line for line in command.said)
    # As the engine process said; a dry run comes to the same without one.
    foretold = json.loads(invoke("--dry-run", "--json", "--port", "0", *SMALL).stdout)
    assert shown["identity"]["backend"] == foretold["identity"]["backend"]
    assert shown["fingerprint"] == foretold["fingerprint"]
    # An answer comes a moment before its request is over, which is when its line is written.
    command.read_until(r"GET /version 200")
    assert command.end(signal.SIGTERM) == 0
    assert [each for each in running_servers() if each.pid == command.process.pid] == []
    assert re.search(r"stopping: 0 requests running, given up to 30 s", "\n".join(command.said))
    assert not any("leaked" in line for line in command.said)  # by the native module, at its end


def _paste(line: str, **variables: str) -> Any:
    """What a shell makes of a line; the same by other means where there is no curl."""
    if shutil.which("curl") is None:
        spelled = line.replace("$HEADRACE_API_KEY", variables["HEADRACE_API_KEY"])
        curl, url, _, kind, _, key, _, body = shlex.split(spelled)
        assert curl == "curl"
        headers = dict(header.split(": ", 1) for header in (kind, key))
        return httpx.post(url, headers=headers, content=body, timeout=60).json()
    done = subprocess.run(
        ["sh", "-c", line], capture_output=True, env=os.environ | variables, check=True, timeout=60
    )
    return json.loads(done.stdout)


def test_an_engine_that_can_not_come_back_ends_it_with_3(start: Callable[..., Command]) -> None:
    command = start("--port", "0", "--max-restarts", "0", "--log-format", "json", *SMALL)
    command.read_until('"event": "ready"')
    events = [json.loads(line) for line in command.said]  # all of them, from the first
    assert "model" in [event.get("phase") for event in events]
    os.kill(command.engine_pid(), signal.SIGKILL)
    assert command.end() == 3
    assert "error: The engine was killed by signal 9" in "\n".join(command.said)


def test_a_model_that_does_not_fit_ends_it_with_2_and_the_ledger(
    start: Callable[..., Command],
) -> None:
    command = start("--port", "0", "--kv-memory", "20MiB", "--context-tokens", "8192")
    assert command.end() == 2
    said = "\n".join(command.said)
    assert "error: A context of 8,192 tokens needs a KV pool of 180.0 MiB" in said
    assert "weights        92.1 MiB" in said
    assert "Traceback" not in said


def test_a_dry_run_reads_the_keys(invoke: Invoke, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkye = "x"\n')
    found = invoke("--dry-run", "--api-keys-file", str(keys))
    assert found.exit_code == 2
    assert "kye" in found.stderr
