"""Descriptions that are wrong, absurd or beyond us: each refused in words that help."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import ConfigError, HeadraceError, UnsupportedModelError, WeightsError
from headrace.models.registry import describe_config, describe_gguf, rope_factors_name

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
SHAPES = {"token_embd.weight": (1000, 64), "output_norm.weight": (64,)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": None}, "vocab_size is missing; expected an integer from 1 to"),
        ({"hidden_size": "64"}, "hidden_size is '64'; expected an integer"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0; expected an integer"),
        ({"hidden_size": True}, "hidden_size is True; expected an integer"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; expected an integer from 1"),
        ({"num_attention_heads": -4}, "num_attention_heads is -4"),
        ({"num_key_value_heads": 3}, "4 attention heads and 3 key/value heads"),
        ({"num_attention_heads": 6}, "6 heads do not divide the hidden size 64"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; expected .* to 1000"),
        ({"intermediate_size": 10**12}, "intermediate_size is 1000000000000"),
        ({"head_dim": 10**6}, "head_dim is 1000000"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; expected a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; expected an object"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; expected true or false"),
        ({"max_position_embeddings": []}, r"max_position_embeddings is \[\]"),
        ({"model_type": None}, "model_type is missing; expected a string"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is .*; expected a list of strings"),
        ({"vocab_size": list(range(10**5))}, "vocab_size is .{0,90}…; expected"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, r"no_rope_layers is \[1\]; .* 2 layers"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 2]}, "expected a 0 or a 1 for each of 2"),
        ({"model_type": "smollm3", "no_rope_layers": "all"}, "expected a list of integers"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
    ],
)
def test_malformed_configs_name_the_field(change: dict[str, object], message: str) -> None:
    with pytest.raises(WeightsError, match=message) as caught:
        describe_config(LLAMA | change, [])
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "'mamba'; supported: llama, mistral, qwen2.*gemma3"),
        ({"attention_bias": True}, "attention_bias is True; supported: false"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "relu2"}, "hidden_act is 'relu2'; supported: silu"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_scaling.type is 'dynamic'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is .*awq"),
        ({"num_local_experts": 8}, "num_local_experts is 8; supported: dense models"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"head_dim": 15}, "15 of a head's 15 values would be rotated; supported: an even"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8,
             "layer_types": ["chunked_attention", "full_attention"]},
            "layer_types is .*; supported: full_attention, sliding_attention",
        ),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "bidirectional"),
        ({"model_type": "smollm3", "attention_bias": True}, "attention_bias is True"),
        ({"model_type": "olmo2", "attention_bias": True}, "attention_bias is True"),
        ({"model_type": "olmo2", "clip_qkv": 8.0}, "clip_qkv is 8.0; supported: null"),
        ({"model_type": "olmo3"}, "'olmo3'; supported: "),
    ],
)  # fmt: skip
def test_features_we_lack_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        describe_config(LLAMA | change, [])
    assert caught.value.remedy


def test_an_unused_tensor_in_a_layer_is_refused() -> None:
    _, refs = describe_config(LLAMA, [])
    names = [refs.layers[0].down.parts[0].name]
    old_buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    describe_config(LLAMA, [*names, old_buffer, "something.else"])
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1\.self_attn\.o_proj\.bias"):
        describe_config(LLAMA, [*names, "model.layers.1.self_attn.o_proj.bias"])
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.2\.mlp"):
        describe_config(LLAMA, ["model.layers.2.mlp.down_proj.weight"])


def test_minimal_gemma3_as_google_publishes_it() -> None:
    """The 4B model's text_config leaves out all that equals the class's defaults."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    spec, _ = describe_config({"model_type": "gemma3", "text_config": text}, [])
    assert (spec.vocab_size, spec.context_tokens, spec.tied_embeddings) == (262_208, 131_072, True)
    local, everywhere = spec.attention[0], spec.attention[5]
    assert (local.window, everywhere.window) == (1024, None)
    assert (local.heads, local.kv_heads, local.head_dim) == (8, 4, 256)
    assert local.scale == 256**-0.5
    assert everywhere.rope.inv_freq[1] == pytest.approx(1e6 ** (-2 / 256) / 8)
    assert local.rope.inv_freq[1] == pytest.approx(1e4 ** (-2 / 256))


