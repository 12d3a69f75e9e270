"""How much probability lies above a key."""

from __future__ import annotations

import math
import mmap

import pytest
import torch
from rowcast.kernels._keys import NO_KEY, key

INF = float("inf")


def mass(softmax_mass, scores, above, rows=None, highest=None, **options):
    rows = torch.arange(len(scores), dtype=torch.int32) if rows is None else rows
    highest = scores[rows].amax(dim=1) if highest is None else highest
    out = torch.full((len(rows),), 99.0, dtype=torch.float64)
    softmax_mass(scores, rows, highest, torch.tensor(above), out=out, **options)
    return out


def test_the_docstrings_example(kernel):
    scores = torch.tensor([[2.0, 3.0, 5.0]]).log()
    above = [key(float(scores[0, 1]), 1)]
    assert mass(kernel("softmax_mass"), scores, above).tolist() == pytest.approx([1.0])
    assert mass(kernel("softmax_mass"), scores, [NO_KEY]).tolist() == pytest.approx([2.0])


def test_of_equal_scores_those_with_a_lower_id_are_above(kernel):
    """Otherwise two ids that tie at the edge of top-p would both stay, or neither. -0.0 ties with 0.0."""
    scores = torch.tensor([[0.0, -0.0, 0.0, -0.0, 5.0, -1.0]])
    for id_, above_it in ((40, 1), (41, 2), (42, 3), (43, 4)):
        found = mass(
            kernel("softmax_mass"), scores, [key(0.0, id_)], highest=torch.zeros(1), first_id=40
        )
        assert found.tolist() == pytest.approx([math.exp(5.0) + above_it - 1])


@pytest.mark.parametrize("num_ids", [1, 7, 41, 700])
def test_each_side_sums_what_the_reference_sums(kernel, reference, num_ids):
    generator = torch.Generator().manual_seed(num_ids)
    scores = (torch.randn(6, num_ids + 2, generator=generator) * 8)[:, :num_ids]
    scores[2] = (scores[2] / 8).round()
    scores[3, ::2] = -INF
    rows = torch.tensor([5, 0, 2, 3, 3], dtype=torch.int32)
    middle = [key(float(scores[row, num_ids // 2]), 900 + num_ids // 2) for row in rows]
    for above in ([NO_KEY] * 5, middle):
        asked = (scores, above, rows, scores[rows].amax(dim=1).clamp(min=-1e30))
        got = mass(kernel("softmax_mass"), *asked, first_id=900)
        wanted = mass(reference("softmax_mass"), *asked, first_id=900)
        assert torch.allclose(got, wanted, rtol=1e-13, atol=0)


def test_what_may_not_be_chosen_weighs_nothing_and_what_hardly_may_next_to_nothing(kernel):
    lowest = torch.finfo(torch.float32).min
    scores = torch.tensor([[-INF, -INF], [0.0, -800.0], [0.0, -600.0], [0.0, lowest]])
    found = mass(
        kernel("softmax_mass"), scores, [NO_KEY] * 4, highest=torch.tensor([lowest, 0, 0, 0])
    )
    assert found.tolist() == pytest.approx([0.0, 1.0, 1.0, 1.0])
    only = mass(kernel("softmax_mass"), scores[2:3, 1:], [NO_KEY], highest=torch.zeros(1))
    assert only.tolist() == pytest.approx([2.6503965530043e-261], rel=1e-12)


@pytest.mark.parametrize("nan", [float("nan"), -float("nan")])
def test_nan_shows(kernel, nan):
    scores = torch.tensor([[1.0, nan, 0.0]])
    for above in (NO_KEY, key(0.5, 0)):
        found = mass(kernel("softmax_mass"), scores, [above], highest=torch.ones(1))
        assert found.isnan().all()


def test_threads_and_ranks_change_nothing_that_counts(kernel, numba_threads):
    from rowcast.kernels.cpu import _numba

    scores = torch.randn(3, 999, generator=torch.Generator().manual_seed(1))
    numba_threads(min(2, _numba.most_threads()))
    highest = torch.full((3,), 4.0)
    whole = mass(kernel("softmax_mass"), scores, [NO_KEY] * 3, highest=highest)
    parts = [
        mass(kernel("softmax_mass"), scores[:, a:b], [NO_KEY] * 3, highest=highest, first_id=a)
        for a, b in ((0, 5), (5, 400), (400, 999))
    ]
    assert torch.allclose(sum(parts), whole, rtol=1e-14, atol=0)


def test_nobody_asks(kernel):
    rows = torch.tensor([], dtype=torch.int32)
    out = torch.empty(0, dtype=torch.float64)
    kernel("softmax_mass")(torch.zeros(2, 3), rows, torch.empty(0), rows.long(), out=out)
    assert mass(
        kernel("softmax_mass"), torch.empty(2, 0), [0, 0], highest=torch.zeros(2)
    ).tolist() == [0.0, 0.0]


def test_row_offsets_pass_two_to_the_31(kernel):
    """SA-07, for top-p's pass over a whole row."""
    num_rows, num_ids = 16_448, 131_072
    no_reserve = 0x4000  # MAP_NORESERVE of Linux
    memory = mmap.mmap(
        -1, 4 * num_rows * num_ids, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    )
    scores = torch.frombuffer(memory, dtype=torch.float32).view(num_rows, num_ids)
    scores[0] = scores[-1] = torch.randn(num_ids, generator=torch.Generator().manual_seed(2))
    rows = torch.tensor([0, num_rows - 1], dtype=torch.int32)
    found = mass(kernel("softmax_mass"), scores, [NO_KEY] * 2, rows)
    wanted = (scores[0].double() - scores[0].max().double()).exp().sum()
    assert found.tolist() == pytest.approx([float(wanted)] * 2, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "wrong", "told"),
    [
        ("scores", torch.zeros(2, 5, dtype=torch.float64), "scores must be"),
        ("scores", torch.zeros(5, 2).t(), "packed in its last dimension"),
        ("rows", torch.tensor([0, 1]), "rows must be"),
        ("highest", torch.ones(3), "highest must be as long as rows, 2, got 3"),
        ("above", torch.zeros(2, dtype=torch.int32), "above must be"),
        ("out", torch.zeros(1, dtype=torch.float64), "out must be as long as rows, 2, got 1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(kernel, name, wrong, told):
    arguments = {
        "scores": torch.zeros(2, 5),
        "rows": torch.tensor([0, 1], dtype=torch.int32),
        "highest": torch.ones(2),
        "above": torch.zeros(2, dtype=torch.int64),
        "out": torch.zeros(2, dtype=torch.float64),
    }
    with pytest.raises(ValueError, match=told):
        kernel("softmax_mass")(**(arguments | {name: wrong}))
