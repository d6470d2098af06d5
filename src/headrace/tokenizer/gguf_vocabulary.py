"""A GGUF's own vocabulary (`tokenizer.ggml.*`) as a `Vocabulary`, without a tokenizer.json.

Two kinds exist for the models Headrace runs: "gpt2" (byte-level BPE with merges; how text is cut
before the merges is named by `tokenizer.ggml.pre`) and "llama" (SentencePiece BPE, whose merges
follow from the scores). It knows nothing of the GGUF file format: metadata arrives as a mapping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from headrace.core.errors import UnsupportedModelError, WeightsError
from headrace.tokenizer.vocabulary import (
    BYTE_PIECE,
    SPACE_MARK,
    Spelling,
    Vocabulary,
    find_reserved,
)

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

NO_TOKEN = 2**32 - 1  # some converters write -1 where there is none

# Tokens that end a turn or a text if they exist, for files that name only one of them.
END_PIECES = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
        *("<end_of_turn>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "</s>"),
    }
)

_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"


def _words(digits: str, letters: str = r"\p{L}", others: str = r"[^\s\p{L}\p{N}]") -> str:
    """The cl100k family: a word with one leading sign, digits, a run of signs, white space."""
    return rf"{_SUFFIXES}|{_LEAD}{letters}+|{digits}| ?{others}+[\r\n]*{_TAIL}"


def _cased_words(digits: str, suffixes: str = "") -> str:
    """The o200k family: as above, but a word also breaks where lower case turns upper."""
    return (
        rf"{_LEAD}{_UPPER}*{_LOWER}+{suffixes}|{_LEAD}{_UPPER}+{_LOWER}*{suffixes}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_TAIL}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """How text is cut before merging. No `splits`: GPT-2's own expression."""

    splits: tuple[str, ...] = ()
    single_digits: bool = False
    whole_words_first: bool = False  # a word that is a token is taken without its merges
    nfc: bool = False
    add_bos: bool = False  # where the file does not say


_GPT2 = PreTokenizer()
_SINGLE_DIGITS = PreTokenizer(single_digits=True)
_LLAMA3 = PreTokenizer(splits=(_words(r"\p{N}{1,3}"),), whole_words_first=True, add_bos=True)
_QWEN2 = PreTokenizer(splits=(_words(r"\p{N}"),), nfc=True)
_QWEN35 = PreTokenizer(
    splits=(_words(r"\p{N}", r"[\p{L}\p{M}]", r"[^\s\p{L}\p{M}\p{N}]"),), nfc=True
)
_TEKKEN = PreTokenizer(splits=(_cased_words(r"\p{N}"),), whole_words_first=True, add_bos=True)
_GPT4O = PreTokenizer(splits=(_cased_words(r"\p{N}{1,3}", rf"{_SUFFIXES}?"),))
_DEEPSEEK_CODER = PreTokenizer(
    splits=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"), single_digits=True
)
_DEEPSEEK_V3 = PreTokenizer(
    splits=(
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + _TAIL,
    )
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo", "mpt"), _GPT2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        _SINGLE_DIGITS,
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "pixtral"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer(splits=_LLAMA3.splits)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), _QWEN2),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK_V3,
}


