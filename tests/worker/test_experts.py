"""A layer of experts alone: its choice, its sums, and each sentence for a config.json that cannot be."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rowcast.tests.worker.test_model_config import LLAMA, folder_with
from rowcast.worker.architectures import QKNorm
from rowcast.worker.backend import select_backend
from rowcast.worker.layer_kinds import LayerKind
from rowcast.worker.layers.experts import Experts
from rowcast.worker.layers.linear import Linear
from rowcast.worker.model_config import ModelConfig
from rowcast.worker.parallel import TensorParallelGroup
from rowcast.worker.rope import Rope
from torch.nn import functional

HIDDEN, WIDTH, NUM_EXPERTS = 20, 12, 6


def weights(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """router, gate_up, down."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((NUM_EXPERTS, HIDDEN), (NUM_EXPERTS, 2 * WIDTH, HIDDEN), (NUM_EXPERTS, HIDDEN, WIDTH))
    router, gate_up, down = (torch.randn(*s, generator=generator).div(4).to(dtype) for s in shapes)
    return router, gate_up, down


def experts_of(
    router: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, *, normalize: bool
) -> Experts:
    return Experts(
        activation="silu",
        experts_per_token=3,
        normalize=normalize,
        router=Linear(router),
        gate_up=gate_up,
        down=down,
        parallel=TensorParallelGroup.alone(),
    )


def step_of(backend: str) -> SimpleNamespace:
    return SimpleNamespace(backend=select_backend(backend, "cpu"))


def by_hand(x: torch.Tensor, *, normalize: bool) -> torch.Tensor:
    """A token and an expert at a time, in float64."""
    router, gate_up, down = (weight.double() for weight in weights(torch.float32))
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, vector in enumerate(x.double()):
        shares = torch.softmax(router @ vector, dim=0)
        chosen = sorted(range(NUM_EXPERTS), key=lambda expert: -shares[expert])[:3]
        total = sum(shares[expert] for expert in chosen) if normalize else 1.0
        for expert in chosen:
            gate, up = (gate_up[expert] @ vector).chunk(2)
            out[token] += shares[expert] / total * (down[expert] @ (functional.silu(gate) * up))
    return out


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 2, 50])
def test_a_token_gets_the_weighted_sum_of_its_experts(
    kernel_backend: str, num_tokens: int, normalize: bool
):
    x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
    before = x.clone()
    layer = experts_of(*weights(torch.float32), normalize=normalize)
    out = layer(x, step_of(kernel_backend))
    assert (out - by_hand(x, normalize=normalize)).abs().max() < 1e-5
    assert torch.equal(
        x, before
    )  # the residual's norm is read once more where layers run in parallel


