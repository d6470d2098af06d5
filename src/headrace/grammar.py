"""Compiles JSON schemas, regular expressions and Lark grammars into constraints, with llguidance.

Grammars come from clients and are not trusted, so compiling one is bounded:

- `MAX_GRAMMAR_BYTES` bounds the source, and with it how deeply rules can be nested. The compiler
  recurses along them, so it runs in a thread with a stack (`STACK_BYTES`, of which only the used
  part takes memory) that is large enough for the deepest nesting.
- `LIMITS` bounds the work, in llguidance's units: expressions built for the first lexer state and
  for one mask (`initial_lexer_fuel`, `step_lexer_fuel`), parser items of one mask
  (`step_max_items`), memory (`max_lexer_states`, of 1 to 2 kB; `max_grammar_size`, in symbols). One
  mask takes about 40 ms at worst, and a request that would need more is ended.
- `MAX_MULTIPLE` bounds what llguidance does not: the automaton of `multipleOf`.
- `MAX_GBNF_CHARACTERS` bounds a translation that takes quadratic time and blocks other requests.

CPU time and memory are not bounded here, since the compiler can't be interrupted from within its
process. A server, whose grammars are not trusted, therefore compiles in processes that can be
killed (server/grammars/process.py); a program that uses this directly knows where its grammars come
from. A grammar that can't be compiled is the request's error. Knows tokenizers; neither engine nor
HTTP.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, TypeVar

from headrace.core.constraint import (
    MAX_GRAMMAR_BYTES,
    Allowed,
    Foreseen,
    GrammarKind,
    GrammarSpec,
)
from headrace.core.errors import HeadraceError, InvalidRequestError
from headrace.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")

MAX_MULTIPLE = 100_000
MAX_GBNF_CHARACTERS = 8192
STACK_BYTES = 256 << 20
LOOK_S = 0.005  # of CPU time for looking ahead: usually enough for a hundred tokens
LIMITS = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
}
# One space or one line break with an indent, where JSON allows whitespace: a small model that may
# write endless whitespace does.
JSON_LAYOUT: dict[str, object] = {
    "whitespace_pattern": r"[ ]|\n[ ]{0,16}",
    "whitespace_flexible": True,
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,  # a keyword that is not understood is refused, not ignored
}
# llguidance before 1.8 lets that pattern match repeatedly: there, json.dumps's layout is used.
JSON_ON_ONE_LINE: dict[str, object] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
}

_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*(-?[0-9][-+.0-9eE]*)')
_STACK_LOCK = threading.Lock()  # the stack size of new threads is a setting of the whole process


class GrammarCompiler:
    """Compiles for one model's vocabulary. Safe to use from several threads; `compile` takes
    milliseconds, so not from an event loop."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._made: LLTokenizer | None = None
        self._ends = _Ends((), 0)
        self._layout = JSON_LAYOUT

    def prepare(self) -> None:
        """Build what all grammars share (some tenths of a second), if it is not built yet."""
        with self._lock:
            if self._made is None:
                pieces = _Pieces(self._tokenizer, self._vocab_size)
                self._ends = _Ends(pieces.eos_token_ids, len(pieces.tokens))
                made = _make_tokenizer(pieces)
                self._layout = JSON_ON_ONE_LINE if _repeats_blanks(made) else JSON_LAYOUT
                self._made = made

    def compile(self, spec: GrammarSpec) -> Matched:
        """A constraint at its start, with its first mask. A grammar that can't be compiled, or
        matches nothing, raises an InvalidRequestError that names the spec's param."""
        return on_deep_stack(lambda: self.start(spec))

    def start(self, spec: GrammarSpec) -> Matched:
        """The same for callers that have a large stack already."""
        param = spec.param
        _check_source(spec, param)
        self.prepare()
        from llguidance import LLMatcher, LLParserLimits

        assert self._made is not None
        limits = LLParserLimits(verbose_errors=False, **LIMITS)  # type: ignore[arg-type]
        grammar = _grammar(spec, param, self._layout)
        matcher = LLMatcher(self._made, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise _invalid(spec, param, _brief(matcher))
        constraint = Matched(matcher, self._ends)
        try:
            mask = constraint.mask()
        except HeadraceError as error:
            why = _brief(matcher)
            if "NoExtension" in why:
                why = "it matches no text"
            raise _invalid(spec, param, why) from error
        if not any(mask):
            raise _invalid(spec, param, "none of this model's tokens can begin it")
        return constraint


class _Ends:
    """A model's end tokens, each of which ends a text. llguidance before 1.7 supports only one, so
    it gets the first, and the others are mapped to that one."""

    def __init__(self, token_ids: Sequence[int], vocab_size: int) -> None:
        self._first, *others = token_ids or (0,)
        self._others = frozenset(others)
        bits = bytearray((vocab_size + 7) // 8)
        for token in others:
            bits[token >> 3] |= 1 << (token & 7)
        self._bits = int.from_bytes(bits, "little")

    def widen(self, mask: bytes) -> bytes:
        """The mask with every end token allowed, if the first one is."""
        if not self._others or not _allows(mask, self._first):
            return mask
        together = int.from_bytes(mask, "little") | self._bits
        return together.to_bytes(len(mask), "little")

    def name(self, token_id: int) -> int:
        return self._first if token_id in self._others else token_id


class Matched:
    """Implements `core.constraint.Constraint`."""

    def __init__(self, matcher: LLMatcher, ends: _Ends, mask: bytes | None = None) -> None:
        self._matcher = matcher
        self._ends = ends
        self._mask = mask
        self._asked: tuple[Sequence[int], int] | None = None  # to be foreseen
        self._seen: Foreseen | None = None

    def mask(self) -> bytes:
        if self._mask is None:
            mask = self._matcher.compute_bitmask()
            if (
                self._matcher.is_error()
            ):  # its mask then allows only end tokens, as if the text were complete
                raise _too_complex(self._matcher)
            self._mask = self._ends.widen(mask)
        return self._mask

    def accept(self, *token_ids: int) -> None:
        self._asked = self._seen = None
        for token_id in token_ids:
            self._accept(token_id)

    def _accept(self, token_id: int) -> None:
        mask, self._mask = self._mask, None
        if self._matcher.consume_token(self._ends.name(token_id)):
            return
        if mask is not None and _allows(mask, token_id):
            raise _too_complex(self._matcher)
        raise HeadraceError(
            f"Token {token_id} is not allowed by the grammar; expected one of its mask.",
            "This is a mistake in Headrace: please report it.",
        )

    @property
    def is_stopped(self) -> bool:
        return self._matcher.is_stopped()

    def allowed(self, wait_s: float = 0.0) -> Allowed:
        return Allowed(b"", is_stopped=True) if self.is_stopped else Allowed(self.mask())

    def foresee(self, *token_ids: int, forced: int = 0) -> None:
        self._asked, self._seen = (token_ids, forced), None

    def foreseen(self, wait_s: float = 0.0) -> Foreseen | None:
        if self._asked is not None and self._seen is None:
            self._seen = self.look_ahead(*self._asked)
        return self._seen

    def look_ahead(self, token_ids: Sequence[int], forced: int) -> Foreseen:
        """As `foresee` says. A grammar that can't be followed that far, or not within LOOK_S, is
        followed as far as it can be: it is not the request's fault that someone looks ahead."""
        if self.is_stopped:
            return Foreseen()
        if not token_ids:
            token_ids, forced = self._matcher.compute_ff_tokens()[:forced], 0
        if not token_ids or not _allows(self.mask(), token_ids[0]):
            return Foreseen()  # as at most places, without a copy
        ahead = self.fork()  # a matcher that failed once can't be used again
        masks: list[bytes] = []
        until_s = time.thread_time() + LOOK_S
        with contextlib.suppress(HeadraceError):
            if ahead._follow(token_ids, masks, until_s) and forced:
                more = ahead._matcher.compute_ff_tokens()[:forced]
                token_ids = [*token_ids, *more]
                ahead._follow(more, masks, until_s)
        return Foreseen(token_ids[: len(masks)], masks)

    def _follow(self, token_ids: Sequence[int], masks: list[bytes], until_s: float) -> bool:
        """Advance while the tokens are allowed and something may follow them; whether all are.
        Adds the mask after each."""
        for token_id in token_ids:
            if time.thread_time() > until_s or not _allows(self.mask(), token_id):
                return False
            self._accept(token_id)
            if self.is_stopped:
                return False
            masks.append(self.mask())
        return True

    def fork(self) -> Matched:
        return Matched(self._matcher.deep_copy(), self._ends, self._mask)

    def close(self) -> None:
        pass


def _allows(mask: bytes, token_id: int) -> bool:
    at = token_id >> 3
    return at < len(mask) and bool(mask[at] >> (token_id & 7) & 1)


class _Pieces:
    """A vocabulary as llguidance needs it: each token's bytes, and a function that tokenizes."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_ids = sorted(token for token in tokenizer.eos_ids if token < vocab_size)
        if not self.eos_token_ids:  # an id that no model can sample
            self.eos_token_ids = [len(self.tokens)]
            self.tokens.append(b"<end>")
        self.eos_token_id = self.eos_token_ids[0]
        special = {*tokenizer.special_ids, *self.eos_token_ids}
        self.special_token_ids = sorted(token for token in special if token < len(self.tokens))
        plain = (t for t, data in enumerate(self.tokens) if data and t not in special)
        self._by_bytes = {self.tokens[token]: token for token in plain}
        self._longest = max(map(len, self._by_bytes), default=1)

    def __call__(self, data: bytes) -> list[int]:
        """The tokens that this model uses for a text in the middle of another one."""
        text = data.decode("utf-8", "replace")
        # Some tokenizers put a space before a text, but not if it begins with a new line.
        for before in ("", "\n"):
            ids = self._tokenizer.encode(before + text, add_bos=False)
            for skipped in range(min(len(ids), 3) + 1 if before else 1):
                if b"".join(self.tokens[token] for token in ids[skipped:]) == data:
                    return ids[skipped:]
        return self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        """Greedy: takes the longest matching token repeatedly."""
        ids: list[int] = []
        at = 0
        while at < len(data):
            for length in range(min(self._longest, len(data) - at), 0, -1):
                if (token := self._by_bytes.get(data[at : at + length])) is not None:
                    ids.append(token)
                    break
            else:
                break  # no token begins with this byte: the rest can't be tokenized
            at += length
        return ids


def _make_tokenizer(pieces: _Pieces) -> LLTokenizer:
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError as error:
        raise HeadraceError(
            "llguidance is not installed; it is needed to compile grammars.",
            "Install it: pip install llguidance.",
        ) from error
    wrapper = TokenizerWrapper(pieces)
    return LLTokenizer(wrapper, n_vocab=len(pieces.tokens), eos_token=pieces.eos_token_id)


def _repeats_blanks(made: LLTokenizer) -> bool:
    """Whether this llguidance lets a whitespace pattern match several times in a row."""
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_json_schema('{"type": "array"}', overrides=JSON_LAYOUT)  # type: ignore[arg-type]
    tokens = made.tokenize_bytes(b"[  1]")
    return LLMatcher(made, grammar, log_level=0).validate_tokens(tokens) == len(tokens)


def _grammar(spec: GrammarSpec, param: str, layout: dict[str, object]) -> str:
    """The grammar in llguidance's form. Its compiler reports errors inside."""
    from llguidance import LLMatcher

    if spec.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(spec.source)
    if spec.kind is GrammarKind.LARK:
        return LLMatcher.grammar_from_lark(_lark(spec, param))
    if spec.kind is GrammarKind.CHOICE:
        texts = _parse(spec, param)
        if not (isinstance(texts, list) and texts and all(t and type(t) is str for t in texts)):
            raise _invalid(spec, param, "expected a list of at least one text, none of them empty")
        spelled = (json.dumps(text, ensure_ascii=False) for text in texts)
        return LLMatcher.grammar_from_lark("start: " + " | ".join(spelled))
    schema = {"type": "object"} if spec.kind is GrammarKind.JSON_OBJECT else _parse(spec, param)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise _invalid(spec, param, f"expected an object, found {type(schema).__name__}")
    try:
        text = json.dumps(schema, ensure_ascii=False)
        return LLMatcher.grammar_from_json_schema(text, overrides=layout)  # type: ignore[arg-type]
    except (ValueError, RecursionError) as error:
        raise _invalid(spec, param, str(error)) from error


def _lark(spec: GrammarSpec, param: str) -> str:
    """Translates GBNF, the notation of llama.cpp that vLLM's users have too."""
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    if "::=" not in spec.source or is_lark_syntax(spec.source):
        return spec.source
    if len(spec.source) > MAX_GBNF_CHARACTERS:
        raise _invalid(
            spec,
            param,
            f"it has {len(spec.source)} characters of GBNF; expected at most {MAX_GBNF_CHARACTERS}",
        )
    try:
        return gbnf_to_lark(spec.source)
    except Exception as error:  # its own errors, and those that malformed rules cause
        raise _invalid(spec, param, f"it is not GBNF: {error}") from error


def _parse(spec: GrammarSpec, param: str) -> object:
    try:
        return json.loads(spec.source)
    except (ValueError, RecursionError) as error:
        raise _invalid(spec, param, f"it is not JSON: {error}") from error


def _check_source(spec: GrammarSpec, param: str) -> None:
    try:
        size_bytes = len(spec.source.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise _invalid(spec, param, "it has a lone surrogate") from error
    if size_bytes > MAX_GRAMMAR_BYTES:
        raise _invalid(
            spec, param, f"it has {size_bytes} bytes; expected at most {MAX_GRAMMAR_BYTES}"
        )
    _check_multiples(spec, param)


def _check_multiples(spec: GrammarSpec, param: str) -> None:
    """Several `multipleOf` may apply to one number, so all are combined. A schema may be part of a
    Lark grammar, so the text is searched, not the parsed schema."""
    if spec.kind in (GrammarKind.REGEX, GrammarKind.CHOICE):
        return
    text = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), spec.source)
    together, scale = 1, 1
    for found in _MULTIPLE.findall(text):
        try:
            value = Decimal(found)
        except InvalidOperation:
            raise _invalid(spec, param, f"multipleOf is {found}, which is not a number") from None
        if not (Decimal("1e-6") <= value <= MAX_MULTIPLE):
            raise _invalid(
                spec, param, f"multipleOf is {found}; expected 0.000001 to {MAX_MULTIPLE}"
            )
        numerator, denominator = value.as_integer_ratio()
        wider = math.lcm(scale, denominator)
        together = math.lcm(together * (wider // scale), numerator * (wider // denominator))
        scale = wider
        if together > MAX_MULTIPLE:
            raise _invalid(
                spec,
                param,
                f"multipleOf is {found}, in all steps of {together}; expected at most "
                f"{MAX_MULTIPLE}",
            )


def on_deep_stack(work: Callable[[], T]) -> T:
    """Runs `work` in a thread with a large stack, and returns its result."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="headrace-grammar", daemon=True)
    with _STACK_LOCK:
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _brief(matcher: LLMatcher) -> str:
    """The first part of llguidance's error, on one line, without the state that it adds."""
    text = matcher.get_error().partition("\n<non-verbose")[0] or matcher.stop_reason()
    return " ".join(text.split()).rstrip(".")[:300]


def _too_complex(matcher: LLMatcher) -> InvalidRequestError:
    return InvalidRequestError(
        f"The grammar can't be followed any further: {_brief(matcher)}.", "Simplify the grammar."
    )


def _invalid(spec: GrammarSpec, param: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"The grammar ({spec.kind.value}) can't be used: {why}.",
        "Correct or simplify it.",
        param=param,
    )
