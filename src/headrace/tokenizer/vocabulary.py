"""A vocabulary as read from a model's files: the tokens, what each is, and how they are spelled.

Both readers (tokenizer.json folders, GGUF metadata) fill this in; `Tokenizer` works from it. It
does not know which files it came from, nor how text is split into tokens: that is in `backend`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import tokenizers


class Spelling(StrEnum):
    """How a piece of the vocabulary stands for bytes."""

    BYTE_LEVEL = "byte-level"  # each character stands for one byte, GPT-2's table
    SENTENCEPIECE = "sentencepiece"  # text with U+2581 for a space; <0xNN> for a lone byte


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    backend: tokenizers.Tokenizer  # text -> ids, control tokens recognised
    pieces: list[str]  # by id, as the files spell them; "" where an id has no token
    spelling: Spelling
    added_ids: frozenset[int]  # matched whole in text before anything else: spelled literally
    byte_ids: frozenset[int]  # <0xNN> tokens of a sentencepiece vocabulary
    special_ids: frozenset[int]  # left out of decoded text
    reserved_ids: frozenset[int]  # never made from a user's text; special_ids and look-alikes
    strips_space: bool  # encoding puts a space before the text, decoding takes it off
    prefix_ids: tuple[int, ...]  # what a prompt starts with: the bos token, or nothing
    bos_id: int | None
    eos_id: int | None  # the one that templates call eos_token
    eos_ids: frozenset[int]  # any of these ends a generation
    pad_id: int | None
    chat_template: str | None


# Printable Latin-1 bytes stand for themselves; the other 68 for U+0100 onwards, in order.
_SELF_STANDING = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _SELF_STANDING]
BYTE_OF_CHARACTER: dict[str, int] = {
    **{chr(byte): byte for byte in sorted(_SELF_STANDING)},
    **{chr(0x100 + place): byte for place, byte in enumerate(_OTHERS)},
}

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE_MARK = "\u2581"

# Some files fail to flag turn markers as special (DeepSeek's <｜User｜>); their shape tells.
_CONTROL_SHAPE = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)


def find_reserved(
    pieces: list[str], added: Iterable[int], special: Iterable[int]
) -> frozenset[int]:
    """Ids that a user's text must never produce: special tokens and those that look like them.

    A single character is never reserved, as it may be plain text.
    """
    shaped = {token for token in added if _CONTROL_SHAPE.fullmatch(pieces[token])}
    return frozenset(token for token in {*shaped, *special} if len(pieces[token]) > 1)


def spell_bytes(vocabulary: Vocabulary, token_id: int) -> bytes:
    """The exact bytes a token adds to a text it continues; nothing for an id without a token."""
    if not 0 <= token_id < len(vocabulary.pieces):
        return b""
    piece = vocabulary.pieces[token_id]
    if token_id in vocabulary.added_ids:
        return piece.encode("utf-8", "replace")
    if vocabulary.spelling is Spelling.BYTE_LEVEL:
        try:
            return bytes([BYTE_OF_CHARACTER[character] for character in piece])
        except KeyError:  # not in the byte alphabet: a literal, as the reference takes it
            return piece.encode("utf-8", "replace")
    if token_id in vocabulary.byte_ids:
        return bytes([int(piece[3:5], 16)])
    return piece.replace(SPACE_MARK, " ").encode("utf-8", "replace")
