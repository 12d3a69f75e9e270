"""Which ids top-k and top-p keep, against a reference that sorts everything (SA-05, SA-06), and the parts below."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rowcast.kernels._noise import gumbel
from rowcast.worker.backend import select_backend
from rowcast.worker.sampler import candidates, keys, noise, redraw, top_k, top_p


def keep_by_sorting(scores: np.ndarray, k: int, p: float) -> set[int]:
    order = np.argsort(-scores.astype(np.float64), kind="stable")[: k or None]
    weights = np.exp(scores[order].astype(np.float64) - scores[order[0]])
    weights /= weights.sum()
    if p >= 1:
        return set(order.tolist())
    return set(order[: int(np.searchsorted(np.cumsum(weights), p * (1 - 1e-7))) + 1].tolist())


def kept_ids(scores: torch.Tensor, k: np.ndarray, p: np.ndarray) -> list[set[int]]:
    """Every id as a candidate, in order, through top-k and then top-p."""
    vocab_size = scores.shape[1]
    ordered = candidates.best_candidates(scores, vocab_size, 0).sort(dim=1, descending=True).values
    limit = torch.from_numpy(np.where(k > 0, k, vocab_size).astype(np.int64))
    after_k = top_k.kept(limit, vocab_size)
    in_order = keys.scores_of(ordered)
    weights = (in_order.double() - in_order[:, :1].double()).exp().masked_fill(~after_k, 0.0)
    stays, _ = top_p.kept(in_order, after_k, torch.from_numpy(p), weights.sum(dim=1))
    stays = torch.where(torch.from_numpy(p >= 1).unsqueeze(1), after_k, stays)
    ids = keys.ids_of(ordered)
    return [set(row[mask].tolist()) for row, mask in zip(ids, stays, strict=True)]


@pytest.mark.parametrize(
    ("batch", "vocab_size"), [(1, 1024), (512, 1024), (8, 32_000), (2, 128_256)]
)
def test_kept_ids_equal_those_of_a_full_sort(batch, vocab_size):
    """SA-05, SA-06: exactly, a quarter of each filter off."""
    rng = np.random.default_rng(batch)
    scores = torch.from_numpy(rng.standard_normal((batch, vocab_size)).astype(np.float32) * 4)
    k = np.where(rng.random(batch) < 0.25, 0, rng.integers(1, 100, batch)).astype(np.int32)
    p = np.where(rng.random(batch) < 0.25, 1.0, rng.uniform(0.1, 1.0, batch)).astype(np.float32)
    for row, kept in enumerate(kept_ids(scores, k, p)):
        expected = keep_by_sorting(scores[row].numpy(), int(k[row]), float(p[row]))
        assert kept == expected, (row, k[row], p[row], len(kept), len(expected))


def test_extreme_k_and_p_keep_what_they_say():
    """SA-05, SA-06: k 1, all, 2 and all but one; neither; p 0.01 keeps the best, and others of one batch their own."""
    scores = torch.from_numpy(np.random.default_rng(0).standard_normal((6, 300)).astype(np.float32))
    kept = kept_ids(
        scores,
        np.array([1, 300, 2, 299, 0, 0], np.int32),
        np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.01], np.float32),
    )
    assert [len(ids) for ids in kept[:5]] == [1, 300, 2, 299, 300]
    assert len(kept[5]) >= 1
    assert int(scores[5].argmax()) in kept[5]
    p = np.array([0.1, 0.5, 0.9, 1.0], np.float32)
    for row, ids in enumerate(kept_ids(scores[:4], np.zeros(4, np.int32), p)):
        assert ids == keep_by_sorting(scores[row].numpy(), 0, float(p[row]))


def test_top_p_takes_the_fewest_that_reach_p():
    """0.5 + 0.3 reaches 0.8, though float32's 0.8 is a shade more."""
    scores = torch.tensor([[0.5, 0.3, 0.2]] * 3).log()
    p = np.array([0.8, 0.81, 0.5], np.float32)
    kept = kept_ids(scores, np.zeros(3, np.int32), p)
    assert [len(ids) for ids in kept] == [2, 3, 1]


