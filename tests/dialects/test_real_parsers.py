"""What we write for an engine is accepted by that engine's own parser, and our table of its words
is that parser's. Needs the engines (make test-engines); skipped where they are not."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.dialects.engines import PARSERS, python_with

from headrace.core.foreign.engines import ENGINES
from headrace.dialects import Deployment, Speculation, emit

SCRIPT = Path(__file__).parent / "scripts" / "parse_with.py"
LIMIT_S = 300
# A field, its value, and what it is to each engine: (name of the parsed value, value).
CASES: list[tuple[dict[str, Any], dict[str, tuple[str, object]]]] = [
    ({"tensor_parallel": 2}, {"vllm": ("tensor_parallel_size", 2), "sglang": ("tp_size", 2),
                              "lmdeploy": ("tp", 2)}),
    ({"pipeline_parallel": 2}, {"vllm": ("pipeline_parallel_size", 2), "sglang": ("pp_size", 2)}),
    ({"replicas": 3}, {"vllm": ("data_parallel_size", 3), "sglang": ("dp_size", 3),
                       "lmdeploy": ("dp", 3)}),
    ({"context_tokens": 8192}, {"vllm": ("max_model_len", 8192), "sglang": ("context_length", 8192),
                                "lmdeploy": ("session_len", 8192)}),
    ({"max_sequences": 64}, {"vllm": ("max_num_seqs", 64), "sglang": ("max_running_requests", 64),
                             "lmdeploy": ("max_batch_size", 64)}),
    ({"max_batch_tokens": 4096}, {"vllm": ("max_num_batched_tokens", 4096),
                                  "sglang": ("chunked_prefill_size", 4096),
                                  "lmdeploy": ("max_prefill_token_num", 4096)}),
    ({"quantization": "fp8"}, {"vllm": ("quantization", "fp8"), "sglang": ("quantization", "fp8"),
                               "lmdeploy": ("model_format", "fp8")}),
    ({"quantization": "awq"}, {"vllm": ("quantization", "awq"), "sglang": ("quantization", "awq"),
                               "lmdeploy": ("model_format", "awq")}),
    ({"quantization": "nvfp4"}, {"vllm": ("quantization", "modelopt_fp4"),
                                 "sglang": ("quantization", "modelopt_fp4")}),
    ({"quantization": "int8"}, {"vllm": ("quantization", "int8_per_channel_weight_only"),
                                "sglang": ("quantization", "w8a8_int8")}),
    ({"dtype": "bf16"}, {"vllm": ("dtype", "bfloat16"), "sglang": ("dtype", "bfloat16"),
                         "lmdeploy": ("dtype", "bfloat16")}),
    ({"kv_dtype": "fp8"}, {"vllm": ("kv_cache_dtype", "fp8"),
                           "sglang": ("kv_cache_dtype", "fp8_e4m3"),
                           "lmdeploy": ("quant_policy", 16)}),
    ({"kv_dtype": "int8"}, {"vllm": ("kv_cache_dtype", "int8_per_token_head"),
                            "lmdeploy": ("quant_policy", 8)}),
    ({"gpu_memory": 0.85}, {"vllm": ("gpu_memory_utilization", 0.85)}),
    ({"static_memory": 0.8}, {"sglang": ("mem_fraction_static", 0.8)}),
    ({"kv_fraction": 0.7}, {"lmdeploy": ("cache_max_entry_count", 0.7)}),
    ({"kv_memory": 4 << 30}, {"vllm": ("kv_cache_memory_bytes", 4 << 30)}),
    ({"kv_tokens": 65536}, {"sglang": ("max_total_tokens", 65536)}),
    ({"prefix_cache": False}, {"vllm": ("enable_prefix_caching", False),
                               "sglang": ("disable_radix_cache", True)}),
    ({"prefix_cache": True}, {"vllm": ("enable_prefix_caching", True),
                              "lmdeploy": ("enable_prefix_caching", True)}),
    ({"chunked_prefill": False}, {"vllm": ("enable_chunked_prefill", False),
                                  "sglang": ("chunked_prefill_size", -1)}),
    ({"eager": True}, {"vllm": ("enforce_eager", True),
                       "sglang": ("cuda_graph_backend_decode", "disabled"),
                       "lmdeploy": ("eager_mode", True)}),
    ({"speculation": Speculation(method="eagle3", draft="c/d e", tokens=3)}, {
        "vllm": ("speculative_config",
                 {"method": "eagle3", "model": "c/d e", "num_speculative_tokens": 3}),
        "sglang": ("speculative_num_draft_tokens", 4),
        "lmdeploy": ("speculative_num_draft_tokens", 3)}),
    ({"speculation": Speculation(method="ngram", tokens=4)}, {
        "vllm": ("speculative_config", {"method": "ngram", "num_speculative_tokens": 4}),
        "sglang": ("speculative_algorithm", "NGRAM")}),
    ({"load_format": "dummy"}, {"vllm": ("load_format", "dummy"),
                                "sglang": ("load_format", "dummy")}),
    ({"revision": "v1"}, {"vllm": ("revision", "v1"), "sglang": ("revision", "v1"),
                          "lmdeploy": ("revision", "v1")}),
    ({"served_model_name": "a b"}, {"vllm": ("served_model_name", ["a b"]),
                                    "sglang": ("served_model_name", "a b"),
                                    "lmdeploy": ("model_name", "a b")}),
    ({"host": "0.0.0.0", "port": 9000}, {"vllm": ("port", 9000), "sglang": ("port", 9000),
                                         "lmdeploy": ("server_port", 9000)}),
]  # fmt: skip


@cache
def answers(engine: str) -> list[dict[str, Any]]:
    """The parser's flags, then its answer to each case."""
    python = python_with(engine)
    commands = []
    for fields, _ in CASES:
        text = emit(Deployment(model="org/name", **fields), engine).text.replace("\\\n", " ")
        begin = len(ENGINES[engine].commands[0].split())
        commands.append(shlex.split(text)[begin:])
    done = subprocess.run(
        [str(python), str(SCRIPT), engine],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("engine", PARSERS)
def test_what_we_write_is_accepted_and_means_the_same(engine: str) -> None:
    for (fields, expected), answer in zip(CASES, answers(engine)[1:], strict=True):
        assert "error" not in answer, (fields, answer)
        if engine in expected:
            name, value = expected[engine]
            assert answer["values"][name] == value, fields


@pytest.mark.parametrize("engine", PARSERS)
def test_every_flag_of_the_parser_is_in_our_table(engine: str) -> None:
    table = ENGINES[engine]
    for flag, takes_value in answers(engine)[0]["flags"].items():
        found = table.find(flag)
        assert found is not None, flag
        assert found[0].is_switch is not takes_value, flag
