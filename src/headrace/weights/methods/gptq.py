"""GPTQ as AutoGPTQ and GPTQModel save it: 4- or 8-bit codes, one scale and zero point per group,
and possibly inputs that were quantized in another order (act-order).

For a module of `in` inputs and `out` outputs, with groups of g inputs and n codes per word:

    qweight  I32 [in / n, out]       n inputs per word, the first one lowest
    qzeros   I32 [in / g, out / n]   n outputs per word, the first one lowest
    scales   F16 [in / g, out]
    g_idx    I32 [in]                the group of each input; without it, groups in order

The checkpoint format "gptq" stores zero points minus one (modulo the bits); "gptq_v2" as they are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.core.errors import UnsupportedModelError, WeightsError
from headrace.models.fields import Fields
from headrace.models.refs import TensorRef
from headrace.weights.dequantize import dequantize_plain
from headrace.weights.files.mapped import DAMAGED, shown
from headrace.weights.methods.awq import (
    SCALE_DTYPES,
    packed_module,
    plain_packed_names,
    read_group_size,
)
from headrace.weights.methods.quantized import (
    ANOTHER_COPY,
    INT4_ZERO,
    Beside,
    CodeKind,
    Codes,
    QuantizedFile,
    QuantizedMatrix,
    QuantizedTensor,
    as_bytes,
    check_divides,
    find_stored,
    has_other_bytes,
    nibbles,
    zero_points,
)
from headrace.weights.tensor import Tensor

_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class GptqMethod:
    """Implements `quantized.Method`."""

    bits: int
    group_size: int  # -1: one scale per output channel
    act_order: bool
    less_one: bool  # zero points are stored minus one

    @classmethod
    def from_config(cls, config: Fields) -> GptqMethod:
        bits = config.integer("bits")
        if bits not in (4, 8):
            raise config.unsupported("bits", "4 and 8")
        written = config.text("checkpoint_format", default="gptq")
        if written not in ("gptq", "gptq_v2"):
            raise config.unsupported("checkpoint_format", "gptq and gptq_v2")
        if config.text("pack_dtype", default="int32") != "int32":
            raise config.unsupported("pack_dtype", "int32")
        if config.flag("is_marlin_format", default=False):
            raise config.unsupported("is_marlin_format", "false")
        _refuse_rules(config)
        return cls(
            bits,
            read_group_size(config),
            act_order=config.flag("desc_act", default=False),
            less_one=written == "gptq",
        )

    def plain_names(self, file: QuantizedFile, names: Collection[str]) -> list[str]:
        return plain_packed_names(file, names, ("qzeros", "scales", "g_idx"))

    def find(self, role: str, ref: TensorRef, file: QuantizedFile) -> QuantizedTensor | None:
        module = packed_module(ref, file)
        if module is None:
            return None
        outputs, inputs = ref.shape
        group = inputs if self.group_size == -1 else self.group_size
        word = _WORD_BITS // self.bits
        check_divides(file, ref, "outputs", outputs, word)
        check_divides(file, ref, "inputs", inputs, word)
        check_divides(file, ref, "inputs, in groups", inputs, group)
        groups = inputs // group
        codes = find_stored(file, f"{module}.qweight", role, ("I32",), [(inputs // word, outputs)])
        zeros = find_stored(file, f"{module}.qzeros", role, ("I32",), [(groups, outputs // word)])
        scales = find_stored(file, f"{module}.scales", role, SCALE_DTYPES, [(groups, outputs)])
        order: Tensor | None = None
        if self.act_order or f"{module}.g_idx" in file.codes:
            order = find_stored(file, f"{module}.g_idx", role, ("I32",), [(inputs,)])

        def decode() -> QuantizedMatrix:
            return self._decode(file, codes, zeros, scales, order, group)

        def look() -> Beside:
            return Beside(
                has_other_bytes(zeros, self._symmetric_byte),
                None if order is None else _permutation(file, order, group),
            )

        kind = CodeKind.INT4 if self.bits == 4 else CodeKind.INT8
        sources = (codes, zeros, scales) if order is None else (codes, zeros, scales, order)
        return QuantizedTensor(ref.name, kind, (outputs, inputs), sources, 1, group, decode, look)

    def _decode(
        self,
        file: QuantizedFile,
        codes: Tensor,
        zeros: Tensor,
        scales: Tensor,
        order: Tensor | None,
        group: int,
    ) -> QuantizedMatrix:
        values = self._codes(as_bytes(codes).transpose(1, 0, 2))
        points = self._codes(as_bytes(zeros)).T
        if self.less_one:  # a zero point of 0 is stored as the largest code
            points = points + np.uint8(1) & np.uint8((1 << self.bits) - 1)
        permutation = None if order is None else _permutation(file, order, group)
        if permutation is not None:
            values = values[:, permutation]
        kind, zero = CodeKind.INT4, INT4_ZERO
        kept: Codes = values
        kept_points: Codes = points
        if self.bits == 8:  # both minus 128, as signed bytes
            kind, zero = CodeKind.INT8, 0
            kept, kept_points = ((v ^ np.uint8(128)).view(np.int8) for v in (values, points))
        return QuantizedMatrix(
            kind=kind,
            codes=kept,
            scales=np.ascontiguousarray(dequantize_plain(scales).T),
            zeros=zero_points(kept_points, zero),
            permutation=permutation,
            group_rows=1,
            group_columns=group,
        )

    @property
    def _symmetric_byte(self) -> int:
        """The stored byte of zero points that are all the middle code."""
        code = (1 << self.bits - 1) - self.less_one
        return code if self.bits == 8 else code * 0x11

    def _codes(self, words: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """[a, b, bytes per word] -> [a, b * codes per word]"""
        split = nibbles(words) if self.bits == 4 else np.ascontiguousarray(words)
        return split.reshape(len(split), -1)


def _permutation(file: QuantizedFile, order: Tensor, group: int) -> NDArray[np.int32] | None:
    """The inputs sorted by group; None if they already are."""
    owners = np.frombuffer(order.data, "<i4")
    groups = len(owners) // group
    where = f"{file.path}: tensor {shown(order.name)}"
    if owners.min() < 0 or owners.max() >= groups:
        wrong = owners.min() if owners.min() < 0 else owners.max()
        raise WeightsError(
            f"{where}: group of an input: found {wrong}; expected 0 to {groups - 1}.", DAMAGED
        )
    members = np.bincount(owners, minlength=groups)
    if (members != group).any():
        raise UnsupportedModelError(
            f"{where}: group {int(np.argmax(members != group))} has "
            f"{members[np.argmax(members != group)]} inputs; expected {group} in each group.",
            ANOTHER_COPY,
        )
    permutation = np.argsort(owners, kind="stable").astype(np.int32)
    return None if (np.diff(permutation) == 1).all() else permutation


def _refuse_rules(config: Fields) -> None:
    """Refuses GPTQModel's per-module rules, except those that leave a module unquantized: these
    show in the tensors. Others would change the module's bits or groups."""
    rules = config.section("dynamic")
    if rules is not None and not all(name.startswith("-:") for name in rules.names()):
        raise config.unsupported("dynamic", "rules that leave modules out (-:)")