def test_candidates_are_exact_where_scores_tie():
    """torch.topk takes any of equal scores; another rank count would then keep other ids."""
    scores = torch.tensor([[1.0, 2.0, 1.0, 1.0, 2.0, 1.0, 0.0]])
    for width, expected in ((1, [11]), (2, [11, 14]), (3, [10, 11, 14]), (5, [10, 11, 12, 13, 14])):
        found = candidates.best_candidates(scores, width, 10)
        assert sorted(keys.ids_of(found)[0].tolist()) == expected


def test_merged_candidates_are_certain_down_to_the_worst_of_a_rank_that_left_some_out():
    """Rank 0 (3 ids, all offered) hides nothing; rank 1 left ids out below 5.0: only what is at least 5.0 is sure."""
    low = candidates.best_candidates(torch.tensor([[9.0, 4.0, 1.0]]), 3, 0)
    high = candidates.best_candidates(torch.tensor([[8.0, 7.0, 5.0, 4.5, 4.4]]), 3, 3)
    ordered, certain = candidates.merge(torch.stack([low, high]), torch.tensor([3, 5]))
    assert keys.ids_of(ordered)[0].tolist() == [0, 3, 4, 5, 1, 2]
    assert certain.tolist() == [4]


def test_keys_sort_as_score_then_lowest_id_and_give_both_back():
    scores = torch.tensor([3.5, -1.0, -1.0, 0.0, -0.0, 1e-40, float("-inf"), 2e38])
    ids = torch.tensor([5, 2**31, 7, 9, 8, 1, 0, 4])
    packed = keys.pack(scores, ids)
    order = packed.argsort(descending=True).tolist()
    assert order == [7, 0, 5, 4, 3, 2, 1, 6]  # 8 before 9: 0.0 and -0.0 tie
    assert keys.ids_of(packed).tolist() == ids.tolist()
    assert keys.scores_of(packed).tolist() == scores.tolist()


def test_a_stream_is_splitmix64_of_seed_and_position():
    """Against the formula in Python's own integers. What becomes of a stream: tests/kernels/test_gumbel_argmax.py."""
    wrap, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & wrap
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & wrap
        return z ^ (z >> 31)

    seeds, positions = [0, 1, 2**63 - 1], [0, 77, 2**31 - 1]
    got = noise.streams(np.array(seeds), np.array(positions)).view(np.uint64).tolist()
    assert got == [
        mix((mix((seed + golden) & wrap) + position * golden) & wrap)
        for seed, position in zip(seeds, positions, strict=True)
    ]


def test_drawing_again_gives_the_token_that_sorting_gives():
    """The two ways through a row whose candidates do not reach p must never part."""
    count, vocab_size = 200, 500
    rng = np.random.default_rng(4)
    scores = torch.from_numpy(rng.standard_normal((count, vocab_size)).astype(np.float32))
    scores[:100] = (scores[:100] * 4).round() / 4  # ties, also at the edge of the kept set
    p = rng.uniform(0.05, 0.99, count).astype(np.float32)
    stream = torch.from_numpy(noise.streams(np.arange(count), np.full(count, 9)))
    off = torch.zeros(count)
    total = (scores.double() - scores.amax(dim=1, keepdim=True).double()).exp().sum(dim=1)
    tokens, settled = redraw.choose(
        scores, stream, torch.from_numpy(p), off, total, select_backend("cpu", "cpu")
    )
    assert settled.float().mean() > 0.8  # a small p may use up its draws
    perturbed = scores + gumbel(stream, torch.arange(vocab_size))
    kept = kept_ids(scores, np.zeros(count, np.int32), p)
    for row in range(count):
        if settled[row]:
            best = max(kept[row], key=lambda token: (float(perturbed[row, token]), -token))
            assert int(tokens[row]) == best, (row, p[row])
