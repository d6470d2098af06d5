"""Whole quantized models on the backends that are always there, and damaged ones on none: read as
they are or refused in our own words, soon, in little memory."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.plans import Draw, Row, plan_of, rows_of
from tests.weights.packers import (
    CONFIG,
    Checkpoint,
    checkpoint,
    pack_awq,
    pack_eight_bit,
    pack_gptq,
)

from headrace.backends.cpu import layout
from headrace.backends.cpu.runner import CpuRunner
from headrace.backends.reference.runner import ReferenceRunner
from headrace.core.errors import HeadraceError, UnsupportedModelError
from headrace.core.step import Runner
from headrace.weights.dequantize import dequantize, plain_tensor
from headrace.weights.describe import describe_file
from headrace.weights.load import find_weights, open_weights
from headrace.weights.methods.quantized import Beside, CodeKind, QuantizedMatrix, QuantizedTensor
from headrace.weights.weight import Weight

Bounded = Callable[[], AbstractContextManager[list[HeadraceError]]]
RNG = np.random.default_rng(11)
TOKENS = [3, 17, 40, 5, 22, 9, 31]

KINDS: dict[str, tuple[Callable[[], Checkpoint], dict[str, object]]] = {
    "awq": (
        lambda: checkpoint(partial(pack_awq, RNG, group=32)),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    ),
    "gptq": (
        lambda: checkpoint(partial(pack_gptq, RNG, group=16, bits=8, act_order=True)),
        {"quant_method": "gptq", "bits": 8, "group_size": 16, "desc_act": True},
    ),
    "fp8": (
        lambda: checkpoint(
            lambda o, i: pack_eight_bit(RNG, o, i, shape=(o // 16, i // 16), block=(16, 16))
        ),
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
    ),
    "int8": (
        lambda: checkpoint(lambda o, i: pack_eight_bit(RNG, o, i, dtype="int8", shape=(o, 1))),
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {"g": {"weights": {"num_bits": 8, "strategy": "channel"}}},
        },
    ),
}


@pytest.fixture(params=KINDS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Checkpoint]:
    make, config = KINDS[request.param]
    made = make()
    made.save(tmp_path, config)
    return tmp_path, made


def logprobs(runner: Runner) -> list[float]:
    """Of a chunk's tokens and of the token that follows them."""
    entry = Row(
        sequence_id=0,
        token_ids=TOKENS,
        start=0,
        block_table=[0],
        targets=[*TOKENS[1:], 1],
        draw=Draw(temperature=0.0),
    )
    runner.submit(plan_of(entry))
    (result,) = rows_of(runner.collect())
    assert result.error is None
    return [*result.target_logprobs, result.logprob]


def test_a_quantized_model_is_its_values_on_every_backend(
    saved: tuple[Path, Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, made = saved
    plain = tmp_path_factory.mktemp("plain")
    (plain / "config.json").write_text(json.dumps(CONFIG))
    save_file({n: torch.from_numpy(v) for n, v in made.truth.items()}, plain / "model.safetensors")
    with open_weights(plain) as file:
        spec, refs = describe_file(file)
        expected = logprobs(ReferenceRunner(spec, find_weights(refs, file), total_blocks=2))
    with open_weights(folder) as file:
        spec, refs = describe_file(file)
        weights = find_weights(refs, file)
        found = logprobs(ReferenceRunner(spec, weights, total_blocks=2))
        assert found == expected  # the same float32 values
        with CpuRunner(
            spec, weights, total_blocks=2, kv_dtype="f32", release=file.release
        ) as runner:
            assert np.allclose(logprobs(runner), expected, atol=0.01)
            assert runner.weight_bytes == layout.weight_bytes(weights)


def test_the_cpu_backend_says_so_where_a_value_is_out_of_its_range() -> None:
    matrix = QuantizedMatrix(
        kind=CodeKind.INT8,
        codes=np.full((16, 64), 127, np.int8),
        scales=np.full((16, 1), 1e4, np.float32),
        zeros=None,
        permutation=None,
        group_rows=1,
        group_columns=64,
    )
    part = QuantizedTensor(
        "w.weight", CodeKind.INT8, (16, 64), (), 1, 64, lambda: matrix, lambda: Beside(False, None)
    )
    assert dequantize(part).max() == 127e4
    with pytest.raises(UnsupportedModelError, match=r"'w\.weight'.*1\.27e\+06.*F16") as caught:
        plain_tensor(part)
    assert caught.value.remedy


HOSTILE: list[object] = [
    None, 0, 1, -1, 3, 4, 7, 8, 16, 32, 64, 96, 2**31, 2**63, 10**400, 0.5, True, False, "", "4",
    "gptq_v2", "GEMM", [], [0, 0], [1, 1], [16, 16], [2**62, 1], ["a"], {}, {"": {}}, "x" * 4000,
]  # fmt: skip


def _read(folder: Path, bounded: Bounded) -> bool:
    """Read whole; whether it was taken."""
    with bounded() as refused, open_weights(folder) as file:
        _, refs = describe_file(file)

        def read(_role: str, weight: Weight) -> None:
            for part in weight.parts:
                assert dequantize(part).shape == part.shape

        find_weights(refs, file).map(read)
    return not refused


def test_hostile_values_in_the_config(saved: tuple[Path, Checkpoint], bounded: Bounded) -> None:
    folder, _ = saved
    whole = json.loads((folder / "config.json").read_text())
    config = whole["quantization_config"]
    names = {*config, "bits", "group_size", "desc_act", "checkpoint_format", "weight_block_size",
             "version", "dynamic", "config_groups", "format"}  # fmt: skip
    taken = refused = 0
    for name in sorted(names):
        for value in HOSTILE:
            changed = {**whole, "quantization_config": {**config, name: value}}
            (folder / "config.json").write_text(json.dumps(changed))
            if _read(folder, bounded):
                taken += 1
            else:
                refused += 1
    assert taken > 10
    assert refused > 10


def test_random_damage_to_tensors(saved: tuple[Path, Checkpoint], bounded: Bounded) -> None:
    """Shapes, dtypes and names of single tensors change in a header whose spans stay right, and
    bytes of their contents change at random."""
    folder, _ = saved
    rng = random.Random(20261115)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    names = [name for name in header if name.startswith("model.layers.1.mlp.down_proj")]
    taken = 0
    for _ in range(150):
        changed = json.loads(json.dumps(header))
        data = bytearray(content[8 + length :])
        name = rng.choice(names)
        entry = changed[name]
        match rng.randrange(5):
            case 0:
                rng.shuffle(entry["shape"])
            case 1:
                size = (entry["data_offsets"][1] - entry["data_offsets"][0]) // 4
                entry["dtype"] = rng.choice(["I32", "F32", "U32"])
                entry["shape"] = rng.choice([[size], [1, size], [size, 1], [size // 2, 2]])
            case 2:
                size = entry["data_offsets"][1] - entry["data_offsets"][0]
                entry["dtype"] = rng.choice(["I8", "U8", "F8_E4M3", "F8_E5M2", "BOOL"])
                entry["shape"] = rng.choice([[size], [1, size], [64, size // 64]])
            case 3:
                changed[name + rng.choice(["x", "_scale", ""])] = changed.pop(name)
            case _:
                begin, end = header[name]["data_offsets"]
                for _ in range(8):
                    data[rng.randrange(begin, end)] = rng.randrange(256)
        text = json.dumps(changed).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)
        taken += _read(folder, bounded)
    assert 5 < taken < 145
