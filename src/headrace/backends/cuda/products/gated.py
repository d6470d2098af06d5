"""activation(gate) * up, with the quantization of the result for the product that follows.

Gate and up values of one output lie side by side (as a gated matrix gives them), or gate first
and up after it. The activations themselves serve the products' epilogue too.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.backends.cuda.products.norm import store_quantized

ACTIVATION_NONE = 0
ACTIVATION_SILU = 1
ACTIVATION_GELU_TANH = 2


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """float32 in, float32 out; tanh through the sigmoid, which a GPU has an instruction for."""
    if ACTIVATION == 1:
        return x * tl.sigmoid(x)
    else:
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def gated_kernel(
    gate_up,  # [rows, 2 * width]
    out,  # [rows, width]
    scales,  # [rows] f32, with QUANTIZE
    width,
    gate_up_stride,
    out_stride,
    BLOCK: tl.constexpr,  # with QUANTIZE a whole row: a power of two >= width
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    QUANTIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    gate_up += row * gate_up_stride
    out += row * out_stride
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if INTERLEAVED:
        both = tl.program_id(1) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        pairs = tl.load(gate_up + both, mask=both < 2 * width, other=0.0)
        gate, up = tl.split(tl.reshape(pairs, (BLOCK, 2)))
    else:
        gate = tl.load(gate_up + columns, mask=mask, other=0.0)
        up = tl.load(gate_up + width + columns, mask=mask, other=0.0)
    values = activate(gate.to(tl.float32), ACTIVATION) * up.to(tl.float32)
    if QUANTIZE == 0:
        tl.store(out + columns, values.to(out.dtype.element_ty), mask=mask)
    else:
        peak = tl.max(tl.where(mask, tl.abs(values), 0.0), 0)
        store_quantized(values, peak, out, scales, row, columns, mask, QUANTIZE)
