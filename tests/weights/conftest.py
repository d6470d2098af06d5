"""Small valid model files, written by the formats' own libraries, for the tests to start from."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save

from headrace.core.errors import HeadraceError, UnsupportedModelError, WeightsError

torch.set_num_threads(1)

SECONDS_EACH = 2.0  # generous: the machine is shared. An honest read takes a millisecond
BYTES_EACH = 4 << 20


@pytest.fixture(scope="session")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Every kind of metadata value, and tensors of four formats."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("t.u8", 200)
    writer.add_int8("t.i8", -100)
    writer.add_uint16("t.u16", 60_000)
    writer.add_int16("t.i16", -30_000)
    writer.add_uint32("t.u32", 4_000_000_000)
    writer.add_int32("t.i32", -2_000_000_000)
    writer.add_uint64("t.u64", 2**63 + 1)
    writer.add_int64("t.i64", -(2**62))
    writer.add_float32("t.f32", 0.5)
    writer.add_float64("t.f64", 0.1)
    writer.add_bool("t.yes", True)
    writer.add_bool("t.no", False)
    writer.add_string("t.text", "Ġtwo words\n😀")
    writer.add_array("t.tokens", ["<s>", "", "é", "日本", "Ġthe"])
    writer.add_array("t.scores", [0.25, -1.5, 3.0])
    writer.add_array("t.kinds", [1, 2, 3, -4])
    writer.add_array("t.flags", [True, False, True])
    writer.add_array("t.nested", [[1, 2], [3]])
    rng = np.random.default_rng(0)
    for name, kind, shape in [
        ("blk.0.attn_q.weight", gguf.GGMLQuantizationType.Q4_1, (3, 64)),
        ("blk.0.attn_norm.weight", gguf.GGMLQuantizationType.F32, (7,)),
        ("blk.0.ffn_up.weight", gguf.GGMLQuantizationType.Q8_0, (2, 32)),
        ("output.weight", gguf.GGMLQuantizationType.F16, (2, 3, 4)),
    ]:
        values = rng.standard_normal(shape).astype(np.float32)
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.fixture(scope="session")
def safetensors_bytes() -> bytes:
    """The three dtypes that are read and one that is not."""
    torch.manual_seed(0)
    return save(
        {
            "model.embed_tokens.weight": torch.randn(5, 4),
            "model.norm.weight": torch.randn(4).to(torch.bfloat16),
            "lm_head.weight": torch.randn(2, 3).to(torch.float16),
            "model.position_ids": torch.arange(6, dtype=torch.int64),
        },
        metadata={"format": "pt"},
    )


@contextmanager
def _bounded() -> Iterator[list[HeadraceError]]:
    refused: list[HeadraceError] = []
    tracemalloc.reset_peak()
    held = tracemalloc.get_traced_memory()[0]
    start = time.perf_counter()
    try:
        yield refused
    except (WeightsError, UnsupportedModelError) as error:
        _check_message(error)
        refused.append(error.with_traceback(None))
    assert time.perf_counter() - start < SECONDS_EACH
    assert tracemalloc.get_traced_memory()[1] - held < BYTES_EACH


def _check_message(error: HeadraceError) -> None:
    text = str(error)
    assert "\n" not in text
    assert error.remedy
    assert len(text) < 2000
    text.encode("utf-8")  # what comes from the file can be printed


@pytest.fixture
def bounded() -> Iterator[Callable[[], AbstractContextManager[list[HeadraceError]]]]:
    """`with bounded() as refused:` a read that may fail in our own words only, soon, in little
    memory; the error, if there was one, is then in the list."""
    tracemalloc.start()
    try:
        yield _bounded
    finally:
        tracemalloc.stop()


@pytest.fixture
def model_folder(tmp_path: Path, safetensors_bytes: bytes) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes)
    return tmp_path
