"""Tokens to text, one at a time.

A token may end in the middle of a character; what is emitted never does. It knows nothing of stop
strings (stop.py) or of why a generation ends.
"""

from __future__ import annotations

import codecs

from headrace.tokenizer.tokenizer import Tokenizer


class StreamDetokenizer:
    """Emits each character with the token that completes it.

    The pieces, joined, are `tokenizer.decode(ids, continuation=continuation)`. At most three bytes
    are held back, and bytes that can't become a character are emitted as U+FFFD at once.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        continuation: bool = True,
        shown_ids: frozenset[int] = frozenset(),  # special tokens to emit anyway
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - shown_ids if skip_special else frozenset()
        self._drop_space = tokenizer.strips_space and not continuation
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        if token_id in self._skipped:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if data and self._drop_space:
            self._drop_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What was held back: nothing, or U+FFFD for an incomplete character."""
        return self._decoder.decode(b"", final=True)
