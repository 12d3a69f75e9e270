"""The model families that a GGUF file can be converted of: their configuration, tensor names and values.

One entry of `FAMILIES` for each `general.architecture`; what all share (embedding, heads, MLP) is said once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .gguf_metadata import Metadata

_DECODER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How one architecture's GGUF file becomes a Hugging Face folder."""

    title: str
    layer_names: Mapping[str, str]
    """Part of a GGUF name inside a layer -> part of the Hugging Face name."""
    head_norms: tuple[str, ...] = ()
    """Those of the layer's norms that are head_dim wide; the others are hidden_size wide."""
    qkv_bias: bool = False
    """q, k and v have biases that config.json does not speak of."""
    config: Callable[[Metadata], dict[str, Any]]
    """Makes the content of config.json."""
    convert_weight: Callable[[str, np.ndarray, dict[str, Any]], np.ndarray]
    """(Hugging Face name, float32 values, config) -> the values as Hugging Face stores them."""


def family_of(metadata: Metadata) -> Family:
    """Raises: ValueError for an architecture that is not in `FAMILIES`."""
    family = FAMILIES.get(metadata.architecture)
    if family is None:
        known = ", ".join(repr(name) for name in sorted(FAMILIES))
        raise ValueError(
            f"{metadata.path} holds a {metadata.architecture!r} model; rowcast converts {known} models only: "
            "give the model's Hugging Face folder instead"
        )
    return family


def tensor_shapes(family: Family, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of exactly the tensors that a model of this configuration has."""
    hidden, inner, head_dim = (
        config["hidden_size"],
        config["intermediate_size"],
        config["head_dim"],
    )
    q_rows, kv_rows = (
        config["num_attention_heads"] * head_dim,
        config["num_key_value_heads"] * head_dim,
    )
    attention_bias, mlp_bias = config["attention_bias"], config.get("mlp_bias", False)
    qkv_bias = attention_bias or family.qkv_bias
    linear = {
        "self_attn.q_proj": (q_rows, hidden, qkv_bias),
        "self_attn.k_proj": (kv_rows, hidden, qkv_bias),
        "self_attn.v_proj": (kv_rows, hidden, qkv_bias),
        "self_attn.o_proj": (hidden, q_rows, attention_bias),
        "mlp.gate_proj": (inner, hidden, mlp_bias),
        "mlp.up_proj": (inner, hidden, mlp_bias),
        "mlp.down_proj": (hidden, inner, mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        for name in family.layer_names.values():
            prefix = f"model.layers.{layer}.{name}"
            if name not in linear:
                shapes[f"{prefix}.weight"] = (head_dim if name in family.head_norms else hidden,)
                continue
            rows, columns, has_bias = linear[name]
            shapes[f"{prefix}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}.bias"] = (rows,)
    return shapes


def _decoder_config(metadata: Metadata) -> dict[str, Any]:
    """What config.json says of every family."""
    path = metadata.path
    metadata.refuse_own(
        {
            "expert_count": "mixture-of-experts layers",
            "rope.scaling.type": "scaled rotary positions",
            "attn_logit_softcapping": "capped attention scores",
            "final_logit_softcapping": "capped logits",
        }
    )
    num_heads = metadata.own_count("attention.head_count")
    num_kv_heads = metadata.own_count("attention.head_count_kv", num_heads)
    hidden_size = metadata.own_count("embedding_length")
    head_dim = metadata.own_count("attention.key_length", hidden_size // max(num_heads, 1))
    value_dim = metadata.own_count("attention.value_length", head_dim)
    rope_dim = metadata.own_count("rope.dimension_count", head_dim)
    if not head_dim == value_dim == rope_dim or head_dim % 2 or not head_dim:
        raise ValueError(
            f"{path} has key, value and rotary dimensions {head_dim}, {value_dim} and {rope_dim}; "
            "the conversion supports one even number for all three"
        )
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"{path} has {num_heads} query heads and {num_kv_heads} KV heads; query heads must be a multiple"
        )
    num_layers = metadata.own_count("block_count")
    # A damaged layer count can be four thousand million: no list of that length.
    if num_layers > len(metadata.tensor_names):
        raise ValueError(
            f"{path} announces {num_layers} layers and holds {len(metadata.tensor_names)} tensors; "
            "it may be one part of a split file: give the merged one"
        )
    return {
        "vocab_size": len(metadata.tokens),
        "hidden_size": hidden_size,
        "intermediate_size": metadata.own_count("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": metadata.own_count("context_length"),
        "rms_norm_eps": metadata.own_real("attention.layer_norm_rms_epsilon"),
        "attention_bias": "blk.0.attn_q.bias" in metadata.tensor_names,
        "attention_dropout": 0.0,
        "tie_word_embeddings": "output.weight" not in metadata.tensor_names,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": "float32",
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


# Llama


def _llama_config(metadata: Metadata) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_decoder_config(metadata),
        "hidden_act": "silu",
        "rope_theta": metadata.own_real("rope.freq_base", 10000.0),
        "mlp_bias": "blk.0.ffn_gate.bias" in metadata.tensor_names,
        "pretraining_tp": 1,
    }


def _llama_weight(name: str, weight: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    if ".q_proj." in name:
        return unpermute(weight, config["num_attention_heads"])
    if ".k_proj." in name:
        return unpermute(weight, config["num_key_value_heads"])
    return weight


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the row order that GGUF's llama models give the query and key projections.

    Shapes: weight [num_heads * head_dim, ...]; the result has the same shape.
    GGUF rotates neighbouring rows (2i, 2i + 1) of a head; Hugging Face rotates rows (i, i + head_dim / 2). So row
    2i + j of a head there is row i + j * head_dim / 2 here.
    Example: one head, rows [a0, b0, a1, b1] -> [a0, a1, b0, b1].
    Source: `permute` of llama.cpp's converter, inverted.
    """
    half = weight.shape[0] // num_heads // 2
    paired = weight.reshape(num_heads, half, 2, *weight.shape[1:])
    return paired.swapaxes(1, 2).reshape(weight.shape)


# Qwen 2, 2.5 and 3


def _qwen_config(metadata: Metadata) -> dict[str, Any]:
    number = metadata.architecture.removeprefix("qwen")
    config = _decoder_config(metadata)
    if number == "2":
        config["attention_bias"] = False  # `Family.qkv_bias`; the output projection has none
    return {
        "architectures": [f"Qwen{number}ForCausalLM"],
        "model_type": metadata.architecture,
        **config,
        "hidden_act": "silu",
        "rope_theta": metadata.own_real("rope.freq_base", 10000.0),
        "use_sliding_window": False,
    }


def _as_it_is(name: str, weight: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    return weight


# Gemma 3


def _gemma3_config(metadata: Metadata) -> dict[str, Any]:
    config = _decoder_config(metadata)
    window = metadata.own_count("attention.sliding_window")
    if window < 1:
        raise ValueError(f"{metadata.path} has a sliding window of {window} tokens, expected >= 1")
    full_base = metadata.own_real("rope.freq_base", 1e6)
    sliding_base = metadata.own_real("rope.freq_base_swa", 1e4)
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **config,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["head_dim"],
        "sliding_window": window,
        "layer_types": _gemma3_layer_types(metadata, config["num_hidden_layers"]),
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": full_base},
            "sliding_attention": {"rope_type": "default", "rope_theta": sliding_base},
        },
    }


