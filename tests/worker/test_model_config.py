"""What a model folder says, and each sentence for what rowcast cannot run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rowcast.worker.model_config import ModelConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 90,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 2,
}


def folder_with(path: Path, generation: dict | None = None, **changes) -> Path:
    values = {key: value for key, value in {**LLAMA, **changes}.items() if value != "absent"}
    (path / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_sizes_and_defaults_come_from_config_json(tmp_path: Path):
    config = ModelConfig.from_folder(folder_with(tmp_path))
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 6, 3)
    assert config.head_dim == 48 // 6
    assert config.rope_theta == 10000.0
    assert not config.tie_word_embeddings
    assert not config.attention_bias
    assert config.torch_dtype == "float32"
    absent = folder_with(
        tmp_path, num_key_value_heads="absent", head_dim=10, torch_dtype="bfloat16"
    )
    config = ModelConfig.from_folder(absent)
    assert (config.num_kv_heads, config.head_dim, config.torch_dtype) == (6, 10, "bfloat16")


@pytest.mark.parametrize(
    "said",
    [
        {"rope_theta": 500.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_theta": 500.0, "rope_scaling": {"type": "default"}},
        {"rope_theta": 500.0, "rope_scaling": None},
    ],
    ids=str,
)
def test_the_rope_base_is_found_where_old_and_new_configs_put_it(tmp_path: Path, said):
    assert ModelConfig.from_folder(folder_with(tmp_path, **said)).rope_theta == 500.0


def test_eos_ids_are_those_of_both_files(tmp_path: Path):
    """A chat model's end of turn is often in generation_config.json alone, and the text ran on past it."""
    folder = folder_with(tmp_path, generation={"eos_token_id": [7, 2]}, eos_token_id=2)
    assert ModelConfig.from_folder(folder).eos_token_ids == (7, 2)
    folder = folder_with(tmp_path, generation={}, eos_token_id=[5, 6])
    assert ModelConfig.from_folder(folder).eos_token_ids == (5, 6)
    folder = folder_with(tmp_path, generation={}, eos_token_id=None)
    assert ModelConfig.from_folder(folder).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "architecture Qwen3MoeForCausalLM is not"),
        ({"architectures": "absent"}, "architecture nothing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 'RoPE type "llama3"'),
        ({"rope_parameters": {"rope_type": "yarn"}}, 'rope_parameters asks for RoPE type "yarn"'),
        ({"rope_scaling": {"factor": 8.0}}, "rope_scaling has factor and no rope_type"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}},
            "rope_parameters has full_attention and no rope_type",
        ),
        ({"compression_config": {"format": "int4"}}, "compression_config = "),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor = 0.25"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, 'layer_types has "sliding_att'),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu"'),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config = "),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"logits_scaling": 8.0}, "logits_scaling = 8.0"),
        ({"num_key_value_heads": 4}, "num_attention_heads 6 must be a multiple"),
        ({"hidden_size": 49}, "head_dim is missing"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"vocab_size": 0}, "vocab_size must be an integer, at least 1, got 0"),
        ({"vocab_size": "absent"}, "vocab_size must be an integer, at least 1, got nothing"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer, at least 1, got true"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number above 0"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype must be one of float32, bfloat16, float16"),
        ({"eos_token_id": 100}, "eos_token_id must name ids in [0, 100), got 100"),
        ({"eos_token_id": [1, -1]}, "eos_token_id must name ids in [0, 100), got -1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_be_ignored_is_refused_by_name(tmp_path: Path, changes, named):
    """A feature of config.json that is silently left out gives plausible wrong text."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared below
        ModelConfig.from_folder(folder_with(tmp_path, **changes))
    assert named in str(caught.value)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [(None, "cannot read"), ("{", "is not JSON"), ("[1]", "must hold a JSON object, got list")],
)
def test_a_missing_or_garbled_config_gets_a_sentence(tmp_path: Path, text, named):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=named):
        ModelConfig.from_folder(tmp_path)
