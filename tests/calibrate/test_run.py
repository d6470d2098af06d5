"""A whole calibration of a tiny model with random weights, without a server: what a profile has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.calibrate import run
from headrace.calibrate.run import calibrate, plain_ids
from headrace.core.config import Device, EngineConfig, LoadFormat
from headrace.hardware.profile import load_profile
from headrace.simulate.profiled import setup_of
from headrace.simulate.serve import serve
from headrace.tokenizer.tokenizer import Tokenizer
from headrace.workload.ask import Ask

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


def config() -> EngineConfig:
    return EngineConfig(
        device=Device.CPU,
        load_format=LoadFormat.DUMMY,
        max_sequences=4,
        max_batch_tokens=32,
        kv_tokens=2048,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_profile_has_what_a_simulation_needs(folder: Path, tmp_path: Path) -> None:
    stages: list[str] = []
    made = calibrate(
        str(folder),
        config=config(),
        seconds=0.01,
        tell=lambda what, done, total: stages.append(what),
        with_server=False,
    )
    assert made.is_complete
    assert made.serving is None
    assert list(dict.fromkeys(stages)) == [
        "preparing",
        "step times",
        "the engine's own time",
        "the machine's ceilings",
    ]
    assert {one.decode_rows for one in made.steps} >= {0, 1, 2, 4}
    assert any(one.decode_rows and one.prompt_tokens for one in made.steps)
    assert all(one.seconds > 0 and one.repetitions >= 3 for one in made.steps)
    assert made.limits.max_batch_tokens == 32
    assert made.limits.total_blocks == 2048 // 16
    assert made.ceilings is not None
    assert set(made.ceilings.read_bytes_s) >= {"1"}
    assert made.ceilings.multiplies_s["int8"] > 0
    assert made.ceilings.products
    assert made.model["backend"]["name"] == "cpu"
    made.save(tmp_path / "profile.json")
    again = load_profile(tmp_path / "profile.json")
    (served,) = serve([Ask(at_s=0, prompt_tokens=40, output_tokens=5)], setup_of(again)).served
    assert served.is_done
    assert served.ttft_s > 0


def test_a_ctrl_c_after_the_first_steps_keeps_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "measure_host", stopped)
    made = calibrate(
        str(folder), config=config(), seconds=0.01, tell=lambda what, done, total: None
    )
    assert not made.is_complete
    assert made.steps
    assert made.host == ()


def test_plain_words_are_seen_by_a_client() -> None:
    class Words:
        def token_bytes(self, token: int) -> bytes:
            return [b" the", b"\xe2\x82", b"12", b"cat", b"<|end|>"][token]

    tokenizer: Tokenizer = Words()  # type: ignore[assignment]
    assert plain_ids(tokenizer, 5) == [0, 3]
