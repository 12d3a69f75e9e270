"""The layers' order of rounding, bit for bit that of transformers' own modules, in 16 bits where it shows."""

from __future__ import annotations

import pytest
import torch
from rowcast.worker.layers.embedding import VocabEmbedding
from rowcast.worker.layers.mlp import GatedMLP
from rowcast.worker.layers.norm import RMSNorm
from rowcast.worker.parallel import TensorParallelGroup
from torch.nn import functional

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_llamas_norm_rounds_before_it_scales(dtype: torch.dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    theirs = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    theirs.weight.data = torch.rand(48).to(dtype) + 0.5
    x = torch.randn(200, 48).to(dtype)
    assert torch.equal(RMSNorm(theirs.weight.data, 1e-5)(x), theirs(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemmas_norm_scales_before_it_rounds(dtype: torch.dtype):
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    theirs = Gemma3RMSNorm(48, eps=1e-6).to(dtype)
    theirs.weight.data = (torch.rand(48) - 0.5).to(dtype)
    x = torch.randn(200, 48).to(dtype)
    scale = theirs.weight.data.float() + 1.0
    ours = RMSNorm(scale, 1e-6)(x)
    assert ours.dtype == dtype
    assert torch.equal(ours, theirs(x))
    if dtype is not torch.float32:  # rounding first is another result: the test can tell
        assert not torch.equal(RMSNorm(scale.to(dtype), 1e-6)(x), theirs(x))


def test_heads_with_their_own_weights_are_normalized_in_one_pass():
    weight, x = torch.rand(5, 16), torch.randn(7, 9, 16)[:, 2:7]  # heads 2 to 6 of a wider tensor
    ours = RMSNorm(weight, 1e-6)(x)
    for head in range(5):
        assert torch.equal(ours[:, head], RMSNorm(weight[head], 1e-6)(x[:, head]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_embedding_scale_is_rounded_before_it_multiplies(dtype: torch.dtype):
    """sqrt(3072) = 55.4256 is 55.5 in bfloat16."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    theirs = Gemma3TextScaledWordEmbedding(20, 64, 0, embed_scale=3072**0.5).to(dtype)
    alone = TensorParallelGroup.alone()
    ours = VocabEmbedding(theirs.weight.data, range(20), alone, scale=3072**0.5)
    ids = torch.arange(20, dtype=torch.int32)
    before = theirs.weight.data.clone()
    assert torch.equal(ours(ids), theirs(ids))
    assert torch.equal(theirs.weight.data, before)  # a tied head reads the same matrix, unscaled


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_the_gate_is_activated_and_not_the_rest(activation: str):
    from transformers.activations import ACT2FN

    gate, up = torch.randn(6, 8), torch.randn(6, 8)

    def gate_up(x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, torch.cat((gate, up)))

    mlp = GatedMLP(
        activation=activation,
        gate_up=gate_up,
        down=torch.clone,
        down_bias=None,
        parallel=TensorParallelGroup.alone(),
    )
    x = torch.randn(3, 8)
    assert torch.equal(mlp(x), ACT2FN[activation](x @ gate.T) * (x @ up.T))
