"""Templates that try to take time, memory or the machine: each is stopped, and quickly."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from headrace.core.errors import TemplateError
from headrace.tokenizer import template_budget
from headrace.tokenizer.chat_template import ChatTemplate
from headrace.tokenizer.template_sandbox import MAX_SOURCE_CHARS
from headrace.tokenizer.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
HUGE = "1000000000"
GROW = "{% set ns = namespace(v=START) %}{% for i in range(60) %}{% set ns.v = STEP %}{% endfor %}"


def grow(start: str, step: str, end: str = "") -> str:
    return GROW.replace("START", start).replace("STEP", step) + end


BOMBS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "filtered loop": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}"
    "{% endfor %}",
    "range": "{{ range(10 ** 12) | list }}",
    "static text in a buffer": "{% set x %}{% for i in range(99999) %}"
    + "x" * 10_000
    + "{% endfor %}{% endset %}",
    "static text in a macro": "{% macro f() %}"
    + "x" * 50_000
    + "{% endmacro %}{% set x %}{% for i in range(9999) %}{{ f() }}{% endfor %}{% endset %}",
    "output": "{% set x = 'a' * 4000000 %}{% for i in range(9) %}{{ x }}{% endfor %}",
    "many values": "{% set x = 'a' * 4000000 %}[" + ", ".join(["{% set y = x[1:] %}"] * 200) + "]",
    "times": "{{ 'a' * 10 ** 9 }}",
    "times, left": "{{ " + HUGE + " * 'a' }}",
    "list times": "{{ [1] * " + HUGE + " }}",
    "power": "{{ 9 ** 999999999 }}",
    "squares": grow("9", "ns.v * ns.v"),
    "doubling by +": grow("'ab'", "ns.v + ns.v"),
    "doubling by ~": grow("'ab'", "ns.v ~ ns.v"),
    "doubling by join": grow("'ab'", "ns.v.join(ns.v)"),
    "doubling by join filter": grow("'ab'", "[ns.v, ns.v] | join(ns.v)"),
    "doubling by replace": grow("'ab'", "ns.v.replace('a', ns.v)"),
    "doubling by replace filter": grow("'ab'", "ns.v | replace('a', ns.v)"),
    "doubling by %": grow("'ab'", "'%s%s' % (ns.v, ns.v)"),
    "doubling by format filter": grow("'ab'", "'%s%s' | format(ns.v, ns.v)"),
    "doubling by format": grow("'ab'", "'{0}{0}'.format(ns.v)"),
    "doubling by list": grow("[1]", "ns.v + ns.v"),
    "nested twice": grow("[1]", "[ns.v, ns.v]", "{{ ns.v }}"),
    "nested twice, dict": grow("{}", "{'a': ns.v, 'b': ns.v}", "{{ ns.v | tojson }}"),
    "nested twice, compared": grow("[1]", "(ns.v, ns.v)", "{{ ns.v == ns.v }}"),
    "sum of lists": grow("[1]", "[ns.v, ns.v] | sum(start=[])"),
    "center": "{{ 'a'.center(" + HUGE + ") }}",
    "ljust": "{{ 'a'.ljust(width=" + HUGE + ") }}{{ 'a'.ljust(" + HUGE + ") }}",
    "zfill": "{{ 'a'.zfill(" + HUGE + ") }}",
    "expandtabs": "{{ '\t'.expandtabs(" + HUGE + ") }}",
    "center filter": "{{ 'a' | center(" + HUGE + ") }}",
    "indent filter": "{{ 'a\n' | indent(" + HUGE + ", true) }}",
    "format width": "{{ '{:" + HUGE + "}'.format(1) }}",
    "format nested width": "{{ '{:{}}'.format(1, " + HUGE + ") }}",
    "format bracket": "{{ '{0[}]:" + HUGE + "}'.format({'}': 1}) }}",
    "format_map": "{{ '{a:" + HUGE + "}'.format_map({'a': 1}) }}",
    "% width": "{{ '%" + HUGE + "d' % 1 }}",
    "% star": "{{ '%*d' % (" + HUGE + ", 1) }}",
    "% precision": "{{ '%." + HUGE + "f' % 1 }}",
    "% nested key": "{{ '%(a(b))" + HUGE + "d' % {'a(b)': 1} }}",
    "json indent": "{{ [[1]] | tojson(indent=" + HUGE + ") }}",
    "json separators": "{{ [1, 2] | tojson(separators=('a' * 4000000, ':')) }}",
    "round": "{{ 1.5 | round(" + HUGE + ", 'ceil') }}",
    "to_bytes": "{{ (1).to_bytes(" + HUGE + ", 'big') }}",
    "lipsum": "{{ lipsum(n=" + HUGE + ") }}",
    "slow strip": "{% set x = 'ab' * 2000000 %}{{ x.strip(x) }}",
    "slow trim": "{% set x = 'ab' * 2000000 %}{{ x | trim(x) }}",
    "slow rfind": "{% set x = 'a' * 2000000 %}{{ x.rfind('b' + x[:1000000]) }}",
    "slow sort": "{% set a = 'a' * 2000000 %}{{ ([a + 'b', a + 'c'] * 1000) | sort | length }}",
    "batch": "{{ [1] | batch(" + HUGE + ", 0) | list }}",
    "strftime": "{{ strftime_now('%c' * 100000) }}",
    "recursive macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "doubling macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "doubling loop": "{% for x in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}"
    "{% endif %}{% endfor %}",
    "parentheses": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "deep blocks": "{% if 1 %}" * 5_000 + "{% endif %}" * 5_000,
    "long number": "{{ " + "9" * 50_000 + " }}",
    "long source": "x" * (MAX_SOURCE_CHARS + 1),
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['sys'] }}",
    "environment": "{{ self._TemplateReference__context.environment }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% from 'os' import path %}",
    "extends": "{% extends 'x' %}",
    "checks by name": "{{ checked_charge(-1000000000) }}",
    "hidden name": "{% set ns = namespace(__class__=1) %}",
}


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS.keys())
def test_stopped(source: str, chatml: Tokenizer) -> None:
    tracemalloc.start()
    start = time.monotonic()
    try:
        with pytest.raises(TemplateError):
            ChatTemplate(source, chatml).render(MESSAGES)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.monotonic() - start < 15  # with tracemalloc on; the deadline itself is 2 s
    assert peak < 300 << 20


@pytest.mark.parametrize(
    "source",
    ["{{ '{0.__class__}'.format('') }}", "{{ raise_exception.__globals__ }}", "{{ x.__init__ }}"],
)
def test_hidden_attributes_show_nothing(source: str, chatml: Tokenizer) -> None:
    assert ChatTemplate(source, chatml).render(MESSAGES, x=1) == ""


def test_deadline(chatml: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "DEADLINE_S", 0.05)
    source = "{% for i in range(90000) %}{{ 'x' | upper | lower | upper | lower }}{% endfor %}"
    start = time.monotonic()
    with pytest.raises(TemplateError, match=r"over 0\.05 s"):
        ChatTemplate(source, chatml).render(MESSAGES)
    assert time.monotonic() - start < 2


def test_limits_start_anew_with_each_rendering(
    chatml: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_budget, "MAX_STEPS", 150)
    template = ChatTemplate("{% for i in range(100) %}.{% endfor %}", chatml)
    for _ in range(5):
        assert template.render(MESSAGES) == "." * 100


def test_long_chats_are_within_limits(chatml: Tokenizer) -> None:
    """Half a million tokens of text, a thousand turns, a template that adds up a list."""
    source = (
        "{% set ns = namespace(seen=[]) %}{% for m in messages %}{% set ns.seen = ns.seen + [m] %}"
        "<|im_start|>{{ m.role + '\n' + m.content | trim ~ '<|im_end|>\n' }}{% endfor %}"
        "{{ ns.seen | length }}"
    )
    messages = [{"role": "user", "content": f"{turn} " + "word " * 400} for turn in range(1000)]
    text = ChatTemplate(source, chatml).render(messages)
    assert text.endswith("1000")
    assert len(text) > 2_000_000
