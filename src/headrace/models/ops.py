"""The operations a decoder is written over. Backends implement them; the decoder calls them.

Tensors (`T`) and prepared weights (`W`) are opaque: numpy arrays in the reference backend, slots
of a recorded program on the CPU, torch tensors on a GPU, shapes alone when counting. `n` is the
number of tokens in the step; only the backend knows which tokens, positions and blocks these are.

qkv rows hold [query heads | key heads | value heads], each of `head_dim`.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from headrace.models.spec import Activation, AttentionSpec

T = TypeVar("T")
W = TypeVar("W")
W_contra = TypeVar("W_contra", contravariant=True)  # W where it is only taken, never given


class Ops(Protocol[T, W_contra]):
    def embed(self, table: W_contra, scale: float) -> T:
        """The step's tokens' rows of the table, times scale -> [n, hidden]. A rank that has only
        some of the vocabulary gives zeros for other tokens."""
        ...

    def norm(self, x: T, weight: W_contra, eps: float) -> T:
        """RMS norm over the last axis: [n, d] -> [n, d]"""
        ...

    def linear(self, x: T, weight: W_contra) -> T:
        """Product with a weight of one or more parts stacked by output, plus bias if it has one:
        [n, in] -> [n, out]"""
        ...

    def head_norm(
        self, qkv: T, q_weight: W_contra, k_weight: W_contra, attention: AttentionSpec
    ) -> T:
        """RMS norm of each query head and each key head, or with `attention.joint_norm` of all
        query heads as one and all key heads as one; values pass: qkv -> qkv"""
        ...

    def rope(self, qkv: T, attention: AttentionSpec) -> T:
        """Rotate query and key heads by their tokens' positions: qkv -> qkv"""
        ...

    def attention(self, qkv: T, attention: AttentionSpec) -> T:
        """Write keys and values to the blocks of this layer, then attend causally over them:
        qkv -> [n, heads * head_dim]"""
        ...

    def gated(self, gate_up: T, activation: Activation) -> T:
        """activation(gate) * up: [n, 2 * d], gate first -> [n, d]"""
        ...

    def add(self, x: T, y: T) -> T:
        """[n, d] + [n, d] -> [n, d]"""
        ...

    def select(self, x: T) -> T:
        """Only the rows whose logits the step wants: [n, d] -> [m, d]"""
        ...

    def softcap(self, x: T, cap: float) -> T:
        """cap * tanh(x / cap)"""
        ...

    def reduce(self, x: T) -> T:
        """The sum of all ranks' x, on every rank, with the same bits: [n, d] -> [n, d]"""
        ...

    def gather(self, x: T, width: int) -> T:
        """All ranks' columns side by side: [m, some] -> [m, width]. Only the first rank has
        them; what the others get is not to be read."""
        ...

    def receive(self, width: int) -> T:
        """The rows that the stage before this one has sent -> [n, width]"""
        ...

    def send(self, x: T) -> T:
        """Rows to the next stage; returns them unchanged."""
        ...
