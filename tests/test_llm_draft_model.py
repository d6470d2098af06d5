"""A draft model of another family and size beside the model that answers, with random weights: any
two go together if their tokens are the same, and no others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace import LLM, SamplingParams
from headrace.core.errors import ConfigError
from headrace.speculate.speculator import TimedSpeculator

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Norms over heads, tied weights, heads of another size, and a few more rows without a token.
QWEN: dict[str, object] = {
    **LLAMA,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 544,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
PROMPTS = ["one, two, three, one, two,", "a different text"]


def write_model(folder: Path, config: dict[str, object], *words: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *words]
    made = Tokenizer(models.BPE(vocab={piece: at for at, piece in enumerate(pieces)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    return folder


def load(path: Path, speculate: str = "off") -> LLM:
    return LLM(path, load_format="dummy", device="cpu", kv_tokens=1024, speculate=speculate)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def large(folder: Path) -> Path:
    return write_model(folder / "large", LLAMA)


@pytest.fixture(scope="module")
def plain(large: Path) -> Iterator[LLM]:
    with load(large) as model:
        yield model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_another_family_drafts(plain: LLM, large: Path, tmp_path: Path, temperature: float) -> None:
    small = write_model(tmp_path / "small", QWEN)
    params = SamplingParams(
        temperature=temperature, seed=3, max_tokens=24, ignore_eos=True, n=2, logprobs=1
    )
    with load(large, f"draft:{small}") as model:
        found = model._assembled.speculator
        assert isinstance(found, TimedSpeculator)
        assert found.model is not None
        for rows in (1, 4, 16, 64):  # what it decides must not depend on this machine
            for _ in range(40):
                found.curve.learn(rows, 0, 0.01)
                found.model.curve.learn(rows, 0, 1e-5)
        answers = [output.outputs for output in model.generate(PROMPTS, params)]
        assert model.stats.drafts.draft_tokens > 0
        assert found.model.held_blocks == 0
    assert answers == [output.outputs for output in plain.generate(PROMPTS, params)]


def test_another_vocabulary_is_refused_with_both_names(large: Path, tmp_path: Path) -> None:
    longer = write_model(tmp_path / "longer", QWEN, "\u0120word")
    with pytest.raises(ConfigError, match="256 and 257 tokens") as refused:
        load(large, f"draft:{longer}")
    assert "large" in str(refused.value)
    assert "longer" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_tokens_in_another_order_are_refused(folder: Path, tmp_path: Path) -> None:
    one = write_model(tmp_path / "one", LLAMA, "\u0120a", "\u0120b")
    other = write_model(tmp_path / "other", QWEN, "\u0120b", "\u0120a")
    with pytest.raises(ConfigError, match=r"token 256 is .* and ") as refused:
        load(one, f"draft:{other}")
    assert refused.value.param == "speculate"
