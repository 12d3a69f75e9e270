"""Scores bounded to softcap * tanh(score / softcap): interpreted Triton and the Numba twin."""

from __future__ import annotations

import math

import pytest
import torch

CAP = 50.0


def error(got, wanted):
    return (got.double() - wanted.double()).abs().max().item()


def weight_of_the_second_key(paged_case, kernel, first: float, second: float, **options) -> float:
    """What the second of two keys with these scaled scores weighs."""
    case = paged_case([2], [1], num_heads=1, num_kv_heads=1, head_dim=1, block_size=2)
    keys_values = case.pool[int(case.block_table[0, 0]), 1]
    case.query.fill_(2.0)
    case.scale = 0.5
    keys_values[0, 0, :, 0] = torch.tensor([first, second])
    keys_values[1, 0, :, 0] = torch.tensor([0.0, 1.0])
    return case.attend(kernel("paged_attention"), **options).item()


@pytest.mark.parametrize("score", [1, 1000, 3000, 4400, 5000, 10000, -10000])
def test_large_scores_reach_the_cap_and_no_more(kernel, paged_case, score):
    """K04: tanh by way of exp(2x) overflowed, and inf / inf is NaN (vLLM 56578, SGLang 33915).

    A score is read off its weight beside a key whose capped score is known.
    """
    capped = CAP * math.tanh(score / CAP)
    assert capped == pytest.approx({1: 0.99987, -10000: -50}.get(score, 50), abs=1e-5)
    beside = 0.0 if score == 1 else math.copysign(1e6, score)
    of_beside = CAP * math.tanh(beside / CAP)
    got = weight_of_the_second_key(paged_case, kernel, beside, score, softcap=CAP)
    wanted = 1 / (1 + math.exp(of_beside - capped))
    assert got == pytest.approx(wanted, abs=2e-6)
    without = weight_of_the_second_key(paged_case, kernel, beside, score)
    assert abs(without - wanted) > 2e-5  # a cap that is dropped shows


@pytest.mark.parametrize("cap", [0.5, 5.0, 50.0])
def test_scores_of_every_size_are_capped_to_float32_rounding(kernel, paged_case, cap):
    """Both sides of where the series near 0 ends, and the very small."""
    scores = torch.logspace(-4, 2, 49).mul(cap)
    scores = torch.cat((scores, -scores))
    case = paged_case([2] * 98, [1] * 98, num_heads=1, num_kv_heads=1, head_dim=1, block_size=2)
    blocks = case.block_table[:, 0].long()
    case.scale = 1.0
    case.query.fill_(1.0)
    case.pool[blocks, 1, 0, 0, :, 0] = torch.stack((torch.zeros(98), scores), 1)
    case.pool[blocks, 1, 1, 0, :, 0] = torch.tensor([0.0, 1.0])
    got = case.attend(kernel("paged_attention"), softcap=cap)[:, 0, 0]
    capped = cap * torch.tanh(scores.double() / cap)
    seen = torch.logit(got.double())
    inside = capped.abs() < 5  # further out the weight says little of the score
    assert ((seen - capped)[inside].abs() <= 4e-6 + 2e-5 * capped[inside].abs()).all()
    assert error(got, torch.sigmoid(capped)) < 5e-7


@pytest.mark.parametrize("visible", [{}, {"window": 20}, {"chunk": 24}], ids=str)
@pytest.mark.parametrize("head_dim", [48, 80, 256])
def test_equals_the_reference_where_the_cap_bends_every_score(
    kernel, reference, paged_case, head_dim, visible
):
    """K-02: capped after scaling and before masking, so what is masked weighs nothing, whatever the cap."""
    case = paged_case(
        [33, 1, 90, 57], [1, 1, 5, 40], num_heads=6, num_kv_heads=2, head_dim=head_dim
    )
    case.query *= 8
    if visible:
        case.give_back(**visible)
    got = case.attend(kernel("paged_attention"), softcap=3.0, **visible)
    assert error(got, case.attend(reference("paged_attention"), softcap=3.0, **visible)) < 4e-6
    assert error(got, case.attend(reference("paged_attention"), **visible)) > 0.1


def test_equals_transformers_eager_attention(kernel, paged_case):
    """The reference, too, could be wrong."""
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    case = paged_case([19], [19], num_heads=4, num_kv_heads=2, head_dim=16, block_size=4)
    case.query *= 6
    blocks = case.block_table[0, :5].long()
    keys, values = (  # [1, 2, 19, 16]
        case.pool[blocks, 1, which].transpose(0, 1).flatten(1, 2)[None, :, :19] for which in (0, 1)
    )
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    wanted, _ = eager_attention_forward(
        module.eval(),
        case.query.transpose(0, 1)[None],
        keys,
        values,
        torch.full((19, 19), -math.inf).triu(1),
        scaling=case.scale,
        softcap=2.0,
    )
    assert error(case.attend(kernel("paged_attention"), softcap=2.0), wanted[0]) < 4e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits(reference, paged_case, dtype):
    from rowcast.kernels.paged_attention import paged_attention

    case = paged_case([90], [9], num_heads=4, num_kv_heads=1, head_dim=64, dtype=dtype)
    got = case.attend(paged_attention, softcap=2.0)
    wanted = case.attend(reference("paged_attention"), softcap=2.0)
    torch.testing.assert_close(got, wanted, atol=1.5e-2, rtol=1e-2)


@pytest.mark.parametrize("softcap", [-1.0, math.inf, math.nan])
def test_a_cap_that_is_none_is_refused(kernel, paged_case, softcap):
    case = paged_case([5], [1], num_heads=1, num_kv_heads=1, head_dim=16)
    with pytest.raises(ValueError, match="softcap must be a number, 0 or above, got"):
        case.attend(kernel("paged_attention"), softcap=softcap)
