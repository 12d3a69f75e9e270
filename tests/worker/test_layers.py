"""The layers' order of rounding, bit for bit that of transformers' own modules, in 16 bits where it shows."""

from __future__ import annotations

import pytest
import torch
from rowcast.worker.layers.embedding import VocabEmbedding
from rowcast.worker.layers.mlp import GatedMLP
from rowcast.worker.layers.norm import AllHeadsRMSNorm, LayerNorm, RMSNorm
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
def test_olmos_norm_scales_before_it_rounds(dtype: torch.dtype):
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    theirs = Olmo2RMSNorm(48, eps=1e-5)
    theirs.weight.data = (torch.rand(48) + 0.5).to(dtype).float()
    x = torch.randn(200, 48).to(dtype)
    assert torch.equal(RMSNorm(theirs.weight.data, 1e-5)(x), theirs(x))


class OneOfSeveral(TensorParallelGroup):
    """A rank whose peers' parts of the sum are known."""

    def __init__(self, of_peers: torch.Tensor) -> None:
        self._of_peers = of_peers
        self.part = of_peers

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        self.part = tensor.clone()
        return tensor.add_(self._of_peers)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_normalized_together_are_summed_over_ranks_and_a_shared_kv_head_once(
    dtype: torch.dtype,
):
    """OLMo 2's norm spans what no rank holds alone; of two ranks with the same KV head one adds it to the sum."""
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    eps, x = 1e-5, torch.randn(20, 6, 8).to(dtype)  # 4 query heads and 2 KV heads
    query, key = Olmo2RMSNorm(32, eps), Olmo2RMSNorm(16, eps)
    for norm in (query, key):
        norm.weight.data = torch.rand_like(norm.weight.data) + 0.5
    wanted = torch.cat((query(x[:, :4].flatten(1)), key(x[:, 4:].flatten(1))), 1).view(20, 6, 8)
    weight = torch.cat((query.weight.data, key.weight.data)).view(6, 8)

    def on_rank(heads: list[int], counts_kv: bool, of_peers: torch.Tensor):
        rank = OneOfSeveral(of_peers)
        norm = AllHeadsRMSNorm(
            weight[heads],
            eps,
            num_local_q=len(heads) - 1,
            num_q=4,
            num_kv=2,
            counts_kv=counts_kv,
            parallel=rank,
        )
        return norm(x[:, heads]), rank.part

    # ranks 0 and 1 share KV head 0, rank 2 has KV head 1 alone
    ranks = [([0, 4], True), ([1, 4], False), ([2, 3, 5], True)]
    parts = [on_rank(heads, counts, torch.zeros(20, 2))[1] for heads, counts in ranks]
    for rank, (heads, counts) in enumerate(ranks):
        of_peers = sum(parts[:rank] + parts[rank + 1 :], torch.zeros(20, 2))
        torch.testing.assert_close(on_rank(heads, counts, of_peers)[0], wanted[:, heads])


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_is_torchs_and_heads_may_have_their_own(dtype: torch.dtype):
    from transformers.models.stablelm.modeling_stablelm import StableLmLayerNormPerHead

    theirs = torch.nn.LayerNorm(48, eps=1e-5).to(dtype)
    theirs.weight.data, theirs.bias.data = torch.rand(48).to(dtype), torch.rand(48).to(dtype)
    x = torch.randn(50, 48).to(dtype)
    ours = LayerNorm(theirs.weight.data, theirs.bias.data, 1e-5)(x)
    torch.testing.assert_close(ours, theirs(x))
    assert ours.dtype == dtype

    each = StableLmLayerNormPerHead(16, 3, eps=1e-5).to(dtype)
    for norm in each.norms:
        norm.weight.data = torch.rand(16).to(dtype)
    weights = torch.stack([norm.weight.data for norm in each.norms])
    heads = torch.randn(7, 3, 16).to(dtype)
    wanted = each(heads.transpose(0, 1)[None])[0].transpose(0, 1)
    torch.testing.assert_close(LayerNorm(weights, None, 1e-5)(heads), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemmas_embedding_scale_is_rounded_before_it_multiplies(dtype: torch.dtype):
    """sqrt(3072) = 55.4256 is 55.5 in bfloat16. Granite's multiplier is a number beside the tensor, and is not."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    theirs = Gemma3TextScaledWordEmbedding(20, 64, 0, embed_scale=3072**0.5).to(dtype)
    alone = TensorParallelGroup.alone()
    ours = VocabEmbedding(
        theirs.weight.data,
        range(20),
        alone,
        dtype=dtype,
        scale=3072**0.5,
        round_scale=True,
    )
    ids = torch.arange(20, dtype=torch.int32)
    before = theirs.weight.data.clone()
    assert torch.equal(ours(ids), theirs(ids))
    assert torch.equal(theirs.weight.data, before)  # a tied head reads the same matrix, unscaled
    granites = VocabEmbedding(theirs.weight.data, range(20), alone, dtype=dtype, scale=10.1)
    assert torch.equal(granites(ids), theirs.weight.data * 10.1)


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
