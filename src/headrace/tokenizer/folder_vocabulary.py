"""A model folder's tokenizer files as a `Vocabulary`.

tokenizer.json says how text becomes ids; tokenizer_config.json, special_tokens_map.json,
generation_config.json, config.json and chat_template.jinja say which tokens begin and end a text
and how a chat is written. It does not know what the model is, and never runs code from a folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import tokenizers

from headrace.core.errors import UnsupportedModelError, WeightsError
from headrace.tokenizer.vocabulary import (
    BYTE_PIECE,
    SPACE_MARK,
    Spelling,
    Vocabulary,
    find_reserved,
)

MAX_TOKENIZER_BYTES = 256 << 20  # the largest published ones are some 35 MB
MAX_CONFIG_BYTES = 16 << 20
_DOWNLOAD = "Download the model's folder again, with its tokenizer files."


def read_folder_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary in `folder`. Raises WeightsError if a file is missing or malformed."""
    backend = _read_backend(folder / "tokenizer.json")
    config = _read_config(folder / "tokenizer_config.json")
    tokens_map = _read_config(folder / "special_tokens_map.json")
    ids = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    pieces = [""] * (max([*ids.values(), *added], default=-1) + 1)
    for piece, token in ids.items():
        pieces[token] = piece
    for token, entry in added.items():
        pieces[token] = entry.content
    if not pieces:
        raise WeightsError(f"{folder / 'tokenizer.json'} holds no tokens.", _DOWNLOAD)

    named = {
        name: _named_token(name, config, tokens_map, ids, folder)
        for name in ("bos_token", "eos_token", "pad_token")
    }
    bos, eos, pad = named["bos_token"], named["eos_token"], named["pad_token"]
    ends = {
        *(() if eos is None else (eos,)),
        *_end_ids(folder / "generation_config.json", len(pieces)),
        *_end_ids(folder / "config.json", len(pieces)),
    }
    special = {token for token, entry in added.items() if entry.special}
    special |= {token for token in (bos, *ends) if token is not None and pieces[token]}
    spelling, strips_space = _spelling(backend, folder)
    return Vocabulary(
        backend=backend,
        pieces=pieces,
        spelling=spelling,
        added_ids=frozenset(added),
        byte_ids=frozenset(t for t, piece in enumerate(pieces) if BYTE_PIECE.fullmatch(piece)),
        special_ids=frozenset(special),
        reserved_ids=find_reserved(pieces, added, special),
        strips_space=strips_space,
        prefix_ids=_prefix_ids(backend, config, bos),
        bos_id=bos,
        eos_id=eos,
        eos_ids=frozenset(ends),
        pad_id=pad,
        chat_template=_chat_template(folder, config),
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    text = _read_text(path, MAX_TOKENIZER_BYTES)
    if text is None:
        raise WeightsError(
            f"{path} is missing; Headrace reads a folder's tokenizer from it.",
            "Download it with the model, or convert tokenizer.model with transformers.",
        )
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises bare Exception
        raise WeightsError(f"{path} is not a tokenizer: {str(error)[:300]}.", _DOWNLOAD) from error
    # A file may contain truncation and padding settings from training; prompts need neither.
    backend.no_truncation()
    backend.no_padding()
    model = backend.model
    if isinstance(model, tokenizers.models.BPE) and model.dropout is not None:
        model.dropout = None
        backend.model = model
    return backend


def _read_text(path: Path, limit_bytes: int) -> str | None:
    try:
        with path.open("rb") as file:
            data = file.read(limit_bytes + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WeightsError(f"{path} can't be read: {error.strerror}.", "Check the path.") from error
    if len(data) > limit_bytes:
        raise WeightsError(f"{path} is over {limit_bytes} bytes.", _DOWNLOAD)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise WeightsError(f"{path} is not UTF-8 at byte {error.start}.", _DOWNLOAD) from error


def _read_config(path: Path) -> dict[str, object]:
    text = _read_text(path, MAX_CONFIG_BYTES)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is not JSON: {error}.", _DOWNLOAD) from error
    if not isinstance(value, dict):
        raise WeightsError(
            f"{path} holds a JSON {type(value).__name__}; expected an object.", _DOWNLOAD
        )
    return value


def _named_token(
    name: str,
    config: Mapping[str, object],
    tokens_map: Mapping[str, object],
    ids: Mapping[str, int],
    folder: Path,
) -> int | None:
    value = config[name] if name in config else tokens_map.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    if value is None:
        return None
    token = ids.get(value) if isinstance(value, str) else None
    if token is None and name != "pad_token":  # padding is only used in training
        raise WeightsError(
            f"{folder}: {name} is {value!r}, which tokenizer.json does not have.", _DOWNLOAD
        )
    return token


def _end_ids(path: Path, count: int) -> list[int]:
    value = _read_config(path).get("eos_token_id")
    if value is None:
        return []
    said = value if isinstance(value, list) else [value]
    ids = [token for token in said if isinstance(token, int) and token >= 0]
    if len(ids) != len(said):
        raise WeightsError(
            f"{path}: eos_token_id is {value!r}; expected a token id or a list of them.", _DOWNLOAD
        )
    return [token for token in ids if token < count]


def _prefix_ids(
    backend: tokenizers.Tokenizer, config: Mapping[str, object], bos: int | None
) -> tuple[int, ...]:
    """The tokens that the files put before a text: by `add_bos_token` if it is set, else by
    tokenizer.json.

    Runs the post-processor to see what it adds around a text. Only tokens before the text are used:
    a prompt is to be continued, so it has no end token.
    """
    said = config.get("add_bos_token")
    if isinstance(said, bool):
        return (bos,) if said and bos is not None else ()
    around = backend.encode("a", add_special_tokens=True)
    prefix = []
    for token, added in zip(around.ids, around.special_tokens_mask, strict=True):
        if not added:
            break
        prefix.append(token)
    return tuple(prefix)


def _spelling(backend: tokenizers.Tokenizer, folder: Path) -> tuple[Spelling, bool]:
    """How pieces spell text, and whether decoding removes a leading space."""
    steps = list(_steps(backend.decoder, "decoders"))
    kinds = {step.get("type") for step in steps}
    if not steps:
        kinds = {step.get("type") for step in _steps(backend.pre_tokenizer, "pretokenizers")}
    if "ByteLevel" in kinds:
        return Spelling.BYTE_LEVEL, False
    marks = any(
        step.get("type") == "Replace" and SPACE_MARK in json.dumps(step, ensure_ascii=False)
        for step in steps
    )
    if marks or kinds & {"Metaspace", "ByteFallback"}:
        strips = any(
            (step.get("type") == "Strip" and step.get("content") == " " and step.get("start"))
            or (step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in steps
        )
        return Spelling.SENTENCEPIECE, strips
    raise UnsupportedModelError(
        f"{folder / 'tokenizer.json'} decodes by {sorted(map(str, kinds)) or 'nothing'}; Headrace "
        "reads byte-level and SentencePiece tokenizers.",
        "Use a decoder-only language model.",
    )


def _steps(part: object, children: str) -> Iterator[dict[str, object]]:
    """A component and, where it is a sequence, its parts, each as its JSON object."""
    if part is None:
        return
    state = getattr(part, "__getstate__")()  # noqa: B009 - the stubs leave it out
    pending = [json.loads(state)]
    while pending:
        step = pending.pop(0)
        if isinstance(step.get(children), list):
            pending = [*step[children], *pending]
        else:
            yield step


def _chat_template(folder: Path, config: Mapping[str, object]) -> str | None:
    """From its own file if there is one, else from tokenizer_config.json: a single template, or one
    of several by name."""
    text = _read_text(folder / "chat_template.jinja", MAX_CONFIG_BYTES)
    if text is not None:
        return text
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {
            entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)
        }
        value = named.get("default", next(iter(named.values())) if len(named) == 1 else None)
    if value is None:
        return None
    if not isinstance(value, str):
        raise WeightsError(
            f"{folder / 'tokenizer_config.json'}: chat_template is a {type(value).__name__}; "
            "expected text.",
            _DOWNLOAD,
        )
    return value
