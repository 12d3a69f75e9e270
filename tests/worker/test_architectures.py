"""Every architecture, the whole path of the worker: rowcast's greedy tokens against transformers' own.

Prompts are longer than any window. Beside one rank each model runs on two, three, and one more than it has KV heads,
where there are so many query heads. README.md's table of models is filled from MODELS.
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import rowcast
from rowcast.tests.worker.generation import (
    generate,
    greedy,
    make_runner,
    random_prompts,
    transformers_tokens,
)
from rowcast.tests.worker.rank_pool import RankPool, generate_on_rank
from rowcast.tests.worker.tiny_models import VOCAB_SIZE, heads, make_model, with_config
from rowcast.worker.architectures import ARCHITECTURES

MAX_TOKENS = 24
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class Model:
    """without: what config.json may say instead; then what the case is about is off, and its tokens are others."""

    architecture: str
    sizes: dict[str, Any]
    without: dict[str, Any] = field(default_factory=dict)
    max_model_len: int = 128


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 1000.0, **more}


PLAIN = {"rope_parameters": rope("default")}
LONGROPE = rope(
    "longrope",
    short_factor=[1.0 + i / 8 for i in range(12)],
    long_factor=[1.5 + i / 2 for i in range(12)],
    partial_rotary_factor=0.5,
)
# Layers are few and texts short: every kind of scaling is set so that it reaches the fast turns too.
MODELS = {
    "llama-linear": Model(
        architecture="Llama",
        sizes=heads(3, 1, 48, rope_parameters=rope("linear", factor=4.0)),
        without=PLAIN,
    ),
    "llama-llama3": Model(
        architecture="Llama",
        sizes=heads(
            3,
            2,
            48,
            rope_parameters=rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            ),
        ),
        without=PLAIN,
    ),
    "llama-yarn": Model(
        architecture="Llama",
        sizes=heads(
            1,
            4,
            80,
            rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=64),
            attention_bias=True,
            mlp_bias=True,
        ),
        without=PLAIN,
    ),
    "llama-dynamic": Model(
        architecture="Llama",
        sizes=heads(2, 3, 96, rope_parameters=rope("dynamic", factor=4.0)),
    ),
    "smollm3": Model(
        architecture="SmolLM3",
        sizes=heads(5, 2, 48, num_hidden_layers=4, no_rope_layer_interval=2),
        without={"no_rope_layers": [1, 1, 1, 1]},
    ),
    "smollm3-windows": Model(
        architecture="SmolLM3",
        sizes=heads(3, 1, 80, no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=7),
        without={"use_sliding_window": False, "layer_types": None},
    ),
    "mistral": Model(
        architecture="Mistral",
        sizes=heads(3, 4, 128, sliding_window=11),
        without={"sliding_window": None},
    ),
    "qwen2": Model(
        architecture="Qwen2",
        sizes=heads(7, 1, 48, sliding_window=5),
        without={
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 0,
            "layer_types": None,
        },
    ),
    "qwen2.5-windows": Model(
        architecture="Qwen2",
        sizes=heads(
            2,
            5,
            96,
            use_sliding_window=True,
            sliding_window=9,
            max_window_layers=1,
            tie_word_embeddings=True,
        ),
        without={"max_window_layers": 2, "layer_types": None},
    ),
    "qwen3": Model(
        architecture="Qwen3",
        sizes=heads(5, 1, 128, attention_bias=True),
        without={"rms_norm_eps": 5.0},
    ),
    "qwen3-windows": Model(
        architecture="Qwen3",
        sizes=heads(1, 8, 48, use_sliding_window=True, sliding_window=6, max_window_layers=2),
        without={"use_sliding_window": False, "layer_types": None},
    ),
    "gemma": Model(
        architecture="Gemma",
        sizes=heads(1, 5, 96),
        without={"hidden_act": "silu"},
    ),
    "gemma2": Model(
        architecture="Gemma2",
        sizes=heads(
            3,
            2,
            256,
            num_hidden_layers=4,
            sliding_window=9,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
        without={"attn_logit_softcapping": None},
    ),
    "gemma3-linear": Model(
        architecture="Gemma3",
        sizes=heads(
            1,
            6,
            48,
            sliding_window=8,
            sliding_window_pattern=2,
            query_pre_attn_scalar=20,
            rope_parameters={FULL: rope("linear", factor=8.0), SLIDING: rope("default")},
        ),
        without={"rope_parameters": {FULL: rope("default"), SLIDING: rope("default")}},
    ),
    "phi3-short": Model(
        architecture="Phi3",
        sizes=heads(
            3,
            2,
            48,
            hidden_size=288,
            original_max_position_embeddings=128,
            rope_parameters=LONGROPE,
        ),
        without={"rope_parameters": {**LONGROPE, "short_factor": [1.0] * 12}},
    ),
    "phi3-long-and-a-window": Model(
        architecture="Phi3",
        sizes=heads(
            1,
            7,
            48,
            hidden_size=336,
            original_max_position_embeddings=24,
            sliding_window=13,
            rope_parameters=LONGROPE,
        ),
        without={
            "original_max_position_embeddings": 128,
            "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 128},
        },
    ),
    "olmo2": Model(
        architecture="Olmo2",
        sizes=heads(3, 2, 80, attention_bias=True),
        without={"rms_norm_eps": 5.0},
    ),
    "olmo2-shared-kv": Model(architecture="Olmo2", sizes=heads(2, 4, 48)),
    "olmo3": Model(
        architecture="Olmo3",
        sizes=heads(
            3,
            1,
            48,
            num_hidden_layers=4,
            sliding_window=9,
            rope_parameters={
                FULL: rope("yarn", factor=4.0, original_max_position_embeddings=64),
                SLIDING: rope("default"),
            },
        ),
        without={"layer_types": [FULL] * 4},
    ),
    "granite": Model(
        architecture="Granite",
        sizes=heads(
            3,
            3,
            48,
            embedding_multiplier=3.0,
            attention_multiplier=0.3,
            residual_multiplier=0.4,
            logits_scaling=5.0,
            mlp_bias=True,
        ),
        without={"residual_multiplier": 1.0},
    ),
    "stablelm": Model(
        architecture="StableLm",
        sizes=heads(3, 1, 48, hidden_size=144, use_qkv_bias=True, partial_rotary_factor=0.25),
        without={"rope_parameters": rope("default", partial_rotary_factor=1.0)},
    ),
    "stablelm-parallel-qk-norm": Model(
        architecture="StableLm",
        sizes=heads(2, 3, 80, hidden_size=480, use_parallel_residual=True, qk_layernorm=True),
    ),
}


def prompts_of(seed: int) -> list[list[int]]:
    """Eight, the first of 40 tokens and the second of one."""
    single = random_prompts(41, vocab_size=VOCAB_SIZE, seed=seed, longest=1)
    others = random_prompts(6, vocab_size=VOCAB_SIZE, seed=seed, longest=40)
    return [[token for (token,) in single[1:]], single[0], *others]


def world_sizes(model: Model) -> list[int]:
    """One, two, three, and one more than the KV heads, as far as there are query heads for them."""
    num_heads, num_kv_heads = (
        model.sizes[key] for key in ("num_attention_heads", "num_key_value_heads")
    )
    return sorted(size for size in {1, 2, 3, num_kv_heads + 1} if size <= num_heads)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_those_of_transformers_on_any_number_of_ranks(
    name: str, tmp_path: Path, rank_pool: RankPool
):
    model, seed = MODELS[name], len(name)
    folder = make_model(tmp_path / "model", model.architecture, seed=seed, **model.sizes)
    prompts = prompts_of(seed)
    expected = transformers_tokens(folder, prompts, MAX_TOKENS)
    assert sum(len(set(tokens)) > 2 for tokens in expected) >= 5  # not one token over and over
    options = {
        "max_num_batched_tokens": 64,
        "block_size": 8,
        "max_model_len": model.max_model_len,
    }
    case = (options, prompts, greedy(MAX_TOKENS))
    assert generate(make_runner(folder, **options), prompts, case[2]) == expected
    if model.without:
        other = with_config(folder, tmp_path / "without", model.without)
        assert generate(make_runner(other, **options), prompts, case[2]) != expected
    for world_size in world_sizes(model)[1:]:
        for rank, tokens in enumerate(
            rank_pool.run(world_size, generate_on_rank, str(folder), [case])
        ):
            assert tokens == [expected], f"rank {rank} of {world_size}"


SPECIAL = ["gemma2", "olmo2", "phi3-short", "granite", "stablelm-parallel-qk-norm"]


@pytest.mark.parametrize("name", SPECIAL)
def test_interpreted_triton_kernels_give_the_tokens_of_the_cpu_twins_and_16_bits_pass_through(
    name: str, tmp_path: Path
):
    """What a GPU computes in: whatever is done in float32 beside 16-bit weights must hand 16 bits on."""
    model = MODELS[name]
    folder = make_model(tmp_path, model.architecture, **{**model.sizes, "num_hidden_layers": 2})
    prompts = [[5, 17, 100, 3, 44, 9, 12, 7, 31, 2, 196], [1]]
    options = {"max_num_batched_tokens": 8, "block_size": 4, "max_model_len": 32}
    expected = generate(make_runner(folder, **options), prompts, greedy(2))
    triton = {**options, "kernel_backend": "triton"}
    assert generate(make_runner(folder, **triton), prompts, greedy(2)) == expected
    narrow = make_runner(folder, dtype="bfloat16", **triton)
    first = [tokens[0] for tokens in generate(narrow, prompts, greedy(1))]
    assert first == [tokens[0] for tokens in expected]


def test_every_architecture_is_tried_and_the_readme_says_on_what():
    """What is not tried here has a mixture of experts, and a test of its own."""
    tried: dict[str, set[int]] = {}
    for model in MODELS.values():
        name = f"{model.architecture}ForCausalLM"
        tried[name] = tried.get(name, set()) | set(world_sizes(model))
    readme = (Path(rowcast.__file__).parent / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| ([\d, ]+) \|$", readme, re.MULTILINE)
    ranks = {name: ranks for name, _, ranks in rows}
    for name, sizes in tried.items():
        assert ranks[name] == ", ".join(map(str, sorted(sizes)))
    mixtures = {name for name, said, _ in rows if "experts" in said}
    assert set(ARCHITECTURES) - set(tried) <= mixtures
    version = ".".join(importlib.metadata.version("transformers").split(".")[:2])
    assert f"transformers {version} in float32" in readme
