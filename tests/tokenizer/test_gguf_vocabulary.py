"""Vocabularies out of GGUF metadata give the ids of the tokenizers they were made from.

Oracles: transformers (the default model's file, and its table of split expressions), tokenizers
trained here, and sentencepiece itself.
"""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
import transformers
from tokenizers import Regex, models, normalizers, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from headrace.core.errors import UnsupportedModelError, WeightsError
from headrace.tokenizer.gguf_vocabulary import PRE_TOKENIZERS
from headrace.tokenizer.tokenizer import Tokenizer

Train = Callable[..., tokenizers.Tokenizer]


def as_metadata(backend: tokenizers.Tokenizer, pre: str) -> dict[str, object]:
    """What a converter writes for a byte-level tokenizer."""
    model = json.loads(backend.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    special = {token.content for token in backend.get_added_tokens_decoder().values()}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [3 if piece in special else 1 for piece in pieces],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
    }


def test_default_model_as_transformers(
    default_tokenizer: Tokenizer, default_model_path: Path, default_reader: Any, corpus: list[str]
) -> None:
    oracle = transformers.AutoTokenizer.from_pretrained(
        str(default_model_path.parent), gguf_file=default_model_path.name
    )
    for text in corpus:
        # transformers misses that this model cuts digits apart; the pieces between are its own.
        wanted: list[int] = []
        for piece in re.split(r"(\d|½|²|[٣٤٥]|Ⅷ|[𝟙𝟚𝟛])", text):
            wanted += oracle.encode(piece, add_special_tokens=False) if piece else []
        assert default_tokenizer.encode(text) == wanted, text
        assert default_tokenizer.decode(wanted) == text
    for text in ("a\x04b", "\x06\x13\x14\x16\x1d", "x\U00040000y"):  # bytes without a token
        assert default_tokenizer.encode(text) == oracle.encode(text, add_special_tokens=False)


def test_default_model_facts(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.vocab_size == 49152
    assert default_tokenizer.bos_id == 1
    assert default_tokenizer.eos_ids == {0, 2}
    assert default_tokenizer.piece(2) == "<|im_end|>"
    assert default_tokenizer.chat_template is not None
    assert default_tokenizer.encode("2024") == [
        default_tokenizer.encode(digit)[0] for digit in "2024"
    ]


def test_default_model_builds_quickly(default_metadata: dict[str, object]) -> None:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        Tokenizer.from_gguf(default_metadata)
        times.append(time.perf_counter() - start)
    assert min(times) < 1.0  # 0.1 s on an idle machine; the bound leaves room for a busy one


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()))
def test_splits_as_transformers(pre: str, train: Train, corpus: list[str]) -> None:
    split = GGUF_PRE_TOKENIZER_SPLITS[pre]
    # Trained on whole lines, so that merges go across whatever the split must cut.
    oracle = train(r"[^\n]+|\n+", size=2500)
    oracle.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if PRE_TOKENIZERS[pre].whole_words_first:
        model = oracle.model
        assert isinstance(model, models.BPE)
        model.ignore_merges = True
        oracle.model = model
    ours = Tokenizer.from_gguf({**as_metadata(oracle, pre), "tokenizer.ggml.add_bos_token": False})
    if PRE_TOKENIZERS[pre].nfc:
        oracle.normalizer = normalizers.NFC()
    for text in corpus:
        assert ours.encode(text) == oracle.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize("pre", ["gpt-2", "default", "smollm", "starcoder"])
def test_gpt2_splits(pre: str, train: Train, corpus: list[str]) -> None:
    oracle = train(r"[^\n]+|\n+", size=2500)
    ours = Tokenizer.from_gguf(as_metadata(oracle, pre))
    oracle.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in ("smollm", "starcoder"):
        oracle.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), oracle.pre_tokenizer]
        )
    for text in corpus:
        assert ours.encode(text) == oracle.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ours.encode(text)) == text


def test_llama3_takes_whole_words_and_a_bos(train: Train) -> None:
    """A word that is a token is taken even where its merges lead elsewhere, as Llama 3 does."""
    metadata = as_metadata(train(None), "llama-bpe")
    pieces, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(pieces, list)
    assert isinstance(types, list)
    pieces.append("qqzzqq")
    types.append(1)
    ours = Tokenizer.from_gguf(metadata)
    assert ours.encode("qqzzqq") == [0, len(pieces) - 1]
    assert ours.encode("qqzzqq", add_bos=False) == [len(pieces) - 1]
    metadata["tokenizer.ggml.pre"] = "qwen2"
    assert len(Tokenizer.from_gguf(metadata).encode("qqzzqq")) > 2