def _gemma3_layer_types(metadata: Metadata, num_layers: int) -> list[str]:
    """The kind of each layer: the file's list, or all but each n-th are sliding; n is 6 where the file says nothing.

    Source: llama.cpp's rule for the key, and the pattern of all Gemma 3 models.
    """
    pattern = metadata.own("attention.sliding_window_pattern", 6)
    if isinstance(pattern, int) and pattern > 0:
        pattern = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    if not isinstance(pattern, list) or len(pattern) != num_layers:
        raise ValueError(
            f"{metadata.path} has {metadata.architecture}.attention.sliding_window_pattern = {pattern!r:.80}; "
            f"expected a number or {num_layers} flags, one for each layer"
        )
    return ["sliding_attention" if sliding else "full_attention" for sliding in pattern]


def _gemma3_weight(name: str, weight: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """GGUF holds what a norm multiplies with; Gemma's own form holds that less one, and its code adds the one."""
    return weight - np.float32(1) if name.endswith("norm.weight") else weight


FAMILIES = {
    "llama": Family(
        title="plain Llama",
        layer_names={**_DECODER_NAMES, "ffn_norm": "post_attention_layernorm"},
        config=_llama_config,
        convert_weight=_llama_weight,
    ),
    "qwen2": Family(
        title="Qwen 2",
        layer_names={**_DECODER_NAMES, "ffn_norm": "post_attention_layernorm"},
        qkv_bias=True,
        config=_qwen_config,
        convert_weight=_as_it_is,
    ),
    "qwen3": Family(
        title="Qwen 3",
        layer_names={
            **_DECODER_NAMES,
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "ffn_norm": "post_attention_layernorm",
        },
        head_norms=("self_attn.q_norm", "self_attn.k_norm"),
        config=_qwen_config,
        convert_weight=_as_it_is,
    ),
    "gemma3": Family(
        title="Gemma 3 text",
        layer_names={
            **_DECODER_NAMES,
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        head_norms=("self_attn.q_norm", "self_attn.k_norm"),
        config=_gemma3_config,
        convert_weight=_gemma3_weight,
    ),
}
