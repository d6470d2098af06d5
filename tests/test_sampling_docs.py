"""docs/api.md lists the sampling parameters as the table in core/sampling.py has them.

HEADRACE_TEST_WRITE_DOCS=1 pytest tests/test_sampling_docs.py writes the table anew.
"""

from __future__ import annotations

import os
import re
from dataclasses import fields
from pathlib import Path

from headrace.core.checks import Range, rule_of
from headrace.core.request import SamplingParams
from headrace.core.sampling import MODEL_DEFAULTS, Taken, rows_of

DOCUMENT = Path(__file__).parents[1] / "docs/api.md"
PLACES = {
    Taken.COMPLETIONS: "completions, chat",
    Taken.RESPONSES: "responses",
    Taken.MESSAGES: "messages",
    Taken.COMMANDS: "`run`, `chat`",
}


def table() -> str:
    lines = ["| parameter | takes | default | what it does | taken by |", "|---|---|---|---|---|"]
    defaults = {each.name: each.default for each in fields(SamplingParams)}
    for name, row in rows_of(SamplingParams):
        _, rule = rule_of(SamplingParams, name)
        takes = rule.expected if isinstance(rule, Range) else ""
        default = "the model's" if name in MODEL_DEFAULTS else str(defaults[name]).lower()
        default = "" if default in ("none", "()") else default
        places = "everywhere"
        if row.taken != Taken.EVERYWHERE:
            places = ", ".join(words for place, words in PLACES.items() if place & row.taken)
        lines.append(f"| `{name}` | {takes} | {default} | {row.help} | {places} |")
    return "\n".join(lines)


def test_the_table_is_that_of_the_code() -> None:
    text = DOCUMENT.read_text()
    marked = re.compile(r"(<!-- sampling parameters -->\n).*?(\n<!-- end -->)", re.DOTALL)
    assert len(marked.findall(text)) == 1
    written = marked.sub(lambda found: f"{found[1]}{table()}{found[2]}", text)
    if os.environ.get("HEADRACE_TEST_WRITE_DOCS"):
        DOCUMENT.write_text(written)
    assert text == written, "HEADRACE_TEST_WRITE_DOCS=1 pytest tests/test_sampling_docs.py"
