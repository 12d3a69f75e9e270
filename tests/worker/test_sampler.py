"""The sampler as the runner calls it: logits and what each row asks for -> tokens, on any number of ranks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from rowcast.tests.worker.fake_ranks import on_ranks
from rowcast.tests.worker.sampling import random_logits, rows_of, sample, sampler_of
from rowcast.worker.sampler.sampler import SamplingRows


def splits(vocab_size: int, *cuts: int) -> tuple[range, ...]:
    return tuple(range(a, b) for a, b in pairwise((0, *cuts, vocab_size)))


def sample_on(
    ranks: tuple[range, ...], logits: torch.Tensor, rows: SamplingRows
) -> list[np.ndarray]:
    def work(group):
        mine = ranks[group.rank]
        return sampler_of(ranks, group).sample(logits[:, mine.start : mine.stop], rows).tokens

    return on_ranks(len(ranks), work)


# ---------------------------------------------------------------- greedy (SA-01)


def test_temperature_zero_is_argmax_whatever_seed_and_position():
    """SA-01, and top_k 1 is the same."""
    logits = random_logits(128, 200_000)
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
        return sampler_of(ranks, group).sample(part, rows_of(2, top_k=2), digest=digest).digests

    expected = np.array([0, 2**64 - 5, 2], "<u8").tobytes()
    assert on_ranks(3, work) == [expected] * 3


# ---------------------------------------------------------------- seeds (SA-04)


def test_the_same_seed_and_position_choose_the_same_token_and_others_do_not():
    logits = random_logits(1, 5_000, spread=0.5).expand(200, -1)
    first = sample(logits, rows_of(200, seeds=42))
    assert (sample(logits, rows_of(200, seeds=42)) == first).all()
    assert (sample(logits, rows_of(200, seeds=43)) != first).mean() > 0.9
    assert len(set(first.tolist())) > 150  # positions 0, 1, 2, ... draw anew


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
