"""/fit: the answers are those of `headrace fit`, and the work is bounded. No server is started."""

from __future__ import annotations

import asyncio
import contextlib
import json
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.core.errors import InvalidRequestError, UnavailableError
from headrace.fits.report import Asked, make_report
from headrace.plan.fit_text import report_facts
from headrace.server.api.fit import fit
from headrace.server.request.call import Call, Reply
from headrace.server.request.turns import KEPT, MOST_WAITING, Turns

QUERY = "model=llama-3.1-8b&gpu=l40s&quant=fp8&kv_dtype=fp8&context=4096&concurrency=8"


def asked(query: str) -> dict[str, Any]:
    call = Call(method="GET", path="/fit", headers={}, request_id="1", query=query)
    reply = asyncio.run(fit(cast(Any, SimpleNamespace(fits=Turns())), call))
    found: dict[str, Any] = json.loads(cast(Reply, reply).body)
    return found


def test_it_says_what_the_command_says() -> None:
    given = Asked(gpu="l40s", gpus=1, quant="fp8", kv_dtype="fp8", context=4096, concurrency=8)
    expected = json.loads(json.dumps(report_facts(make_report("llama-3.1-8b", given))))
    assert asked(QUERY) == {"schema": "headrace-fit/1", **expected}


def test_every_choice_is_one() -> None:
    found = asked("")
    assert {"id": "meta-llama/Meta-Llama-3.1-8B", "precision": "bf16"} in found["models"]
    assert [each["name"] for each in found["gpus"] if each["name"] == "h100-sxm"] == ["h100-sxm"]
    for quant in ("fp8", "int4"):
        assert quant in found["quants"]
    assert "fp8" in found["kv_dtypes"]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("model=/etc/passwd&gpu=l40s", "not a model that Headrace knows by name"),
        ("model=llama-3.1-8b", "No GPU is named"),
        ("model=llama-3.1-8b&gpu=nothing", "nothing"),
        ("model=llama-3.1-8b&gpu=l40s&quant=x", "x"),
        ("model=llama-3.1-8b&gpu=l40s&context=1000000", "the model's is 131072"),
        ("model=llama-3.1-8b&gpu=l40s&concurrency=0", "concurrency"),
        ("model=llama-3.1-8b&gpu=l40s&concurrency=100000000", "concurrency"),
        (f"model={'x' * 201}", "model"),
    ],
)
def test_what_can_not_be_asked(query: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        asked(query)


def test_no_file_is_looked_at(tmp_path: Any) -> None:
    """A path is a name like any other, also where a config.json is there."""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(InvalidRequestError, match="not a model that Headrace knows"):
        asked(f"model={tmp_path}&gpu=l40s")


def test_one_at_a_time_a_few_wait_and_the_same_again_takes_no_work() -> None:
    at_once, done = [0, 0], list[int]()

    def work(number: int) -> int:
        at_once[0] += 1
        at_once[1] = max(at_once)
        done.append(number)
        at_once[0] -= 1
        return number

    async def many() -> list[Any]:
        turns = Turns()
        asking = [turns.answer(n // 2, partial(work, n // 2)) for n in range(MOST_WAITING + 2)]
        return await asyncio.gather(*asking, return_exceptions=True)

    found = asyncio.run(many())
    assert found[:MOST_WAITING] == [n // 2 for n in range(MOST_WAITING)]
    assert all(isinstance(each, UnavailableError) for each in found[MOST_WAITING:])
    assert (at_once[1], done) == (1, [0, 1, 2, 3])


def test_what_is_kept_is_bounded_and_a_failure_is_not_kept() -> None:
    async def many() -> list[Any]:
        turns, done = Turns(), list[int]()

        def work(number: int) -> int:
            done.append(number)
            return 1 // (number != 1)

        for number in (*range(KEPT + 2), 0, KEPT, 1):
            with contextlib.suppress(ZeroDivisionError):
                await turns.answer(number, partial(work, number))
        return done

    assert asyncio.run(many()) == [*range(KEPT + 2), 0, 1]
