"""`headrace fit`: exit statuses, tables within 100 columns, documented JSON, bad input."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.profiles import profile
from typer.testing import CliRunner

from headrace.backends.demands import Setup, demand_on_gpu
from headrace.cli.commands import app
from headrace.fits.report import Asked, make_report
from headrace.hardware.gpus import find_gpu
from headrace.hardware.profile import Ceilings
from headrace.models.known import all_known, find_known

ROOT = Path(__file__).resolve().parents[2]
H100 = ("--gpu", "h100-sxm")
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))


def shown(*words: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, ["fit", *words])
    assert result.exit_code == exit_code, result.output
    for line in result.output.splitlines():
        is_free = "--json" in words or line.startswith(("error:", "  try:"))
        assert is_free or len(line) <= 100, line
    return result.output


def test_what_fits_and_what_does_not() -> None:
    text = shown("llama-3.1-8b", *H100)
    assert re.search(r"on h100-sxm, 1 x 8,192 tokens: fits, with [\d.]+ GiB to spare", text)
    assert "the context is 8,192 tokens by default; the model's own is 131,072" in text
    assert "what would fit" not in text
    text = shown("llama-3.1-70b", *H100, exit_code=1)
    assert re.search(r"does not fit: [\d.]+ GiB too\s+much", text)
    assert re.search(r"^weights +131\.4 GiB +70\.55 billion parameters in bf16$", text, re.M)
    assert re.search(r"^  embedding +2\.0 GiB +1,050,673,152 values x 16 bits$", text, re.M)
    assert "80 layers x 2 x 8 KV heads x 128; bf16: 327,680 bytes" in text
    for engine in ("Headrace", "vLLM", "SGLang", "llama.cpp", "Ollama"):
        assert re.search(rf"^  {engine} ", text, re.M)


@pytest.mark.parametrize("known", all_known(), ids=lambda known: known.id)
def test_every_known_model_has_a_ledger(known: object) -> None:
    """On a GPU that holds few of them: the long form, in 100 columns."""
    from headrace.models.known import Known
    from headrace.plan.fit_text import report_facts, report_lines, too_wide

    assert isinstance(known, Known)
    report = make_report(known.id, Asked(gpu="rtx-5090", concurrency=3))
    assert not too_wide(report_lines(report, explain=True))
    facts = json.loads(json.dumps(report_facts(report)))
    assert facts["fits"] == (facts["spare_bytes"] >= 0)
    assert sum(facts["ledger"]["weights"].values()) == facts["ledger"]["weights_bytes"]
    assert facts["ledger"]["weights_bytes"] > 0.4 * facts["parameters"]


def test_explained() -> None:
    text = shown("llama-3.1-8b", *H100, "--explain")
    for name in ("weights =", "KV pool =", "total =", "budget =", "most sequences =", "TTFT >="):
        assert f"\n  {name}" in text


def test_changes_fit_when_they_are_asked_for() -> None:
    """Each of them, given back as flags."""
    asked = ("llama-3.1-70b", *H100, "--concurrency", "32", "--context", "4096")
    facts = json.loads(shown(*asked, "--json", exit_code=1))
    assert facts["changes"]
    for change in facts["changes"]:
        text = CliRunner().invoke(app, ["fit", *asked, *change["flags"].split(), "--json"])
        again = json.loads(text.output)
        assert again["fits"], change
        assert again["spare_bytes"] == change["spare_bytes"]


def test_json_has_the_documented_fields() -> None:
    facts = json.loads(shown("gpt-oss-20b", *H100, "--json"))
    page = (ROOT / "docs" / "fit.md").read_text()
    for name in [*facts, *(f"ledger.{key}" for key in facts["ledger"])]:
        assert f"`{name}`" in page, name
    for name in facts["floors"]:
        assert f"`floors.{name}`" in page, name


def test_a_bare_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    for given in (str(path), str(tmp_path)):
        facts = json.loads(shown(given, *H100, "--json"))
        assert facts["context_tokens"] == 512
        assert facts["ledger"]["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2


def test_a_gguf_file_is_counted_as_it_would_be_served(default_model_path: Path) -> None:
    """On a CPU as the backend's own ledger has it; a GPU holds it in bf16, and that is said."""
    from headrace.assemble import plan_memory
    from headrace.backends.registry import find_backend
    from headrace.core.config import Device, EngineConfig
    from headrace.weights.load import open_weights

    facts = json.loads(shown(str(default_model_path), "--context", "4096", "--json"))
    config = EngineConfig(device=Device.CPU, context_tokens=4096, kv_tokens=4096)
    with open_weights(default_model_path) as file:
        ledger = plan_memory(file, find_backend(Device.CPU), config)[2].ledger
    assert facts["precision"] == "Q4_1 and Q8_0"
    for name in ("weights_bytes", "kv_pool_bytes", "activations_bytes", "runtime_bytes"):
        assert facts["ledger"][name] == getattr(ledger, name), name
    widened = json.loads(shown(str(default_model_path), *H100, "--json"))
    assert widened["precision"] == "bf16"
    assert widened["ledger"]["weights_bytes"] == pytest.approx(2 * facts["parameters"], rel=0.01)
    assert any("held on a GPU as bf16" in note for note in widened["notes"])


def test_several_gpus() -> None:
    facts = json.loads(shown("llama-3.1-70b", *H100, "--gpus", "4", "--json"))
    assert (facts["tp"], facts["replicas"]) == (4, 1)
    facts = json.loads(
        shown("llama-3.1-8b", *H100, "--gpus", "4", "--tp", "2", "--concurrency", "9", "--json")
    )
    assert (facts["tp"], facts["replicas"], facts["concurrency"]) == (2, 2, 5)


