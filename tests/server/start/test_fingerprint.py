"""The fingerprint: the same for the same answers, another for anything that changes them."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.numpy import save_file
from tests.weights.packers import checkpoint, pack_awq

from headrace.backends.cuda import device
from headrace.backends.registry import choose_backend
from headrace.core.config import EngineConfig
from headrace.core.sampling import NEUTRAL, model_defaults
from headrace.core.server_config import ServerConfig
from headrace.server.start.fingerprint import NEUTRAL_SETTINGS, Identity, complete, fingerprint
from headrace.server.start.model import read_model
from headrace.weights.files.gguf import GgufFile


@dataclass(frozen=True)
class Read:
    identity: Identity

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.identity)


def read(path: Path, **settings: Any) -> Read:
    """Settings may be either config's."""
    server = {f.name: settings.pop(f.name) for f in fields(ServerConfig) if f.name in settings}
    engine = EngineConfig.from_mapping({"device": "cpu", **settings})
    served = read_model(path, "a-model", server=ServerConfig(**server), engine=engine)
    return Read(complete(served.identity, choose_backend(engine).facts(engine)))


@pytest.fixture(scope="module")
def plain(default_model_path: Path) -> Read:
    return read(default_model_path)


def test_it_says_what_it_stands_for(plain: Read) -> None:
    identity = plain.identity
    assert plain.fingerprint.startswith("hr-")
    assert len(plain.fingerprint) == len("hr-0123456789ab")
    # As published by who made the wheel that the model comes in.
    pinned = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert identity["model"]["catalog_sha256"] == pinned
    assert set(identity["quantization"]) == {"Q4_1", "Q8_0", "F32"}
    assert identity["kv_dtype"] == "f16"
    assert identity["sampling"] == {
        **{"temperature": 0.2, "top_p": 0.9, "top_k": 0, "repetition_penalty": 1.0}
    }
    assert identity["settings"]["max_n"] == 16


def test_it_is_the_same_again(plain: Read, default_model_path: Path) -> None:
    assert read(default_model_path).fingerprint == plain.fingerprint


@pytest.mark.parametrize(
    "settings",
    [
        {"port": 9},
        {"host": "0.0.0.0"},
        {"api_key": "secret"},
        {"log_level": "debug"},
        {"threads": 1},
        {"hang_timeout_s": 99.0},
        {"max_stored_responses": 0},
    ],
)
def test_how_it_is_reached_and_watched_does_not_count(
    plain: Read, default_model_path: Path, settings: dict[str, Any]
) -> None:
    found = read(default_model_path, **settings)
    assert found.fingerprint == plain.fingerprint
    assert "secret" not in str(found.identity)


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_dtype": "int8"},
        {"context_tokens": 1000},
        {"max_n": 3},
        {"max_prompt_tokens": 5},
        {"timeout_s": 1.0},
        {"served_model_name": "other"},
        {"device": "reference"},
        {"kv_tokens": 4096},
    ],
)
def test_what_changes_answers_or_limits_counts(
    plain: Read, default_model_path: Path, settings: dict[str, Any]
) -> None:
    assert read(default_model_path, **settings).fingerprint != plain.fingerprint