def test_smollm3_as_published() -> None:
    """The 3B model's config.json and GGUF, of which only the former lists the layers."""
    config = {
        "model_type": "smollm3",
        "architectures": ["SmolLM3ForCausalLM"],
        "attention_bias": False,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 128256,
    }
    spec, _ = describe_config(config, [])
    still = [a.layer for a in spec.attention if not any(a.rope.inv_freq)]
    assert still == list(range(3, 36, 4))
    assert (spec.context_tokens, spec.tied_embeddings) == (65536, True)
    assert spec.parameters == 3_075_098_624
    assert len({id(a.rope) for a in spec.attention}) == 2  # tables are made once for each
    unlisted = {k: v for k, v in config.items() if k != "no_rope_layers"}
    assert describe_config(unlisted, [])[0] == spec
    metadata = {
        "general.architecture": "smollm3",
        "smollm3.block_count": 36,
        "smollm3.context_length": 65536,
        "smollm3.embedding_length": 2048,
        "smollm3.feed_forward_length": 11008,
        "smollm3.attention.head_count": 16,
        "smollm3.attention.head_count_kv": 4,
        "smollm3.rope.freq_base": 5e6,
        "smollm3.attention.layer_norm_rms_epsilon": 1e-6,
        "smollm3.rope.dimension_count": 128,
    }
    shapes = {"token_embd.weight": (128256, 2048), "output_norm.weight": (2048,)}
    found, _ = describe_gguf(metadata, shapes)
    ropes = [replace(a, rope=replace(a.rope, interleaved=False)) for a in found.attention]
    assert replace(found, attention=tuple(ropes)) == spec


def test_smollm3_windows_are_of_the_layers_that_do_not_rotate() -> None:
    config = LLAMA | {"model_type": "smollm3", "no_rope_layers": [0, 1], "sliding_window": 8}
    assert [a.window for a in describe_config(config, [])[0].attention] == [None, None]
    spec, _ = describe_config(config | {"use_sliding_window": True}, [])
    assert [a.window for a in spec.attention] == [8, None]
    assert spec.attention[1].rope.inv_freq[1] == pytest.approx(2e6 ** (-2 / 16))


@pytest.mark.parametrize("architecture", ["smollm3", "olmo2"])
def test_a_window_in_a_gguf_whose_architecture_has_none(architecture: str) -> None:
    """OLMo 3's files say olmo2: read as OLMo 2 they would generate nonsense."""
    metadata = {name.replace("llama.", f"{architecture}."): value for name, value in GGUF.items()}
    metadata["general.architecture"] = architecture
    describe_gguf(metadata | {f"{architecture}.attention.sliding_window": 0}, SHAPES)
    with pytest.raises(UnsupportedModelError, match=r"sliding_window is 4096; supported: no"):
        describe_gguf(metadata | {f"{architecture}.attention.sliding_window": 4096}, SHAPES)


def test_mistral_window_null_is_none_and_absent_is_the_default() -> None:
    mistral = LLAMA | {"model_type": "mistral"}
    assert describe_config(mistral, [])[0].attention[0].window == 4096
    off = describe_config(mistral | {"sliding_window": None}, [])[0]
    assert off.attention[0].window is None


def test_yarn_stretches_the_context_where_the_file_leaves_it_to_the_reader() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    spec, _ = describe_config(LLAMA | {"rope_scaling": scaling}, [])
    assert spec.context_tokens == 2048


@pytest.mark.parametrize("wanted", [0, -1, 513])
def test_a_context_the_model_was_not_made_for(wanted: int) -> None:
    assert describe_config(LLAMA, [], 512)[0].context_tokens == 512
    with pytest.raises(ConfigError, match=f"context_tokens is {wanted}; .* 1 to 512") as caught:
        describe_config(LLAMA, [], wanted)
    assert caught.value.param == "context_tokens"


def test_gguf_reads_as_the_config_does() -> None:
    spec, refs = describe_gguf(GGUF, SHAPES)
    there, _ = describe_config(LLAMA | {"tie_word_embeddings": True}, [])
    assert spec.parameters == there.parameters
    assert spec.tied_embeddings
    assert refs.head is refs.embed
    untied, refs = describe_gguf(GGUF, SHAPES | {"output.weight": (1000, 64)})
    assert not untied.tied_embeddings
    assert refs.head is not None
    assert refs.head.parts[0].name == "output.weight"


