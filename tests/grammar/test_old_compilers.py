"""What llguidance's older releases lack is made up for here: several end tokens, bounded blanks.

The newest one runs these too: one way for all of them. `make test-floors` runs them on the oldest.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.grammar.conftest import byte_level
from tokenizers import AddedToken

from headrace.core.constraint import GrammarKind, GrammarSpec
from headrace.core.errors import HeadraceError
from headrace.grammar import JSON_ON_ONE_LINE, GrammarCompiler, Matched
from headrace.tokenizer.tokenizer import Tokenizer

ENDS = ("<|end|>", "<|turn|>", "<|far|>")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Three tokens end a text, as in many chat models; the last is in another byte of a mask."""
    folder: Path = tmp_path_factory.mktemp("several-ends")
    backend = byte_level()
    others = [f"<|{number}|>" for number in range(20)]
    backend.add_special_tokens([AddedToken(t, special=True) for t in (ENDS[1], *others, ENDS[2])])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    ids = [backend.token_to_id(end) for end in ENDS]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    made = Tokenizer.from_folder(folder)
    assert made.eos_ids == set(ids)
    return made


def allowed(constraint: Matched) -> set[int]:
    mask = constraint.mask()
    return {token for token in range(len(mask) * 8) if mask[token >> 3] >> (token & 7) & 1}


def start(tokenizer: Tokenizer, kind: str, source: str) -> Matched:
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    return compiler.compile(GrammarSpec(kind=GrammarKind(kind), source=source))


def test_any_end_token_may_end_a_text(tokenizer: Tokenizer) -> None:
    (letter,) = tokenizer.encode("a", add_bos=False)
    constraint = start(tokenizer, "regex", "a+")
    assert not allowed(constraint) & tokenizer.eos_ids  # not before it has begun
    constraint.accept(letter)
    assert allowed(constraint) >= {*tokenizer.eos_ids, letter}
    for end in tokenizer.eos_ids:
        branch = constraint.fork()
        branch.accept(end)
        assert branch.is_stopped


def test_none_may_where_the_text_is_not_done(tokenizer: Tokenizer) -> None:
    for end in tokenizer.eos_ids:
        constraint = start(tokenizer, "regex", "aa")
        assert not allowed(constraint) & tokenizer.eos_ids
        with pytest.raises(HeadraceError, match="is not allowed by the grammar"):
            constraint.accept(end)


def test_the_layout_without_free_blanks_is_that_of_pythons_json(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = {"name": "a b", "ages": [1, 22], "deep": {"is": True, "not": None}}
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    compiler.prepare()
    monkeypatch.setattr(compiler, "_layout", JSON_ON_ONE_LINE)
    spec = GrammarSpec(kind=GrammarKind.JSON_OBJECT)

    def follows(text: str) -> bool:
        constraint = compiler.compile(spec)
        for token in tokenizer.encode(text, add_bos=False):
            if token not in allowed(constraint):
                return False
            constraint.accept(token)
        return constraint.is_stopped or bool(allowed(constraint) & tokenizer.eos_ids)

    assert follows(json.dumps(value))
    assert not follows(json.dumps(value, indent=1))
    assert not follows(json.dumps(value).replace(", ", ",  "))


@pytest.mark.parametrize("blanks", ["  ", "\n\n", " \n"])
def test_blanks_never_repeat(tokenizer: Tokenizer, blanks: str) -> None:
    constraint = start(tokenizer, "json_schema", '{"type": "array"}')
    taken = 0
    for token in tokenizer.encode("[" + blanks, add_bos=False):
        if token not in allowed(constraint):
            break
        constraint.accept(token)
        taken += 1
    assert taken <= 2, "a bracket and one blank"
    assert taken < len(tokenizer.encode("[" + blanks, add_bos=False))
