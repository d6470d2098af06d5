"""Text to token ids and back, for one model.

The splitting itself is the `tokenizers` library's. What is here is the line between a user's text
and the model's control tokens: `encode` never yields a control token from what a user typed,
`encode_template` recognises them. It knows nothing of chats or of streaming.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from headrace.core.errors import InvalidRequestError
from headrace.tokenizer.folder_vocabulary import read_folder_vocabulary
from headrace.tokenizer.gguf_vocabulary import read_gguf_vocabulary
from headrace.tokenizer.vocabulary import Vocabulary, spell_bytes

LONG_CHARACTERS = 4096  # takes a few milliseconds


class Tokenizer:
    """One model's tokenizer. Safe to share between threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._backend = vocabulary.backend
        self._bytes: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._plain: tokenizers.Tokenizer | None = None
        # Random, so that no user can type it. Its first character is not a marker of chat_template.
        self._nonce = f"\ufdef{secrets.token_hex(8)}"
        self.vocab_size = len(vocabulary.pieces)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.eos_ids = vocabulary.eos_ids
        self.pad_id = vocabulary.pad_id
        self.special_ids = vocabulary.special_ids
        self.chat_template = vocabulary.chat_template

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """From tokenizer.json and the files beside it."""
        return cls(read_folder_vocabulary(folder))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """From a GGUF's `tokenizer.ggml.*` keys."""
        return cls(read_gguf_vocabulary(metadata))

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """A user's text. Control tokens typed in it stay plain text.

        `add_bos` adds the tokens that this model's texts start with; some models have none.
        """
        ids = _encode(self._backend, text)
        if not self._vocabulary.reserved_ids.isdisjoint(ids):
            ids = _encode(self._plain_backend(), text)
        return [*self._vocabulary.prefix_ids, *ids] if add_bos else ids

    def encode_template(self, text: str, *, marker: str | None = None) -> list[int]:
        """A rendered chat template: control tokens are recognised, nothing is put first.

        Where `marker`, one character of U+FDD0 to U+FDEE, stands inside a control token's text,
        that text was typed by a user: the marker is taken out and the text stays plain.
        """
        if marker is None or marker not in text:
            return _encode(self._backend, text)
        # The reverse is easier: rename the control tokens that no marker breaks, and use a
        # tokenizer that knows only the new names.
        renamed = self.reserved_pattern.sub(lambda match: self._nonce + match[0], text)
        return _encode(self._plain_backend(), renamed.replace(marker, ""))

    def decode(
        self, ids: Iterable[int], *, skip_special: bool = True, continuation: bool = False
    ) -> str:
        """The text of some tokens; bytes that are not UTF-8 become U+FFFD.

        A tokenizer that puts a space before each text takes it off again, unless the tokens
        continue a text and the space is theirs.
        """
        special = self.special_ids if skip_special else frozenset()
        data = b"".join(self.token_bytes(token) for token in ids if token not in special)
        if self.strips_space and not continuation:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes a token adds to the text it continues; none for an id without a token."""
        found = self._bytes.get(token_id)
        if found is None:
            if not 0 <= token_id < self.vocab_size:  # not cached: there is no limit to such ids
                return b""
            found = self._bytes[token_id] = spell_bytes(self._vocabulary, token_id)
        return found

    def piece(self, token_id: int) -> str:
        """A token as the model's files spell it, for people; empty for an id without a token."""
        return self._vocabulary.pieces[token_id] if 0 <= token_id < self.vocab_size else ""

    @property
    def strips_space(self) -> bool:
        """Whether the tokenizer adds a space before each text, which decoding removes."""
        return self._vocabulary.strips_space

    @cached_property
    def longest_token_characters(self) -> int:
        """The most characters of text that a token stands for."""
        return max(1, *map(len, self._vocabulary.pieces))

    def shown(self, token_id: int) -> tuple[str, bool]:
        """A token in readable form, including control tokens, and whether it is valid text by
        itself: a part of a character is shown as its bytes, such as \\xe2\\x82."""
        data = self.token_bytes(token_id)
        try:
            return data.decode("utf-8"), True
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in data), False

    @cached_property
    def reserved_texts(self) -> frozenset[str]:
        """The texts of the tokens that a user can't make by typing them."""
        return frozenset(self._vocabulary.pieces[token] for token in self._vocabulary.reserved_ids)

    @cached_property
    def reserved_pattern(self) -> re.Pattern[str]:
        """Matches any of `reserved_texts`, the longest that fits."""
        texts = sorted(self.reserved_texts, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def _plain_backend(self) -> tokenizers.Tokenizer:
        """The backend with every reserved token renamed to something that no user can type.

        Renaming works where a flag would not: the library can skip special tokens when matching,
        but some vocabularies also reach them by merges or as whole words, and some files fail to
        flag them. Made when first needed; few texts hold a control token.
        """
        with self._lock:
            if self._plain is None:
                names = {text: self._nonce + text for text in self.reserved_texts}
                state = json.loads(self._backend.to_str())
                _rename(state, names)
                self._plain = tokenizers.Tokenizer.from_str(json.dumps(state))
            return self._plain


def _encode(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        if len(text) > LONG_CHARACTERS:
            # The same, but the library lets other threads run meanwhile.
            return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return backend.encode(text, add_special_tokens=False).ids
    except (TypeError, UnicodeError) as error:
        if not isinstance(text, str):
            raise InvalidRequestError(
                f"The text is a {type(text).__name__}; expected a string.", "Send text."
            ) from error
        place = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
        raise InvalidRequestError(
            f"The text has a lone surrogate at character {place}, which UTF-8 can't express.",
            "Send valid Unicode text.",
        ) from error


def _rename(state: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename tokens throughout a tokenizer's JSON, and forget the merges that made them."""
    state["post_processor"] = None
    for entry in state["added_tokens"]:
        entry["content"] = names.get(entry["content"], entry["content"])
    model = state["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): i for piece, i in model["vocab"].items()}
    else:  # Unigram: (piece, score) in order of id
        model["vocab"] = [(names.get(piece, piece), score) for piece, score in model["vocab"]]
    if "merges" in model:
        model["merges"] = [
            (left, right)
            for left, right in model["merges"]
            if left + right not in names and left not in names and right not in names
        ]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
