"""No key of a config class of transformers is passed over in silence: changed, it changes the model or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rowcast.worker.architectures import ARCHITECTURES
from rowcast.worker.model_config import ModelConfig

# What no token depends on: training, files, identity, what only generate() reads.
HARMLESS = {
    "_name_or_path",
    "architectures",  # refused by a test of its own
    "attention_dropout",
    "bos_token_id",
    "chunk_size_feed_forward",
    "embd_pdrop",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "resid_pdrop",
    "return_dict",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "transformers_version",
    "use_cache",
}
# Keys that mean nothing beside the other values of `class_values`.
HARMLESS_OF = {
    "Gemma3ForCausalLM": {"_sliding_window_pattern"},  # layer_types are there
    "Phi3ForCausalLM": {"original_max_position_embeddings"},  # RoPE is the default one
    "Qwen2ForCausalLM": {"max_window_layers"},  # layer_types are there
    "Qwen3ForCausalLM": {"max_window_layers"},
    "Qwen3MoeForCausalLM": {"max_window_layers"},  # heeded by nobody
    "SmolLM3ForCausalLM": {"no_rope_layer_interval"},  # no_rope_layers are there
}
# Where use_sliding_window decides, it is on.
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
MORE = {
    "Qwen2ForCausalLM": WINDOWS,
    "Qwen3ForCausalLM": WINDOWS,
    "Qwen3MoeForCausalLM": WINDOWS,
    "SmolLM3ForCausalLM": {"use_sliding_window": True, "sliding_window": 8},
}


def class_values(name: str) -> dict[str, Any]:
    """What a small config of an architecture's class says, every key of it."""
    import transformers

    first = name.removesuffix("ForCausalLM")
    config_name = "Gemma3TextConfig" if first == "Gemma3" else f"{first}Config"
    config = getattr(transformers, config_name)(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=90,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=None,
        **MORE.get(name, {}),
    )
    return {**config.to_dict(), "architectures": [name]}


def other_values(value: Any) -> list[Any]:
    match value:
        case bool():
            return [not value]
        case int() | float():
            return [value * 2 if value else 1]
        case str():
            return ["strange"]
        case list() if value:
            return [value[1:]]
        case dict():
            return [{**value, "strange": 1}]
        case _:
            return [3, "strange", True]


def read(path: Path, values: dict[str, Any]) -> ModelConfig:
    (path / "config.json").write_text(json.dumps(values))
    return ModelConfig.from_folder(path)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_key_counts_or_is_refused(name: str, tmp_path: Path):
    values = class_values(name)
    before = read(tmp_path, values)
    passed_over = []
    for key in sorted(values.keys() - HARMLESS - HARMLESS_OF.get(name, set())):
        for other in other_values(values[key]):
            try:
                same = read(tmp_path, {**values, key: other}) == before
            except ValueError:
                same = False
            if same:
                passed_over.append((key, values[key], other))
    assert passed_over == []
