"""Command lines as people write them, read as deployments."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.core.errors import ConfigError
from headrace.dialects import Deployment, Speculation, read_command

READ: list[tuple[str, str, dict[str, Any]]] = [
    (
        "vllm serve meta-llama/Llama-3.1-8B --max-model-len 8k -tp 2 --gpu_memory_utilization=0.85",
        "vllm",
        {
            "model": "meta-llama/Llama-3.1-8B",
            "context_tokens": 8000,
            "tensor_parallel": 2,
            "gpu_memory": 0.85,
        },
    ),
    ("vllm serve a/b --max-model-len 8K", "vllm", {"model": "a/b", "context_tokens": 8192}),
    ("vllm serve a/b --max-model-len auto", "vllm", {"model": "a/b"}),
    (
        "vllm serve a/b --no-enable-prefix-caching --enforce-eager --max-num-seqs 16 -q fp8",
        "vllm",
        {
            "model": "a/b",
            "prefix_cache": False,
            "eager": True,
            "max_sequences": 16,
            "quantization": "fp8",
        },
    ),
    (
        "vllm serve a/b --speculative-config.method ngram "
        "--speculative-config.num_speculative_tokens 4",
        "vllm",
        {"model": "a/b", "speculation": Speculation(method="ngram", tokens=4)},
    ),
    (
        "docker run --gpus all -p 8000:8000 vllm/vllm-openai:v0.32.0 --model a/b -tp=4",
        "vllm",
        {"model": "a/b", "tensor_parallel": 4},
    ),
    (
        "python3 -m vllm.entrypoints.openai.api_server \\\n --model a/b \\\n --port 9000 | tee log",
        "vllm",
        {"model": "a/b", "port": 9000},
    ),
    (
        "python3 -m sglang.launch_server --model-path a/b --tp 4 --mem-fraction-static 0.85 "
        "--chunked-prefill-size -1 --disable-cuda-graph --disable-radix-cache",
        "sglang",
        {
            "model": "a/b",
            "tensor_parallel": 4,
            "static_memory": 0.85,
            "chunked_prefill": False,
            "eager": True,
            "prefix_cache": False,
        },
    ),
    (
        "sglang serve --model-path a/b --speculative-algorithm EAGLE3 "
        "--speculative-draft-model-path c/d --speculative-num-draft-tokens 4",
        "sglang",
        {"model": "a/b", "speculation": Speculation(method="eagle3", draft="c/d", tokens=3)},
    ),
    (
        "PREFIX_CACHING=0 text-generation-launcher --model-id a/b --num-shard 2 "
        "--max-total-tokens 4096 --cuda-graphs 0",
        "tgi",
        {
            "model": "a/b",
            "tensor_parallel": 2,
            "context_tokens": 4096,
            "prefix_cache": False,
            "eager": True,
        },
    ),
    (
        "./llama-server -m model.gguf -c 32768 -np 4 -ngl 20 -ctk q8_0 -ctv q8_0 -fa on",
        "llama.cpp",
        {
            "model": "model.gguf",
            "context_tokens": 8192,
            "max_sequences": 4,
            "gpu_layers": 20,
            "kv_dtype": "q8_0",
        },
    ),
    (
        "llama-server -hf org/model-GGUF:Q4_K_M -c 16384",
        "llama.cpp",
        {
            "model": "org/model-GGUF",
            "quantization": "q4_k_m",
            "context_tokens": 16384,
            "kv_tokens": 16384,
        },
    ),
    (
        "llama-server -m m.gguf -sm row -ts 3,1",
        "llama.cpp",
        {"model": "m.gguf", "tensor_parallel": 2},
    ),
    (
        "lmdeploy serve api_server a/b --tp 2 --quant-policy 8 --cache-max-entry-count 0.5",
        "lmdeploy",
        {"model": "a/b", "tensor_parallel": 2, "kv_dtype": "int8", "kv_fraction": 0.5},
    ),
    (
        "trtllm-serve a/b --tp_size 2 --max_seq_len 4096 --max_batch_size 8",
        "trtllm",
        {"model": "a/b", "tensor_parallel": 2, "context_tokens": 4096, "max_sequences": 8},
    ),
    (
        'FROM llama3\nPARAMETER num_ctx 4096\nSYSTEM """\nFROM here on be kind\n"""',
        "ollama",
        {"model": "llama3", "context_tokens": 4096},
    ),
    (
        "headrace serve a/b --context-tokens 2048 --graphs off --gpu-memory 60GiB",
        "headrace",
        {"model": "a/b", "context_tokens": 2048, "eager": True, "gpu_memory_bytes": 60 << 30},
    ),
]


@pytest.mark.parametrize(("text", "engine", "expected"), READ)
def test_command_lines(text: str, engine: str, expected: dict[str, Any]) -> None:
    reading = read_command(text)
    assert reading.engine.name == engine
    assert reading.deployment == Deployment(**expected)
    assert reading.unknown == ()


def test_dtype_fp8_is_a_wrong_flag_and_said_to_be() -> None:
    reading = read_command("vllm serve a/b --dtype fp8")
    assert reading.deployment == Deployment(model="a/b", quantization="fp8")
    assert "--quantization fp8" in reading.notes[0]


def test_llama_contexts_are_explained() -> None:
    (note,) = read_command("llama-server -m m.gguf -c 8192 -np 4").notes
    assert "2,048" in note
    (note,) = read_command("llama-server -m m.gguf -c 8192 -np 4 -kvu").notes
    assert "all 4 slots share" in note


def test_what_is_not_understood_is_named() -> None:
    reading = read_command(
        "vllm serve a/b --tool-call-parser hermes --api-key secret --bogus 3 --max-model-len 100"
    )
    assert reading.unknown == ("--bogus",)
    assert reading.others == (("--tool-call-parser", "hermes"), ("--api-key", "***"))
    assert reading.deployment.context_tokens == 100


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "begins with 'nothing'"),
        ("nginx -g x", "begins with 'nginx -g x'"),
        ("vllm serve 'a", "can't be read"),
        ("vllm serve a --max-model-len", "has no value"),
        ("vllm serve a --max-model-len --port 3", "has no value"),
        ("vllm serve a --max-model-len many", "expected a whole number"),
        ("vllm serve a --gpu-memory-utilization 90", "expected a fraction"),
        ("vllm serve a --speculative-config eagle", "expected a JSON object"),
        ("docker run ubuntu ls", "image is not one"),
    ],
)
def test_command_lines_that_are_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_command(text)
    assert expected in caught.value.cause
    assert caught.value.remedy
