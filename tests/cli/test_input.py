"""What is said to a model: arguments and pipes of `run`, lines, blocks and pastes of `chat`."""

from __future__ import annotations

import json
import os
import select
import stat
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from types import ModuleType

import pytest
from tests.cli_harness import DRIVER, SOURCE, Invoke, converse, start

from headrace.cli import lines as lines_module
from headrace.cli import piped
from headrace.cli import run as run_module
from headrace.cli.history import MAX_ENTRIES, MAX_ENTRY_CHARACTERS, History
from headrace.cli.lines import StreamLines, TerminalLines, Typed, read_message
from headrace.core.errors import InvalidRequestError

# run


def test_what_is_piped_in_follows_the_prompt(invoke: Invoke, model: str, fake: ModuleType) -> None:
    result = invoke("run", "Summarize", "-m", model, typed="the file\nof two lines\n")
    assert result.stdout == "said: Summarize the file of two lines\n"
    for option in ("--no-stdin", "--stdin"):
        result = invoke("run", "Summarize", option, "-m", model, typed="the file")
        assert ("the file" in result.stdout) == (option == "--stdin")


@pytest.mark.parametrize("typed", ["", " \n\n"])
def test_nothing_piped_in_changes_nothing(invoke: Invoke, model: str, typed: str) -> None:
    result = invoke("run", "hello", "-m", model, typed=typed)
    assert (result.stdout, result.stderr) == ("said: hello\n", "")


def test_prompt_and_pipe_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "piped_text", lambda: piped.PipedText(None, b"file\n"))
    assert run_module._read_prompt("ask", None) == ("ask\n\nfile\n", None)
    assert run_module._read_prompt("-", False) == ("file\n", None)


def run_with_stdin(
    model: str, stdin: int | None, *options: str, close: bool = False
) -> tuple[int, str, str]:
    """The command in a process, with this very standard input, or with none at all."""
    close_it = "import os; os.close(0)\n" if close else ""
    done = subprocess.run(
        [sys.executable, "-c", close_it + DRIVER, "run", "hello", "-m", model, *options],
        stdin=stdin,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_pipe_in_which_nothing_comes_is_said_and_does_not_hang(model: str) -> None:
    """As under a supervisor that keeps its end open: dropped, but not in silence."""
    reading, writing = os.pipe()
    try:
        status, out, said = run_with_stdin(model, reading)
        assert (status, out) == (0, "said: hello\n")
        assert "sent nothing for 5 s: answering without it" in said
        assert "--stdin" in said
        assert run_with_stdin(model, reading, "--no-stdin") == (0, "said: hello\n", "")
    finally:
        os.close(reading)
        os.close(writing)


def test_no_standard_input_at_all(model: str, tmp_path: Path) -> None:
    assert run_with_stdin(model, subprocess.DEVNULL) == (0, "said: hello\n", "")
    assert run_with_stdin(model, None, close=True) == (0, "said: hello\n", "")
    redirected = tmp_path / "file.txt"
    redirected.write_text("from a file")
    with redirected.open() as file:
        assert run_with_stdin(model, file.fileno()) == (0, "said: hello from a file\n", "")


def test_a_pipe_that_begins_late_is_read(model: str) -> None:
    """It begins after the model is loaded, as a slow command's output does."""
    process = start("run", "hello", "--stdin", "-m", model)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
    out, said = process.communicate(b"late text", timeout=60)
    assert (out, said) == (b"said: hello late text\n", b"")


def test_a_pipe_that_begins_while_the_model_loads_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr(run_module, "piped_text", lambda: piped.PipedText(reading))
    prompt, late = run_module._read_prompt("ask", None)
    assert prompt == "ask"
    assert late is not None  # not waited for before the model is loaded
    os.write(writing, b"file")
    os.close(writing)
    assert run_module._with_late(prompt, late) == "ask\n\nfile"
    os.close(reading)


def test_standard_input_without_an_end_is_refused(
    model: str, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piped, "MAX_BYTES", 1 << 20)
    with open("/dev/zero", "rb") as zeros:
        text = piped.PipedText(zeros.fileno())
        assert text.has_begun(30)
        with pytest.raises(InvalidRequestError, match="over 1 MiB"):
            text.text()


def test_a_models_name_as_the_prompt_is_said(
    invoke: Invoke, fake: ModuleType, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.fetch import resolve

    monkeypatch.setattr(resolve, "is_cached", lambda _: True)
    for name in ("smollm2", "org/name", model):
        said = invoke("run", name).stderr
        assert f"note: {name} was used as the prompt" in said
        assert f"headrace run --model {name} PROMPT" in said
    assert invoke("run", "smollm2", "-m", model).stderr == ""
    assert "note" not in invoke("run", "Is smollm2 any good?").stderr


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["why", "is", "it"], "Quote it: headrace run 'why is it'"),
        (["smollm2", "Why?"], "To use that model: headrace run --model smollm2 'Why?'"),
    ],
)
def test_a_prompt_without_quotes(
    invoke: Invoke, fake: ModuleType, words: list[str], remedy: str
) -> None:
    result = invoke("run", *words)
    assert result.exit_code == 2
    assert remedy in result.stderr
    assert fake.LLM.made == []


