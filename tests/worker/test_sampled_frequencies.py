"""How often each token is sampled, against the exact softmax with every filter, by chi-square."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rowcast.tests.worker.sampling import random_logits, rows_of, sample
from rowcast.worker.sampler.sampler import SamplingRows

OPTIONS = [
    {},
    {"temperature": 0.6},
    {"temperature": 2.0},
    {"top_k": 7},
    {"top_k": 300},
    {"top_p": 0.8},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1e-4},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.02, "top_p": 0.7},
    {"min_p": 1e-5, "top_k": 500},
]


def probabilities(
    logits: torch.Tensor, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0
) -> np.ndarray:
    """Softmax with filters the slow way: sort, cut, renormalize."""
    scores = logits.double().numpy() / temperature
    order = np.argsort(-scores, kind="stable")
    if min_p:
        order = order[scores[order] >= scores[order[0]] + math.log(min_p)]
    if top_k:
        order = order[:top_k]
    weights = np.exp(scores[order] - scores[order[0]])
    weights /= weights.sum()
    if top_p < 1:
        keep = int(np.searchsorted(np.cumsum(weights), top_p * (1 - 1e-9))) + 1
        order, weights = order[:keep], weights[:keep]
    out = np.zeros(len(scores))
    out[order] = weights / weights.sum()
    return out


def assert_as_often(counts: np.ndarray, chances: np.ndarray) -> None:
    """Chi-square below df + 10 * sqrt(2 df), rare ids taken together until 10 are expected; impossible ones never."""
    assert counts[chances == 0].sum() == 0
    order = np.argsort(-chances, kind="stable")
    order = order[chances[order] > 0]
    expected = chances[order] * counts.sum()
    bins = np.floor((np.cumsum(expected) - expected) / 10).astype(np.int64)
    _, starts = np.unique(bins, return_index=True)
    wanted = np.add.reduceat(expected, starts)
    got = np.add.reduceat(counts[order].astype(np.float64), starts)
    chi_square = ((got - wanted) ** 2 / wanted)[wanted > 5].sum()
    df = int((wanted > 5).sum())
    assert chi_square < df + 10 * math.sqrt(2 * df), (chi_square, df)


at_full_size = pytest.mark.skipif(
    "ROWCAST_SA02" not in os.environ, reason="minutes: ROWCAST_SA02=1 runs SA-02 at full size"
)


@pytest.mark.parametrize(
    ("vocab_size", "draws"), [(1_000, 4_000), (50_257, 300)], ids=["1000", "50257"]
)
@pytest.mark.parametrize("asked", OPTIONS, ids=str)
def test_frequencies_follow_the_exact_softmax(asked: dict, vocab_size: int, draws: int):
    """SA-02. Both ways through a row: its candidates settle it, or it is gathered whole (a large k, a small min-p)."""
    logits = random_logits(1, vocab_size, seed=3, spread=2.0)[0]
    assert_as_often(drawn(logits, draws, **asked), probabilities(logits, **asked))


@pytest.mark.parametrize("asked", OPTIONS, ids=str)
def test_frequencies_in_triton(asked: dict):
    """SA-02 in the kernels that a GPU runs. Few draws: interpreted, each takes milliseconds."""
    logits = random_logits(1, 1_000, seed=3, spread=2.0)[0]
    counts = drawn(logits, 60, kernel_backend="triton", **asked)
    assert_as_often(counts, probabilities(logits, **asked))


def test_triton_draws_what_numba_draws():
    """Token by token, at 50,257 ids with every filter: so the frequencies above hold for a GPU as well."""
    logits = random_logits(1, 50_257, seed=3, spread=2.0)[0].expand(len(OPTIONS), -1)
    one_each = [
        rows_of(1, seeds=5, positions=np.array([position]), **asked)
        for position, asked in enumerate(OPTIONS)
    ]
    fields = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
    rows = SamplingRows(
        **{name: np.concatenate([getattr(row, name) for row in one_each]) for name in fields}
    )
    tokens = sample(logits, rows, kernel_backend="triton").tolist()
    assert tokens == sample(logits, rows).tolist()
    assert len(set(tokens)) > 3


def drawn(logits: torch.Tensor, draws: int, *, kernel_backend="cpu", **asked: Any) -> np.ndarray:
    """How often each id came: positions 0, 1, 2, ... of one seed."""
    counts = np.zeros(len(logits), np.int64)
    at_once = 20_000_000 // len(logits)
    for first in range(0, draws, at_once):
        count = min(at_once, draws - first)
        rows = rows_of(count, seeds=11, positions=np.arange(first, first + count), **asked)
        tokens = sample(logits.expand(count, -1), rows, kernel_backend=kernel_backend)
        counts += np.bincount(tokens, minlength=len(logits))
    return counts


def test_min_p_keeps_what_is_likely_enough():
    """SA-08: one logit of 10.0 among 0.01: 0.1 leaves only that one, 0.0 masks nothing."""
    logits = torch.full((1, 1024), 0.01)
    logits[0, 77] = 10.0
    many = logits.expand(3000, -1)
    assert set(sample(many, rows_of(3000, min_p=0.1)).tolist()) == {77}
    everyone = sample(many, rows_of(3000, min_p=0.0))
    share = 1023 / (1023 + math.exp(9.99))
    assert abs((everyone != 77).mean() - share) < 5 * math.sqrt(share / 3000)
    # The rule is >=: an id at just min_p times the best stays.
    logits = torch.tensor([[1.0, 0.25, 0.2499]]).log().expand(3000, -1)
    assert set(sample(logits, rows_of(3000, min_p=0.25)).tolist()) == {0, 1}
    assert set(sample(logits, rows_of(3000, min_p=1.0)).tolist()) == {0}


def test_what_ties_at_the_edge_of_min_p_has_its_part_in_top_p():
    """399 ids of just min_p's likelihood; left out of the sum, 0.9 of it was the best id alone."""
    logits = torch.full((400,), 0.25).log()
    logits[0] = 0.0
    chances = np.zeros(400)
    chances[: 1 + 359] = 0.25  # 1 + 358 / 4 is below 0.9 * (1 + 399 / 4), 1 + 359 / 4 is not
    chances[0] = 1.0
    counts = drawn(logits, 2_000, min_p=0.25, top_p=0.9)
    assert_as_often(counts, chances / chances.sum())


