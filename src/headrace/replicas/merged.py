"""Several replicas' /metrics as one text: each sample gets the label of its replica.

A family's lines stay together, as Prometheus demands, under the help of the first replica that has
it. Knows the text format; no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping

LABEL = "replica"


def merge_metrics(texts: Mapping[str, str]) -> str:
    """`texts` are by the label's value."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for name, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("#"):
                words = line.split(" ", 3)
                if len(words) < 3 or words[1] not in ("HELP", "TYPE"):
                    continue
                if words[2] != family:
                    family = words[2]
                    samples.setdefault(family, [])
                head = heads.setdefault(family, [])
                if not any(known.startswith(f"# {words[1]} ") for known in head):
                    head.append(line)
            elif line:
                samples.setdefault(family, []).append(labelled(line, name))
    lines = [line for family, rows in samples.items() for line in (*heads.get(family, ()), *rows)]
    return "\n".join([*lines, ""]) if lines else ""


def labelled(sample: str, value: str) -> str:
    """`name 1`, or `name{a="b"} 1`, with one more label."""
    brace, space = sample.find("{"), sample.find(" ")
    if 0 <= brace < space:
        comma = "" if sample[brace + 1] == "}" else ","
        return f'{sample[: brace + 1]}{LABEL}="{value}"{comma}{sample[brace + 1 :]}'
    return f'{sample[:space]}{{{LABEL}="{value}"}}{sample[space:]}'
