"""The architectures that rowcast runs, and what each name means beyond what config.json says.

One row an architecture, read by `model_config.py` alone: the decoder knows switches, not names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What transformers' class of this name does, whatever config.json says.

    defaults: the class's own values, for keys that a config.json may leave out.
    activation_key: where config.json names the MLP's activation.
    thetas: layer_types that may stand in config.json -> the RoPE base of such layers where it names none.
    head_norms: q and k are normalized per head before they turn.
    sandwich_norms: what attention and MLP give is normalized once more before it is added.
    offset_norms: norm weights are stored as their difference from 1.
    scaled_embeddings: embeddings are multiplied by sqrt(hidden_size).
    """

    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    activation_key: str = "hidden_act"
    thetas: Mapping[str, float] = field(
        default_factory=lambda: MappingProxyType({"full_attention": 10_000.0})
    )
    head_norms: bool = False
    sandwich_norms: bool = False
    offset_norms: bool = False
    scaled_embeddings: bool = False


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "LlamaForCausalLM": Architecture(defaults={"hidden_act": "silu"}),
        "Gemma3ForCausalLM": Architecture(
            defaults={
                "eos_token_id": 1,
                "head_dim": 256,
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": 256,
                "sliding_window": 4096,
                "sliding_window_pattern": 6,
                "tie_word_embeddings": True,
            },
            activation_key="hidden_activation",
            thetas={"full_attention": 1_000_000.0, "sliding_attention": 10_000.0},
            head_norms=True,
            sandwich_norms=True,
            offset_norms=True,
            scaled_embeddings=True,
        ),
    }
)