def test_seeds_are_independent_too():
    """The same position under seeds 0, 1, 2, ... must be as good as one seed's positions: n > 1 draws so."""
    logits = random_logits(1, 30, seed=3, spread=1.5)[0]
    rows = rows_of(20_000, seeds=0, positions=5)
    rows = replace(rows, seeds=np.arange(20_000))
    counts = np.bincount(sample(logits.expand(20_000, -1), rows), minlength=30)
    assert_as_often(counts, probabilities(logits))


def test_the_tail_is_reachable():
    """SA-02 with fewer draws: noise that is too coarse never lets ids of probability 2e-7 win."""
    vocab_size, draws = 200_000, 4_000
    weights = torch.ones(vocab_size)
    weights[123] = vocab_size * 20.0
    tail = 1 / 21
    tokens = sample(weights.log().expand(draws, -1), rows_of(draws))
    in_tail = tokens[tokens != 123]
    sigma = math.sqrt(draws * tail * (1 - tail))
    assert abs(len(in_tail) - draws * tail) < 5 * sigma
    assert len(set(in_tail.tolist())) > 0.9 * len(in_tail)


@at_full_size
@pytest.mark.parametrize("flat", [False, True], ids=["one-likely-id", "flat"])
def test_the_tail_at_full_size(flat: bool):
    """SA-02, number for number: 500,000 draws with one id of weight e^18, or 4,000,000 of weights 500 to 1,499."""
    ids = torch.arange(200_000)
    weights = (500 + ids % 1000 if flat else 1 + ids % 3).double()
    if not flat:
        weights[77] = math.exp(18)
    chances = (weights / weights.sum()).numpy()
    draws = 4_000_000 if flat else 500_000
    counts = drawn(weights.log().float(), draws)
    if flat:
        assert (counts > 0).mean() > 0.99
        assert_as_often(counts, chances)
        return
    tail = 1 - chances[77]
    sigma = math.sqrt(draws * tail * (1 - tail))
    assert abs(draws - counts[77] - draws * tail) < 10 * sigma


@at_full_size
@pytest.mark.parametrize("asked", OPTIONS, ids=str)
def test_frequencies_in_triton_at_full_size(asked: dict):
    """The suite compares a row of this vocabulary with Numba's token; here the interpreted kernels draw 300."""
    logits = random_logits(1, 50_257, seed=3, spread=2.0)[0]
    assert_as_often(
        drawn(logits, 300, kernel_backend="triton", **asked), probabilities(logits, **asked)
    )
