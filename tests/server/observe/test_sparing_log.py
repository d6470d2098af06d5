"""A log that a flood can't flood."""

from __future__ import annotations

import logging

import pytest

from headrace.core.errors import AuthenticationError
from headrace.server.observe.record import HttpRecord
from headrace.server.observe.request_log import REFUSALS_PER_S, RequestLog
from headrace.server.observe.sparing_log import SparingLog


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_few_lines_a_second_and_how_many_were_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    log = SparingLog(logging.getLogger("tests"), 3, clock)
    for number in range(100):
        log.info("flood", "line %d", number)
    log.info("else", "of another kind")
    clock.now_s = 1.0
    log.info("flood", "later")
    lines = [(r.getMessage(), getattr(r, "left_out", 0)) for r in caplog.records]
    assert lines == [
        ("line 0", 0),
        ("line 1", 0),
        ("line 2", 0),
        ("of another kind", 0),
        ("later", 97),
    ]


@pytest.mark.parametrize("key_name", [None, "team-a"])
def test_strangers_who_are_refused_are_told_sparingly(
    caplog: pytest.LogCaptureFixture, key_name: str | None
) -> None:
    caplog.set_level(logging.INFO)
    watcher = RequestLog()
    for number in range(200):
        watcher.on_http(
            HttpRecord(
                request_id=f"r{number}",
                method="POST",
                route="/v1/chat/completions",
                status=401,
                arrived_s=0.0,
                ended_s=0.0,
                key_name=key_name,
                error=AuthenticationError("No key."),
            )
        )
    few = 2 * REFUSALS_PER_S  # should a second begin meanwhile
    assert len(caplog.records) <= few if key_name is None else len(caplog.records) == 200
