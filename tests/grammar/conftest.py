"""Small tokenizers of both kinds, and a grammar compiler for each."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from headrace.grammar import GrammarCompiler
from headrace.tokenizer.tokenizer import Tokenizer

TEXTS = ['{"name": "Joe", "ages": [1, 22, 333]}', "true false null", "the quick brown fox " * 3]


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken("<|end|>", special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def sentencepiece() -> tokenizers.Tokenizer:
    """As Llama 2's: a space before every text, bytes as <0xNN>."""
    pieces = ["<unk>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *(chr(code) for code in range(33, 127)), "▁t", "tr", "▁tr", "ue", "▁1", "na"]
    merges = [("▁", "t"), ("t", "r"), ("▁t", "r"), ("u", "e"), ("▁", "1"), ("n", "a")]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return backend


@pytest.fixture(scope="module", params=[byte_level, sentencepiece], ids=lambda make: make.__name__)
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    request.param().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}', encoding="utf-8")
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + 7)  # rows that no token has