def test_run_as_json(invoke: Invoke, model: str) -> None:
    result = invoke("run", "hello", "--json", "--stats", "-m", model)
    found = json.loads(result.stdout)
    assert found["text"] == "said: hello"
    assert (found["prompt_tokens"], found["answer_tokens"]) == (2, 2)
    assert (found["finish_reason"], found["model"]) == ("stop", "any")
    assert "stats:" in result.stderr


def test_run_and_chat_take_a_pool_of_one_context(
    invoke: Invoke, model: str, fake: ModuleType
) -> None:
    invoke("run", "hello", "-m", model)
    invoke("chat", model, typed="hi\n")
    assert [made["config"].max_sequences for made in fake.LLM.made] == [1, 1]
    for asked in (["--kv-memory", "1GiB"], ["--max-sequences", "7"], ["--kv-fraction", "0.1"]):
        invoke("run", "hello", "-m", model, *asked)
        assert fake.LLM.made[-1]["config"].max_sequences == (7 if "7" in asked else None)


# chat


def test_a_block_is_one_message(fake: ModuleType) -> None:
    lines = ['"""one', "", "/exit is text here", 'two"""', '"""in one line"""', '"""', "a", '"""']
    out, _ = converse(fake, lines)
    assert out == "said: one /exit is text here two\nsaid: in one line\nsaid: a\n"


def test_blocks_in_a_pipe_and_one_that_never_ends() -> None:
    source = StringIO('plain\n"""a\n  b\n"""\n/stats\n"""open\nto the end')
    lines = StreamLines(source, StringIO(), prompts=False)
    found = [read_message(lines) for _ in range(5)]
    assert found == [
        Typed("plain"),
        Typed("a\n  b", is_command_free=True),
        Typed("/stats"),
        Typed("open\nto the end", is_command_free=True),
        None,
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
@pytest.mark.parametrize("library", ["gnu", "libedit"])
def test_a_paste_is_one_message_and_is_remembered(model: str, tmp_path: Path, library: str) -> None:
    """At a pseudo-terminal: with the terminal's marks where readline knows them, and bare lines
    that come at once where it does not (as libedit: told so here)."""
    import pty
    import readline

    if library == "gnu" and "libedit" in (readline.__doc__ or ""):
        pytest.skip("this Python has libedit")
    told = "import readline; readline.__doc__ = 'libedit'\n" if library == "libedit" else ""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", told + DRIVER, "chat", model],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ
        | {"PYTHONPATH": str(SOURCE), "TERM": "xterm", "HEADRACE_STATE": str(tmp_path)},
        start_new_session=True,
    )
    os.close(theirs)
    seen = b""

    def wait_for(text: bytes) -> None:
        nonlocal seen
        deadline = time.monotonic() + 30
        while text not in seen:
            ready, _, _ = select.select([ours], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"waited for {text!r}, saw {seen!r}"
            seen += os.read(ours, 4096)
        seen = seen.partition(text)[2]

    pasted = b"first line\nsecond line\nthird"
    try:
        wait_for(b">>> ")
        marked = b"\x1b[200~" + pasted + b"\x1b[201~\r"
        os.write(ours, marked if library == "gnu" else pasted + b"\n")
        wait_for(b"said: first line second line third")
        wait_for(b">>> ")
        os.write(ours, b"\x04")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    kept = tmp_path / "chat_history.jsonl"
    assert [json.loads(line) for line in kept.read_text().splitlines()] == [pasted.decode()]
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


def test_lines_that_come_at_once_are_joined_where_pastes_are_not_marked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    typed = ["one", "two", "three"]
    waiting = [True, False, False]
    monkeypatch.setattr("builtins.input", lambda prompt="": typed.pop(0))
    monkeypatch.setattr(TerminalLines, "_set_up", lambda self: None)
    monkeypatch.setattr(TerminalLines, "_more_waits", lambda self: waiting.pop(0))
    lines = TerminalLines(None, StringIO())
    assert [lines.read(">>> "), lines.read(">>> ")] == ["one\ntwo", "three"]
    assert lines_module.PROMPT == ">>> "


def test_the_history_is_private_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "state" / "history"
    history = History(path)
    assert history.load() == []
    assert [history.add(text) for text in ("a", "a", " ", "b\nc")] == [True, False, False, True]
    assert not history.add("x" * (MAX_ENTRY_CHARACTERS + 1))
    assert History(path).load() == ["a", "b\nc"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with path.open("a") as file:
        file.write("not JSON\n5\n" + "".join(f'"{n}"\n' for n in range(2 * MAX_ENTRIES)))
    path.chmod(0o644)
    kept = History(path).load()
    assert (len(kept), kept[-1]) == (MAX_ENTRIES, str(2 * MAX_ENTRIES - 1))
    assert len(path.read_text().splitlines()) == MAX_ENTRIES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_history_that_cannot_be_kept_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    history = History(tmp_path / "file" / "history")
    assert history.load() == []
    assert history.add("a")
    outside = tmp_path / "outside"
    outside.write_text("mine")
    link = tmp_path / "link"
    link.symlink_to(outside)
    History(link).add("never written there")
    assert outside.read_text() == "mine"


def test_no_history(
    invoke: Invoke, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_STATE", str(tmp_path / "state"))
    assert invoke("chat", model, "--no-history", typed="secret\n").exit_code == 0
    assert not (tmp_path / "state" / "chat_history.jsonl").exists()  # nor is one kept of a pipe
    assert invoke("chat", model, typed="secret\n").exit_code == 0
    assert not (tmp_path / "state" / "chat_history.jsonl").exists()
