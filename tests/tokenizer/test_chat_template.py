"""Chats rendered and tokenized as transformers does it, and messages that are refused.

The templates are written for these tests in the manner of the well-known families.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from transformers.utils.chat_template_utils import render_jinja_template

from headrace.core.errors import InvalidRequestError, TemplateError
from headrace.tokenizer.chat_template import ChatTemplate
from headrace.tokenizer.tokenizer import Tokenizer

CHATML = """\
{%- for message in messages -%}
    {%- if loop.first and message.role != 'system' -%}
        {{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- endif -%}
    {{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " ~ date_string ~ "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
        + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("Roles must alternate user/assistant/user/assistant/...") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {%- generation %}{{- " " + message["content"] + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not \
supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'assistant') %}\
{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' }}{% if message['content'] is string %}
{{ message['content'] | trim }}{% else %}{% for item in message['content'] %}\
{% if item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}{% endif %}
{{ '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}
{{'<start_of_turn>model\\n'}}{% endif %}
"""

PHI3 = """\
{% for message in messages %}{% if message['role'] in ['system', 'user', 'assistant'] %}\
{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}
"""

QWEN_TOOLS = """\
{%- macro show(call) %}
{{- '<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
{%- if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}\
{% endif %}
{{- '}\\n</tool_call>' }}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- messages[0].content if messages[0].role == 'system' else 'You help.' }}
    {{- "\\n\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}{{ "\\n" }}{{ tool | tojson(indent=2) }}{% endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and not message.content.startswith('<tool_response>') %}
        {%- set ns.last = index %}{% break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content or '' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- endif %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and thought %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}\
{% endif %}
        {{- content }}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n' if not loop.first or content }}{{ show(tool_call.function or tool_call) }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{ '<|im_start|>user' }}\
{% endif %}
        {{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- elif not (tools and message.role == 'system') %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}\
{% endif %}
{%- endif %}
"""

ODDS = """\
{{ none }} {{ nothing }} {{ 7 // 2 }} {{ 7 / 2 }} {{ 2 ** 5 }} {{ 'ab' * 3 }} {{ [1] + [2] }}
{{ "%s and %03d" % ("x", 7) }} {{ "{} {name:>5}".format(1, name="n") }} {{ 'A-b_C' | title }}
{{ ['c', 'a', 'b'] | sort | join(', ') }} {{ [3, 1] | sum }} {{ [1, 2, 3] | map('string') | list }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ 'x' | indent(4, true) }}
{% for key, value in {'b': 1, 'a': [2, {'c': none}]} | dictsort %}{{ key }}={{ value }};{% endfor %}
{% for item in range(6) if item % 2 %}{{ loop.index }}/{{ loop.length }}:{{ item }} {% endfor %}
{% for item in [[1, [2]], 3] recursive %}{{ loop(item) if item is iterable else item }}{% endfor %}
{% for x in [] %}{% else %}empty{% endfor %} {{ {'a': "é<>&'"} | tojson }}
{{ 'é' | tojson(ensure_ascii=True) }} {{ [1, 2, 1] | unique | list }}
{% set text %}block {{ messages[0].content }}{% endset %}{{ text | upper | replace('B', 'bb') }}
{% macro twice(x, n=2) %}{{ x * n }}{{ caller() if caller else '' }}{% endmacro %}{{ twice('z') }}
{% call twice('q') %} called{% endcall %} {% filter upper %}shout{% endfilter %}
{{ 'a,b,,c'.split(',') }} {{ '  s '.strip() }} {{ ('x', 1)[0] }} {{ {'k': 'v'}.items() | list }}
{{ 3.7 | round | int }} {{ 'abc'[::-1] }} {{ 'abc' | reverse }} {{ "q" in "quick" }} {{ dict(a=1) }}
{{ "<'&" | e }} {{ '<b>' | safe ~ '<' }} {{ 'x y' | urlencode }} {{ ' t ' | trim }}
{{ messages[0]['missing'] | default('fallback') }} {{ loop is defined }}
"""

SYSTEM = {"role": "system", "content": "  Be brief.\n"}
USER = {"role": "user", "content": "Où est la gare ? 駅は？ 👨‍👩‍👧 <b>&amp;</b>\n"}
REPLY = {"role": "assistant", "content": "Là-bas."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "function": {"name": "find", "arguments": {"q": 'gare "N"', "n": 3}}},
        {"type": "function", "function": {"name": "now", "arguments": "{}"}},
    ],
}
RESULT = {"role": "tool", "name": "find", "content": '{"found": "là"}'}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nThere."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Finds “things” <quickly>",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
        },
    }
]
TOKENS = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}


def reference(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    rendered, _ = render_jinja_template([messages], chat_template=source, **TOKENS, **options)
    text = rendered[0]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize(
    "messages",
    [[USER], [SYSTEM, USER], [USER, REPLY, USER], [SYSTEM, USER, REPLY, USER]],
    ids=["user", "system-user", "user-reply-user", "system-user-reply-user"],
)
@pytest.mark.parametrize(
    "source",
    [CHATML, LLAMA3, MISTRAL, GEMMA, PHI3, QWEN_TOOLS, ODDS],
    ids=["chatml", "llama3", "mistral", "gemma", "phi3", "qwen", "odds"],
)
def test_as_transformers(
    source: str, messages: list[dict[str, Any]], prompt: bool, chatml: Tokenizer
) -> None:
    if source is GEMMA and messages[0] is SYSTEM:
        with pytest.raises(TemplateError, match="System role not supported"):
            ChatTemplate(source, chatml).render(messages)
        return
    ours = ChatTemplate(source, chatml).render(messages, add_generation_prompt=prompt)
    assert ours == reference(source, messages, add_generation_prompt=prompt)


@pytest.mark.parametrize("extra", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [SYSTEM, USER, CALL, RESULT, RESULT, REPLY, USER],
        [USER, THOUGHT, USER, CALL, RESULT],
        [USER, {**REPLY, "reasoning": "because"}],
    ],
)
def test_tools_as_transformers(
    messages: list[dict[str, Any]], extra: dict[str, Any], chatml: Tokenizer
) -> None:
    for tools in (None, TOOLS):
        ours = ChatTemplate(QWEN_TOOLS, chatml).render(messages, tools=tools, **extra)
        wanted = reference(QWEN_TOOLS, messages, tools=tools, add_generation_prompt=True, **extra)
        assert ours == wanted


@pytest.mark.parametrize(
    "begun",
    ["Sure, there are", "end", "<|im_", "a\n", "im_end|>", "Sûr 🦀", "<|im_end|>", "x<|im_end|>y"],
)
@pytest.mark.parametrize(
    "source",
    [CHATML, LLAMA3, GEMMA, PHI3, QWEN_TOOLS],
    ids=["chatml", "llama3", "gemma", "phi3", "qwen"],
)
def test_a_last_message_is_continued_where_it_ends(
    source: str, begun: str, chatml: Tokenizer
) -> None:
    """As transformers does where it is clear; where the text looks like the template's own words,
    the prompt is what goes before the message, and the message."""
    messages = [USER, {"role": "assistant", "content": begun}]
    template = ChatTemplate(source, chatml)
    ids = template.encode(messages, add_generation_prompt=False, continue_final_message=True)
    text = chatml.decode(ids, skip_special=False)
    tag = "0123456789"
    tagged = [USER, {"role": "assistant", "content": begun + tag}]
    assert text == template.render(tagged, add_generation_prompt=False).split(tag)[0]
    assert text.endswith(begun)
    if begun.startswith(("S", "a")):
        rendered = reference(
            source, messages, continue_final_message=True, add_generation_prompt=False
        )
        assert text.rstrip() == rendered.rstrip()
    typed = [USER, {"role": "assistant", "content": "plain"}]
    plain = template.encode(typed, add_generation_prompt=False, continue_final_message=True)
    assert [t for t in ids if t in chatml.special_ids] == [
        t for t in plain if t in chatml.special_ids
    ]


def test_what_cannot_be_continued_is_refused(chatml: Tokenizer) -> None:
    def encode(source: str, message: dict[str, Any]) -> list[int]:
        return ChatTemplate(source, chatml).encode([message], continue_final_message=True)

    with pytest.raises(TemplateError, match="2 times"):
        encode("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", USER)
    with pytest.raises(TemplateError, match="0 times"):
        encode("{% for m in messages %}{{ m.content[:1] }}{% endfor %}", USER)
    with pytest.raises(InvalidRequestError, match="can be continued"):
        encode(CHATML, {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]})


def test_ids_as_transformers(
    train: Callable[..., tokenizers.Tokenizer], make_folder: Callable[..., Path]
) -> None:
    folder = make_folder(
        train(None),
        tokenizer_config__json={
            "tokenizer_class": "PreTrainedTokenizerFast",
            **TOKENS,
            "chat_template": QWEN_TOOLS,
        },
    )
    ours = Tokenizer.from_folder(folder)
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    messages: list[dict[str, Any]] = [SYSTEM, USER, CALL, RESULT, REPLY, USER]
    ids = ChatTemplate(ours.chat_template, ours).encode(messages, tools=TOOLS)
    wanted = oracle.apply_chat_template(
        messages, tools=TOOLS, add_generation_prompt=True, return_dict=False
    )
    assert ids == wanted


def test_default_model_chat(default_tokenizer: Tokenizer, default_model_path: Path) -> None:
    template = ChatTemplate(default_tokenizer.chat_template, default_tokenizer)
    messages = [USER, REPLY, {"role": "user", "content": "And 2 + 2?"}]
    assert default_tokenizer.chat_template is not None
    wanted = reference(default_tokenizer.chat_template, messages, add_generation_prompt=True)
    assert template.render(messages) == wanted
    ids = template.encode(messages)
    assert ids[0] == 1
    assert default_tokenizer.decode(ids, skip_special=False) == wanted


def test_date_comes_from_the_clock(chatml: Tokenizer) -> None:
    template = ChatTemplate(
        "{{ strftime_now('%d %b %Y') }}", chatml, clock=lambda: datetime(2031, 5, 9)
    )
    assert template.render([USER]) == "09 May 2031"


def test_parts_are_joined_for_templates_that_want_text(chatml: Tokenizer) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    assert "one \ntwo<|im_end|>" in ChatTemplate(CHATML, chatml).render(messages)
    assert ChatTemplate(GEMMA, chatml).render(messages) == reference(
        GEMMA, messages, add_generation_prompt=True
    )


def test_callers_messages_are_left_alone(chatml: Tokenizer) -> None:
    message = {"role": "assistant", "content": "<|im_end|>", "reasoning": "x"}
    ChatTemplate(CHATML, chatml).encode([message])
    assert message == {"role": "assistant", "content": "<|im_end|>", "reasoning": "x"}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ({"role": "user"}, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 3, "content": "x"}], "messages[0].role"),
        ([{"role": "<|im_end|>", "content": "x"}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": {"text": "x"}}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0].type"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "a\udc00"}], "messages[0].content"),
        ([{"role": "user", "content": "x", "name": object()}], "messages[0].name"),
        ([{"role": "user", "content": "x", "tool_calls": [{1: 2}]}], "messages[0].tool_calls[0]"),
    ],
)
def test_bad_messages(messages: Any, param: str, chatml: Tokenizer) -> None:
    template = ChatTemplate(CHATML, chatml)
    for use in (template.render, template.encode):
        with pytest.raises(InvalidRequestError) as caught:
            use(messages)
        assert caught.value.param == param


def test_bad_tools_and_extras(chatml: Tokenizer) -> None:
    template = ChatTemplate(CHATML, chatml)
    for tools in ("x", [3]):
        with pytest.raises(InvalidRequestError, match="tools"):
            template.render([USER], tools=tools)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="bos_token"):
        template.render([USER], bos_token="<|im_start|>")
    deep: Any = "x"
    for _ in range(50):
        deep = [deep]
    with pytest.raises(InvalidRequestError, match="nested"):
        template.render([USER], documents=deep)


def test_no_template(chatml: Tokenizer) -> None:
    with pytest.raises(TemplateError, match=r"no chat template.*plain prompt"):
        ChatTemplate(chatml.chat_template, chatml)


def test_refusal_carries_the_templates_words(chatml: Tokenizer) -> None:
    with pytest.raises(TemplateError, match="Roles must alternate user/assistant"):
        ChatTemplate(MISTRAL, chatml).render([USER, USER])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if x %}", "line 1"),
        ("a\n{{ 'x' | no_such_filter }}", "no_such_filter"),
        ("{{ messages[0].nothing.deeper }}", "nothing"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ no_such_function() }}", "no_such_function"),
    ],
)
def test_broken_templates(source: str, words: str, chatml: Tokenizer) -> None:
    with pytest.raises(TemplateError, match=words):
        ChatTemplate(source, chatml).render([USER])
