"""The library as its users know it, on the default model and the native kernels."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace import LLM, AsyncEngine, SamplingParams
from headrace.assemble import assemble
from headrace.core.config import EngineConfig
from headrace.core.errors import (
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    TemplateError,
)
from headrace.core.request import FinishReason, RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(default_model_path: Path) -> Iterator[LLM]:
    with LLM(default_model_path, context_tokens=512) as model:
        yield model


def free_blocks(llm: LLM) -> tuple[int, int]:
    pool = llm._engine.blocks
    return pool.available_blocks, pool.total_blocks


def test_outputs_are_shaped_as_vllm_users_know_them(llm: LLM) -> None:
    prompts = ["The capital of France is", "Once upon a time"]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.prompt for o in outputs] == prompts
    for output in outputs:
        assert isinstance(output, RequestOutput)
        assert output.finished
        (completion,) = output.outputs
        assert len(completion.token_ids) == 12
        assert completion.finish_reason == "length"
        assert completion.cumulative_logprob < 0
        assert llm.tokenizer.decode(completion.token_ids, continuation=True) == completion.text
    assert outputs[0].outputs[0].text.startswith(" Paris")


def test_a_prompt_answers_the_same_alone_and_in_a_batch(llm: LLM) -> None:
    prompts = ["def fib(n):", "The moon", "A list of colours: red,", "1 2 3 4 5 6 7"]
    params = [
        SamplingParams(temperature=t, top_p=0.95, seed=seed, max_tokens=20)
        for seed, t in enumerate((0.0, 0.7, 1.0, 1.3))
    ]
    together = llm.generate(prompts, params)
    for prompt, param, output in zip(prompts, params, together, strict=True):
        (alone,) = llm.generate(prompt, param)
        assert alone.outputs == output.outputs  # text, ids and logprobs, to the last bit


def test_the_same_seed_gives_the_same_text_and_another_one_does_not(llm: LLM) -> None:
    def text(seed: int | None) -> str:
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=16)
        return llm.generate("Today I", params)[0].outputs[0].text

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(6)}) > 1
    assert len({text(None) for _ in range(6)}) > 1


def test_chat_answers_and_stops_by_itself(llm: LLM) -> None:
    (output,) = llm.chat(
        [{"role": "user", "content": "Name three primary colors."}],
        SamplingParams(temperature=0, max_tokens=60),
    )
    completion = output.outputs[0]
    assert "Blue" in completion.text
    assert completion.finish_reason == "stop"
    assert "<|im_end|>" not in completion.text
    two = llm.chat([[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Bye"}]])
    assert len(two) == 2


def test_stop_strings_are_cut_off_and_end_the_work(llm: LLM) -> None:
    (whole,) = llm.generate("The capital of France is", SamplingParams(temperature=0))
    stop = whole.outputs[0].text[8:12]
    (output,) = llm.generate(
        "The capital of France is", SamplingParams(temperature=0, stop=[stop, "never there"])
    )
    completion = output.outputs[0]
    assert completion.finish_reason == "stop"
    assert completion.text == whole.outputs[0].text.partition(stop)[0]
    assert len(completion.token_ids) < len(whole.outputs[0].token_ids)


def test_a_stream_is_the_answer_in_pieces(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Once upon a time")
    (whole,) = llm.generate([ids], GREEDY)
    events = list(llm.stream(ids, GREEDY))
    assert "".join(e.text for e in events) == whole.outputs[0].text
    assert [e.token_id for e in events] == whole.outputs[0].token_ids
    assert [e.finish_reason for e in events] == [None] * 11 + [FinishReason.LENGTH]


def test_leaving_a_stream_at_any_time_frees_its_blocks(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Once upon a time")
    llm.stream(ids, GREEDY)  # never started
    for taken in (1, 3):
        stream = llm.stream(ids, GREEDY)
        for _ in range(taken):
            next(stream)
        assert free_blocks(llm)[0] < free_blocks(llm)[1]
        stream.close()  # type: ignore[attr-defined]
        assert free_blocks(llm)[0] == free_blocks(llm)[1]
    asked = iter([False, True])
    assert len(list(llm.stream(ids, GREEDY, stopped=lambda: next(asked)))) == 1
    assert not llm._engine.has_work
    assert free_blocks(llm)[0] == free_blocks(llm)[1]


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match=r"512 tokens.*600 tokens"):
        llm.generate([[5] * 600])
    with pytest.raises(ContextLengthError, match=r"512 tokens.*512 tokens"):
        llm.generate([[5, 6], [5] * 512])  # the other prompt is not left behind
    assert not llm._engine.has_work


def test_a_length_that_does_not_fit_is_refused_and_none_is_fitted(llm: LLM) -> None:
    words = r"512 tokens\. However, you requested 520 tokens \(500 in the prompt, 20 in the comple"
    with pytest.raises(ContextLengthError, match=words) as caught:
        llm.generate([[5] * 500], SamplingParams(max_tokens=20, ignore_eos=True))
    assert caught.value.param == "max_tokens"
    assert "12 or less" in caught.value.remedy
    with pytest.raises(ContextLengthError, match="520 tokens"):
        llm.stream([5] * 500, SamplingParams(max_tokens=20))
    ask = SamplingParams(max_tokens=12, ignore_eos=True)
    for params in (ask, SamplingParams(max_tokens=None, ignore_eos=True)):
        [output] = llm.generate([[5] * 500], params)
        assert len(output.outputs[0].token_ids) == 12
        assert output.outputs[0].finish_reason == "length"
    [output] = llm.generate([[5] * 500])  # asked for nothing: no more than the room
    assert 1 <= len(output.outputs[0].token_ids) <= 12
    assert not llm._engine.has_work


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
def test_values_out_of_range_are_refused_by_name(values: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequestError, match=param) as error:
        SamplingParams(**values)  # type: ignore[arg-type]
    assert error.value.param == param


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ([[]], "empty"),
        ([[49152]], "49152.*0 to 49151"),
        ([[-1]], "-1"),
        ([[1.5]], "1.5"),
        ("bad \ud800 surrogate", "surrogate"),
    ],
)
def test_prompts_that_are_none_are_refused(llm: LLM, prompt: object, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompt)  # type: ignore[arg-type]


def test_options_out_of_range_are_refused_before_loading(default_model_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"context_tokens is 9000.*8192"):
        LLM(default_model_path, context_tokens=9000)
    with pytest.raises(ConfigError, match="threads is 0"):
        LLM(default_model_path, threads=0)
    with pytest.raises(ConfigError, match="device is 'tpu'; expected one of auto, cpu, cuda, refe"):
        LLM(default_model_path, device="tpu")
    with pytest.raises(InvalidRequestError, match="2 sampling parameters for 1 prompt"):
        LLM(default_model_path, context_tokens=32).generate("x", [GREEDY, GREEDY])


@pytest.mark.parametrize("made", [LLM, AsyncEngine, assemble])
def test_the_old_name_of_device_answers_with_the_new_one(made: Callable[..., object]) -> None:
    told = "backend='reference'\" is now \"device='reference'"
    cases: list[dict[str, object]] = [{}, {"config": EngineConfig()}, {"threads": 2}]
    for more in cases:
        with pytest.raises(ConfigError, match=told):
            made("/absent.gguf", backend="reference", **more)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_one_setting_says_what_computes(default_model_path: Path, device: str) -> None:
    with LLM(default_model_path, device=device, context_tokens=32, kv_tokens=32) as llm:
        assert llm._assembled.backend.name == device
        [output] = llm.generate("The capital of France is", replace(GREEDY, max_tokens=2))
        assert output.outputs[0].text == " Paris."


def test_messages_of_a_wrong_shape_are_refused(llm: LLM) -> None:
    with pytest.raises((InvalidRequestError, TemplateError)):
        llm.chat([{"role": "user"}])


def test_serving_on_a_cpu_never_imports_torch(default_model_path: Path) -> None:
    """With imports of torch and its like made to fail, not just absent from sys.modules."""
    code = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "triton", "safetensors", "gguf"):
            raise AssertionError("imported " + name)
sys.meta_path.insert(0, Refuse())
import headrace.cli.commands
from headrace import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=2)
llm = LLM({str(default_model_path)!r}, context_tokens=64)
print(llm.generate("The capital of France is", params)[0].outputs[0].text)
print(len(llm.chat([{{"role": "user", "content": "Hi"}}], params)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [" Paris.", "1"]


def test_a_busy_machine_is_told(default_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(default_model_path, context_tokens=64, threads=2) as llm:
        runner = llm._assembled.runner
        monkeypatch.setattr(type(runner), "threads", 2)
        for mean, told in ((2.0, None), (1.9, None), (1.25, "1.2 of 2 threads")):
            monkeypatch.setattr(type(runner), "take_mean_threads", lambda _, mean=mean: mean)
            report = llm.threads_report()
            assert report is None if told is None else told in str(report)
