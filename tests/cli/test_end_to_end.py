"""The command line with the real default model: installed code, real files, separate processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.fetch.catalog import CATALOG, DEFAULT_NAME, cached_path

MAIN = "import sys; sys.argv[0] = 'headrace'; from headrace.cli.commands import main; main()"
QUESTION = "What is the capital of France? Answer in one short sentence."
GREEDY = ("--temperature", "0", "--max-tokens", "24")


def headrace(*arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", MAIN, *arguments],
        input=typed,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=os.environ | {"HEADRACE_OFFLINE": "1"},  # the model is here: nothing may be fetched
        timeout=120,
        check=False,
    )


@pytest.mark.usefixtures("default_model_path")
def test_run_answers_and_repeats_itself() -> None:
    first = headrace("run", QUESTION, *GREEDY, "--stats")
    assert first.returncode == 0, first.stderr
    assert "Paris" in first.stdout
    assert "first token after" in first.stderr
    assert "Traceback" not in first.stderr
    again = headrace("run", "-", *GREEDY, typed=QUESTION)
    assert again.stdout == first.stdout


@pytest.mark.usefixtures("default_model_path")
def test_run_with_a_seed_repeats_itself() -> None:
    seeded = ("run", "Tell me a story.", "--temperature", "1", "--max-tokens", "16", "--seed", "7")
    first, again = headrace(*seeded), headrace(*seeded)
    assert first.returncode == 0, first.stderr
    assert first.stdout.strip()
    assert first.stdout == again.stdout


def test_run_reads_any_gguf_file(default_model_path: Path, tmp_path: Path) -> None:
    blob = tmp_path / "blob"  # as in other tools' caches: no suffix
    blob.symlink_to(default_model_path)
    done = headrace("run", "--raw", "One, two, three,", "-m", str(blob), *GREEDY)
    assert done.returncode == 0, done.stderr
    assert "four" in done.stdout


@pytest.mark.usefixtures("default_model_path")
def test_run_ends_at_a_stop_string() -> None:
    counted = ("run", "--raw", "One, two, three,", *GREEDY)
    whole, cut = headrace(*counted), headrace(*counted, "--stop", "four")
    assert cut.returncode == 0, cut.stderr
    assert cut.stdout.rstrip("\n") == whole.stdout.partition("four")[0].rstrip("\n")


@pytest.mark.usefixtures("default_model_path")
def test_chat_remembers_and_forgets() -> None:
    lines = "My name is Zebedee.\nWhat is my name?\n/reset\nWhat is my name?\n/stats\n"
    done = headrace("chat", *GREEDY, typed=lines)
    assert done.returncode == 0, done.stderr
    _, remembered, forgotten = done.stdout.strip("\n").split("\n", 2)
    assert "Zebedee" in remembered
    assert "Zebedee" not in forgotten
    assert "of 8192 tokens" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.usefixtures("default_model_path")
def test_ctrl_c_stops_an_answer_and_the_next_one_is_whole() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "chat", "--temperature", "0", "--max-tokens", "500"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"Write a very long story about a river and a mill.\n")
    process.stdin.flush()
    begun = process.stdout.read(8)
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(b"/reset\n" + QUESTION.encode() + b"\n", timeout=120)
    assert process.returncode == 0, said
    assert said.decode().splitlines()[:2] == ["(stopped)", "The conversation is forgotten."]
    alone = headrace("run", QUESTION, "--temperature", "0", "--max-tokens", "500").stdout
    assert (begun + out).decode().endswith("\n" + alone)


@pytest.mark.usefixtures("default_model_path")
def test_a_prompt_past_the_context_gives_both_numbers() -> None:
    done = headrace("run", "--raw", "-", "--context-tokens", "64", typed="word " * 100)
    assert (done.returncode, done.stdout) == (2, "")
    assert "64" in done.stderr
    assert "10" in done.stderr  # a hundred and some tokens
    assert done.stderr.startswith("error: ")


def test_info_knows_this_machine_and_the_model(default_model_path: Path) -> None:
    done = headrace("info", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["model"]["path"] == str(default_model_path)
    assert facts["model"]["layers"] == 30
    assert facts["machine"]["cpu"]
    assert 1 <= facts["machine"]["threads"] <= (os.cpu_count() or 1)
    assert 0 < facts["machine"]["memory_available_bytes"] <= facts["machine"]["memory_total_bytes"]


def test_info_gives_the_ledger_without_loading(default_model_path: Path) -> None:
    shown = headrace("info", "--ledger").stdout
    assert "a token's KV: 2 × 30 layers × 3 KV heads × 64 × 2 bytes (f16) = 23,040 bytes" in shown
    facts = json.loads(headrace("info", "--ledger", "--json").stdout)["ledger"]
    assert facts["kv_pool_bytes"] == facts["kv_tokens"] * 23_040
    assert facts["total_bytes"] < facts["available_bytes"]


def test_what_does_not_fit_shows_the_ledger_and_what_would(default_model_path: Path) -> None:
    done = headrace("run", "x", "--kv-memory", "20MiB", "--context-tokens", "8192")
    assert (done.returncode, done.stdout) == (2, "")
    first, *table, last = done.stderr.splitlines()
    assert first.startswith("error: A context of 8,192 tokens needs a KV pool of 180.0 MiB")
    assert [line.split()[0] for line in table[:2]] == ["weights", "KV"]
    assert last == "  try: Set --kv-memory 180MiB, or --context-tokens 896."


def test_a_damaged_model_is_told_and_not_run(default_model_path: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    with default_model_path.open("rb") as file:
        short.write_bytes(file.read(1 << 20))
    done = headrace("run", "hello", "-m", str(short))
    assert (done.returncode, done.stdout) == (2, "")
    assert "short.gguf" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_fixture_is_the_cached_catalog_file(default_model_path: Path) -> None:
    assert default_model_path == cached_path(CATALOG[DEFAULT_NAME])