@pytest.mark.skipif(torch.cuda.is_available(), reason="it can be used")
def test_a_driver_whose_gpu_can_not_be_used_is_not_taken_for_one(
    plain: Read, default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was: the fingerprint guessed by the driver, and said that a CPU's answers were a GPU's."""
    monkeypatch.setattr(device, "driver_is_present", lambda: True)
    found = read(default_model_path, device="auto").identity
    assert found["backend"] == plain.identity["backend"]
    assert found["backend"]["name"] == "cpu"
    assert found["kv_dtype"] == "f16"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model as a folder; only its header is ever looked at."""
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32},
        **{"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"num_key_value_heads": 1, "vocab_size": 8, "max_position_embeddings": 64},
        **{"rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = {word: number for number, word in enumerate("abcdefg")} | {"</s>": 7}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    write_weights(tmp_path, 1.0)
    return tmp_path


def write_weights(folder: Path, value: float) -> None:
    weights = np.full((8, 32), value, np.float32)
    save_file({"model.embed_tokens.weight": weights}, folder / "model.safetensors")


def test_a_folder_is_its_files(folder: Path) -> None:
    first = read(folder)
    assert first.identity["model"]["bytes"] == 8 * 32 * 4
    assert first.identity["quantization"] == {"F32": 1.0}
    assert read(folder).fingerprint == first.fingerprint
    (folder / "README.md").write_text("Nothing that counts.")
    assert read(folder).fingerprint == first.fingerprint
    seen = [first.fingerprint]
    tokenizer = folder / "tokenizer_config.json"
    tokenizer.write_text(json.dumps({"eos_token": "</s>", "add_bos_token": False}))
    seen.append(read(folder).fingerprint)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    seen.append(read(folder).fingerprint)
    write_weights(folder, 2.0)
    seen.append(read(folder).fingerprint)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 1e5}))
    seen.append(read(folder).fingerprint)
    assert len(set(seen)) == len(seen)


def test_every_setting_is_decided_about() -> None:
    known = {f.name for config in (ServerConfig, EngineConfig) for f in fields(config)}
    assert known >= NEUTRAL_SETTINGS
    assert "api_key" in NEUTRAL_SETTINGS


def test_the_same_bytes_elsewhere_are_the_same_model(
    plain: Read, default_model_path: Path, tmp_path: Path
) -> None:
    """But for the catalog's default sampling values, which only its own file has."""
    copy = tmp_path / "other.gguf"
    os.symlink(default_model_path, copy)
    found = read(copy)
    model = {**plain.identity["model"], "catalog_sha256": None}
    assert found.identity["model"] == model
    assert found.identity["tokenizer_sha256"] == plain.identity["tokenizer_sha256"]
    assert found.identity["sampling"] == model_defaults(NEUTRAL)


def test_other_weights_are_another_model(
    plain: Read, default_model_path: Path, tmp_path: Path
) -> None:
    """One byte at the start of one tensor, as a fine-tune would leave none of them alone."""
    copy = tmp_path / "model.gguf"
    shutil.copyfile(default_model_path, copy)
    with GgufFile.open(copy) as file:
        start, _ = file._spans["blk.7.ffn_up.weight"]
    with copy.open("r+b") as out:
        out.seek(start + 5)
        byte = out.read(1)[0]
        out.seek(start + 5)
        out.write(bytes([byte ^ 1]))
    found = read(copy)
    assert found.identity["model"]["sampled_sha256"] != plain.identity["model"]["sampled_sha256"]
    assert found.identity["tokenizer_sha256"] == plain.identity["tokenizer_sha256"]


def test_another_template_is_another_model(
    plain: Read, default_model_path: Path, tmp_path: Path
) -> None:
    data = default_model_path.read_bytes()
    written = b"You are a helpful AI assistant named SmolLM"
    assert data.count(written) == 1
    copy = tmp_path / "model.gguf"
    copy.write_bytes(data.replace(written, written.swapcase()))
    found = read(copy)
    assert found.identity["chat_template_sha256"] != plain.identity["chat_template_sha256"]
    assert found.identity["model"]["sampled_sha256"] == plain.identity["model"]["sampled_sha256"]
    assert found.fingerprint != plain.fingerprint


def test_codes_of_a_quantized_model_count(tmp_path: Path) -> None:
    made = checkpoint(partial(pack_awq, np.random.default_rng(1), group=32))
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 32}
    made.save(tmp_path, quantization)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    first = read(tmp_path)
    assert first.identity["quantization"].keys() == {"I32", "F16", "BF16"}
    made.tensors["model.layers.1.mlp.down_proj.qweight"][0, 0] ^= 1
    made.save(tmp_path, quantization)
    assert read(tmp_path).fingerprint != first.fingerprint
