"""Models by name, as a config.json alone: to be measured with random weights.

A folder made of one holds a tokenizer too, where the package for it is: as small as can be, since
whoever assembles a model reads one, or with a piece of text for every id of the vocabulary, where
text is measured too.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

_LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
}
_LLAMA3_ROPE: dict[str, object] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

SHAPES: dict[str, dict[str, object]] = {
    "llama-3.1-8b": _LLAMA
    | {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_scaling": _LLAMA3_ROPE | {"factor": 8.0},
    },
    "llama-3.2-1b": _LLAMA
    | {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_scaling": _LLAMA3_ROPE | {"factor": 32.0},
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    # Small enough for a test on any machine, and shaped as kernels like it.
    "tiny": _LLAMA
    | {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    },
}


def write_shape(name: str, folder: Path, *, whole_vocabulary: bool = False) -> Path:
    """The folder, with what `assemble(..., load_format="dummy")` reads."""
    (folder / "config.json").write_text(json.dumps(SHAPES[name], indent=2))
    if importlib.util.find_spec("tokenizers") is not None:
        size = SHAPES[name]["vocab_size"] if whole_vocabulary else 0
        assert isinstance(size, int)
        _write_tokenizer(folder / "tokenizer.json", size)
    return folder


def _write_tokenizer(path: Path, size: int) -> None:
    """Bytes, and words up to so many tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Nothing merges into them, so no text is encoded with them; every one can be decoded.
    pieces += [_word(number) for number in range(size - len(pieces))]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))


def _word(number: int) -> str:
    """A space, as byte-level pieces spell it, and letters: " a", " b", ... " z", " aa", ..."""
    letters = ""
    while number >= 0:
        number, letter = divmod(number, 26)
        letters = chr(ord("a") + letter) + letters
        number -= 1
    return "\u0120" + letters