def read_gguf_vocabulary(metadata: Mapping[str, object]) -> Vocabulary:
    """The vocabulary of a GGUF's metadata; WeightsError names a key that is missing or wrong."""
    model = metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"The GGUF's tokenizer.ggml.model is {model!r}; Headrace builds 'gpt2' (byte-level "
            "BPE) and 'llama' (SentencePiece BPE).",
            "Use the model's folder with its tokenizer.json instead.",
        )
    pieces = _strings(metadata, "tokenizer.ggml.tokens")
    types = _types(metadata, len(pieces))
    special = _special_ids(metadata, pieces, types)
    if model == "gpt2":
        pre = _pre_tokenizer(metadata)
        backend = _byte_level(metadata, pieces, pre)
        spelling, strips_space, bos_default = Spelling.BYTE_LEVEL, False, pre.add_bos
    else:
        strips_space = _flag(metadata, "tokenizer.ggml.add_space_prefix", default=True)
        backend = _sentencepiece(metadata, pieces, types, strips_space)
        spelling, bos_default = Spelling.SENTENCEPIECE, True
    user_defined = [
        token
        for token, kind in enumerate(types)
        if kind == USER_DEFINED
        and token not in special
        and pieces[token]
        and not (model == "llama" and SPACE_MARK in pieces[token])
    ]
    backend.add_special_tokens([_added(pieces[token], special=True) for token in sorted(special)])
    backend.add_tokens([_added(pieces[token], special=False) for token in user_defined])
    added = frozenset({*special, *user_defined})
    bos = _token_id(metadata, "bos_token_id", len(pieces))
    add_bos = _flag(metadata, "tokenizer.ggml.add_bos_token", default=bos_default)
    template = metadata.get("tokenizer.chat_template")
    return Vocabulary(
        backend=backend,
        pieces=pieces,
        spelling=spelling,
        added_ids=added,
        byte_ids=frozenset(_byte_ids(pieces, types)),
        special_ids=special,
        reserved_ids=find_reserved(pieces, added, special),
        strips_space=strips_space,
        prefix_ids=(bos,) if add_bos and bos is not None else (),
        bos_id=bos,
        eos_id=_token_id(metadata, "eos_token_id", len(pieces)),
        eos_ids=_end_ids(metadata, pieces, types),
        pad_id=_token_id(metadata, "padding_token_id", len(pieces)),
        chat_template=template if isinstance(template, str) and template else None,
    )


def _added(piece: str, *, special: bool) -> AddedToken:
    return AddedToken(piece, special=special, normalized=False)


def _byte_level(
    metadata: Mapping[str, object], pieces: list[str], pre: PreTokenizer
) -> tokenizers.Tokenizer:
    merges = _merges(metadata)
    if merges is None:
        raise _missing("tokenizer.ggml.merges", "a list of 'left right' strings")
    backend = tokenizers.Tokenizer(_bpe(pieces, merges, ignore_merges=pre.whole_words_first))
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(split), behavior="isolated") for split in pre.splits
    ]
    if pre.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pre.splits))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(
    metadata: Mapping[str, object], pieces: list[str], types: list[int], space_prefix: bool
) -> tokenizers.Tokenizer:
    merges = _merges(metadata)
    if merges is None:
        merges = _merges_from_scores(pieces, types, _scores(metadata, len(pieces)))
    unknown = _token_id(metadata, "unknown_token_id", len(pieces))
    if unknown is None and UNKNOWN in types:
        unknown = types.index(UNKNOWN)
    byte_fallback = len({pieces[token].upper() for token in _byte_ids(pieces, types)}) == 256
    backend = tokenizers.Tokenizer(
        _bpe(
            pieces,
            merges,
            unk_token=None if unknown is None else pieces[unknown],
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    )
    # SentencePiece puts its space before every run of text, one that starts with a space included.
    spaces = normalizers.Replace(" ", SPACE_MARK)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE_MARK), spaces]) if space_prefix else spaces
    )
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(
        [*steps, decoders.Strip(content=" ", left=1, right=0)] if space_prefix else steps
    )
    return backend


def _bpe(pieces: list[str], merges: list[tuple[str, str]], **options: object) -> models.BPE:
    vocab: dict[str, int] = {}
    for token, piece in enumerate(pieces):
        vocab.setdefault(piece, token)  # a piece listed twice encodes to its first id
    try:
        return models.BPE(vocab=vocab, merges=merges, **options)
    except Exception as error:  # tokenizers raises bare Exception
        raise WeightsError(
            f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}.",
            "The file is damaged or was converted wrongly; download or convert it again.",
        ) from error


