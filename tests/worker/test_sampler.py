"""The sampler as the runner calls it: logits and what each row asks for -> tokens, on any number of ranks."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from rowcast.tests.worker.fake_ranks import on_ranks
from rowcast.worker.parallel import TensorParallelGroup
from rowcast.worker.sampler.sampler import Sampler, SamplingRows


def rows_of(
    count: int, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=7, positions=None
) -> SamplingRows:
    """Scalars are the same for every row; positions default to 0, 1, 2, ..."""
    positions = np.arange(count) if positions is None else positions
    return SamplingRows(
        temperature=np.broadcast_to(np.float32(temperature), count).copy(),
        top_k=np.broadcast_to(np.int32(top_k), count).copy(),
        top_p=np.broadcast_to(np.float32(top_p), count).copy(),
        min_p=np.broadcast_to(np.float32(min_p), count).copy(),
        seeds=np.broadcast_to(np.int64(seeds), count).copy(),
        positions=np.broadcast_to(positions, count).copy(),
    )


def sample(logits: torch.Tensor, rows: SamplingRows) -> np.ndarray:
    sampler = Sampler((range(logits.shape[1]),), TensorParallelGroup.alone())
    return sampler.sample(logits, rows).tokens


def splits(vocab_size: int, *cuts: int) -> tuple[range, ...]:
    return tuple(range(a, b) for a, b in pairwise((0, *cuts, vocab_size)))


def sample_on(
    ranks: tuple[range, ...], logits: torch.Tensor, rows: SamplingRows
) -> list[np.ndarray]:
    def work(group):
        mine = ranks[group.rank]
        return Sampler(ranks, group).sample(logits[:, mine.start : mine.stop], rows).tokens

    return on_ranks(len(ranks), work)


def random_logits(
    rows: int, vocab_size: int, *, seed: int = 0, spread: float = 3.0
) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


# ---------------------------------------------------------------- greedy (SA-01)


def test_temperature_zero_is_argmax_whatever_seed_and_position():
    logits = random_logits(128, 20_000)
    expected = logits.argmax(dim=1).numpy()
    for seed in (0, 2**63 - 1):
        assert (sample(logits, rows_of(128, temperature=0, seeds=seed)) == expected).all()
    assert (sample(logits, rows_of(128, top_k=1)) == expected).all()


def test_greedy_ties_go_to_the_lowest_id_on_any_rank_count():
    """Ranks that break ties by rank order or by topk's whim would disagree with one rank."""
    logits = torch.zeros(3, 12)
    logits[0, [5, 9]] = 2.0
    logits[1, [11, 3, 4]] = 1.0
    logits[2] = -0.0  # equals 0.0: all ids tie
    logits[2, 7] = 0.0
    rows = rows_of(3, temperature=0)
    assert sample(logits, rows).tolist() == [5, 3, 0]
    for ranks in (splits(12, 6), splits(12, 4, 9), splits(12, 1, 2, 3)):
        assert all(tokens.tolist() == [5, 3, 0] for tokens in sample_on(ranks, logits, rows))


def test_a_mixed_batch_leaves_greedy_rows_alone_and_neighbours_change_nothing():
    """SA-01, SA-04: each row of a batch of every kind gets the token that it gets alone."""
    count = 40
    logits = random_logits(count, 700)
    rng = np.random.default_rng(1)
    rows = SamplingRows(
        temperature=rng.choice([0.0, 0.3, 1.0, 2.0], count).astype(np.float32),
        top_k=rng.choice([0, 1, 3, 50, 300, 699], count).astype(np.int32),
        top_p=rng.choice([1.0, 0.95, 0.5, 0.01], count).astype(np.float32),
        min_p=rng.choice([0.0, 0.0, 0.2, 1e-4], count).astype(np.float32),
        seeds=rng.integers(0, 2**63, count),
        positions=rng.integers(0, 5000, count),
    )
    together = sample(logits, rows)
    is_greedy = (rows.temperature == 0) | (rows.top_k == 1)
    assert (together[is_greedy] == logits.argmax(dim=1).numpy()[is_greedy]).all()
    alone = [sample(logits[i : i + 1], rows[np.array([i])])[0] for i in range(count)]
    assert together.tolist() == [int(token) for token in alone]
    backwards = np.arange(count)[::-1].copy()
    assert (sample(logits.flip(0), rows[backwards])[::-1] == together).all()


# ---------------------------------------------------------------- ranks


