"""Tiny random models of every architecture, saved as folders, whose tokens depend on what makes each one special."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

VOCAB_SIZE = 197  # a prime: no number of ranks divides it


def heads(num_kv_heads: int, group: int, head_dim: int, **more: Any) -> dict[str, Any]:
    """Sizes of an attention with so many KV heads and `group` query heads to each."""
    num_heads = num_kv_heads * group
    return {
        "num_key_value_heads": num_kv_heads,
        "num_attention_heads": num_heads,
        "head_dim": head_dim,
        "hidden_size": num_heads * 8,
        **more,
    }


def make_model(
    folder: Path,
    architecture: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    num_files: int = 1,
    **sizes: Any,
) -> Path:
    """Save a random model, in so many files.

    architecture is the first part of transformers' class names, sizes are its config's. Logits lie far enough apart
    that rounding decides nothing. Norms and biases are random too: where they start, at 1 and 0, a mistake would not
    show. A tied embedding is small: a larger one outweighs the layers, and each token repeats the one before it
    whatever attention saw.
    """
    import torch
    import transformers

    torch.manual_seed(seed)
    config_name = "Gemma3TextConfig" if architecture == "Gemma3" else f"{architecture}Config"
    config = getattr(transformers, config_name)(
        **{
            "vocab_size": VOCAB_SIZE,
            "intermediate_size": 97,
            "num_hidden_layers": 3,
            "max_position_embeddings": 256,
            "initializer_range": 0.2,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            **sizes,
        }
    )
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    centre = 0.0 if architecture.startswith("Gemma") else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            elif "norm" in name:
                parameter.uniform_(centre - 0.5, centre + 0.5)
        if config.tie_word_embeddings:
            model.model.embed_tokens.weight.normal_(0.0, 0.02)
    model.to(getattr(torch, dtype))
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    # Tensors are not cut, so a file is seldom full: tried, from files of almost twice a share down.
    for parts in range(5 * num_files, 96 * num_files, num_files):
        model.save_pretrained(folder, max_shard_size=8 * num_bytes // parts + 1)
        if len(list(folder.glob("*.safetensors"))) == num_files:
            return folder
        shutil.rmtree(folder)
    raise AssertionError(f"no size of a file gives {num_files} files")


def with_config(folder: Path, to: Path, changes: dict[str, Any]) -> Path:
    """The same weights under a config.json with other values."""
    to.mkdir()
    for path in folder.iterdir():
        if path.name != "config.json":
            (to / path.name).symlink_to(path)
    values = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**values, **changes}))
    return to
