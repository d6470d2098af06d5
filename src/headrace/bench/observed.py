"""What was really sent and said, as a workload: for Mooncake's trace format, or to run again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from headrace.bench.record import Record
from headrace.workload.ask import Ask


def observed_asks(records: Sequence[Record]) -> Iterator[Ask]:
    """In order of their times, with the lengths that the endpoint counted."""
    for one in sorted(records, key=lambda each: each.scheduled_s):
        shared, room = [], one.prompt_tokens
        for name, tokens in one.ask.shared:  # an answer may have been shorter than asked for
            shared.append((name, min(tokens, room)))
            room -= shared[-1][1]
        yield replace(
            one.ask,
            at_s=one.scheduled_s,
            prompt_tokens=one.prompt_tokens,
            output_tokens=one.tokens if one.is_good else one.ask.output_tokens,
            shared=tuple(part for part in shared if part[1]),
            after_s=None,  # it came at this time
        )