def _merges_from_scores(
    pieces: list[str], types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, the best-scored piece first.

    Control, byte and unused pieces take no part: text must not be able to merge into them.
    User-defined ones are matched whole beforehand, unless they hold the space mark.
    """
    rank = {
        piece: scores[token]
        for token, piece in enumerate(pieces)
        if types[token] == NORMAL or (types[token] == USER_DEFINED and SPACE_MARK in piece)
    }
    found: list[tuple[float, str, str]] = []
    for piece, score in rank.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in rank and right in rank:
                found.append((score, left, right))
    found.sort(key=lambda merge: -merge[0])
    return [(left, right) for _, left, right in found]


def _pre_tokenizer(metadata: Mapping[str, object]) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        raise UnsupportedModelError(
            f"The GGUF's tokenizer.ggml.pre is {name!r}; supported: "
            f"{', '.join(sorted(PRE_TOKENIZERS))}.",
            "Use the model's folder with its tokenizer.json instead.",
        )
    return pre


def _special_ids(
    metadata: Mapping[str, object], pieces: list[str], types: list[int]
) -> frozenset[int]:
    special = {token for token, kind in enumerate(types) if kind in (CONTROL, UNKNOWN)}
    for key in ("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id"):
        token = _token_id(metadata, key, len(pieces))
        if token is not None:  # files without token types name at least these
            special.add(token)
    return frozenset(token for token in special if pieces[token])


def _byte_ids(pieces: list[str], types: list[int]) -> list[int]:
    bytes_said = [token for token, kind in enumerate(types) if kind == BYTE]
    return [token for token in bytes_said if BYTE_PIECE.fullmatch(pieces[token])]


def _end_ids(metadata: Mapping[str, object], pieces: list[str], types: list[int]) -> frozenset[int]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = {_token_id(metadata, key, len(pieces)) for key in keys}
    known = {
        token
        for token, kind in enumerate(types)
        if kind in (CONTROL, USER_DEFINED) and pieces[token] in END_PIECES
    }
    return frozenset(token for token in {*named, *known} if token is not None)


def _missing(key: str, expected: str, found: str = "missing") -> WeightsError:
    return WeightsError(
        f"GGUF metadata {key} is {found}; expected {expected}.",
        "The file is damaged or was converted wrongly; download or convert it again.",
        param=key,
    )


def _sequence(metadata: Mapping[str, object], key: str, expected: str) -> list[object] | None:
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise _missing(key, expected, f"a {type(value).__name__}")
    return list(value)


def _strings(metadata: Mapping[str, object], key: str) -> list[str]:
    values = _sequence(metadata, key, "a list of strings")
    if not values:
        raise _missing(key, "a list of strings", "missing" if values is None else "empty")
    strings = [value for value in values if isinstance(value, str)]
    if len(strings) != len(values):
        raise _missing(key, "a list of strings", "a list with other types")
    return strings


def _merges(metadata: Mapping[str, object]) -> list[tuple[str, str]] | None:
    key = "tokenizer.ggml.merges"
    if metadata.get(key) is None:
        return None
    pairs = []
    for place, merge in enumerate(_strings(metadata, key)):
        cut = merge.find(" ", 1)
        if cut < 0 or cut == len(merge) - 1:
            raise _missing(f"{key}[{place}]", "'left right'", repr(merge))
        pairs.append((merge[:cut], merge[cut + 1 :]))
    return pairs


def _types(metadata: Mapping[str, object], count: int) -> list[int]:
    key, expected = "tokenizer.ggml.token_type", f"{count} integers from 1 to 6, one per token"
    values = _sequence(metadata, key, expected)
    if values is None:
        return [NORMAL] * count
    types = [value for value in values if isinstance(value, int) and 0 <= value <= BYTE]
    if len(types) != count or len(values) != count:
        raise _missing(key, expected, f"a list of {len(values)}, of which {len(types)} are")
    return types


def _scores(metadata: Mapping[str, object], count: int) -> list[float]:
    key, expected = "tokenizer.ggml.scores", f"{count} numbers, one per token"
    values = _sequence(metadata, key, expected)
    if values is None:
        raise _missing(key, expected)
    scores = [float(value) for value in values if isinstance(value, (int, float))]
    if len(scores) != count or len(values) != count or any(s != s for s in scores):
        raise _missing(key, expected, f"a list of {len(values)}, or not all are numbers")
    return scores


def _token_id(metadata: Mapping[str, object], name: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key)
    if value is None or value == NO_TOKEN:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise _missing(key, f"a token id below {count}", repr(value))
    return value


def _flag(metadata: Mapping[str, object], key: str, *, default: bool) -> bool:
    value = metadata.get(key, default)
    if not isinstance(value, bool):
        raise _missing(key, "true or false", repr(value))
    return value
