"""Tiny random Gemma 3 models whose tokens depend on every layer."""

from __future__ import annotations

from pathlib import Path


def make_gemma(folder: Path, *, seed: int = 0, **sizes) -> Path:
    """Save a random Gemma 3 (text); sizes are Gemma3TextConfig's.

    Its embeddings are small: scaled and tied to the head, larger ones outweigh the layers, and each token repeats the
    one before it whatever attention saw. Its attention scale is not head_dim ** -0.5.
    """
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(seed)
    config = Gemma3TextConfig(
        **{
            "vocab_size": 199,
            "hidden_size": 64,
            "intermediate_size": 90,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "max_position_embeddings": 256,
            "sliding_window": 8,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 20,
            "initializer_range": 0.2,
            **sizes,
        }
    )
    model = Gemma3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # they start at 0, where a mistake would not show
                parameter.uniform_(-0.5, 0.5)
        model.model.embed_tokens.weight.normal_(0.0, 0.02)
    model.save_pretrained(folder)
    return folder
