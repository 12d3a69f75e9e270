"""The architectures that rowcast runs, and what each name means beyond what config.json says.

One row an architecture, read by `model_config.py`, `layer_kinds.py` and `rope.py` alone: the decoder knows switches,
not names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

from .expert_config import ExpertRules


class Windows(Enum):
    """Which layers see a sliding window, where config.json does not name every layer's type."""

    NONE = "no layer"
    ALL = "all, if there is a sliding_window"
    ALTERNATING = "the first, the third and so on"
    PATTERN = "all but each sliding_window_pattern-th"
    UPPER = "from max_window_layers on, if use_sliding_window"
    UNROTATED = "those without RoPE, if use_sliding_window"


class QKNorm(Enum):
    """How queries and keys are normalized before they turn."""

    NONE = "not"
    HEAD = "each head for itself, all by one weight"
    EACH_HEAD = "each head for itself, by its own weight"
    ALL_HEADS = "all heads together"


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What transformers' class of this name does, whatever config.json says.

    defaults: the class's own values, for keys that a config.json may leave out.
    computes: of the keys that others must leave neutral (`model_config.NEUTRAL_VALUES`), those that this one reads.
    activation_key: where config.json names the MLP's activation.
    gelu_means_tanh: an activation of "gelu" is the tanh approximation, as the first folders meant it.
    windows: which layers see a window.
    rope_theta: the RoPE base where config.json names none.
    sliding_rope_theta: that of sliding layers, where they have a RoPE of their own.
    partial_rotary: partial_rotary_factor is heeded.
    qkv_bias: q, k and v have biases, whatever attention_bias says.
    qk_norm: as in `QKNorm`.
    pre_norms: what goes into attention and MLP is normalized.
    post_norms: what attention and MLP give is normalized before it is added.
    layer_norms: norms take the mean off and have a bias; otherwise they are root-mean-square norms.
    offset_norms: norm weights are stored as their difference from 1.
    wide_norms: norms are scaled in float32 and then rounded to the model's dtype, not the other way round.
    scaled_embeddings: embeddings are multiplied by sqrt(hidden_size), rounded to the model's dtype.
    fused_projections: q, k and v are stored as one matrix, and so are gate and up.
    experts: how it says and stores its mixture of experts, if it has one.
    """

    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    computes: frozenset[str] = frozenset()
    activation_key: str = "hidden_act"
    gelu_means_tanh: bool = False
    windows: Windows = Windows.NONE
    rope_theta: float = 10_000.0
    sliding_rope_theta: float | None = None
    partial_rotary: bool = False
    qkv_bias: bool = False
    qk_norm: QKNorm = QKNorm.NONE
    pre_norms: bool = True
    post_norms: bool = False
    layer_norms: bool = False
    offset_norms: bool = False
    wide_norms: bool = False
    scaled_embeddings: bool = False
    fused_projections: bool = False
    experts: ExpertRules | None = None


_BIASES = frozenset({"attention_bias", "mlp_bias"})
_EXPERTS = frozenset({"num_experts", "num_local_experts"})
_GEMMA_2 = {
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_QWEN_2 = {
    "hidden_act": "silu",
    "max_window_layers": 28,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
}

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "LlamaForCausalLM": Architecture(defaults={"hidden_act": "silu"}, computes=_BIASES),
        "SmolLM3ForCausalLM": Architecture(
            defaults={
                "hidden_act": "silu",
                "no_rope_layer_interval": 4,
                "num_key_value_heads": 4,
                "tie_word_embeddings": True,
            },
            computes=_BIASES | {"no_rope_layer_interval", "no_rope_layers", "use_sliding_window"},
            windows=Windows.UNROTATED,
            rope_theta=2_000_000.0,
        ),
        "MistralForCausalLM": Architecture(
            defaults={"hidden_act": "silu", "num_key_value_heads": 8, "sliding_window": 4096},
            windows=Windows.ALL,
        ),
        "Qwen2ForCausalLM": Architecture(
            defaults=_QWEN_2,
            computes=frozenset({"use_sliding_window"}),
            windows=Windows.UPPER,
            qkv_bias=True,
        ),
        "Qwen3ForCausalLM": Architecture(
            defaults={**_QWEN_2, "head_dim": 128},
            computes=frozenset({"attention_bias", "use_sliding_window"}),
            windows=Windows.UPPER,
            qk_norm=QKNorm.HEAD,
        ),
        "GemmaForCausalLM": Architecture(
            defaults={
                "eos_token_id": 1,
                "head_dim": 256,
                "hidden_act": "gelu_pytorch_tanh",
                "num_key_value_heads": 16,
                "tie_word_embeddings": True,
            },
            computes=frozenset({"attention_bias"}),
            gelu_means_tanh=True,
            offset_norms=True,
            wide_norms=True,
            scaled_embeddings=True,
        ),
        "Gemma2ForCausalLM": Architecture(
            defaults={
                **_GEMMA_2,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
            computes=frozenset(
                {"attention_bias", "attn_logit_softcapping", "final_logit_softcapping"}
                | {"query_pre_attn_scalar"}
            ),
            activation_key="hidden_activation",
            windows=Windows.ALTERNATING,
            post_norms=True,
            offset_norms=True,
            wide_norms=True,
            scaled_embeddings=True,
        ),
        "Gemma3ForCausalLM": Architecture(
            defaults={**_GEMMA_2, "sliding_window_pattern": 6},
            computes=frozenset(
                {"attention_bias", "query_pre_attn_scalar", "rope_local_base_freq"}
                | {"sliding_window_pattern"}
            ),
            activation_key="hidden_activation",
            windows=Windows.PATTERN,
            rope_theta=1_000_000.0,
            sliding_rope_theta=10_000.0,
            qk_norm=QKNorm.HEAD,
            post_norms=True,
            offset_norms=True,
            wide_norms=True,
            scaled_embeddings=True,
        ),
        "Phi3ForCausalLM": Architecture(
            defaults={
                "hidden_act": "silu",
                "original_max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
            },
            windows=Windows.ALL,
            partial_rotary=True,
            fused_projections=True,
        ),
        "Olmo2ForCausalLM": Architecture(
            defaults={"hidden_act": "silu", "rms_norm_eps": 1e-5},
            computes=frozenset({"attention_bias"}),
            qk_norm=QKNorm.ALL_HEADS,
            pre_norms=False,
            post_norms=True,
            wide_norms=True,
        ),
        "Olmo3ForCausalLM": Architecture(
            defaults={
                "hidden_act": "silu",
                "rms_norm_eps": 1e-5,
                "sliding_window": 4096,
                "sliding_window_pattern": 4,
            },
            computes=frozenset({"attention_bias"}),
            windows=Windows.PATTERN,
            rope_theta=500_000.0,
            sliding_rope_theta=500_000.0,
            qk_norm=QKNorm.ALL_HEADS,
            pre_norms=False,
            post_norms=True,
            wide_norms=True,
        ),
        "GraniteForCausalLM": Architecture(
            defaults={"attention_multiplier": 1.0, "hidden_act": "silu"},
            computes=_BIASES
            | {"attention_multiplier", "embedding_multiplier", "logits_scaling"}
            | {"residual_multiplier"},
        ),
        "StableLmForCausalLM": Architecture(
            defaults={
                "hidden_act": "silu",
                "num_key_value_heads": 32,
                "partial_rotary_factor": 0.25,
            },
            computes=frozenset({"qk_layernorm", "use_parallel_residual", "use_qkv_bias"}),
            partial_rotary=True,
            layer_norms=True,
        ),
        "MixtralForCausalLM": Architecture(
            defaults={
                "eos_token_id": 2,
                "hidden_act": "silu",
                "num_experts_per_tok": 2,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-5,
            },
            computes=_EXPERTS,
            windows=Windows.ALL,
            rope_theta=1_000_000.0,
            experts=ExpertRules(
                width_key="intermediate_size",
                selective=False,
                block="block_sparse_moe",
                gate="w1",
                up="w3",
                down="w2",
            ),
        ),
        "Qwen3MoeForCausalLM": Architecture(
            defaults={
                "hidden_act": "silu",
                "moe_intermediate_size": 768,
                "num_experts_per_tok": 8,
                "num_key_value_heads": 4,
                "sliding_window": 4096,
            },
            # some folders say use_qk_norm, which the class does not ask: it always does
            computes=_EXPERTS | {"attention_bias", "use_qk_norm", "use_sliding_window"},
            windows=Windows.ALL,
            qk_norm=QKNorm.HEAD,
            experts=ExpertRules(
                width_key="moe_intermediate_size",
                selective=True,
                block="mlp",
                gate="gate_proj",
                up="up_proj",
                down="down_proj",
            ),
        ),
    }
)
