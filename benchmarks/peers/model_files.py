"""Writes the weights that the engines compete with, from the default model's GGUF or from nothing.

    python -m peers.model_files SOURCE.gguf FOLDER [q4_1 q4_0 q8_0 float32 1b-q4_0]

Runs in an environment of its own (gguf, numpy, safetensors). `q4_1` is a link to the source itself;
`q4_0` and `q8_0` are what the gguf package's quantizer makes of its dequantized matrices (the q4_0
one keeps the source's 8-bit output layer, so that both 4-bit files weigh the same); `float32` is a
folder in the transformers format, for engines that read no GGUF; `1b-q4_0` has Llama-3.2-1B's shape
and random weights. Knows nothing of engines.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from peers.workloads import file_name

FORMATS = ("q4_1", "q4_0", "q8_0", "float32", "1b-q4_0")
Array = npt.NDArray[Any]

# Llama-3.2-1B
LAYERS, WIDTH, FEED_FORWARD, HEADS, KV_HEADS, HEAD, VOCABULARY = 16, 2048, 8192, 32, 8, 64, 128256
# A nibble minus 8 has a standard deviation of 4.6: this gives weights of about 0.02.
RANDOM_SCALE = 0.0043
Q4_0_BLOCK, Q4_0_BLOCK_BYTES = 32, 18


def write_all(source: Path, folder: Path, formats: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    writers: dict[str, Callable[[Path], None]] = {
        "q4_1": lambda to: to.symlink_to(source.resolve()),
        "q4_0": lambda to: requantize(source, to, gguf.GGMLQuantizationType.Q4_0),
        "q8_0": lambda to: requantize(source, to, gguf.GGMLQuantizationType.Q8_0),
        "float32": lambda to: write_float_folder(source, to),
        "1b-q4_0": write_random_1b,
    }
    for format_name in formats:
        final = folder / file_name(format_name)
        if final.exists():
            continue
        part = folder / f"part-{os.getpid()}-{final.name}"
        writers[format_name](part)
        part.rename(final)
        print(f"wrote {final}", flush=True)


def requantize(source: Path, to: Path, wanted: Any) -> None:
    reader = gguf.GGUFReader(source)
    writer = _writer_like(reader, to)
    for tensor in reader.tensors:
        four_bit = tensor.tensor_type in (
            gguf.GGMLQuantizationType.Q4_0,
            gguf.GGMLQuantizationType.Q4_1,
        )
        if four_bit and tensor.tensor_type != wanted:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    _finish(writer)


def _writer_like(reader: Any, to: Path) -> Any:
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(to, architecture)
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = entry.types[0]
        inner = entry.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, entry.contents(), kind, sub_type=inner)
    return writer


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_random_1b(to: Path) -> None:
    """All matrices Q4_0, the embeddings (which are the output layer) too."""
    writer = gguf.GGUFWriter(to, "llama")
    writer.add_name("random weights, Llama-3.2-1B shape")
    writer.add_context_length(8192)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    _add_vocabulary(writer)
    chooser = np.random.default_rng(0)
    for name, rows, columns in matrices_1b():
        blocks = random_q4_0(chooser, rows, columns)
        writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    for name in norms_1b():
        writer.add_tensor(name, np.ones(WIDTH, dtype=np.float32))
    _finish(writer)


def matrices_1b() -> Iterator[tuple[str, int, int]]:
    yield "token_embd.weight", VOCABULARY, WIDTH
    for layer in range(LAYERS):
        for name, rows, columns in (
            ("attn_q", HEADS * HEAD, WIDTH),
            ("attn_k", KV_HEADS * HEAD, WIDTH),
            ("attn_v", KV_HEADS * HEAD, WIDTH),
            ("attn_output", WIDTH, HEADS * HEAD),
            ("ffn_gate", FEED_FORWARD, WIDTH),
            ("ffn_up", FEED_FORWARD, WIDTH),
            ("ffn_down", WIDTH, FEED_FORWARD),
        ):
            yield f"blk.{layer}.{name}.weight", rows, columns


def norms_1b() -> Iterator[str]:
    yield "output_norm.weight"
    for layer in range(LAYERS):
        yield f"blk.{layer}.attn_norm.weight"
        yield f"blk.{layer}.ffn_norm.weight"


def random_q4_0(chooser: np.random.Generator, rows: int, columns: int) -> Array:
    """Blocks of 32: a half-precision scale, then 16 bytes of nibbles. (rows, bytes of a row)"""
    blocks = columns // Q4_0_BLOCK
    packed = chooser.integers(0, 256, (rows, blocks, Q4_0_BLOCK_BYTES), dtype=np.uint8)
    packed[:, :, :2] = np.frombuffer(np.float16(RANDOM_SCALE).tobytes(), dtype=np.uint8)
    return packed.reshape(rows, blocks * Q4_0_BLOCK_BYTES)


def _add_vocabulary(writer: Any) -> None:
    """Bytes, then made-up words: text is never asked for, but every engine wants a tokenizer."""
    letters = list(_byte_letters().values())
    words = [f"w{number}" for number in range(VOCABULARY - len(letters) - 2)]
    tokens = [*letters, *words, "<|begin|>", "<|end|>"]
    kinds = [gguf.TokenType.NORMAL] * (len(tokens) - 2) + [gguf.TokenType.CONTROL] * 2
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["w 0"])
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 1)


def _byte_letters() -> dict[int, str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in shown}
    hidden = [byte for byte in range(256) if byte not in letters]
    letters |= {byte: chr(256 + number) for number, byte in enumerate(hidden)}
    return letters


def write_float_folder(source: Path, to: Path) -> None:
    """The file's numbers as float32, in a folder that transformers reads."""
    from safetensors.numpy import save_file

    reader = gguf.GGUFReader(source)
    to.mkdir()
    read = _reader_of(reader)
    heads, kv_heads = read("llama.attention.head_count"), read("llama.attention.head_count_kv")
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if ".attn_q." in tensor.name:
            values = undo_permutation(values, heads)
        elif ".attn_k." in tensor.name:
            values = undo_permutation(values, kv_heads)
        if (name := transformers_name(tensor.name)) is not None:
            tensors[name] = np.ascontiguousarray(values)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    tied = "lm_head.weight" not in tensors
    (to / "config.json").write_text(json.dumps(_config(read, tied), indent=2))
    _write_tokenizer(read, to)


