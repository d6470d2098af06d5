"""Both text formats of /metrics, read strictly by the grammars of their specifications: every name
is itself, whatever the Accept header asks for."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_plain
from tests.server.observe.test_metrics import FACTS, FakeEngine, live, record_of, snapshot
from tests.server.observe.test_prometheus import VLLM_DASHBOARDS

from headrace.server.observe.exposition import Exposition
from headrace.server.observe.metrics import Metrics
from headrace.server.observe.text_format import choose_format

OPEN, PLAIN = "application/openmetrics-text", "text/plain"
# What Prometheus sends by default: 2.42 (Debian's), 2.53, 3.0; then as its `scrape_protocols` and
# `metric_name_escaping_scheme` can make it.
PROMETHEUS_2_42 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_2_53 = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;"
    "q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping={0};q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping={0};q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROMETHEUS_3_PLAIN = "text/plain;version=1.0.0;escaping={0};q=0.6,text/plain;version=0.0.4;q=0.5"
PROTOBUF = (
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;"
    "q=0.6,application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.4"
)
ESCAPINGS = ("allow-utf-8", "underscores", "dots", "values", "nonsense")
ACCEPTED = {
    "": PLAIN,
    "*/*": PLAIN,
    "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8": PLAIN,
    "text/plain": PLAIN,
    "application/json": PLAIN,
    OPEN: OPEN,
    f"{OPEN.upper()} ; Version=1.0.0": OPEN,
    f"{OPEN};version=2.0.0,text/plain;version=0.0.4;q=0.1": PLAIN,
    f"{OPEN};version=1.0.0;q=0.3,text/plain;version=0.0.4;q=0.7": PLAIN,
    f"{OPEN};version=1.0.0;q=0": PLAIN,
    f"{OPEN};version=1.0.0;q=nan": PLAIN,
    PROMETHEUS_2_42: OPEN,
    PROMETHEUS_2_53: OPEN,
    PROTOBUF: OPEN,
    **{PROMETHEUS_3.format(each): OPEN for each in ESCAPINGS},
    **{PROMETHEUS_3_PLAIN.format(each): PLAIN for each in ESCAPINGS},
}

# Both specifications' metric-name and label; a label's value has no bare quote, \ or line end.
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? (-?[0-9.]+(?:e[+-]?[0-9]+)?|NaN)")
COMMENT = re.compile(rf"# (HELP|TYPE) ({NAME}) (.+)")
SUFFIXES = {  # what a family's samples are called after its name
    OPEN: {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")},
    PLAIN: {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")},
}


@dataclass
class Read:
    """A scrape, read strictly."""

    types: dict[str, str] = field(default_factory=dict)
    samples: dict[str, list[str]] = field(default_factory=dict)  # labels, by name


def read(text: str, media: str) -> Read:
    found, current = Read(), ""
    assert text.endswith("\n")
    lines = text[:-1].split("\n")
    if media == OPEN:
        assert lines.pop() == "# EOF"
    for line in lines:
        if comment := COMMENT.fullmatch(line):
            kind, current, rest = comment.groups()
            if kind == "TYPE":
                assert current not in found.types, f"{current} comes twice"
                found.types[current] = rest
            continue
        sample = SAMPLE.fullmatch(line)
        assert sample, line
        name, labels = sample[1], sample[2] or ""
        wanted = [current + suffix for suffix in SUFFIXES[media][found.types[current]]]
        assert name in wanted, f"{name} is no sample of {current}"
        found.samples.setdefault(name, []).append(labels)
    return found


@pytest.fixture(scope="module")
def exposition() -> Exposition:
    metrics = Metrics(FakeEngine(facts=FACTS))
    metrics.on_snapshot(snapshot(prefix_misses={"evicted": 2}, step_s={"compute": 1.5}))
    live(metrics, record_of(prompt_tokens=5), [0.1, 0.2], "stop")
    return Exposition(metrics, 'a "quoted"\nname \\ of: it', lambda: {"version": "1"})


@pytest.mark.parametrize("accept", ACCEPTED)
def test_names_are_the_same_whatever_is_asked_for(exposition: Exposition, accept: str) -> None:
    text, content_type = exposition.write(accept)
    media = content_type.split(";")[0]
    assert media == ACCEPTED[accept]
    found = read(text.decode(), media)
    plain = read(exposition.write("")[0].decode(), PLAIN)
    assert found.samples == plain.samples
    for name in found.samples:
        assert name.startswith(("headrace:", "vllm:", "process_")), name
    assert {"headrace:prompt_tokens_total", "headrace:engine_up", *VLLM_DASHBOARDS} <= set(
        found.samples
    )


@pytest.mark.parametrize("accept", ["", PROMETHEUS_2_42, PROMETHEUS_3.format("allow-utf-8")])
def test_prometheus_own_parsers_read_the_same(exposition: Exposition, accept: str) -> None:
    text, content_type = exposition.write(accept)
    is_open = content_type.startswith(OPEN)
    families = parse_open(text.decode()) if is_open else parse_plain(text.decode())  # type: ignore[no-untyped-call]
    found = {sample.name: sample.labels for family in families for sample in family.samples}
    assert found.keys() == read(exposition.write("")[0].decode(), PLAIN).samples.keys()
    assert found["headrace:engine_up"] == {"model_name": 'a "quoted"\nname \\ of: it'}


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8"),
        (PROMETHEUS_2_42, f"{OPEN}; version=1.0.0; charset=utf-8"),
        (f"{OPEN};version=0.0.1", f"{OPEN}; version=0.0.1; charset=utf-8"),
        (
            PROMETHEUS_3.format("allow-utf-8"),
            f"{OPEN}; version=1.0.0; charset=utf-8; escaping=allow-utf-8",
        ),
        (
            PROMETHEUS_3_PLAIN.format("values"),
            "text/plain; version=1.0.0; charset=utf-8; escaping=values",
        ),
        # It would double every underscore: something else came, and is named.
        (
            PROMETHEUS_3.format("dots"),
            f"{OPEN}; version=1.0.0; charset=utf-8; escaping=underscores",
        ),
    ],
)
def test_the_content_type_says_what_came(accept: str, content_type: str) -> None:
    assert choose_format(accept).content_type == content_type


@pytest.mark.parametrize("accept", [",;,=", "text/plain;q=x;;", ";" * 1000, f"{OPEN};version"])
def test_an_accept_header_that_is_nonsense_gets_the_plain_format(accept: str) -> None:
    assert choose_format(accept).content_type.startswith(PLAIN)
