"""Which type each matrix has in a GGUF mixture such as Q4_K_M, without an importance matrix.

The rules are those of llama.cpp's quantizer (src/llama-quant.cpp, as of 2026-08), for the mixtures
that people download. Knows types, not bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.models.formats import GGUF, Format
from headrace.models.matrices import Matrix, Part

# What a mixture has where no rule below says otherwise.
MIXTURES = {
    "q2_k": "Q2_K",
    "q3_k_s": "Q3_K",
    "q3_k_m": "Q3_K",
    "q3_k_l": "Q3_K",
    "q4_0": "Q4_0",
    "q4_k_s": "Q4_K",
    "q4_k_m": "Q4_K",
    "q5_0": "Q5_0",
    "q5_k_s": "Q5_K",
    "q5_k_m": "Q5_K",
    "q6_k": "Q6_K",
    "q8_0": "Q8_0",
    "iq4_nl": "IQ4_NL",
    "iq4_xs": "IQ4_XS",
}
# A row that is no multiple of a type's block gets another type.
_NARROW = {
    "IQ4_XS": "IQ4_NL",
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
_VALUES = ("v", "kv_up")
_FEW_EXPERTS = 8  # Mixtral: attention is so small beside the experts that it gets more bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a matrix is in the model, and what about the model matters for its type."""

    layer: int = 0
    layers: int = 1
    heads_per_kv: int = 1
    experts: int = 0
    tied: bool = False


def gguf_format(mixture: str, matrix: Matrix, place: Place) -> Format:
    kind = _fitting(_type(mixture, matrix, place), matrix.columns)
    return GGUF[kind]


def _type(mixture: str, matrix: Matrix, place: Place) -> str:
    default = MIXTURES[mixture]
    if matrix.part is Part.OUTPUT or (matrix.part is Part.EMBEDDING and place.tied):
        narrow = matrix.columns % (GGUF[default].group or 1)
        return "Q8_0" if narrow or default == "Q8_0" else "Q6_K"
    if matrix.part is Part.EMBEDDING:
        return default
    if matrix.part is Part.ROUTER:
        return "F32"
    if matrix.name in _VALUES:
        return _value_type(mixture, default, place)
    if matrix.name == "k" and place.experts == _FEW_EXPERTS:
        return "Q8_0"
    if matrix.name.endswith("_down") and matrix.part in (Part.MLP, Part.EXPERTS):
        return _down_type(mixture, default, place)
    if matrix.name == "attn_out":
        return _out_type(mixture, default, place)
    return default


def _value_type(mixture: str, default: str, place: Place) -> str:
    grouped = place.heads_per_kv >= 4
    chosen = default
    if mixture == "q2_k":
        chosen = "Q4_K" if grouped else "Q3_K"
    elif mixture == "q3_k_m":
        chosen = "Q5_K" if place.layer < 2 else "Q4_K"
    elif mixture == "q3_k_l" or (mixture in ("iq4_nl", "iq4_xs") and grouped):
        chosen = "Q5_K"
    elif mixture in ("q4_k_m", "q5_k_m") and _more_bits(place):
        chosen = "Q6_K"
    elif mixture == "q4_k_s" and place.layer < 4:
        chosen = "Q5_K"
    if place.layers == 80 and place.heads_per_kv == 8 and chosen in ("Q3_K", "Q4_K"):
        chosen = "Q5_K"  # a Llama of 70B, as llama.cpp tells one
    return "Q8_0" if place.experts == _FEW_EXPERTS else chosen


def _down_type(mixture: str, default: str, place: Place) -> str:
    early = place.layer < place.layers // 8
    if mixture == "q2_k":
        return "Q3_K"
    if mixture == "q3_k_m":
        return "Q5_K" if place.layer < place.layers // 16 else "Q4_K"
    if mixture == "q3_k_l":
        return "Q5_K"
    if mixture in ("q4_k_m", "q5_k_m") and _more_bits(place):
        return "Q6_K"
    if mixture in ("q4_k_s", "iq4_nl", "iq4_xs") and early:
        return "Q5_K"
    return default


def _out_type(mixture: str, default: str, place: Place) -> str:
    if place.experts == _FEW_EXPERTS:
        more = ("q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m", "iq4_nl", "iq4_xs")
        return "Q5_K" if mixture in more else default
    return {"q2_k": "Q3_K", "q3_k_m": "Q4_K", "q3_k_l": "Q5_K"}.get(mixture, default)


def _more_bits(place: Place) -> bool:
    eighth = place.layers // 8
    last = place.layer >= 7 * place.layers // 8
    return place.layer < eighth or last or (place.layer - eighth) % 3 == 2


def _fitting(kind: str, columns: int) -> str:
    block = GGUF[kind].group or 1
    if columns % block == 0:
        return kind
    narrow = _NARROW.get(kind, "F16")
    return narrow if columns % (GGUF[narrow].group or 1) == 0 else "F16"