def test_gguf_per_layer_numbers_that_agree_are_one_number() -> None:
    same = GGUF | {"llama.attention.head_count_kv": [2, 2]}
    assert describe_gguf(same, SHAPES)[0].attention[1].kv_heads == 2
    mixed = GGUF | {"llama.attention.head_count_kv": [2, 4]}
    with pytest.raises(UnsupportedModelError, match=r"head_count_kv is \[2, 4\]"):
        describe_gguf(mixed, SHAPES)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"general.architecture": "rwkv7"}, UnsupportedModelError, "'rwkv7'; supported: llama"),
        ({"general.architecture": None}, WeightsError, "general.architecture is missing"),
        ({"llama.block_count": 10**9}, WeightsError, "llama.block_count is 1000000000"),
        ({"llama.block_count": "2"}, WeightsError, "llama.block_count is '2'"),
        ({"llama.context_length": None}, WeightsError, "llama.context_length is missing"),
        ({"llama.attention.head_count": 0}, WeightsError, "llama.attention.head_count is 0"),
        ({"llama.attention.head_count_kv": 3}, WeightsError, "3 key/value heads"),
        ({"llama.attention.value_length": 8}, UnsupportedModelError, "value_length is 8"),
        ({"llama.expert_count": 8}, UnsupportedModelError, "expert_count is 8"),
        ({"llama.rope.dimension_count": 7}, UnsupportedModelError, "dimension_count is 7"),
        ({"llama.rope.freq_base": 0.0}, WeightsError, "llama.rope.freq_base is 0.0"),
    ],
)
def test_malformed_gguf_names_the_key(
    change: dict[str, object], error: type[HeadraceError], message: str
) -> None:
    with pytest.raises(error, match=message):
        describe_gguf(GGUF | change, SHAPES)


@pytest.mark.parametrize("shape", [(1000,), (0, 64), (10**9, 64)])
def test_gguf_needs_an_embedding(shape: tuple[int, ...]) -> None:
    with pytest.raises(WeightsError, match=r"token_embd\.weight is of shape"):
        describe_gguf(GGUF, {"token_embd.weight": shape})
    with pytest.raises(WeightsError, match=r"token_embd\.weight is missing"):
        describe_gguf(GGUF, {})


def test_rope_factors_must_come_with_the_tensor() -> None:
    shapes = SHAPES | {"rope_freqs.weight": (8,)}
    assert rope_factors_name(GGUF, shapes) == "rope_freqs.weight"
    assert rope_factors_name(GGUF, SHAPES) is None
    with pytest.raises(WeightsError, match=r"none rotary factors given.*rope_freqs\.weight"):
        describe_gguf(GGUF, shapes)


_JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from(["", "silu", "x" * 999]),
    st.lists(st.integers(-1, 3), max_size=3),
    st.dictionaries(
        st.sampled_from(["type", "rope_type", "factor", "rope_theta"]),
        st.one_of(st.floats(), st.sampled_from(["linear", "yarn", "longrope", "llama3"])),
        max_size=3,
    ),
)
_FIELDS = [
    *LLAMA, "head_dim", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window",
    "layer_types", "tie_word_embeddings", "partial_rotary_factor", "query_pre_attn_scalar",
    "final_logit_softcapping", "text_config", "use_sliding_window", "max_window_layers",
    "no_rope_layers", "no_rope_layer_interval", "clip_qkv",
]  # fmt: skip
_KINDS = ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "gemma3_text"]
_KINDS += ["smollm3", "olmo2"]


@settings(max_examples=400, deadline=None)
@given(
    kind=st.sampled_from(_KINDS),
    change=st.dictionaries(st.sampled_from(_FIELDS), _JUNK, max_size=3),
)
def test_no_config_does_worse_than_an_error_of_ours(kind: str, change: dict[str, object]) -> None:
    said = ""
    try:
        describe_config(LLAMA | {"model_type": kind} | change, [])
    except HeadraceError as error:
        said = str(error)
    assert len(said) < 500


@settings(max_examples=400, deadline=None)
@given(
    change=st.dictionaries(
        st.sampled_from(
            [*GGUF, "llama.rope.scaling.type", "llama.rope.scaling.factor",
             "llama.attention.key_length", "llama.rope.dimension_count", "llama.rope.freq_base"]
        ),
        _JUNK,
        max_size=3,
    )
)  # fmt: skip
def test_no_gguf_does_worse_than_an_error_of_ours(change: dict[str, object]) -> None:
    said = ""
    try:
        describe_gguf(GGUF | change, SHAPES)
    except HeadraceError as error:
        said = str(error)
    assert len(said) < 500
