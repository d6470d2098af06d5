"""Not one word of another engine is unknown: on the command line, in LLM(...), in a file, in a
variable. The table is the one that command lines are read with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from headrace import LLM, AsyncEngine
from headrace.cli.commands import app
from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError
from headrace.core.foreign.answers import find_keyword, understand
from headrace.core.foreign.engines import ENGINES
from headrace.core.foreign.topics import NEEDLESS, TOPICS
from headrace.core.foreign.values import COUNT, SHARE, Count, Names
from headrace.core.foreign.words import Word, plain
from headrace.core.settings import SettingsFile, resolve_settings

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def sample(word: Word) -> str | None:
    """A value that the word takes; None for one without."""
    if word.is_switch:
        return None
    if isinstance(word.kind, Count):
        return "1"
    if isinstance(word.kind, Names):
        return next(iter(word.kind.ours))
    if word.kind is SHARE:
        return "0.5"
    return {"drain_timeout_s": "1", "log_level": "info"}.get(word.field, "x")


def flags_of(engine: str) -> Iterator[tuple[str, Word]]:
    for word in ENGINES[engine].words:
        for flag in word.flags:
            if flag.startswith("-"):
                yield flag, word


def parsed(command: str, arguments: list[str]) -> dict[str, Any]:
    """What the command would be called with."""
    context = COMMANDS[command].make_context(command, arguments)
    return dict(context.params)


def problem(act: Callable[..., object], *arguments: object) -> Exception | None:
    try:
        act(*arguments)
    except Exception as error:
        return error
    return None


def is_answered(error: Exception | None) -> bool:
    return error is None or (isinstance(error, ConfigError) and bool(error.remedy))


@pytest.mark.parametrize("command", ["serve", "run", "chat"])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_flag_is_understood_or_answered(command: str, engine: str) -> None:
    own = {opt for param in COMMANDS[command].params for opt in param.opts}
    prompt = ["hello"] if command == "run" else []
    for flag, word in flags_of(engine):
        value = sample(word)
        given = [*prompt, flag, *([] if value is None else [value])]
        error = problem(parsed, command, given)
        assert "No such option" not in str(error)
        # A flag that is ours too may be given a value that only they have.
        assert is_answered(error) or flag in own, given
        if isinstance(error, ConfigError):
            assert flag in error.cause, given


@pytest.mark.parametrize("engine", ENGINES)
def test_every_keyword_is_understood_or_answered(engine: str) -> None:
    for flag, word in flags_of(engine):
        if flag.startswith("--") and not flag.startswith("--no-"):
            values = {plain(flag): True if word.is_switch else sample(word)}
            error = problem(EngineConfig.from_mapping, values)
            assert is_answered(error), values
            assert "Unknown" not in str(error), values


@pytest.mark.parametrize("engine", ENGINES)
def test_every_name_in_a_file_or_a_variable(engine: str) -> None:
    for flag, word in flags_of(engine):
        keyword, value = plain(flag), sample(word)
        if not flag.startswith("--") or flag.startswith("--no-"):
            continue
        tables = {"engine": {keyword: value or True}}
        file = SettingsFile(name="headrace.toml", values=tables)
        error = problem(resolve_settings, {}, {}, file)
        assert is_answered(error), tables
        assert "nknown" not in str(error) or "It belongs to" in str(error), tables
        variables = {f"HEADRACE_{keyword.upper()}": value or "1"}
        error = problem(resolve_settings, {}, variables)
        assert is_answered(error), variables
        assert "nknown" not in str(error), variables


UNDERSTOOD = [
    (["--max-model-len", "512"], {"context_tokens": 512}),
    (["--max-model-len=1K"], {"context_tokens": 1024}),
    (["--max_model_len", "512"], {"context_tokens": 512}),
    (["--max-model-len", "auto"], {"context_tokens": None}),
    (["--context-length", "512"], {"context_tokens": 512}),
    (["--session-len", "512"], {"context_tokens": 512}),
    (["--gpu-memory-utilization", "0.8"], {"gpu_memory": "0.8"}),
    (["--max-num-seqs", "4", "--max-num-batched-tokens", "64"], {
        "max_sequences": 4, "max_batch_tokens": 64}),
    (["-np", "4"], {"max_sequences": 4}),
    (["-tp", "2", "--pp-size", "3"], {"tensor_parallel": 2, "pipeline_parallel": 3}),
    (["--tensor-parallel-size", "1"], {"tensor_parallel": None}),
    (["--max-running-requests", "4"], {"max_sequences": 4}),
    (["--chunked-prefill-size", "64"], {"max_batch_tokens": 64}),
    (["--kv-cache-dtype", "fp8_e4m3"], {"kv_dtype": "fp8"}),
    (["--kv-cache-dtype", "auto"], {"kv_dtype": None}),
    (["-ctk", "f16", "-ctv", "f16"], {"kv_dtype": "f16"}),
    (["-q", "fp8"], {"quantization": "fp8"}),
    (["--quantization", "awq"], {"quantization": None}),
    (["--quantize", "gptq"], {"quantization": None}),
    (["--load-format", "safetensors"], {"load_format": None}),
    (["--generation-config", "vllm"], {"generation_config": "none"}),
    (["--enforce-eager"], {"graphs": "off"}),
    (["--disable-cuda-graph"], {"graphs": "off"}),
    (["--no-enforce-eager"], {"graphs": None}),
    (["--no-enable-prefix-caching"], {"no_prefix_cache": True}),
    (["--disable-radix-cache"], {"no_prefix_cache": True}),
    (["--enable-prefix-caching"], {"no_prefix_cache": False}),
    (["--enable-chunked-prefill", "--trust-remote-code"], {"context_tokens": None}),
    (["-tp", "1", "--pipeline-parallel-size", "1"], {"context_tokens": None}),
    (["-ngl", "0"], {"device": "cpu"}),
    (["-ngl", "99"], {"device": None}),
    (["--model-path", "smollm2"], {"model": "smollm2"}),
    (["--served-model-name", "a", "--server-port", "9"], {"served_model_name": "a", "port": 9}),
    (["--allowed-origins", '["https://a.example"]'], {"cors_origin": ["https://a.example"]}),
    (["--uvicorn-log-level", "trace"], {"log_level": "debug"}),
    (["--scheduling-policy", "priority"], {"policy": "priority"}),
    (["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}'],
     {"speculate": "ngram", "max_draft_tokens": 4}),
    (["--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens", "3"],
     {"speculate": "ngram", "max_draft_tokens": 3}),
    (["-md", "small.gguf", "--draft-max", "8"],
     {"speculate": "draft:small.gguf", "max_draft_tokens": 8}),
    (["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "5"],
     {"speculate": "ngram", "max_draft_tokens": 4}),
    (["--no-enable-lora", "--cpu-offload-gb", "0"], {"context_tokens": None}),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "expected"), UNDERSTOOD)
def test_flags_with_the_same_meaning(arguments: list[str], expected: dict[str, Any]) -> None:
    found = parsed("serve", arguments)
    assert {name: found[name] for name in expected} == expected


ANSWERED = [
    (["--tensor-split", "1,2"], "divides a model evenly", "--tensor-parallel"),
    (["--dtype", "fp8"], "fp8 is no type of activations", "--quantization fp8"),
    (["--dtype", "bfloat16"], "chooses the type", "--kv-dtype"),
    (["--no-enable-chunked-prefill"], "in chunks", "length of the context"),
    (["--chunked-prefill-size", "-1"], "in chunks", "length of the context"),
    (["--speculative-config", "{}"], "draft model with the method", "draft:MODEL"),
    (["--speculative-config.method", "eagle3"], "no heads", "--speculate auto"),
    (["--spec-type", "draft-mtp"], "no heads", "--speculate auto"),
    (["--mem-fraction-static", "0.8"], "weights and KV pool alone", "--gpu-memory"),
    (["-c", "4096"], "divides this context", "--context-tokens"),
    (["-ngl", "20"], "all layers on the GPU, or none", "--device cpu"),
    (["--kv-cache-dtype", "nvfp4"], "keeps keys and values as f32", "--kv-dtype"),
    (["--enable-lora"], "does not load adapters", "Merge"),
    (["--ssl-keyfile", "x"], "plain HTTP", "reverse proxy"),
    (["--download-dir", "/x"], "in its cache", "HEADRACE_CACHE"),
    (["--otlp-traces-endpoint", "x"], "OTEL_*", "--trace"),
    (["--max-model-len", "lots"], "expected a whole number", "Correct it"),
    (["--max-model-len"], "has no value", "Give --max-model-len a value"),
    (["--context-tokens", "5", "--max-model-len", "6"], "both set context_tokens", "Keep one"),
    (["--max-model-len", "5", "--context-length", "6"], "both set context_tokens", "Keep one"),
    (["-ctk", "f16", "-ctv", "f32"], "both set kv_dtype", "Keep one"),
    (["-O3"], "Headrace has no such setting", "Leave it out"),
]


@pytest.mark.parametrize(("arguments", "cause", "remedy"), ANSWERED)
def test_flags_that_are_answered(arguments: list[str], cause: str, remedy: str) -> None:
    result = CliRunner().invoke(app, ["serve", "--dry-run", *arguments])
    assert result.exit_code == 2
    assert cause in result.stderr
    assert remedy in result.stderr


def test_a_dry_run_shows_what_was_understood(default_model_path: Path) -> None:
    arguments = ["--max-model-len", "64", "--max-num-seqs", "2", "--no-enable-prefix-caching"]
    result = CliRunner().invoke(
        app, ["serve", "-m", str(default_model_path), "--dry-run", "--json", *arguments]
    )
    assert result.exit_code == 0, result.stderr
    settings = json.loads(result.stdout)["settings"]
    assert settings["context_tokens"]["value"] == 64
    assert settings["max_sequences"]["value"] == 2
    assert settings["prefix_cache"]["value"] is False


def test_what_stands_after_two_dashes_or_is_a_value_stays() -> None:
    assert parsed("run", ["--system", "--enforce-eager", "hello"])["system"] == "--enforce-eager"
    assert parsed("run", ["--", "--enforce-eager"])["prompt"] == "--enforce-eager"


def test_a_flag_of_the_server_says_so_elsewhere() -> None:
    result = CliRunner().invoke(app, ["run", "hello", "--server-port", "80"])
    assert "this is --port of `headrace serve`; `headrace run` does not have it" in result.stderr


def test_a_key_is_not_repeated() -> None:
    given = ["serve", "--api-keys", "s3cret", "--api-key", "other", "--dry-run"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2
    assert "both set api_key" in result.stderr
    assert "s3cret" not in result.stderr


@pytest.mark.parametrize("made", [LLM, AsyncEngine])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"tensor_parallel_size": 2, "device": "cpu"}, "tensor_parallel is 2; the CPU backend"),
        ({"dtype": "fp8"}, "fp8 is no type of activations"),
        ({"enable_lora": True}, "does not load adapters"),
        ({"max_model_len": 5, "context_tokens": 6}, "max_model_len and context_tokens are given"),
        ({"context_tokens": 6, "max_model_len": 6}, "context_tokens and max_model_len are given"),
        ({"port": 80}, "port is port here, a setting of the server and not of an engine"),
        ({"model_path": "x"}, "model_path is given; expected model"),
        ({"max_model_lenn": 5}, "Unknown engine setting 'max_model_lenn'"),
    ],
)
def test_a_program_gets_the_same_answers(
    made: Any, settings: dict[str, object], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        made("/absent.gguf", **settings)
    assert expected in caught.value.cause
    assert caught.value.remedy


def test_a_program_written_for_vllm(default_model_path: Path) -> None:
    with LLM(
        model=default_model_path,
        max_model_len=64,
        max_num_seqs=2,
        gpu_memory_utilization=0.8,
        tensor_parallel_size=1,
        enable_prefix_caching=False,
        enforce_eager=True,
        trust_remote_code=True,
        dtype="auto",
        quantization=None,
        kv_cache_dtype="auto",
        enable_lora=False,
    ) as llm:
        assert llm.context_tokens == 64
        assert llm._assembled.runner.limits.max_sequences == 2


def test_a_file_and_variables() -> None:
    file = SettingsFile(
        name="headrace.toml",
        values={"engine": {"max_model_len": 64}, "server": {"allowed_origins": ["http://a.b"]}},
    )
    found = resolve_settings({}, {"HEADRACE_ENFORCE_EAGER": "1"}, file)
    assert (found.engine.context_tokens, found.engine.graphs) == (64, "off")
    assert found.server.cors_origin == ("http://a.b",)
    assert found.origins["graphs"] == "HEADRACE_ENFORCE_EAGER"
    found = resolve_settings({"context_tokens": 32}, {"HEADRACE_MAX_MODEL_LEN": "128"}, file)
    assert found.engine.context_tokens == 32  # a flag, then a variable, then the file
    wrong = SettingsFile(name="headrace.toml", values={"server": {"max_model_len": 64}})
    with pytest.raises(ConfigError, match="max_model_len is context_tokens here, which does not"):
        resolve_settings({}, {}, wrong)
    twice = {"HEADRACE_MAX_MODEL_LEN": "5", "HEADRACE_CONTEXT_TOKENS": "6"}
    with pytest.raises(ConfigError, match="context_tokens is set twice"):
        resolve_settings({}, twice)


def test_answers_for_all_topics_and_reasons_for_all_that_is_needless() -> None:
    used = {word.topic for engine in ENGINES.values() for word in engine.words if word.topic}
    assert used == set(TOPICS)
    for name in NEEDLESS:
        found = find_keyword(name)
        assert found is not None
        assert understand(found[0], None if found[0].is_switch else "x", name) == {}


def test_numbers() -> None:
    read = {text: COUNT.read(text) for text in ("7", "8k", "8K", "25.6k", "1M", "-1", "auto")}
    assert list(read.values()) == [7, 8000, 8192, 25600, 1 << 20, None, None]
    for text in ("", "1.5", "x", "k", True):
        with pytest.raises(ValueError, match="whole number"):
            COUNT.read(text)
