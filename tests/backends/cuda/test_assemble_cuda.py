"""A model put together for a GPU: the whole way from settings to tokens, with a GPU made up where
there is none."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from headrace.assemble import assemble
from headrace.backends.cuda import device as device_module
from headrace.backends.cuda import runner as runner_module
from headrace.backends.cuda.device import Gpu
from headrace.core.errors import ConfigError, DeviceError, MemoryFitError
from headrace.core.request import GenerateRequest, SamplingParams
from headrace.core.sizes import GIB

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


_TOKENIZER = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
}


@pytest.fixture
def folder(tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    if device.type == "cpu":
        gpu = Gpu(
            index=0,
            name="made up",
            capability=(9, 0),
            multiprocessors=runner_module.multiprocessors_of(device),
            total_bytes=4 * GIB,
            free_bytes=3 * GIB,
        )
        monkeypatch.setattr(device_module, "find_gpu", lambda: gpu)
        made = partial(runner_module.CudaRunner, device=device)
        monkeypatch.setattr(runner_module, "CudaRunner", made)
    return tmp_path


def test_random_weights_without_a_tokenizer(folder: Path) -> None:
    model = assemble(
        str(folder),
        device="cuda",
        load_format="dummy",
        max_batch_tokens=16,
        max_sequences=4,
        kv_tokens=512,
        gpu_memory="2GiB",
    )
    assert model.runner.limits.steps_in_flight == 2
    assert model.allocated is not None
    assert model.notes == ()
    for row in model.ledger.compare(model.allocated):
        assert abs(row.share) <= 0.03, row
    assert model.ledger.graphs_bytes > 0
    assert "graphs" in model.ledger.render(model.allocated)
    for name in ("a", "b"):
        params = SamplingParams(temperature=0, max_tokens=3)
        model.engine.add(
            GenerateRequest(request_id=name, prompt_token_ids=[1, 2, 3, 4, 5], params=params)
        )
    found: dict[str, list[int]] = {"a": [], "b": []}
    while model.engine.has_work:
        for token in model.engine.step():
            assert token.error is None
            found[token.request_id].append(token.token_id)
    assert len(found["a"]) == 3
    assert found["a"] == found["b"]
    with pytest.raises(ConfigError, match="has no tokenizer"):
        _ = model.tokenizer
    model.close()


def test_what_does_not_fit_is_refused_before_anything_is_loaded(folder: Path) -> None:
    with pytest.raises(MemoryFitError, match="does not fit"):
        assemble(str(folder), device="cuda", load_format="dummy", gpu_memory="1MiB")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU is made up")
def test_a_dry_run_says_which_gpu_the_ledger_is_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from headrace.cli.commands import app

    gpu = {"usable": True, "name": "made up", "capability": "9.0", "memory_free_bytes": 3 * GIB}
    monkeypatch.setattr(device_module, "describe", lambda: gpu)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "xdg"))
    asked = ["serve", str(folder), "--dry-run", "--port", "0", "--load-format", "dummy"]
    asked += ["--max-batch-tokens", "16", "--max-sequences", "4", "--kv-tokens", "512"]
    (folder / "tokenizer.json").write_text(json.dumps(_TOKENIZER))
    shown = CliRunner().invoke(app, [*asked, "--device", "cuda"])
    assert shown.exit_code == 0, shown.output
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    at = lines.index("gpu")
    assert lines[at + 1 : at + 5] == [
        "usable yes", "name made up", "capability 9.0", "memory free 3,221.2 MB",
    ]  # fmt: skip
    assert lines.index("model") < at < lines.index("ledger")
    report = json.loads(CliRunner().invoke(app, [*asked, "--device", "cuda", "--json"]).stdout)
    assert report["gpu"] == gpu
    # One that is not asked for is not looked at; one that was passed over is shown with the reason.
    report = json.loads(CliRunner().invoke(app, [*asked, "--device", "cpu", "--json"]).stdout)
    assert "gpu" not in report
    gpu |= {"usable": False, "why": "torch is not installed."}

    def refuse() -> Gpu:
        raise DeviceError("torch is not installed.", "Install it.")

    monkeypatch.setattr(device_module, "find_gpu", refuse)
    for is_there in (False, True):
        monkeypatch.setattr(device_module, "driver_is_present", lambda found=is_there: found)
        report = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
        assert ("gpu" in report) is is_there
    assert report["gpu"]["why"] == "torch is not installed."
