from __future__ import annotations

from pathlib import Path

import pytest

from headrace.bench.prompts import Scale, Writer, flat, read_prompts, scale_of
from headrace.core.errors import ConfigError
from headrace.workload.ask import Ask
from headrace.workload.named import find_workload


def test_lengths_come_out_as_the_endpoint_counts_them() -> None:
    scale = scale_of((24, 24 * 1.5 + 20), (216, 216 * 1.5 + 20))  # type: ignore[arg-type]
    assert (scale.fixed, scale.each) == (20, 1.5)
    ask = Ask(at_s=0, prompt_tokens=320, output_tokens=4)
    (message,) = Writer(scale, "salt").messages(ask, 0, {})
    assert len(message["content"].split()) == 200  # 200 * 1.5 + 20


def test_an_endpoint_that_counts_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match="more tokens for more words"):
        scale_of((24, 100), (216, 100))


def test_random_prompts_share_no_prefix() -> None:
    """Random words alone would share one word in 160 prompts, and a cache would be measured."""
    writer = Writer(Scale(), "salt")
    texts = [
        writer.messages(Ask(at_s=0, prompt_tokens=40, output_tokens=4), n, {})[0]["content"]
        for n in range(300)
    ]
    starts = {tuple(text.split()[:4]) for text in texts}
    assert len(starts) == 300


def test_two_runs_share_nothing_and_two_prompts_of_one_run_share_their_prefix() -> None:
    asks = list(find_workload("rag").asks(count=2))
    one, other = (Writer(Scale(), "a").messages(ask, 0, {}) for ask in asks)
    again = Writer(Scale(), "b").messages(asks[0], 0, {})
    assert one[0]["role"] == "system"
    assert one[0] == other[0]
    assert one[1] != other[1]
    assert one[0] != again[0]
    assert flat(one).split()[:4] != flat(again).split()[:4]


def test_a_later_turn_is_the_whole_conversation_with_the_real_answer() -> None:
    asks = list(find_workload("agent").asks(count=2))
    writer = Writer(Scale(), "a")
    first = writer.messages(asks[0], 0, {})
    later = writer.messages(asks[1], 1, {"session 0 turn 0 answer": "What it said."})
    assert [message["role"] for message in later] == ["system", "user", "assistant", "user"]
    assert later[:2] == first
    assert later[2]["content"] == "What it said."


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text('Hello.\n{"prompt": "Hi"}\n{"body": {"messages": [{"role": "user"}]}}\n')
    assert read_prompts(path) == [
        [{"role": "user", "content": "Hello."}],
        [{"role": "user", "content": "Hi"}],
        [{"role": "user"}],
    ]
    path.write_text('{"text": 1}\n')
    with pytest.raises(ConfigError, match="line 1: neither"):
        read_prompts(path)