def _reader_of(reader: Any) -> Callable[[str], Any]:
    return lambda name: reader.fields[name].contents()


def undo_permutation(values: Array, heads: int) -> Array:
    """GGUF has a head's rotated pairs side by side, transformers half a head apart."""
    rows, columns = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def transformers_name(name: str) -> str | None:
    fixed = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    inside = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    if name in fixed:
        return fixed[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in inside:
        return f"model.layers.{parts[1]}.{inside[parts[2]]}.weight"
    return None  # rope frequencies and the like, which transformers works out


def _config(read: Callable[[str], Any], tied: bool) -> dict[str, Any]:
    heads, width = read("llama.attention.head_count"), read("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": read("llama.feed_forward_length"),
        "num_hidden_layers": read("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read("llama.attention.head_count_kv"),
        "head_dim": width // heads,
        "max_position_embeddings": read("llama.context_length"),
        "rms_norm_eps": read("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": read("llama.rope.freq_base"),
        "vocab_size": len(read("tokenizer.ggml.tokens")),
        "tie_word_embeddings": tied,
        "bos_token_id": read("tokenizer.ggml.bos_token_id"),
        "eos_token_id": read("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
    }


def _write_tokenizer(read: Callable[[str], Any], to: Path) -> None:
    """Enough to turn ids into text; prompts are ids."""
    tokens = read("tokenizer.ggml.tokens")
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    merges = [merge.split(" ") for merge in read("tokenizer.ggml.merges")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    }
    (to / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[read("tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[read("tokenizer.ggml.eos_token_id")],
    }
    (to / "tokenizer_config.json").write_text(json.dumps(settings))


def main() -> None:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    formats = sys.argv[3:] or list(FORMATS)
    for stale in folder.glob("part-*"):
        shutil.rmtree(stale) if stale.is_dir() and not stale.is_symlink() else stale.unlink()
    write_all(source, folder, formats)


if __name__ == "__main__":
    main()
