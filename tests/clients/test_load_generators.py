"""guidellm and AIPerf: small loads, whose counts agree with each other's and the server's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.clients.conftest import MODEL, Servers
from tests.clients.environments import environment
from tests.clients.programs import counted, run_program
from tests.clients.tokenizer_files import write_tokenizer_files

REQUESTS = 6
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 8
COUNTERS = (
    "headrace:prompt_tokens_total",
    "headrace:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
)


@pytest.fixture(scope="session")
def tokenizer(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer_files(default_model_path, tmp_path_factory.mktemp("tokenizer"))


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in before}


def test_guidellm(
    servers: Servers, variables: dict[str, str], tokenizer: Path, tmp_path: Path
) -> None:
    url = servers.open.base_url
    command: list[str | Path] = [environment("guidellm").program("guidellm"), "run"]
    command += ["--backend", f"kind=openai_http,target={url},model={MODEL}"]
    command += ["--profile", "kind=concurrent,streams=2"]
    command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}"]
    sizes = f"prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"
    command += ["--data", f"kind=synthetic_text,{sizes}"]
    command += ["--output", "kind=json,path=found.json", "--disable-console-interactive"]
    before = counted(url, *COUNTERS)
    run_program(command, tmp_path, variables)
    served = grown(before, counted(url, *COUNTERS))
    metrics = json.loads((tmp_path / "found.json").read_text())["benchmarks"][0]["metrics"]
    assert metrics["request_totals"]["successful"] == metrics["request_totals"]["total"] == REQUESTS
    output = metrics["output_token_count"]["successful"]
    assert output["min"] == output["max"] == OUTPUT_TOKENS
    prompts = metrics["prompt_token_count"]["successful"]
    # It asks for one more answer before it starts, to see that the server is there.
    probes = served["vllm:request_success_total"] - REQUESTS
    assert 0 <= probes <= 1
    for prefix in ("headrace", "vllm"):
        if probes == 0:
            assert served[f"{prefix}:generation_tokens_total"] == output["total_sum"]
            assert served[f"{prefix}:prompt_tokens_total"] == prompts["total_sum"]
        else:
            assert served[f"{prefix}:generation_tokens_total"] > output["total_sum"]


def test_aiperf(
    servers: Servers, variables: dict[str, str], tokenizer: Path, tmp_path: Path
) -> None:
    url = servers.open.base_url
    command: list[str | Path] = [environment("aiperf").program("aiperf"), "profile"]
    command += ["--model", MODEL, "--url", url, "--endpoint-type", "chat", "--streaming"]
    command += ["--tokenizer", tokenizer, "--concurrency", "2", "--request-count", str(REQUESTS)]
    command += ["--prompt-input-tokens-mean", str(PROMPT_TOKENS)]
    command += ["--prompt-output-tokens-mean", str(OUTPUT_TOKENS)]
    command += [
        "--extra-inputs",
        "ignore_eos:true",
        "--extra-inputs",
        f"min_tokens:{OUTPUT_TOKENS}",
    ]
    command += ["--ui", "simple", "--no-gpu-telemetry", "--artifact-dir", tmp_path / "out"]
    before = counted(url, *COUNTERS)
    # Told to stay off the hub, it takes no folder for a tokenizer either.
    own = {name: value for name, value in variables.items() if name != "HF_HUB_OFFLINE"}
    run_program(command, tmp_path, own)
    served = grown(before, counted(url, *COUNTERS))
    found = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == REQUESTS
    assert not found["error_summary"]
    # What it counted in texts is what the server says in `usage`, and what /metrics says.
    assert found["total_output_tokens"]["avg"] == REQUESTS * OUTPUT_TOKENS
    assert found["total_usage_completion_tokens"]["avg"] == REQUESTS * OUTPUT_TOKENS
    assert served["vllm:request_success_total"] == REQUESTS
    for prefix in ("headrace", "vllm"):
        assert served[f"{prefix}:generation_tokens_total"] == REQUESTS * OUTPUT_TOKENS
        prompts = found["total_usage_prompt_tokens"]["avg"]
        assert served[f"{prefix}:prompt_tokens_total"] == prompts
    # It reads the server's metrics by itself, under their names.
    scraped = json.loads((tmp_path / "out" / "server_metrics_export.json").read_text())["metrics"]
    assert "vllm:generation_tokens" in {name.removesuffix("_total") for name in scraped}