def test_a_draft_takes_memory() -> None:
    plain = json.loads(shown("llama-3.1-8b", *H100, "--json"))
    drafted = json.loads(shown("llama-3.1-8b", *H100, "--draft", "llama-3.2-1b", "--json"))
    assert drafted["ledger"]["draft_bytes"] > 2e9
    assert drafted["total_bytes"] == plain["total_bytes"] + drafted["ledger"]["draft_bytes"]


def test_another_engines_command_line() -> None:
    command = "vllm serve meta-llama/Llama-3.1-70B-Instruct -tp 2 --max-model-len 32768"
    command += " --gpu-memory-utilization 0.92 --kv-cache-dtype fp8 --quantization fp8"
    facts = json.loads(shown(*H100, "--from", command, "--json"))
    assert facts["model"] == "meta-llama/Meta-Llama-3.1-70B"
    assert (facts["tp"], facts["context_tokens"]) == (2, 32768)
    assert (facts["precision"], facts["kv_dtype"]) == ("fp8", "fp8")
    assert facts["budget_bytes"] == int(0.92 * facts["memory_bytes"])
    ours = json.loads(shown(*H100, "--from", command, "--json", "--context", "4096", "--tp", "4",
                            "--gpus", "4"))  # fmt: skip
    assert (ours["tp"], ours["context_tokens"]) == (4, 4096)
    whole = json.loads(shown(*H100, "--from", "vllm serve Qwen/Qwen3-8B", "--json"))
    assert whole["context_tokens"] == find_known("qwen3-8b").spec.context_tokens
    assert "try:" in shown(*H100, "--from", "make coffee", exit_code=2)


def test_this_machine() -> None:
    facts = json.loads(shown("qwen3-0.6b", "--json"))
    assert facts["gpu"] == "this-machine"
    assert facts["kv_dtype"] == "f16"
    assert facts["floors"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("llama-3.1-8b", "--gpu", "H100"), "more than one GPU: h100-sxm, h100-pcie, h100-nvl"),
        (("llama-3.1-8b", "--gpu", "h1000"), "No GPU called 'h1000' is known"),
        (("lama-3.1-8b", *H100), "near it: llama-3.1-8b"),
        (("some/model", *H100), "not in the cache and nothing is fetched"),
        (
            ("llama-3.1-8b", *H100, "--context", "200000"),
            "the model's is 131072",
        ),
        (("llama-3.1-70b", *H100, "--tp", "3"), "does not divide the model: 64 attention heads"),
        (("llama-3.1-70b", *H100, "--gpus", "3", "--tp", "2"), "3 GPUs are not a multiple of tp"),
        (("llama-3.1-8b", "--gpu", "a100-sxm-80gb", "--quant", "fp8"), "FP8 needs 8.9"),
        (("llama-3.1-8b", "--gpu", "a100-sxm-80gb", "--kv-dtype", "fp8"), "Set --kv-dtype bf16"),
        (("llama-3.1-8b", *H100, "--quant", "fp9"), "'fp9' is not a precision"),
        (("llama-3.1-8b", *H100, "--kv-dtype", "int3"), "kv_dtype is 'int3'"),
        (("llama-3.1-8b", *H100, "--gpu-memory", "lots"), "gpu_memory"),
        (("llama-3.1-8b", "--gpu", "ddr5-12ch-4800"), "Set --gpu-memory to its bytes"),
    ],
)
def test_bad_input_says_what_works(words: tuple[str, ...], said: str) -> None:
    text = shown(*words, exit_code=2)
    assert said in " ".join(text.split())
    assert "try:" in text


def test_the_core_is_the_report() -> None:
    """What a search would ask for is what the command shows."""
    report = make_report("llama-3.1-8b", Asked(gpu="h100-sxm", concurrency=7, quant="fp8"))
    gpu = find_gpu("h100-sxm")
    assert gpu.sms is not None
    demand = demand_on_gpu(
        find_known("llama-3.1-8b").spec,
        Setup(precision="fp8", concurrency=7),
        multiprocessors=gpu.sms,
    )
    assert demand.fixed_bytes(8192) == report.fit.demand.fixed_bytes(8192)
    assert report.fit.ledger.weights_bytes == demand.weights.bytes


def test_a_measured_machine_gives_the_floors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "profile.json"
    measured = Ceilings(read_bytes_s={"1": 1e6, "2": 2e6}, multiplies_s={"int8": 5e17, "fp32": 1e9})
    made = replace(profile(), ceilings=measured, machine={"memory_total_bytes": 8 << 30})
    made.save(path)
    report = make_report(str(tmp_path / "config.json"), Asked(profile=path))
    assert report.rate == "int8"
    assert report.flops_s == 1e18  # a multiplication and an addition
    assert report.floors is not None
    # Bound by reading: all bytes that a token reads, at the bandwidth of most threads.
    work, held = report.fit.demand.work, report.fit.demand.sequence_bytes(512)
    assert report.floors.one_tpot_s == pytest.approx((work.token_read_bytes + held) / 2e6)


def test_a_profile_takes_the_place_of_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    replace(profile(), ceilings=None).save(path)
    both = shown("llama-3.1-8b", *H100, "--profile", str(path), exit_code=2)
    assert "both say what to fit on" in both
    alone = shown("llama-3.1-8b", "--profile", str(path), exit_code=2)
    assert "without its ceilings" in alone