@pytest.mark.parametrize("normalize", [True, False])
def test_experts_whom_no_token_takes_are_not_read(kernel_backend: str, normalize: bool):
    router, gate_up, down = weights(torch.float32)
    x = (
        torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(1))
        .expand(9, -1)
        .contiguous()
    )
    left = (router @ x[0]).argsort()[:3]
    gate_up[left], down[left] = float("nan"), float("nan")
    out = experts_of(router, gate_up, down, normalize=normalize)(x, step_of(kernel_backend))
    assert (out - by_hand(x, normalize=normalize)).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_err_no_more_than_transformers_own_layer(dtype: torch.dtype):
    """Shares are taken in float32 and rounded before they weigh; the interpreter cuts bfloat16 where GPUs round it."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=3,
        norm_topk_prob=True,
    )
    config._experts_implementation = "eager"
    theirs = Qwen3MoeSparseMoeBlock(config).to(dtype)
    router, gate_up, down = weights(dtype)
    theirs.gate.weight.data = router
    theirs.experts.gate_up_proj.data = gate_up
    theirs.experts.down_proj.data = down
    x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)
    with torch.no_grad():
        expected = theirs(x.unsqueeze(0))[0].float()
        exact = theirs.float()(x.float().unsqueeze(0))[0]
    ours = experts_of(router, gate_up, down, normalize=True)(x, step_of("triton")).float()
    assert (ours - exact).abs().max() <= 3 * (expected - exact).abs().max()


MIXTRAL = {
    **LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
QWEN = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


def test_what_the_folders_say_of_their_experts(tmp_path: Path):
    mixtral = ModelConfig.from_folder(folder_with(tmp_path, MIXTRAL)).experts
    assert mixtral is not None
    assert (mixtral.num_experts, mixtral.experts_per_token, mixtral.width) == (4, 2, 90)
    assert (mixtral.normalize, mixtral.layers) == (True, (True, True))
    qwen = ModelConfig.from_folder(folder_with(tmp_path, QWEN)).experts
    assert qwen is not None
    assert (qwen.num_experts, qwen.width, qwen.normalize) == (4, 24, False)
    newer = {"num_experts": "absent", "num_local_experts": 4, "norm_topk_prob": True}
    qwen = ModelConfig.from_folder(folder_with(tmp_path, QWEN, **newer)).experts
    assert qwen is not None
    assert (qwen.num_experts, qwen.normalize) == (4, True)
    assert ModelConfig.from_folder(folder_with(tmp_path)).experts is None


def test_published_folders_are_read(tmp_path: Path):
    """What Mixtral 8x7B's and Qwen3-Coder 30B-A3B's config.json say beside sizes."""
    mixtral = {
        "attention_dropout": 0.0,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rope_theta": 1e6,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
    }
    config = ModelConfig.from_folder(folder_with(tmp_path, MIXTRAL, **mixtral))
    assert config.layers == (LayerKind(rope=Rope(theta=1e6)),) * 2
    qwen = {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "max_window_layers": 28,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "qkv_bias": False,
        "rope_scaling": None,
        "rope_theta": 1e7,
        "shared_expert_intermediate_size": 0,
        "sliding_window": None,
        "use_qk_norm": True,
        "use_sliding_window": False,
    }
    config = ModelConfig.from_folder(folder_with(tmp_path, QWEN, **qwen))
    assert config.layers == (LayerKind(rope=Rope(theta=1e7)),) * 2
    assert (config.head_dim, config.qk_norm) == (128, QKNorm.HEAD)


@pytest.mark.parametrize(
    ("said", "layers"),
    [
        ({}, (1, 1, 1, 1, 1)),
        ({"decoder_sparse_step": 2}, (0, 1, 0, 1, 0)),
        ({"mlp_only_layers": [0, 4]}, (0, 1, 1, 1, 0)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (0, 0, 0, 1, 0)),
        ({"decoder_sparse_step": 9}, (0, 0, 0, 0, 0)),
    ],
)
def test_which_layers_have_experts(tmp_path: Path, said, layers):
    config = ModelConfig.from_folder(folder_with(tmp_path, QWEN, num_hidden_layers=5, **said))
    assert config.experts is not None
    assert config.experts.layers == tuple(map(bool, layers))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_experts": 0}, "num_experts must be an integer, at least 1, got 0"),
        ({"num_experts": "absent"}, "num_local_experts must be an integer, at least 1, got nothing"),
        ({"num_local_experts": 5}, "num_local_experts and num_experts must be the same, got 5 and 4"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok must be at most the 4 experts, got 5"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size must be an integer, at least 1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer, at least 1, got 0"),
        ({"mlp_only_layers": 1}, "mlp_only_layers must be a list of layer numbers, got 1"),
        ({"mlp_only_layers": ["0"]}, 'mlp_only_layers must be a list of layer numbers, got ["0"]'),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
    ],
)  # fmt: skip
def test_experts_that_cannot_be_are_refused_by_name(tmp_path: Path, changes, told):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared below
        ModelConfig.from_folder(folder_with(tmp_path, QWEN, **changes))
    assert told in str(caught.value)
    assert "config.json" in str(caught.value)
