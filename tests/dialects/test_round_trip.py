"""What is written for an engine is read again as the same deployment, but for what it can't say."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.dialects import (
    Deployment,
    Speculation,
    emit,
    emit_names,
    engine_names,
    read_command,
)

DEFAULTS: dict[str, Any] = {each.name: each.default for each in fields(Deployment)}
COUNTS = st.integers(1, 2**20)
SHARES = st.sampled_from([0.5, 0.85, 0.9, 0.92, 1.0])
# Names with everything that means something to a shell or to YAML.
MODELS = st.text(st.sampled_from("aB3/-_. $'\"`\\*;&|<>(){}#~!%"), min_size=1, max_size=20).map(
    lambda text: f"org/{text.strip()}x"
)


def or_none(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


DEPLOYMENTS = st.builds(
    Deployment,
    model=MODELS,
    tensor_parallel=st.sampled_from([1, 1, 2, 8]),
    pipeline_parallel=st.sampled_from([1, 1, 2]),
    replicas=st.sampled_from([1, 1, 3]),
    context_tokens=or_none(COUNTS),
    max_sequences=or_none(COUNTS),
    max_batch_tokens=or_none(COUNTS),
    quantization=or_none(
        st.sampled_from(["fp8", "int8", "int4", "awq", "gptq", "nvfp4", "q4_k_m"])
    ),
    dtype=or_none(st.sampled_from(["bf16", "fp16", "fp32"])),
    kv_dtype=or_none(st.sampled_from(["bf16", "f16", "fp8", "int8", "q8_0"])),
    gpu_memory=or_none(SHARES),
    static_memory=or_none(SHARES),
    kv_fraction=or_none(SHARES),
    kv_memory=or_none(st.integers(1, 2**40)),
    kv_tokens=or_none(COUNTS),
    gpu_layers=or_none(st.integers(0, 99)),
    prefix_cache=or_none(st.booleans()),
    chunked_prefill=or_none(st.booleans()),
    eager=or_none(st.booleans()),
    speculation=or_none(
        st.builds(
            Speculation,
            method=st.sampled_from(["ngram", "draft", "eagle3", "mtp"]),
            draft=or_none(MODELS),
            tokens=or_none(st.integers(1, 16)),
        )
    ),
    served_model_name=or_none(st.just("my model")),
    host=or_none(st.sampled_from(["0.0.0.0", "127.0.0.1"])),
    port=or_none(st.integers(1, 65535)),
)


def settled(deployment: Deployment, engine: str) -> Deployment:
    """Without what means two things at once."""
    if deployment.chunked_prefill is False and engine == "sglang":
        deployment = replace(deployment, max_batch_tokens=None)
    if engine == "llama.cpp":
        # A context is that of all slots together, so the slots have to be said, and in tokens it
        # is the pool's size too.
        slots = deployment.max_sequences or 1
        deployment = replace(deployment, max_sequences=slots, kv_tokens=None)
        if deployment.gpus > 1:
            deployment = replace(deployment, pipeline_parallel=1)
    if engine == "ollama" and deployment.port is not None:
        deployment = replace(deployment, host=deployment.host or "127.0.0.1")
    if engine == "ollama" and deployment.port is None:
        deployment = replace(deployment, host=None)
    spec = deployment.speculation
    if spec and spec.tokens is None and engine == "tgi":
        deployment = replace(deployment, speculation=None)
    return deployment


@pytest.mark.parametrize("engine", engine_names())
@settings(max_examples=60, deadline=None)
@given(deployment=DEPLOYMENTS)
def test_what_is_written_is_read_again(engine: str, deployment: Deployment) -> None:
    deployment = settled(deployment, engine)
    emitted = emit(deployment, engine)
    reading = read_command(emitted.text)
    assert reading.engine.name == engine
    assert reading.unknown == ()
    silent = {name: DEFAULTS[name] for name in (*emitted.left_out, *emitted.implied)}
    expected = replace(deployment, **silent)
    if engine == "ollama":  # the name is that of `ollama create`
        expected = replace(expected, served_model_name=None)
    assert reading.deployment == expected
    # Each field that is left out has its note.
    assert len(emitted.notes) >= len(emitted.left_out)


@settings(max_examples=40, deadline=None)
@given(deployment=DEPLOYMENTS)
@pytest.mark.parametrize("of", ["headrace", "vllm", "sglang"])
def test_a_kubernetes_deployment_runs_the_same_command(of: str, deployment: Deployment) -> None:
    deployment = replace(deployment, host=None, port=None)
    emitted = emit(deployment, "k8s", of=of)
    workload, service = yaml.safe_load_all(emitted.text)
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    assert workload["spec"]["replicas"] == deployment.replicas
    assert container["resources"]["limits"]["nvidia.com/gpu"] == (
        1 if of == "headrace" else deployment.gpus
    )
    labels = workload["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    alone = emit(replace(deployment, replicas=1), of).text
    start = 2 if of in ("headrace", "vllm") else 3
    expected = shlex.split(alone.replace("\\\n", " "))[start:]
    assert container["args"] == [*expected, "--host", "0.0.0.0", "--port", "8000"]


def test_what_a_manifest_has_in_common_with_ours() -> None:
    from pathlib import Path

    ours = yaml.safe_load(
        (Path(__file__).parents[2] / "deploy/kubernetes/base/server/deployment.yaml").read_text()
    )["spec"]["template"]["spec"]
    written = next(yaml.safe_load_all(emit(Deployment(model="smollm2"), "k8s").text))
    theirs = written["spec"]["template"]["spec"]
    for name in ("securityContext", "automountServiceAccountToken", "enableServiceLinks"):
        assert theirs[name] == ours[name]
    for name in ("securityContext", "lifecycle", "image"):
        assert theirs["containers"][0][name] == ours["containers"][0][name]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert theirs["containers"][0][probe]["httpGet"] == ours["containers"][0][probe]["httpGet"]


@pytest.mark.parametrize("text", ["", "--help", "two\nlines", "a\x00b"])
def test_texts_that_no_command_line_holds(text: str) -> None:
    for name in emit_names():
        with pytest.raises(ConfigError, match="model is"):
            emit(Deployment(model=text), name)


def test_an_unknown_engine() -> None:
    with pytest.raises(ConfigError, match="Unknown engine 'triton'"):
        emit(Deployment(model="a/b"), "triton")
    with pytest.raises(ConfigError, match="can't be written"):
        emit(Deployment(model="a/b"), "k8s", of="tgi")
