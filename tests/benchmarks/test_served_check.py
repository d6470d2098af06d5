"""What the served check holds answers against, and a run of it."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.plans import Draw, reference_draw

from checks.draws import OTHERS, chi_squared_tail, expected_shares, mean_shares, surprise
from checks.replies import Refused, Reply
from served_check import main, parting

LOGITS = np.random.default_rng(3).normal(0, 1.5, 24).astype(np.float32)
LOGPROBS = LOGITS - np.log(np.exp(LOGITS.astype(np.float64)).sum())
ORDER = [int(token) for token in np.argsort(-LOGITS)]
TOP = [(str(token), float(LOGPROBS[token])) for token in ORDER[:20]]


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 1.0, "top_k": 8},
        {"temperature": 2.0, "top_k": 19},
        {"temperature": 0.5, "top_k": 12, "min_p": 0.1},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 1.0, "min_p": 0.3},
        {"temperature": 1.0, "top_k": 15, "typical_p": 0.5},
        {"temperature": 0.8, "top_k": 19, "min_p": 0.05, "typical_p": 0.9, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 6, "bias": {0: -1.0, 3: 1.0}},
        {"temperature": 1.0, "allowed": [1, 2, 4, 7], "top_p": 0.7},
    ],
)
def test_expectations_are_those_of_the_reference(how: dict[str, Any]) -> None:
    fields = dict(how)
    ranks = fields.pop("bias", {})
    bias = {ORDER[rank]: value for rank, value in ranks.items()}
    allowed = [ORDER[rank] for rank in fields.pop("allowed")] if "allowed" in how else None
    count = 4000
    drawn = Counter(
        str(
            reference_draw(
                LOGITS,
                Draw(**fields, uniform=(n + 0.5) / count, bias=bias, allowed=allowed),
            )[0]
        )
        for n in range(count)
    )
    if bias:
        fields["bias"] = {str(token): value for token, value in bias.items()}
    if allowed:
        fields["allowed"] = [str(token) for token in allowed]
    shares = expected_shares(TOP, fields)
    assert sum(shares.values()) == pytest.approx(1)
    assert drawn.keys() == shares.keys()
    for text, share in shares.items():
        assert drawn[text] / count == pytest.approx(share, abs=2 / count)


def test_what_is_beyond_the_list_is_one_bin_at_temperature_1_alone() -> None:
    shares = expected_shares(TOP, {"temperature": 1.0})
    assert shares[OTHERS] == pytest.approx(1 - sum(math.exp(p) for _, p in TOP))
    with pytest.raises(ValueError, match="does not have"):
        expected_shares(TOP, {"temperature": 0.7})
    with pytest.raises(ValueError, match="the list ends"):
        expected_shares(TOP, {"top_p": 0.9999})


def test_draws_as_expected_are_likely_and_others_are_not() -> None:
    shares = {"a": 0.5, "b": 0.3, "c": 0.2}
    assert surprise(Counter(a=510, b=290, c=200), shares)[0] > 0.1
    assert surprise(Counter(a=400, b=400, c=200), shares)[0] < 1e-9
    chance, said = surprise(Counter(a=500, b=300, c=190, z=10), shares)
    assert chance == 0
    assert "'z'" in said
    assert mean_shares([{"a": 1.0}, {"a": 0.5, "b": 0.5}]) == {"a": 0.75, "b": 0.25}


def test_chances_are_the_tables() -> None:
    assert chi_squared_tail(3.841, 1) == pytest.approx(0.05, rel=0.1)
    assert chi_squared_tail(37.57, 20) == pytest.approx(0.01, rel=0.1)


def test_texts_part_at_their_first_difference() -> None:
    assert parting(["a", "b"], ["a", "b"]) is None
    assert parting(["a", "b"], ["a", "c"]) == 1
    assert parting(["a"], ["a", "b"]) == 1


def test_whole_and_streamed_answers_are_read_alike() -> None:
    whole, streamed = Reply(), Reply()
    logprobs = {"content": [{"token": "a", "logprob": -1.0, "top_logprobs": []}]}
    message = {"content": "ab", "role": "assistant"}
    whole.add(
        {
            "choices": [
                {"index": 0, "message": message, "finish_reason": "stop", "logprobs": logprobs}
            ],
            "usage": {"completion_tokens": 2},
        }
    )
    for piece, finish in (("a", None), ("b", None), (None, "stop")):
        delta = {} if piece is None else {"content": piece}
        found = logprobs if piece == "a" else None
        streamed.add(
            {
                "choices": [
                    {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": found}
                ],
                "usage": None,
            }
        )
    streamed.add({"choices": [], "usage": {"completion_tokens": 2}})
    assert streamed.first.pieces == ["a", "b"]
    streamed.first.pieces = whole.first.pieces
    assert whole == streamed
    with pytest.raises(Refused, match="gone"):
        streamed.add({"error": {"message": "gone"}})


def test_a_check_of_the_default_model(tmp_path: Path, default_model_path: Path) -> None:
    out = tmp_path / "check.json"
    assert main(["--device", "cpu", "--only", "top_p 0.5", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["failed"] == []
    assert [check["name"] for check in found["checks"]] == ["top_p 0.5"]
