"""Streaming text: whole characters only, and in sum what decoding at once gives."""

from __future__ import annotations

import codecs
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.tokenizer.detokenize import StreamDetokenizer
from headrace.tokenizer.tokenizer import Tokenizer

same_fixture = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def stream(tokenizer: Tokenizer, ids: list[int], **options: Any) -> list[str]:
    detokenizer = StreamDetokenizer(tokenizer, **options)
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token a byte."""
    alphabet = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    return [alphabet[bytes([byte])] for byte in data]


@same_fixture
@given(ids=st.lists(st.integers(0, 49_200), max_size=40), skip=st.booleans())
def test_pieces_make_the_whole(ids: list[int], skip: bool, default_tokenizer: Tokenizer) -> None:
    text = "".join(stream(default_tokenizer, ids, skip_special=skip))
    assert text == default_tokenizer.decode(ids, skip_special=skip)


@same_fixture
@given(data=st.binary(max_size=24))
def test_any_bytes(data: bytes, chatml: Tokenizer) -> None:
    """Against Python's own decoder, byte by byte: nothing late, nothing early."""
    pieces = stream(chatml, byte_ids(chatml, data))
    reference = codecs.getincrementaldecoder("utf-8")("replace")
    assert pieces[:-1] == [reference.decode(bytes([byte])) for byte in data]
    assert "".join(pieces) == data.decode("utf-8", "replace")


@same_fixture
@given(text=st.text(max_size=20))
def test_never_half_a_character(text: str, chatml: Tokenizer) -> None:
    pieces = stream(chatml, byte_ids(chatml, text.encode()))
    # Each piece is empty or exactly one character, emitted with the character's last byte.
    assert [piece for piece in pieces if piece] == list(text)


def test_invalid_bytes_are_not_held(chatml: Tokenizer) -> None:
    detokenizer = StreamDetokenizer(chatml)
    euro, letter = byte_ids(chatml, "€".encode()), byte_ids(chatml, b"x")[0]
    assert [detokenizer.push(token) for token in euro] == ["", "", "€"]
    assert detokenizer.push(euro[0]) == ""
    assert detokenizer.push(letter) == "\ufffdx"
    assert detokenizer.push(euro[1]) == "\ufffd"
    assert detokenizer.push(euro[0]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens_shown_or_not(chatml: Tokenizer) -> None:
    ids = chatml.encode_template("hi<|im_end|>")
    assert "".join(stream(chatml, ids)) == "hi"
    assert "".join(stream(chatml, ids, skip_special=False)) == "hi<|im_end|>"


def test_the_space_of_a_continuation() -> None:
    pieces = ["<unk>", "<s>", "▁", "a", "b", "▁a"]
    tokenizer = Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": pieces,
            "tokenizer.ggml.scores": [0.0] * 6,
            "tokenizer.ggml.token_type": [2, 3, 1, 1, 1, 1],
            "tokenizer.ggml.bos_token_id": 1,
        }
    )
    ids = tokenizer.encode("a b")
    assert ids == [1, 5, 2, 4]
    assert "".join(stream(tokenizer, ids)) == " a b" == tokenizer.decode(ids, continuation=True)
    assert "".join(stream(tokenizer, ids, continuation=False)) == "a b" == tokenizer.decode(ids)


def test_control_tokens_that_are_shown(default_tokenizer: Tokenizer) -> None:
    special = {default_tokenizer.piece(token): token for token in default_tokenizer.special_ids}
    start, end = special["<|im_start|>"], special["<|im_end|>"]
    shown = StreamDetokenizer(default_tokenizer, shown_ids=frozenset({start}))
    assert [shown.push(start), shown.push(end)] == ["<|im_start|>", ""]
    assert StreamDetokenizer(default_tokenizer).push(start) == ""
