"""Counts of tokens as they go to clients."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.server.observe.record import RequestRecord
from headrace.server.request.usage import Usage


def record(**more: Any) -> RequestRecord:
    return RequestRecord(request_id="", endpoint="", arrived_s=0.0, prompt_tokens=5, **more)


def sent(*records: RequestRecord) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(Usage.of(records, 7)))
    return found


def test_guesses_are_shown_where_there_were_some() -> None:
    assert "completion_tokens_details" not in sent(record())
    usage = sent(record(right_guesses=3, wrong_guesses=1), record(wrong_guesses=2))
    assert usage["completion_tokens_details"] == {
        "accepted_prediction_tokens": 3,
        "rejected_prediction_tokens": 3,
    }
    assert (usage["completion_tokens"], usage["prompt_tokens"], usage["total_tokens"]) == (
        7,
        10,
        17,
    )
