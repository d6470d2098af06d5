"""The device that kernels are tested on: a GPU, or the CPU through Triton's interpreter."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.errors import HeadraceError
from headrace.fetch.resolve import resolve_model


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: before any kernel is
    import triton.language as tl
    from triton.runtime import interpreter

    # The interpreter (Triton 3.6) keeps scalars as arrays of one value and turns them into loop
    # bounds by int(), which NumPy 2.4 and newer refuse.
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch

    # It keeps bf16 as the 16-bit integers that hold its bits, and multiplies those in tl.dot.
    create_dot = interpreter.InterpreterBuilder.create_dot

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if x.dtype == tl.bfloat16 else x for x in (a, b))
        return create_dot(self, a, b, *rest)

    interpreter.InterpreterBuilder.create_dot = dot

    # It cuts bits off, or rounds without carrying, where a GPU rounds to the nearest.
    convert = interpreter._convert_float
    narrow = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}

    def convert_float(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source != tl.float32 or target not in narrow:
            return convert(values, source, target, rounding)
        rounded = torch.from_numpy(values.view(np.float32)).to(narrow[target])
        bits = torch.uint8 if rounded.itemsize == 1 else torch.uint16
        return rounded.view(bits).numpy()

    interpreter._convert_float = convert_float
    _spare_time()


def _spare_time() -> None:
    """A third of it went into what no test here needs: looking through the whole language at every
    call of a kernel to give it its interpreted meaning, and taking that back; asserting at every
    sum of integers that it does not overflow, which those of a few hundred values can't."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch_language = interpreter._patch_lang
    patched: set[frozenset[int]] = set()

    def patch_once(fn: Any) -> Any:
        seen = frozenset(id(v) for v in fn.__globals__.values() if v is tl or v is tl.core)
        if seen not in patched:
            patched.add(seen)
            patch_language(fn)
        return interpreter._LangPatchScope()  # with nothing to restore

    interpreter._patch_lang = patch_once
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )


if not torch.cuda.is_available():
    _interpret()


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """As everywhere, but that a machine with a GPU need not have it nor reach it."""
    try:
        return resolve_model(None, offline=torch.cuda.is_available())
    except HeadraceError as error:
        if not torch.cuda.is_available():
            raise
        pytest.skip(f"the default model is not here: {error.cause}")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
