"""Every family's logits against transformers, through our readers and the reference backend."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.plans import Row, plan_of

from headrace.backends.reference.runner import ReferenceRunner
from headrace.models.registry import describe_config
from headrace.models.spec import AttentionSpec, ModelSpec, RopeSpec
from headrace.weights.files.safetensors import SafetensorsFolder
from headrace.weights.load import find_weights

MakeTiny = Callable[[str], tuple[torch.nn.Module, Path]]
Change = Callable[[ModelSpec], ModelSpec]

TOLERANCE = 1e-4
LENGTHS = (40, 23, 31)
TOTAL_BLOCKS = 24


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    chosen = random.Random(7)
    return [[chosen.randrange(97) for _ in range(length)] for length in lengths]


def expected(model: torch.nn.Module, token_ids: list[int]) -> NDArray[np.float32]:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.tensor([token_ids])).logits[0]
    return found.numpy()


def make_runner(
    folder: Path, *, context_tokens: int | None = None, change: Change | None = None
) -> ReferenceRunner:
    with SafetensorsFolder.open(folder) as file:
        spec, refs = describe_config(file.config, file.tensors, context_tokens)
        spec = change(spec) if change else spec
        return ReferenceRunner(spec, find_weights(refs, file), total_blocks=TOTAL_BLOCKS)


def relative_error(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def run_whole(runner: ReferenceRunner, token_ids: list[int]) -> NDArray[np.float32]:
    entry = Row(sequence_id=1, token_ids=token_ids, start=0, block_table=[5, 2, 9])
    return runner.logits(plan_of(entry))[0]


def run_in_chunks(runner: ReferenceRunner, texts: list[list[int]]) -> list[NDArray[np.float32]]:
    """All texts at once, each in random chunks, in shuffled blocks that they share out."""
    chosen = random.Random(11)
    free = list(range(TOTAL_BLOCKS))
    chosen.shuffle(free)
    tables = [[free.pop() for _ in range(-(-len(text) // 16))] for text in texts]
    done = [0] * len(texts)
    found: list[list[NDArray[np.float32]]] = [[] for _ in texts]
    while any(at < len(text) for at, text in zip(done, texts, strict=True)):
        waiting = [i for i, text in enumerate(texts) if done[i] < len(text)]
        chosen.shuffle(waiting)
        chunks = []
        for index in waiting:
            at = done[index]
            tokens = texts[index][at : at + chosen.choice([1, 2, 7, 17])]
            chunks.append(
                Row(sequence_id=index, token_ids=tokens, start=at, block_table=tables[index])
            )
            done[index] += len(tokens)
        for chunk, rows in zip(chunks, runner.logits(plan_of(*chunks)), strict=True):
            found[chunk.sequence_id].append(rows)
    return [np.concatenate(rows) for rows in found]


def test_logits_in_one_chunk(make_tiny: MakeTiny, tiny_case: str) -> None:
    model, folder = make_tiny(tiny_case)
    text = prompts()[0]
    found = run_whole(make_runner(folder), text)
    assert relative_error(found, expected(model, text)) <= TOLERANCE


def test_logits_in_many_chunks_and_shuffled_blocks(make_tiny: MakeTiny, tiny_case: str) -> None:
    model, folder = make_tiny(tiny_case)
    texts = prompts()
    for found, text in zip(run_in_chunks(make_runner(folder), texts), texts, strict=True):
        assert relative_error(found, expected(model, text)) <= TOLERANCE


def test_longrope_takes_short_factors_for_a_short_context(make_tiny: MakeTiny) -> None:
    model, folder = make_tiny("phi3_longrope")
    text = prompts()[0][:16]  # transformers takes the short factors up to 16 tokens
    short = run_whole(make_runner(folder, context_tokens=16), text)
    assert relative_error(short, expected(model, text)) <= TOLERANCE
    long = run_whole(make_runner(folder), text)
    assert relative_error(long, expected(model, text)) > 100 * TOLERANCE


def each_layer(change: Callable[[AttentionSpec], AttentionSpec]) -> Change:
    return lambda spec: replace(spec, attention=tuple(change(a) for a in spec.attention))


def slower_rope(attention: AttentionSpec) -> AttentionSpec:
    rope = attention.rope
    slower = RopeSpec(inv_freq=tuple(f * 0.99 for f in rope.inv_freq), scale=rope.scale)
    return replace(attention, rope=slower)


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("llama2", each_layer(slower_rope)),
        ("yarn", each_layer(lambda a: replace(a, rope=replace(a.rope, scale=1.0)))),
        ("llama2", each_layer(lambda a: replace(a, scale=a.scale * 1.01))),
        ("mistral", each_layer(lambda a: replace(a, window=None))),
        ("mistral", each_layer(lambda a: replace(a, window=9))),
        ("gemma2", each_layer(lambda a: replace(a, softcap=None))),
        ("gemma2", lambda spec: replace(spec, final_softcap=None)),
        ("gemma3", lambda spec: replace(spec, embed_scale=1.0)),
    ],
)
def test_the_oracle_notices_a_wrong_spec(make_tiny: MakeTiny, case: str, change: Change) -> None:
    model, folder = make_tiny(case)
    text = prompts()[0]
    found = run_whole(make_runner(folder, change=change), text)
    assert relative_error(found, expected(model, text)) > 10 * TOLERANCE


def older_style(config: dict[str, object]) -> dict[str, object]:
    """A config as transformers 4 wrote it."""
    config = dict(config)
    parameters = config.pop("rope_parameters")
    assert isinstance(parameters, dict)
    config.pop("layer_types", None)
    if "full_attention" in parameters:
        config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        config["sliding_window_pattern"] = 6
        parameters = parameters["full_attention"]
    config["rope_theta"] = parameters["rope_theta"]
    partial = parameters.get("partial_rotary_factor")
    if partial is not None:
        config["partial_rotary_factor"] = partial
    kind = parameters["rope_type"]
    scaling = {k: v for k, v in parameters.items() if k not in ("rope_theta", "rope_type")}
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **scaling}
    return config


def test_older_configs_describe_the_same_model(make_tiny: MakeTiny, tiny_case: str) -> None:
    _, folder = make_tiny(tiny_case)
    config = json.loads((folder / "config.json").read_text())
    with SafetensorsFolder.open(folder) as file:
        assert describe_config(older_style(config), file.tensors) == describe_config(
            config, file.tensors
        )


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_gemma3_inside_a_multimodal_model(make_tiny: MakeTiny, prefix: str) -> None:
    _, folder = make_tiny("gemma3")
    config = json.loads((folder / "config.json").read_text())
    with SafetensorsFolder.open(folder) as file:
        names = [name.replace("model.", prefix, 1) for name in file.tensors]
        plain, _ = describe_config(config, file.tensors)
        text = {k: v for k, v in config.items() if k != "architectures"}
        outer = {
            "model_type": "gemma3",
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": text,
            "vision_config": {},
        }
        nested, refs = describe_config(outer, [*names, "vision_tower.layers.0.weight"])
    assert nested == plain
    assert refs.layers[2].down.parts[0].name == f"{prefix}layers.2.mlp.down_proj.weight"


def test_parameters_are_counted(make_tiny: MakeTiny, tiny_case: str) -> None:
    model, folder = make_tiny(tiny_case)
    with SafetensorsFolder.open(folder) as file:
        spec, _ = describe_config(file.config, file.tensors)
    assert spec.parameters == sum(p.numel() for p in model.parameters())
