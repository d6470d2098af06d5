"""The command line with a stand-in for the model: what goes where, and with which exit status."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.cli_harness import SOURCE, Invoke, Terminal, converse, start

from headrace.cli.chat import ChatSession
from headrace.core.config import Device, EngineConfig, KvDtype, Policy
from headrace.core.errors import ContextLengthError
from headrace.core.request import SamplingParams

LONG = ["--max-tokens", "300", "--context-tokens", "999"]


# run


def test_run_puts_the_answer_alone_on_stdout(invoke: Invoke, model: str, fake: ModuleType) -> None:
    result = invoke("run", "hello there", "-m", model, "--stats", "--system", "be kind")
    assert (result.exit_code, result.stdout) == (0, "said: hello there\n")
    assert result.stderr.startswith("stats: prompt 6 tokens, answer 3 tokens")
    assert "computed by 1.1 of 2 threads\na ledger" in result.stderr
    assert fake.LLM.asked[0][0] == "<system> be kind <user> hello there"


def test_run_passes_every_option(invoke: Invoke, model: str, fake: ModuleType) -> None:
    options = "--temperature 0.5 --top-p 0.6 --top-k 7 --min-p 0.1 --seed 9 --max-tokens 3"
    machine = "--threads 2 --device reference --context-tokens 64 --offline"
    pool = "--kv-memory 1.5GiB --kv-dtype f32 --max-batch-tokens 100 --max-sequences 3"
    order = "--policy shortest --no-prefix-cache --debug-invariants"
    machine = f"{machine} {pool} {order}"
    stops = ["--stop", "a b", "--stop", "c"]
    result = invoke("run", "x y z", "-m", model, *options.split(), *machine.split(), *stops)
    assert result.exit_code == 0, result.output
    assert fake.LLM.asked[0][1] == SamplingParams(
        temperature=0.5, top_p=0.6, top_k=7, min_p=0.1, seed=9, max_tokens=3, stop=("a b", "c")
    )
    [made] = fake.LLM.made
    assert callable(made.pop("progress"))
    assert fake.LLM.made == [
        {
            "model": model,
            "config": EngineConfig(
                device=Device.REFERENCE,
                threads=2,
                context_tokens=64,
                kv_memory=3 << 29,
                kv_dtype=KvDtype.F32,
                max_batch_tokens=100,
                max_sequences=3,
                policy=Policy.SHORTEST,
                prefix_cache=False,
                debug_invariants=True,
            ),
            "offline": True,
        }
    ]


@pytest.mark.parametrize("arguments", [["-"], []])
def test_run_reads_standard_input(invoke: Invoke, model: str, arguments: list[str]) -> None:
    result = invoke("run", *arguments, "-m", model, typed="from a\npipe é\n")
    assert (result.exit_code, result.stdout) == (0, "said: from a pipe é\n")


def test_run_raw_takes_no_template(
    invoke: Invoke, model: str, fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake.LLM, "template", None)
    assert invoke("run", "--raw", "once upon", "-m", model).exit_code == 0
    assert fake.LLM.asked[0][0] == "once upon"
    refused = invoke("run", "once upon", "-m", model)
    assert refused.exit_code == 2
    assert "no chat template" in refused.stderr
    assert "--raw" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "typed", "cause"),
    [
        (["run", ""], None, "The prompt is empty"),
        (["run", " \n"], None, "The prompt is empty"),
        (["run", "-"], "", "The prompt is empty"),
        (["run", "-"], b"\xff\xfe", "not UTF-8 (byte 0)"),
        (["run", "x", "--max-tokens", "0"], None, "max_tokens is 0"),
        (["run", "x", "--temperature", "-1"], None, "temperature is -1.0"),
        (["run", "x", "--top-p", "0"], None, "top_p is 0.0"),
        (["run", "x", "--top-p", "1.5"], None, "top_p is 1.5"),
        (["run", "x", "--temperature", "nan"], None, "temperature is nan"),
        (["run", "x", "--seed", "-1"], None, "seed is -1"),
        (["run", "x", "--stop", ""], None, "stop is"),
        (["run", "x", "--raw", "--system", "y"], None, "--raw"),
        (["run", "x", "--kv-memory", "4 parsecs"], None, "kv_memory is '4 parsecs'; expected"),
        (["run", "x", "--kv-fraction", "1.5"], None, "kv_fraction is 1.5; expected"),
        (["run", "x", "--kv-tokens", "9", "--kv-fraction", "1"], None, "kv_tokens and kv_fraction"),
        (["run", "x", "--max-batch-tokens", "0"], None, "max_batch_tokens is 0"),
        (["run", "x", "-m", "smolm2"], None, "similar names: smollm2"),
        (["run", "x", "-m", "./absent.gguf"], None, "no file or folder './absent.gguf'"),
        (["run", "x", "--offline", "-m", "smollm2"], None, "fetching is turned off"),
        (["models", "pull", "smol"], None, "similar names: smollm2"),
        (["models", "rm", "none"], None, "no model named 'none'"),
        (["models", "verify", "smollm2"], None, "not in the cache"),
    ],
)
def test_bad_input_is_two_lines_and_status_2(
    invoke: Invoke, model: str, fake: ModuleType, arguments: list[str], typed: Any, cause: str
) -> None:
    extra = [] if arguments[0] != "run" or "-m" in arguments else ["-m", model]
    result = invoke(*arguments, *extra, typed=typed)
    assert result.exit_code == 2
    assert result.stdout == ""
    first, second = result.stderr.splitlines()
    assert first.startswith("error: ")
    assert cause in first
    assert second.startswith("  try: ")
    assert fake.LLM.made == []  # refused before a model was loaded


def test_a_prompt_past_the_context_gives_both_numbers(invoke: Invoke, model: str) -> None:
    result = invoke("run", "word " * 120, "-m", model)
    assert result.exit_code == 2
    assert "maximum context length is 100 tokens" in result.stderr
    assert "resulted in 121 tokens" in result.stderr


def test_a_length_that_does_not_fit_is_refused_and_none_is_fitted(
    invoke: Invoke, model: str, fake: ModuleType
) -> None:
    result = invoke("run", "word " * 20, "-m", model, "--max-tokens", "90")
    assert result.exit_code == 2
    assert "you requested 111 tokens (21 in the prompt, 90 in the completion)" in result.stderr
    assert "Lower --max-tokens to 79 or less" in result.stderr
    assert result.stdout == ""
    assert invoke("run", "word " * 20, "-m", model, "--max-tokens", "79").exit_code == 0
    assert invoke("run", "word " * 20, "-m", model).exit_code == 0
    # In a session it is a bound, and an answer that the context cuts says so.
    assert invoke("chat", model, "--max-tokens", "90", typed="word " * 20).exit_code == 0


def test_a_cut_answer_is_said(invoke: Invoke, model: str) -> None:
    result = invoke("run", "word " * 60, "-m", model)
    assert result.stdout.count("word") == 38  # 100 - 61 tokens of room, one of them "said:"
    assert "note: the answer is cut at 39 tokens; --max-tokens" in result.stderr


def test_unknown_options_and_commands_are_usage_errors(invoke: Invoke) -> None:
    assert invoke("run", "x", "--no-such").exit_code == 2
    assert invoke("no-such").exit_code == 2
    assert invoke("run", "x", "--device", "abacus").exit_code == 2


@pytest.mark.parametrize("command", [["run", "x"], ["chat"], ["serve"]])
def test_the_old_name_of_device_answers_with_the_new_one(
    invoke: Invoke, fake: ModuleType, command: list[str]
) -> None:
    result = invoke(*command, "--backend", "reference")
    assert result.exit_code == 2
    assert "'--backend reference' is now '--device reference'." in result.stderr
    result = invoke(*command, "--backend", "abacus")
    assert "this setting is now 'device', one of auto, cpu, cuda, reference." in result.stderr
    assert "Write '--device auto', for example." in result.stderr
    assert fake.LLM.made == []
    assert "--backend" not in invoke(command[0], "--help").output


def test_what_is_not_given_is_left_to_the_model(
    invoke: Invoke, fake: ModuleType, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.fetch import catalog, resolve

    monkeypatch.setattr(resolve, "is_cached", lambda _: True)
    assert invoke("run", "x").exit_code == 0
    entry = catalog.CATALOG[catalog.DEFAULT_NAME]
    # Left open: the LLM knows the model's own (tests/weights/test_habits.py).
    params = fake.LLM.asked[0][1]
    assert (params.temperature, params.top_p, params.top_k) == (None, None, None)
    assert fake.LLM.made[0]["model"] == str(empty_cache / "models" / entry.file_name)


def test_an_unexpected_failure_is_status_1_and_one_cause(model: str) -> None:
    process = start("run", "boom", "-m", model)
    out, said = process.communicate(timeout=30)
    assert (process.returncode, out) == (1, b"")
    assert said.startswith(b"error: unexpected ZeroDivisionError: made to fail\n  try: ")
    assert b"Traceback" not in said
    process = start("run", "boom", "-m", model, HEADRACE_DEBUG="1")
    assert b"Traceback" in process.communicate(timeout=30)[1]


def test_a_reader_that_leaves_is_no_error(model: str) -> None:
    process = start("run", "slow", "--no-stdin", "-m", model, *LONG)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(4) == b"said"
    process.stdout.close()
    assert process.wait(timeout=30) == 141
    assert process.stderr.read() == b""
    process.communicate()


def test_ctrl_c_in_run_is_status_130(model: str) -> None:
    process = start("run", "slow", "--no-stdin", "-m", model, *LONG)
    assert process.stdout is not None
    process.stdout.read(4)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, b"")


def test_help_and_version_are_quick() -> None:
    """Nothing heavy is imported; a time would depend on the machine."""
    code = (
        "import sys\nfrom headrace.cli.commands import main\nsys.argv = ['headrace', sys.argv[1]]\n"
        "try:\n    main()\nfinally:\n    print(sorted(sys.modules), file=sys.stderr)"
    )
    heavy = ["numpy", "torch", "tokenizers", "jinja2", "huggingface_hub", "rich.progress"]
    for flag in ("--help", "--version"):
        done = subprocess.run(
            [sys.executable, "-c", code, flag],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": str(SOURCE)},
            timeout=30,
            check=True,
        )
        assert "headrace" in done.stdout
        assert [name for name in heavy if f"'{name}'" in done.stderr] == []


# chat


def test_chat_keeps_history_until_reset(fake: ModuleType) -> None:
    out, _ = converse(fake, ["one", "two", "/reset", "three"], system="be kind")
    assert out == "said: one\nsaid: two\nsaid: three\n"
    assert [prompt for prompt, _ in fake.LLM.asked] == [
        "<system> be kind <user> one",
        "<system> be kind <user> one <assistant> said: one <user> two",
        "<system> be kind <user> three",
    ]


def test_chat_commands(fake: ModuleType) -> None:
    lines = ["/help", "/stats", "hi", "/stats", "/nonsense", "/system", "/system be brief", "//x"]
    out, notes = converse(fake, [*lines, "", "/exit", "never said"])
    assert out == "said: hi\nsaid: /x\n"
    for expected in (
        "/reset",
        "conversation: 0 of 100 tokens, 0 messages",
        "conversation: 5 of 100 tokens, 2 messages",
        "last answer: prompt 2 tokens, answer 2 tokens",
        "Unknown command /nonsense",
        "none set",
    ):
        assert expected in notes
    assert fake.LLM.asked[-1][0] == "<system> be brief <user> hi <assistant> said: hi <user> /x"


def test_ctrl_c_stops_the_answer_and_not_the_session(fake: ModuleType) -> None:
    before = signal.getsignal(signal.SIGINT)
    out, notes = converse(fake, ["please interrupt this", "next"])
    assert out == "said: please interrupt\nsaid: next\n"
    assert "(stopped)" in notes
    assert fake.LLM.closed == 2  # the generators were closed: the work behind them ends
    # What was seen is part of the conversation.
    assert "<assistant> said: please interrupt <user> next" in fake.LLM.asked[1][0]
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_twice_at_the_prompt_leaves(fake: ModuleType) -> None:
    class Impatient(Terminal):
        script = ["hi\n", "^C", "still here\n", "^C", "^C", "never read\n"]  # noqa: RUF012

        def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
            line = self.script.pop(0)
            if line == "^C":
                raise KeyboardInterrupt
            return line

    out, notes = StringIO(), StringIO()
    source = Impatient()
    params = SamplingParams()
    ChatSession(fake.LLM(), params, source=source, out=out, notes=notes).run()
    assert out.getvalue() == "said: hi\nsaid: still here\n"
    assert notes.getvalue().count("Ctrl-C again") == 2
    assert source.script == ["never read\n"]
    assert notes.getvalue().endswith("Bye.\n")


def test_a_conversation_that_outgrows_the_context_is_not_cut(fake: ModuleType) -> None:
    # 1 + 4 tokens asked, 5 answered with their mark 6; the next message makes 11 + 1 + 8 = 20.
    lines = ["a b c d", "1 2 3 4 5 6 7 8", "e", "/reset", "f"]
    out, notes = converse(fake, lines, context=20)
    assert "With this message the conversation is 20 tokens, and the context holds 20." in notes
    assert "/reset" in notes
    asked = [prompt for prompt, _ in fake.LLM.asked]
    # The refused message is not kept, the rest is whole, and the next one goes on from there.
    assert asked[1:] == ["<user> a b c d <assistant> said: a b c d <user> e", "<user> f"]
    assert out == "said: a b c d\nsaid: e\nsaid: f\n"


def test_an_answer_that_fills_the_context_is_said_to_be_cut(fake: ModuleType) -> None:
    out, notes = converse(fake, ["a b c d e f g"], context=12)
    assert out == "said: a b c\n"
    assert "the conversation is 12 tokens and the context holds 12; /reset" in notes


def test_control_sequences_are_shown_on_a_terminal_and_passed_to_a_pipe(
    fake: ModuleType, invoke: Invoke, model: str
) -> None:
    out, _ = converse(fake, ["escape"])
    assert out == "said: escape \\x1b[31m\n"
    assert invoke("run", "escape", "-m", model).stdout == "said: escape \x1b[31m\n"


def test_chat_through_a_pipe(invoke: Invoke, model: str, fake: ModuleType) -> None:
    result = invoke("chat", model, "--system", "s", typed="hi\n/reset\nlast line")
    assert (result.exit_code, result.stdout) == (0, "said: hi\nsaid: last line\n")
    assert ">>>" not in result.output


def test_chat_through_a_pipe_fails_with_a_status(invoke: Invoke, model: str) -> None:
    result = invoke("chat", model, typed="word " * 120 + "\nnever asked\n")
    assert result.exit_code == 2
    assert "121 tokens" in result.stderr
    assert result.stdout == ""


def test_chat_errors_leave_the_history_as_it_was(
    fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = fake.LLM.stream

    def refuse(self: Any, ids: list[int], params: SamplingParams, **more: Any) -> Any:
        if len(fake.LLM.asked) == 1:
            fake.LLM.asked.append(("refused", params))
            raise ContextLengthError("too long: 3 of 2.", "Shorten it.")
        return stream(self, ids, params, **more)

    monkeypatch.setattr(fake.LLM, "stream", refuse)
    out, notes = converse(fake, ["one", "two", "three"])
    assert out == "said: one\nsaid: three\n"
    assert "too long: 3 of 2." in notes
    assert fake.LLM.asked[-1][0] == "<user> one <assistant> said: one <user> three"


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_chat_at_a_real_terminal(model: str) -> None:
    """Keys typed at a pseudo-terminal: ^C within an answer, then an answer, then ^C twice."""
    import pty

    ours, theirs = pty.openpty()
    arguments = ("chat", model, "--max-tokens", "300", "--context-tokens", "9999")
    process = start(*arguments, terminal=theirs, CONTROLLING="1", TERM="dumb")
    os.close(theirs)
    seen = b""

    def wait_for(text: bytes, patience_s: float = 20) -> bool:
        """Whether it came; what came up to and with it is then forgotten."""
        nonlocal seen
        deadline = time.monotonic() + patience_s
        while text not in seen:
            ready, _, _ = select.select([ours], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return False
            seen += os.read(ours, 4096)
        seen = seen.partition(text)[2]
        return True

    def press_until(text: bytes) -> bool:
        # CPython misses a signal that comes just before readline begins to wait: press again.
        for _ in range(10):
            os.write(ours, b"\x03")
            if wait_for(text, 2):
                return True
        return False

    try:
        for typed, expected in (
            (b"", b">>> "),
            (b"slow\n", b"said: slow 0 1"),
            (b"\x03", b"(stopped)"),
            (b"", b">>> "),
            (b"hello\n", b"said: hello"),
            (b"", b">>> "),
        ):
            os.write(ours, typed)
            assert wait_for(expected), f"waited for {expected!r}, saw {seen!r}"
        assert press_until(b"Ctrl-C again"), seen
        assert process.poll() is None
        assert press_until(b"Bye."), seen
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


# models


def test_models_lists_with_and_without_list(invoke: Invoke, empty_cache: Path) -> None:
    from headrace.fetch.catalog import CATALOG, cached_path

    bare, listed = invoke("models"), invoke("models", "list")
    assert bare.exit_code == 0
    assert bare.stdout == listed.stdout
    heading, row, *_ = bare.stdout.splitlines()
    assert heading.split()[0] == "NAME"
    columns = ["smollm2-135m-instruct", "smollm2", "98.4", "MB", "Q4_1", "8192", "Apache-2.0"]
    assert row.split() == [*columns, "no"]
    path = cached_path(CATALOG["smollm2-135m-instruct"])
    path.parent.mkdir(parents=True)
    path.write_bytes(b"short")
    assert invoke("models").stdout.splitlines()[1].split()[-1] == "damaged"
    with path.open("r+b") as file:
        file.truncate(98_362_432)  # sparse: the right size, and not the right bytes
    assert invoke("models").stdout.splitlines()[1].split()[-1] == "yes"
    assert "is damaged or a different file: its sha256 is" in invoke("models", "verify").stderr
    assert "98.4 MB freed" in invoke("models", "rm", "smollm2", "--yes").stderr
    assert not path.exists()
    assert "not in the cache" in invoke("models", "rm", "smollm2", "--yes").stderr
    assert "nothing is cached" in invoke("models", "verify").stderr


def test_models_pull_honours_offline(
    invoke: Invoke, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_OFFLINE", "1")
    for name in ([], ["smollm2"]):  # no name is the default model's
        result = invoke("models", "pull", *name)
        assert result.exit_code == 2
        assert "smollm2-135m-instruct is not in the cache" in result.stderr


def test_models_pull_from_a_file(
    invoke: Invoke, empty_cache: Path, default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_OFFLINE", "1")  # nothing is fetched, so nothing forbids it
    result = invoke("models", "pull", "smollm2", "--from", str(default_model_path))
    assert result.exit_code == 0, result.output
    arrived = Path(result.stdout.strip())
    assert arrived.parent == empty_cache / "models"
    assert arrived.read_bytes() == default_model_path.read_bytes()
    assert "unpacking" in result.stderr
