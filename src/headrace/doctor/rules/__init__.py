"""The rules: every row of the table of symptoms is a function from an `Observation` to a finding.

Pure: no clock, no files, no network. Each file has one group. `diagnose` runs all of them, puts
the client first, and sets aside what a more exact finding explains.
"""

from __future__ import annotations

from headrace.doctor.finding import Finding, Rule
from headrace.doctor.observation import Observation
from headrace.doctor.rules import (
    cache,
    client,
    decode,
    fleet,
    host,
    memory,
    prefill,
    queue,
    settings,
    traffic,
)

RULES: dict[int, Rule] = {
    number: rule
    for group in (
        client.RULES, memory.RULES, queue.RULES, prefill.RULES, decode.RULES, cache.RULES,
        traffic.RULES, settings.RULES, host.RULES, fleet.RULES,
    )
    for number, rule in group.items()
}  # fmt: skip
# A finding -> the more general ones that it explains.
EXPLAINS: dict[int, tuple[int, ...]] = {
    1: (8, 13, 5, 12, 2),
    2: (11,),
    3: (2, 4, 11, 17),
    4: (2, 11, 17),
    15: (3, 11),
    18: (14,),
    20: (15, 3, 11),
    31: (11, 12),
    36: (19,),
    37: (36, 19),
    38: (3, 4, 11),
    21: (8,),
    22: (21, 8),
    26: (8,),
    33: (8,),
    34: (11, 31),
}


def diagnose(seen: Observation) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """What was found, and what else fits the numbers but is explained by that."""
    found = {number: finding for number, rule in RULES.items() if (finding := rule(seen))}
    explained = {
        general for number in found for general in EXPLAINS.get(number, ()) if general in found
    }
    order = {kind: place for place, kind in enumerate(("fault", "counter", "limit", "expected"))}
    ranked = sorted(
        (finding for number, finding in found.items() if number not in explained),
        key=lambda finding: (finding.rule != client.NUMBER, order[finding.kind], finding.rule),
    )
    return tuple(ranked), tuple(found[number] for number in sorted(explained))
