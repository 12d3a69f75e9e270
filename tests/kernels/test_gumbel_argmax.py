"""The best id of each row, with noise and without; and the noise, whose every bit is the same on each side."""

from __future__ import annotations

import math
import mmap
import random

import numpy as np
import pytest
import torch
from rowcast.kernels._keys import NO_KEY, key
from rowcast.kernels._noise import gumbel

INF, NAN = float("inf"), float("nan")


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def streams(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)


def normal(*shape, seed=0, spread=3.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


def best(gumbel_argmax, logits, rows=None, temperature=0.0, stream=None, **options):
    rows = torch.arange(len(logits), dtype=torch.int32) if rows is None else rows
    temperature = torch.as_tensor(temperature, dtype=torch.float32).expand(len(rows)).contiguous()
    stream = streams(len(rows)) if stream is None else stream
    out = torch.full((len(rows),), 99)
    gumbel_argmax(logits, rows, temperature, stream, out=out, **options)
    return out


def test_of_equal_logits_the_lowest_id_is_best(kernel):
    """The docstring's example; -0.0 is 0.0, and all -inf is a tie as well."""
    run = kernel("gumbel_argmax")
    assert best(run, torch.tensor([[1.0, 3.0, 3.0]]), first_id=10).tolist() == [key(3.0, 11)]
    logits = torch.tensor([[-0.0, 0.0, -0.0], [-1.0, -0.0, 0.0], [-INF, -INF, -INF], [1, INF, INF]])
    wanted = [key(0.0, 0), key(0.0, 1), key(-INF, 0), key(INF, 1)]
    assert best(run, logits).tolist() == wanted


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_is_above_all_and_so_reaches_whoever_checks(kernel, sign):
    """A NaN with its sign bit set sorts below -inf by its bits; comparisons pass it over."""
    logits = normal(2, 300)
    logits[1, [170, 250]] = math.copysign(NAN, sign)
    for temperature in (0.0, 1.0):
        found = best(kernel("gumbel_argmax"), logits, temperature=temperature)
        assert int(found[1]) == key(NAN, 170)
        assert int(found[0]) < key(INF, 0)


@pytest.mark.parametrize("num_ids", [1, 7, 41, 129, 700])
def test_each_side_finds_what_the_reference_finds_bit_by_bit(kernel, reference, num_ids):
    """Rows in any order, some left out, some twice, a gap behind each; the best is passed over, and the next."""
    logits = normal(9, num_ids + 3)[:, :num_ids]
    logits[4] = (logits[4] * 2).round()  # ties
    rows = i32(8, 0, 4, 4, 2, 1, 0)
    asked = {
        "rows": rows,
        "temperature": torch.tensor([0.0, 0.7, 0.0, 1.0, 2.0, 0.01, 1.0]),
        "stream": streams(7),
        "first_id": 2**31 - 800,
    }
    below = None
    for _ in range(3):
        found = best(kernel("gumbel_argmax"), logits, below=below, **asked)
        wanted = best(reference("gumbel_argmax"), logits, below=below, **asked)
        assert found.tolist() == wanted.tolist()
        below = found
    if num_ids == 1:
        assert below.tolist() == [NO_KEY] * 7


def test_ids_that_are_listed_get_the_noise_of_their_number(kernel, reference):
    """Candidates come in order of score: an id's noise must not depend on where it stands."""
    logits = normal(3, 400, spread=1.0)
    order = torch.stack(
        [torch.randperm(400, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    )
    rows, stream = i32(2, 0, 1), streams(3)
    for temperature in (0.0, 1.0):
        asked = {"rows": rows, "temperature": temperature, "stream": stream}
        listed = logits.gather(1, order)
        found = best(kernel("gumbel_argmax"), listed, ids=order, **asked)
        assert found.tolist() == best(kernel("gumbel_argmax"), logits, **asked).tolist()
        assert (
            found.tolist() == best(reference("gumbel_argmax"), listed, ids=order, **asked).tolist()
        )


def test_how_ids_are_dealt_to_ranks_changes_nothing(kernel):
    logits, stream = normal(5, 600), streams(5)
    whole = best(kernel("gumbel_argmax"), logits, temperature=0.9, stream=stream)
    parts = [
        best(kernel("gumbel_argmax"), logits[:, a:b], temperature=0.9, stream=stream, first_id=a)
        for a, b in ((0, 1), (1, 250), (250, 600))
    ]
    assert torch.stack(parts).amax(dim=0).tolist() == whole.tolist()


def test_noise_has_the_bits_that_the_reference_says(kernel):
    """One id a row: its key holds the noise itself. Streams that make `bits` smallest and largest are among them."""
    unmixed = torch.tensor([0, 1, 2, 3, -1, -2, 2**63 - 1, -(2**63)])  # ids 0: bits = mix(stream)
    stream = torch.cat([unmixed, streams(50)])
    zeros = torch.zeros(len(stream), 1)
    found = best(kernel("gumbel_argmax"), zeros, temperature=1.0, stream=stream)
    noise = gumbel(stream, torch.tensor([0]))[:, 0]
    assert found.tolist() == [key(float(value), 0) for value in noise]
    assert float(noise[0]) == pytest.approx(63 * math.log(2), rel=1e-6)


def unmix(bits: int) -> int:
    """The number that splitmix64's finalizer makes these bits of."""
    wrap = 2**64 - 1

    def unshift(z: int, shift: int) -> int:
        found = z
        for _ in range(64 // shift + 1):
            found = z ^ (found >> shift)
        return found

    z = unshift(bits, 31)
    z = unshift(z * pow(0x94D049BB133111EB, -1, 2**64) & wrap, 27)
    return unshift(z * pow(0xBF58476D1CE4E5B9, -1, 2**64) & wrap, 30)


def as_signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def test_noise_is_the_logarithm_of_the_logarithm_over_the_whole_range():
    """Against Python's own numbers: torch's int64 must wrap and shift as unsigned ones do. Bits of every magnitude."""
    rng = random.Random(0)
    bits = [rng.getrandbits(64) >> shift for shift in range(64) for _ in range(20)]
    bits += [2**64 - 1 - (b >> 1) for b in bits] + [0, 1, 2, 2**63, 2**64 - 1]
    stream = [unmix(b) for b in bits]
    got = gumbel(torch.tensor([as_signed(one) for one in stream]), torch.tensor([0]))[:, 0].double()
    for b, value in zip(bits, got.tolist(), strict=True):
        u = min(max(float(np.float32((b >> 1) / 2**63)), 2.0**-63), 1 - 2.0**-24)
        assert value == pytest.approx(-math.log(-math.log1p(-u)), rel=2e-7, abs=3e-7), hex(b)
    step = 49_151 * 0x9E3779B97F4A7C15  # id 49,151 of a stream that begins so much earlier
    earlier = torch.tensor([as_signed(one - step) for one in stream])
    assert torch.equal(gumbel(earlier, torch.tensor([49_151]))[:, 0].double(), got)


def test_an_id_that_only_rare_noise_lifts_is_not_missed():
    """The twin skips blocks whose noise is too small: that must not cost a winner that is 2, 5, 8 or 12 below."""
    from rowcast.kernels.cpu.gumbel_argmax import gumbel_argmax as twin

    gaps = torch.tensor([2.0, 5.0, 8.0, 12.0]).repeat(1_000)
    logits = torch.zeros(4_000, 384)
    logits[:, 200:] = -gaps.unsqueeze(1)
    logits[:, 384 // 2 :: 7] = -INF
    stream = streams(4_000)
    out = torch.empty(4_000, dtype=torch.int64)
    rows, ones = torch.arange(4_000, dtype=torch.int32), torch.ones(4_000)
    twin(*(t.numpy() for t in (logits, rows, ones, stream)), out=out.numpy())
    noisy = logits + gumbel(stream, torch.arange(384))
    wanted = noisy.argmax(dim=1)
    assert torch.equal((2**32 - 1) - (out & 0xFFFFFFFF), wanted)
    assert (wanted >= 200).sum() > 50


def test_threads_change_nothing(numba_threads):
    from rowcast.kernels.cpu import _numba
    from rowcast.kernels.cpu.gumbel_argmax import gumbel_argmax as twin

    def launch(*args, out, **options):
        twin(*(tensor.numpy() for tensor in args), out=out.numpy(), **options)

    logits = normal(5, 1000)
    numba_threads(1)
    alone = best(launch, logits, temperature=1.0)
    numba_threads(min(2, _numba.most_threads()))
    assert torch.equal(best(launch, logits, temperature=1.0), alone)


def test_nobody_asks(kernel):
    assert best(kernel("gumbel_argmax"), normal(3, 5), rows=i32()).tolist() == []
    assert best(kernel("gumbel_argmax"), torch.empty(2, 0)).tolist() == [NO_KEY] * 2


def test_row_offsets_pass_two_to_the_31(kernel):
    """SA-07: row 16,447 of 131,072 ids, a copy of row 0, has the same best five. What is not touched costs nothing."""
    num_rows, num_ids = 16_448, 131_072
    no_reserve = 0x4000  # MAP_NORESERVE of Linux
    memory = mmap.mmap(
        -1, 4 * num_rows * num_ids, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    )
    logits = torch.frombuffer(memory, dtype=torch.float32).view(num_rows, num_ids)
    logits[0] = logits[-1] = normal(num_ids)
    wanted = logits[0].topk(5)
    below = None
    for value, id_ in zip(wanted.values.tolist(), wanted.indices.tolist(), strict=True):
        found = best(kernel("gumbel_argmax"), logits, rows=i32(0, num_rows - 1), below=below)
        assert found.tolist() == [key(value, id_)] * 2
        below = found


@pytest.mark.parametrize(
    ("name", "wrong", "told"),
    [
        ("logits", torch.zeros(2, 5, dtype=torch.float64), "logits must be float32"),
        ("logits", torch.zeros(5, 2).t(), "packed in its last dimension"),
        ("logits", torch.zeros(10), "2 dimensions"),
        ("rows", torch.tensor([0, 1]), "rows must be"),
        ("temperature", torch.ones(3), "temperature must be as long as rows, 2, got 3"),
        ("streams", torch.zeros(2, dtype=torch.int32), "streams must be"),
        ("out", torch.zeros(1, dtype=torch.int64), "out must be as long as rows, 2, got 1"),
        ("below", torch.zeros(3, dtype=torch.int64), "below must be as long as rows, 2, got 3"),
        ("ids", torch.zeros(2, 4, dtype=torch.int64), "ids must be"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(kernel, name, wrong, told):
    arguments = {
        "logits": torch.zeros(2, 5),
        "rows": i32(0, 1),
        "temperature": torch.ones(2),
        "streams": streams(2),
        "out": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=told):
        kernel("gumbel_argmax")(**(arguments | {name: wrong}))
