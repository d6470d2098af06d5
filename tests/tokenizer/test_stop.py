"""Stop strings, against the plainest way there is to find them: look at every prefix."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import InvalidRequestError
from headrace.tokenizer.stop import StopChecker

few_letters = st.text(alphabet="ab<", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab<", min_size=1, max_size=8), max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the first stop string to be completed, the longest of those."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@settings(max_examples=400, deadline=None)
@given(text=few_letters, stops=stop_lists, cuts=st.lists(st.integers(0, 30), max_size=8))
def test_any_cutting_gives_the_same(text: str, stops: list[str], cuts: list[int]) -> None:
    checker = StopChecker(stops)
    ends = [0, *sorted(min(place, len(text)) for place in cuts), len(text)]
    shown, stopped, seen = "", False, ""
    for start, end in pairwise(ends):
        piece, stopped = checker.push(text[start:end])
        shown += piece
        seen += text[start:end]
        if stopped:
            break
        # What is held could still become a stop string; anything that could not is shown.
        held = seen[len(shown) :]
        could = [n for n in range(1, len(seen) + 1) for s in stops if s.startswith(seen[-n:])]
        assert len(held) == max(could, default=0)
    assert (shown + checker.finish(), stopped) == cut(text, stops)


@settings(max_examples=400, deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=60), stop=st.text(alphabet="ab", min_size=4, max_size=9)
)
def test_stops_that_repeat_themselves(text: str, stop: str) -> None:
    """Few letters and long stops: a false start contains the true one."""
    for whole in (text + stop, stop[:-1] + text + stop[: len(stop) // 2] + stop):
        checker = StopChecker([stop])
        shown = "".join(checker.push(character)[0] for character in whole)
        assert shown == whole[: whole.find(stop)]


def test_across_many_tokens() -> None:
    checker = StopChecker(["\n\nUser:"])
    shown = [checker.push(piece) for piece in ["Hi", ".\n", "\n", "Us", "e", "r", ": more", "x"]]
    assert shown == [
        ("Hi", False),
        (".", False),
        ("", False),
        ("", False),
        ("", False),
        ("", False),
        ("", True),
        ("", True),
    ]
    assert checker.finish() == ""


def test_false_start_is_shown() -> None:
    checker = StopChecker(["END"])
    assert checker.push("the EN") == ("the ", False)
    assert checker.push("EMY") == ("ENEMY", False)
    assert checker.push(" E") == (" ", False)
    assert checker.finish() == "E"


def test_stop_and_text_in_one_push() -> None:
    assert StopChecker(["b", "abc"]).push("xabc") == ("xa", True)
    assert StopChecker(["bc", "abc"]).push("xabc") == ("x", True)


def test_which_one_it_was() -> None:
    checker = StopChecker(["bc", "abc", "x"])
    assert checker.push("zab") == ("z", False)
    assert checker.met is None
    assert checker.push("c") == ("", True)
    assert checker.met == "abc"


def test_no_stops_hold_nothing() -> None:
    assert StopChecker([]).push("anything") == ("anything", False)


def test_empty_stop_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StopChecker(["a", ""])
    assert caught.value.param == "stop"
