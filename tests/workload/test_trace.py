"""Traces: read, written, and refused with the line that is at fault."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.workload import lines
from headrace.workload.arrivals import OpenLoop
from headrace.workload.ask import Ask
from headrace.workload.distribution import Exponential, Lognormal, Uniform
from headrace.workload.trace import read_trace, write_mooncake
from headrace.workload.workload import Lengths, Synthetic, fixed

HEAD = "timestamp,input_length,output_length\n"


def written(folder: Path, content: str | bytes) -> Path:
    path = folder / "trace"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_table_is_read_with_times_from_its_first_request(tmp_path: Path) -> None:
    text = "output_length,model,Timestamp,input_length\n5,a,100.5,20\n# note\n\n6,b,101,30\n"
    found = read_trace(written(tmp_path, text))
    assert found.requests == (
        Ask(at_s=0.0, prompt_tokens=20, output_tokens=5),
        Ask(at_s=0.5, prompt_tokens=30, output_tokens=6),
    )
    assert list(found.asks(seed=9, count=1)) == [found.requests[0]]
    assert read_trace(written(tmp_path, "\ufeff" + HEAD + "0,1,1\n")).requests[0].prompt_tokens == 1


def test_mooncake_blocks_become_shared_prefixes(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 9, "hash_ids": [0, 1, 2]},
        {"timestamp": 3055, "input_length": 1030, "output_length": 4, "hash_ids": [0, 1, 7]},
        {"timestamp": 3055, "input_length": 10, "output_length": 4},
    ]
    path = written(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))
    first, second, third = read_trace(path).requests
    assert first.shared == (("block 0", 512), ("block 1", 512), ("block 2", 76))
    assert second.shared[:2] == first.shared[:2]
    assert second.at_s == 3.055
    assert third.shared == ()


def test_mooncake_sessions_follow_their_answers(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 10, "input_length": 5, "output_length": 9, "session_id": "x"},
        {"timestamp": 20, "input_length": 5, "output_length": 9, "session_id": "y"},
        {"delay": 1500, "input_length": 25, "output_length": 9, "session_id": "x"},
    ]
    path = written(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))
    one, other, after = read_trace(path).requests
    assert (one.session, other.session, after.session) == (0, 1, 0)
    assert (after.turn, after.after_s) == (1, 1.5)


@settings(max_examples=25, deadline=None)
@given(
    prefixes=st.integers(0, 3),
    prefix_tokens=st.integers(0, 200),
    turns=st.integers(1, 4),
    seed=st.integers(0, 99),
    block=st.sampled_from([16, 64, 512]),
)
def test_what_is_written_is_read_again(
    tmp_path_factory: pytest.TempPathFactory,
    prefixes: int, prefix_tokens: int, turns: int, seed: int, block: int,
) -> None:  # fmt: skip
    workload = Synthetic(
        prompts=Lengths(Lognormal(100, 1.0)), outputs=Lengths(Uniform(1, 90)),
        arrivals=OpenLoop(rate_s=3.0), prefixes=prefixes, prefix_tokens=prefix_tokens,
        turns=fixed(turns), waits=Exponential(2.0),
    )  # fmt: skip
    asks = list(workload.asks(seed, 25))
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    assert write_mooncake(asks, path, block_tokens=block) == 25
    found = read_trace(path, block_tokens=block).requests
    for ask, again in zip(asks, found, strict=True):
        assert (again.prompt_tokens, again.output_tokens) == (ask.prompt_tokens, ask.output_tokens)
        assert again.at_s == pytest.approx(ask.at_s - asks[0].at_s, abs=2e-6)
        assert (again.session, again.turn) == (ask.session, ask.turn)
        assert (again.after_s is None) == (ask.after_s is None)
    # Two prompts share as many whole blocks as their named segments have in common.
    for one, one_again in zip(asks, found, strict=True):
        for other, other_again in zip(asks, found, strict=True):
            if one.session != other.session:
                both = _common(one.shared, other.shared)
                assert _common(one_again.shared, other_again.shared) == both // block * block


def _common(one: tuple[tuple[str, int], ...], other: tuple[tuple[str, int], ...]) -> int:
    tokens = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        tokens += a[1]
    return tokens


def test_another_rate_scales_times(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, HEAD + "0,1,1\n1,1,1\n4,1,1\n"))
    assert [ask.at_s for ask in trace.at_rate(4.0).requests] == pytest.approx([0, 0.125, 0.5])
    together = replace(trace, requests=trace.requests[:1])
    with pytest.raises(ConfigError, match="same time"):
        together.at_rate(1.0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "empty"),
        (HEAD, "no requests"),
        ("time,in,out\n1,2,3\n", "line 1: no column timestamp"),
        ("timestamp,input_length\n1,2\n", "line 1: no column output_length"),
        (HEAD + "0,5,5\n-1,5,5\n", "line 3: timestamp is -1"),
        (HEAD + "5,5,5\n4,5,5\n", "line 3: its timestamp is 1 s before"),
        (HEAD + "0,-5,5\n", "line 2: input_length is -5"),
        (HEAD + "0,0,5\n", "line 2: input_length is 0"),
        (HEAD + "0,5,1.5\n", "line 2: output_length is 1.5"),
        (HEAD + "0,5\n", "line 2: 2 values; expected 3"),
        (HEAD + "0,5,\n", "line 2: no output_length"),
        (HEAD + "0,x,5\n", "line 2: input_length is 'x'"),
        (HEAD + "nan,5,5\n", "line 2: timestamp is 'nan'"),
        (HEAD + "0,1e99,5\n", "line 2: input_length is 1e"),
        (HEAD.encode() + b"0,5,\xff\n", "line 2: byte 5 is 0xff, which is not UTF-8"),
        ('{"timestamp": 0}\n', "line 1: no input_length"),
        ('{"timestamp": 0, "input_length": 5, "output_length": null}\n', "line 1: no output_len"),
        ('{"input_length": 5, "output_length": 5}\n', "line 1: no timestamp"),
        ('{"timestamp": 0, "input_length": true, "output_length": 5}\n', "line 1: input_length"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 5, "hash_ids": [1, 2]}', "2 hash"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 5, "hash_ids": 4}', "hash_ids"),
        ('{"timestamp": 0,\n', "line 1: not JSON"),
        ("{" * 9 + "\n", "line 1: not JSON"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 5}\n[]\n', "line 2: not an object"),
    ],
)
def test_bad_traces_are_refused_by_line(tmp_path: Path, content: str | bytes, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as found:
        read_trace(written(tmp_path, content))
    assert found.value.remedy


def test_a_file_that_is_no_trace_is_refused_before_it_fills_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(lines, "MAX_LINES", 3)
    with pytest.raises(ConfigError, match="line 2: longer than 100 bytes"):
        read_trace(written(tmp_path, HEAD + "1" * 200))
    with pytest.raises(ConfigError, match="more than 3 lines"):
        read_trace(written(tmp_path, HEAD + "0,1,1\n" * 5))
    with pytest.raises(ConfigError, match="can't be read"):
        read_trace(tmp_path / "none.csv")