@pytest.mark.parametrize("spread", [0.01, 3.0], ids=["flat", "peaked"])
def test_every_rank_chooses_the_same_token_whatever_the_rank_count(spread):
    """Flat rows overflow the exchanged candidates and are gathered whole; peaked ones are not. Both must agree."""
    vocab_size, count = 3_001, 60
    logits = random_logits(count, vocab_size, spread=spread)
    logits[: count // 2] = (logits[: count // 2] * 4).round() / 4  # many ties
    rng = np.random.default_rng(2)
    rows = SamplingRows(
        temperature=rng.choice([0.0, 0.7, 1.0], count).astype(np.float32),
        top_k=rng.choice([0, 0, 5, 200, 256, 257, 1000, 3000, 5000], count).astype(np.int32),
        top_p=rng.choice([1.0, 0.9, 0.5, 0.999], count).astype(np.float32),
        min_p=rng.choice([0.0, 0.0, 0.0, 0.1, 0.9, 1e-3], count).astype(np.float32),
        seeds=rng.integers(0, 2**63, count),
        positions=rng.integers(0, 5000, count),
    )
    expected = sample(logits, rows).tolist()
    for cuts in ((1500,), (10, 2000), (700, 1400, 2100, 2800)):
        for tokens in sample_on(splits(vocab_size, *cuts), logits, rows):
            assert tokens.tolist() == expected


def test_ranks_with_fewer_ids_than_candidates_are_heard():
    """A rank of 3 ids offers 3 candidates of 128; its padding must neither win nor hide other ranks' ids."""
    logits = random_logits(16, 40)
    for asked in (
        {"top_p": 0.9},
        {"top_k": 39},
        {"top_k": 7, "top_p": 0.6},
        {"min_p": 0.05},
        {"min_p": 1e-6, "top_p": 0.99},
    ):
        rows = rows_of(16, **asked)
        expected = sample(logits, rows).tolist()
        for ranks in (splits(40, 3), splits(40, 37), splits(40, 1, 2, 3)):
            assert all(t.tolist() == expected for t in sample_on(ranks, logits, rows))


def test_each_ranks_digest_comes_back_in_rank_order():
    ranks = splits(30, 10, 20)
    logits = random_logits(2, 30)

    def work(group):
        mine = ranks[group.rank]
        part = logits[:, mine.start : mine.stop]
        digest = 2**64 - 5 if group.rank == 1 else group.rank
        return Sampler(ranks, group).sample(part, rows_of(2, top_k=2), digest=digest).digests

    expected = np.array([0, 2**64 - 5, 2], "<u8").tobytes()
    assert on_ranks(3, work) == [expected] * 3


# ---------------------------------------------------------------- seeds (SA-04)


def test_the_same_seed_and_position_choose_the_same_token_and_others_do_not():
    logits = random_logits(1, 5_000, spread=0.5).expand(200, -1)
    first = sample(logits, rows_of(200, seeds=42))
    assert (sample(logits, rows_of(200, seeds=42)) == first).all()
    assert (sample(logits, rows_of(200, seeds=43)) != first).mean() > 0.9
    assert len(set(first.tolist())) > 150  # positions 0, 1, 2, ... draw anew


# ---------------------------------------------------------------- distribution


def reference_probabilities(
    logits: torch.Tensor, *, temperature=1.0, top_k=0, top_p=1.0
) -> np.ndarray:
    """Softmax with filters the slow way: sort, cut, renormalize."""
    scores = logits.double().numpy() / temperature
    order = np.argsort(-scores, kind="stable")
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


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 2.0},
        {"top_k": 7},
        {"top_p": 0.8},
        {"temperature": 1.5, "top_k": 12, "top_p": 0.9},
    ],
    ids=str,
)
def test_frequencies_follow_the_exact_softmax(asked):
    """Chi-square over 20,000 draws from 30 ids: below df + 10 * sqrt(2 df), and nothing outside the filters."""
    draws = 20_000
    logits = random_logits(1, 30, seed=3, spread=1.5)[0]
    expected = reference_probabilities(logits, **asked) * draws
    counts = np.zeros(30)
    for seed in (11, 2**62):
        half = rows_of(draws // 2, seeds=seed, **asked)
        counts += np.bincount(sample(logits.expand(draws // 2, -1), half), minlength=30)
    assert counts[expected == 0].sum() == 0
    likely = expected > 5
    rare = counts[~likely].sum() - expected[~likely].sum()
    chi_square = ((counts - expected)[likely] ** 2 / expected[likely]).sum() + rare**2 / 5
    df = int(likely.sum())
    assert chi_square < df + 10 * math.sqrt(2 * df), (chi_square, df)


def test_seeds_are_independent_too():
    """The same position under seeds 0, 1, 2, ... must be as good as one seed's positions: n > 1 draws so."""
    logits = random_logits(1, 30, seed=3, spread=1.5)[0]
    rows = rows_of(20_000, seeds=0, positions=5)
    rows = SamplingRows(
        temperature=rows.temperature,
        top_k=rows.top_k,
        top_p=rows.top_p,
        min_p=rows.min_p,
        seeds=np.arange(20_000),
        positions=rows.positions,
    )
    counts = np.bincount(sample(logits.expand(20_000, -1), rows), minlength=30)
    expected = reference_probabilities(logits) * 20_000
    likely = expected > 5
    chi_square = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    df = int(likely.sum())
    assert chi_square < df + 10 * math.sqrt(2 * df), (chi_square, df)


def test_the_tail_is_reachable():
    """SA-02, smaller: noise that is too coarse never lets ids of probability 1e-6 win."""
    vocab_size, draws = 20_000, 4_000
    weights = torch.ones(vocab_size)
    weights[123] = vocab_size * 20.0
    tail = 1 / 21
    tokens = sample(weights.log().expand(draws, -1), rows_of(draws))
    in_tail = tokens[tokens != 123]
    sigma = math.sqrt(draws * tail * (1 - tail))
    assert abs(len(in_tail) - draws * tail) < 5 * sigma
    assert len(set(in_tail.tolist())) > 0.9 * len(in_tail)


def test_tiny_temperature_is_greedy_and_stays_finite():
    logits = random_logits(4, 50, spread=30.0)
    rows = rows_of(4, temperature=1e-38, top_p=0.9)
    assert (sample(logits, rows) == logits.argmax(dim=1).numpy()).all()


@pytest.mark.parametrize("bits", [0x7FC00000, -0x400000], ids=["positive", "negative"])
@pytest.mark.parametrize("share", [1, 2], ids=["every score", "every other score"])
@pytest.mark.parametrize(
    "options",
    [{"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.9}],
    ids=str,
)
def test_nan_is_no_score(options, share, bits):
    """Damaged weights answered with id 0 again and again, or, with top-p, with id -1."""
    logits = random_logits(3, 500)
    logits[1, ::share] = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    with pytest.raises(RuntimeError, match="the model computed NaN instead of scores"):
        sample(logits, rows_of(3, **options))
