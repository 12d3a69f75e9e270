"""Mixtures of experts, the whole path of the worker: rowcast's greedy tokens against transformers' own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rowcast.tests.worker.generation import (
    generate,
    greedy,
    make_runner,
    random_prompts,
    transformers_tokens,
)
from rowcast.tests.worker.rank_pool import RankPool, generate_on_rank
from rowcast.tests.worker.test_weights import load
from rowcast.tests.worker.tiny_models import VOCAB_SIZE, heads, make_model, with_config
from rowcast.worker.models.weights import Checkpoint
from safetensors import safe_open

MAX_TOKENS = 24


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """without: what config.json may say instead; then what the case is about is off, and its tokens are others."""

    architecture: str
    sizes: dict[str, Any]
    without: dict[str, Any] = field(default_factory=dict)


def mixtral(**sizes: Any) -> dict[str, Any]:
    """No number of experts, columns or hidden items that 2 or 3 ranks would divide."""
    own = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 35}
    return heads(3, 2, 48, hidden_size=55, **{**own, **sizes})


def qwen3_moe(**sizes: Any) -> dict[str, Any]:
    own = {"num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 23}
    return heads(3, 2, 48, hidden_size=55, **{**own, **sizes})


MIXTURES = {
    "mixtral": Mixture(architecture="Mixtral", sizes=mixtral(), without={"num_experts_per_tok": 1}),
    "mixtral-8-experts-window": Mixture(
        architecture="Mixtral",
        sizes=mixtral(num_local_experts=8, num_hidden_layers=2, sliding_window=9),
        without={"sliding_window": None},
    ),
    "qwen3-moe": Mixture(
        architecture="Qwen3Moe", sizes=qwen3_moe(), without={"norm_topk_prob": True}
    ),
    "qwen3-moe-weights-add-to-one": Mixture(
        architecture="Qwen3Moe",
        sizes=qwen3_moe(norm_topk_prob=True, num_experts=4, num_experts_per_tok=3),
        without={"norm_topk_prob": False},
    ),
    # Layers 0 and 2 have an MLP of another width, 1 and 3 experts; then only 3 has.
    "qwen3-moe-each-second-layer": Mixture(
        architecture="Qwen3Moe",
        sizes=qwen3_moe(decoder_sparse_step=2, num_hidden_layers=4, attention_bias=True),
    ),
    "qwen3-moe-one-layer": Mixture(
        architecture="Qwen3Moe",
        sizes=qwen3_moe(decoder_sparse_step=2, num_hidden_layers=4, mlp_only_layers=[1]),
    ),
    "qwen3-moe-window": Mixture(
        architecture="Qwen3Moe",
        sizes=qwen3_moe(use_sliding_window=True, sliding_window=6, num_hidden_layers=2),
        without={"use_sliding_window": False, "sliding_window": 6},
    ),
}


def make_mixture(folder: Path, name: str) -> Path:
    return make_model(folder, MIXTURES[name].architecture, seed=len(name), **MIXTURES[name].sizes)


def expected_tokens(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' default for experts wants rows of whole 16 bytes; its plain loop takes any."""
    return transformers_tokens(folder, prompts, MAX_TOKENS, experts_implementation="eager")


@pytest.mark.parametrize("name", MIXTURES)
def test_greedy_tokens_equal_those_of_transformers_on_any_number_of_ranks(
    name: str, tmp_path: Path, rank_pool: RankPool
):
    folder = make_mixture(tmp_path / "model", name)
    prompts = [list(range(40)), *random_prompts(7, vocab_size=VOCAB_SIZE, seed=len(name))]
    expected = expected_tokens(folder, prompts)
    assert sum(len(set(tokens)) > 2 for tokens in expected) >= 5  # not one token over and over
    options = {"max_num_batched_tokens": 64, "block_size": 8}
    case = (options, prompts, greedy(MAX_TOKENS))
    assert generate(make_runner(folder, **options), prompts, case[2]) == expected
    if without := MIXTURES[name].without:
        other = with_config(folder, tmp_path / "without", without)
        assert generate(make_runner(other, **options), prompts, case[2]) != expected
    for world_size in (2, 3, 4):  # 4: one more than there are KV heads
        for rank, tokens in enumerate(
            rank_pool.run(world_size, generate_on_rank, str(folder), [case])
        ):
            assert tokens == [expected], f"rank {rank} of {world_size}"


def fuse_experts(folder: Path, to: Path) -> Path:
    """The same checkpoint with a layer's experts in one tensor: what transformers computes with, and may save."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(to, save_original_format=False)
    return to


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_experts_fused_in_one_tensor_a_layer_load_as_those_apart(name: str, tmp_path: Path):
    """transformers computes with the one and saves the other: a folder may hold either."""
    apart = make_mixture(tmp_path / "apart", name)
    fused = fuse_experts(apart, tmp_path / "fused")
    prompts = random_prompts(4, vocab_size=VOCAB_SIZE)
    tokens = []
    for folder in (apart, fused):
        with Checkpoint(folder) as checkpoint:
            assert ("model.layers.0.mlp.experts.gate_up_proj" in checkpoint) == (folder == fused)
        tokens.append(generate(make_runner(folder), prompts, greedy(8)))
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("fused", [False, True])
def test_ranks_read_their_columns_of_every_expert_and_no_more(fused: bool, tmp_path: Path):
    """3 KV heads on 3 ranks: norms and routers alone are read by more than one."""
    folder = make_mixture(tmp_path / "apart", "qwen3-moe-each-second-layer")
    if fused:
        folder = fuse_experts(folder, tmp_path / "fused")
    with safe_open(folder / "model.safetensors", "pt") as file:
        size_of = {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118
    everywhere = ("norm.weight", "layernorm.weight", "mlp.gate.weight", "o_proj.bias")
    replicated = sum(size for name, size in size_of.items() if name.endswith(everywhere))
    assert sum(name.endswith("mlp.gate.weight") for name in size_of) == 2
    assert load(folder) == sum(size_of.values())
    read = [load(folder, rank, 3) for rank in range(3)]
    assert sum(read) == sum(size_of.values()) + 2 * replicated
    assert max(read) < 1.1 * min(read)


def test_interpreted_triton_kernels_give_the_tokens_of_the_cpu_s_and_16_bits_pass_through(
    tmp_path: Path,
):
    """What a GPU computes in: shares that are taken in float32 must hand 16 bits on."""
    folder = make_mixture(tmp_path, "qwen3-moe-window")
    prompts = [[5, 17, 100, 3, 44, 9, 12, 7, 31, 2, 196], [1]]
    options = {"max_num_batched_tokens": 8, "block_size": 4, "max_model_len": 32}
    expected = generate(make_runner(folder, **options), prompts, greedy(2))
    triton = {**options, "kernel_backend": "triton"}
    assert generate(make_runner(folder, **triton), prompts, greedy(2)) == expected
    narrow = make_runner(folder, dtype="bfloat16", **triton)
    first = [tokens[0] for tokens in generate(narrow, prompts, greedy(1))]
    assert first == [tokens[0] for tokens in expected]