def train_sentencepiece(corpus: list[str], **options: Any) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    # Far more text than vocabulary, or the trainer refuses.
    texts = [line for text in corpus for line in text.splitlines() if "\0" not in line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(
    oracle: sentencepiece.SentencePieceProcessor, space_prefix: bool
) -> dict[str, object]:
    count = oracle.get_piece_size()
    types = [1] * count
    user_defined = {"<think>", "▁▁▁"}
    pieces = [oracle.id_to_piece(token) for token in range(count)]
    for token in range(count):
        if oracle.is_unknown(token):
            types[token] = 2
        elif oracle.is_control(token):
            types[token] = 3
        elif oracle.is_byte(token):
            types[token] = 6
        elif pieces[token] in user_defined:
            types[token] = 4
            pieces[token] = pieces[token].replace("▁", " ")  # as converters write them
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [oracle.get_score(token) for token in range(count)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": oracle.bos_id(),
        "tokenizer.ggml.eos_token_id": oracle.eos_id(),
        "tokenizer.ggml.unknown_token_id": oracle.unk_id(),
        "tokenizer.ggml.add_space_prefix": space_prefix,
    }


@pytest.mark.parametrize("space_prefix", [True, False], ids=["llama", "gemma"])
def test_as_sentencepiece(space_prefix: bool, corpus: list[str]) -> None:
    options: dict[str, Any] = {"add_dummy_prefix": space_prefix}
    if not space_prefix:
        options["user_defined_symbols"] = ["<think>", "▁▁▁"]
    oracle = train_sentencepiece(corpus, **options)
    ours = Tokenizer.from_gguf(sentencepiece_metadata(oracle, space_prefix))
    assert ours.encode("") == [oracle.bos_id()]
    for text in [*corpus, "a <think> b", "x      y"]:
        wanted = oracle.encode(text)
        assert ours.encode(text, add_bos=False) == wanted, text
        assert ours.decode(wanted) == text.replace("▁", " "), text
    # Text that reads like a control or a byte token is text.
    for text in ("<s>", "</s> a<unk>", "<0x0A>"):
        assert ours.encode(text, add_bos=False) == oracle.encode(text), text
        assert ours.special_ids.isdisjoint(ours.encode(text, add_bos=False))
    assert ours.token_bytes(oracle.piece_to_id("<0x0A>")) == b"\n"


@pytest.mark.parametrize(
    ("key", "value", "error", "words"),
    [
        ("tokenizer.ggml.model", "bert", UnsupportedModelError, ["bert", "gpt2", "llama"]),
        ("tokenizer.ggml.pre", "nobody-knows", UnsupportedModelError, ["nobody-knows", "qwen2"]),
        ("tokenizer.ggml.tokens", None, WeightsError, ["tokenizer.ggml.tokens", "missing"]),
        ("tokenizer.ggml.tokens", [], WeightsError, ["tokenizer.ggml.tokens", "empty"]),
        ("tokenizer.ggml.tokens", ["a", 1], WeightsError, ["tokenizer.ggml.tokens"]),
        ("tokenizer.ggml.tokens", "abc", WeightsError, ["tokenizer.ggml.tokens"]),
        ("tokenizer.ggml.token_type", [1, 2], WeightsError, ["token_type", "700"]),
        ("tokenizer.ggml.merges", None, WeightsError, ["merges", "missing"]),
        ("tokenizer.ggml.merges", ["ab"], WeightsError, ["merges[0]", "'ab'"]),
        ("tokenizer.ggml.merges", ["zz yy"], WeightsError, ["merges", "zz"]),
        ("tokenizer.ggml.bos_token_id", 700, WeightsError, ["bos_token_id", "700"]),
        ("tokenizer.ggml.eos_token_id", -1, WeightsError, ["eos_token_id", "-1"]),
        ("tokenizer.ggml.add_bos_token", "yes", WeightsError, ["add_bos_token", "yes"]),
    ],
)
def test_refuses(
    key: str, value: object, error: type[Exception], words: list[str], train: Train
) -> None:
    metadata = as_metadata(train(None), "gpt-2")
    metadata[key] = value
    with pytest.raises(error) as caught:
        Tokenizer.from_gguf(metadata)
    for word in words:
        assert word in str(caught.value)


def test_vocabulary_without_types_still_knows_its_ends(train: Train) -> None:
    metadata = as_metadata(train(None), "gpt-2")
    del metadata["tokenizer.ggml.token_type"]
    metadata["tokenizer.ggml.eot_token_id"] = 3
    metadata["tokenizer.ggml.padding_token_id"] = 2**32 - 1
    ours = Tokenizer.from_gguf(metadata)
    assert ours.eos_ids == {2, 3}
    assert ours.pad_id is None
    assert ours.encode_template("<|im_end|>") == [2]
    assert ours.special_ids.isdisjoint(ours.encode("<|im_end|>"))


def test_piece_listed_twice_encodes_to_the_first(train: Train) -> None:
    metadata = as_metadata(train(None), "gpt-2")
    pieces, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(pieces, list)
    assert isinstance(types, list)
    pieces.append("a")
    types.append(1)
    ours = Tokenizer.from_gguf(metadata)
    assert ours.encode("a") == [pieces.index("a")]
    assert ours.decode([len(pieces) - 1]) == "a"
