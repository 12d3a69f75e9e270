"""RoPE's frequencies, stretched, against the functions of transformers that compute them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rowcast.worker.layers.rope_scaling import frequencies
from rowcast.worker.layers.rotary import RotaryEmbedding, rotate
from rowcast.worker.model_config import ModelConfig
from rowcast.worker.rope import Rope

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 50 for i in range(32)],
    "long_factor": [1.0 + i for i in range(32)],
}


def config_of(path: Path, rope: dict, **more) -> ModelConfig:
    values = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 256,
        "intermediate_size": 90,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": rope,
        **more,
    }
    (path / "config.json").write_text(json.dumps(values))
    return ModelConfig.from_folder(path)


@pytest.mark.parametrize("max_model_len", [4096, 8192, 40000, 131072, 200000])
@pytest.mark.parametrize(
    ("rope", "more"),
    [
        ({"rope_type": "linear", "factor": 3.0}, {}),
        ({"rope_type": "dynamic", "factor": 2.0}, {}),
        (LLAMA3, {}),
        ({**LLAMA3, "factor": 32.0}, {}),
        (YARN, {}),
        ({**YARN, "attention_factor": 1.5, "beta_fast": 16, "truncate": False}, {}),
        ({**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}, {}),
        ({**YARN, "factor": 0.5}, {}),
        ({"type": "yarn", "factor": 1.5}, {"rope_theta": 90.0}),
        ({**LONGROPE, "original_max_position_embeddings": 8192}, {}),
        (LONGROPE, {"original_max_position_embeddings": 8192}),
        ({**LONGROPE, "type": "su", "rope_type": None}, {"original_max_position_embeddings": 4096}),
        ({**LONGROPE, "factor": 7.0, "original_max_position_embeddings": 4096}, {}),
        ({**LONGROPE, "attention_factor": 1.25, "original_max_position_embeddings": 4096}, {}),
    ],
    ids=str,
)
def test_frequencies_and_factors_are_those_of_transformers(
    tmp_path: Path, rope: dict, more: dict, max_model_len: int
):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = config_of(tmp_path, rope, **more)
    kind = rope.get("rope_type") or rope["type"]
    theirs = SimpleNamespace(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=131072,
        rope_parameters={
            "original_max_position_embeddings": 131072,
            **rope,
            "rope_theta": more.get("rope_theta", 500000.0),
            **{name: value for name, value in more.items() if name.startswith("original")},
        },
        standardize_rope_params=lambda: None,
    )
    init = ROPE_INIT_FUNCTIONS["longrope" if kind == "su" else kind]
    wanted, factor = init(theirs, None, seq_len=max_model_len)
    layer = config.layers[0].rope
    assert layer is not None
    got, got_factor = frequencies(layer, 64, max_model_len=max_model_len)
    assert torch.equal(got, wanted)
    assert got_factor == pytest.approx(factor, rel=1e-12)


def test_a_stretched_model_may_be_used_as_far_as_it_is_stretched(tmp_path: Path):
    """A dynamic or yarn config names the length before; longer prompts were refused as beyond the model."""
    assert config_of(tmp_path, {}).longest_model_len == 131072
    dynamic = config_of(tmp_path, {"type": "dynamic", "factor": 2.0}, max_position_embeddings=2048)
    assert dynamic.longest_model_len == 4096
    yarn = config_of(tmp_path, YARN, max_position_embeddings=32768)
    assert yarn.longest_model_len == 131072
    assert config_of(tmp_path, LLAMA3).longest_model_len == 131072


def test_a_part_of_each_head_turns_and_the_rest_stays():
    rope = Rope(theta=100.0, rotary_fraction=0.5)
    turns, factor = frequencies(rope, 8, max_model_len=16)
    assert torch.equal(turns, torch.tensor([1.0, 0.1]))
    table = RotaryEmbedding(
        turns, factor=factor, max_position=16, dtype=torch.float32, device="cpu"
    )
    x = torch.randn(3, 2, 8)
    out = rotate(x, *table.at(torch.tensor([0, 5, 15])))
    assert torch.equal(out[..., 4:], x[..., 4:])
    assert torch.equal(out[0], x[0])
    angle = torch.tensor(15.0)
    assert out[2, 0, 0].item() == pytest.approx(
        (x[2, 0, 0] * angle.cos() - x[2, 0, 2] * angle.sin()).item(), abs=1e-6
    )
