"""Attention over the paged cache: interpreted Triton and the Numba twin against the reference.

`paged_case` fills the cache with NaN wherever no key or value belongs, and the tables with a block id that cannot be
read behind the last block, so every test here is also one of what must not be touched.
"""

from __future__ import annotations

import math
import mmap

import pytest
import torch

# (142, 2): a group of more than one tile of heads, and more than one such group
GROUPS = [(12, 4), (20, 4), (28, 4), (36, 4), (48, 2), (24, 1), (32, 1), (71, 1), (8, 8), (142, 2)]


def error(got, wanted):
    return (got.double() - wanted.double()).abs().max().item()


@pytest.mark.parametrize(
    ("seq_lens", "query_lens"),
    [
        pytest.param([32, 24], [1, 8], id="the worked example"),
        pytest.param([1, 5, 130, 300], [1, 1, 1, 1], id="decode"),
        pytest.param([7, 41, 9], [7, 41, 9], id="prefill"),
        pytest.param([33, 1, 150, 257], [1, 1, 5, 140], id="mixed, chunked prefill last"),
    ],
)
def test_equals_the_reference(kernel, reference, paged_case, seq_lens, query_lens):
    case = paged_case(seq_lens, query_lens, num_heads=9, num_kv_heads=3, head_dim=64)
    got = case.attend(kernel("paged_attention"))
    assert error(got, case.attend(reference("paged_attention"))) < 2e-6


def test_equals_torch_s_own_attention(kernel, paged_case):
    """The reference, too, could be wrong: here the KV is laid out anew and torch does the rest."""
    case = paged_case([19, 35], [3, 35], num_heads=6, num_kv_heads=2, head_dim=16, block_size=4)
    got = case.attend(kernel("paged_attention"))
    for batch_index, (first, end) in enumerate([(0, 3), (3, 38)]):
        seq_len = int(case.seq_lens[batch_index])
        blocks = case.block_table[batch_index, : -(-seq_len // 4)].long()
        keys, values = (  # [num_heads, seq_len, head_dim]
            case.pool[blocks, 1, which].transpose(0, 1).flatten(1, 2)[:, :seq_len]
            for which in (0, 1)
        )
        mask = torch.ones(end - first, seq_len, dtype=torch.bool).tril(seq_len - (end - first))
        wanted = torch.nn.functional.scaled_dot_product_attention(
            case.query[first:end].transpose(0, 1),
            keys.repeat_interleave(3, 0),
            values.repeat_interleave(3, 0),
            attn_mask=mask,
            scale=case.scale,
        )
        assert error(got[first:end], wanted.transpose(0, 1)) < 2e-6


@pytest.mark.parametrize("query_len", [1, 20])
def test_nan_past_the_sequence_and_junk_in_the_table_stay_out(
    kernel, reference, paged_case, query_len
):
    """K01: a masked weight of 0 times NaN is NaN (vLLM 47305, flash-attention 1745): mask V where it is read."""
    case = paged_case([20], [query_len], num_heads=4, num_kv_heads=2, head_dim=64, block_size=16)
    last_block = case.pool[int(case.block_table[0, 1]), 1]
    assert last_block[:, :, 4:].isnan().all()
    assert case.pool[0].isnan().all()
    assert case.block_table[0, 2] == 2**31 - 1
    got = case.attend(kernel("paged_attention"))
    assert got.isfinite().all()
    assert error(got, case.attend(reference("paged_attention"))) < 2e-6


def test_padded_requests_and_tokens_are_neither_read_nor_written(kernel, reference, paged_case):
    """Padding comes between and behind; the rows of padded tokens keep what they held."""
    case = paged_case(
        [32, 0, 24, 0, 0],
        [1, 0, 8, 0, 0],
        num_heads=3,
        num_kv_heads=1,
        head_dim=16,
        padding_tokens=7,
    )
    case.block_table[[1, 3, 4]] = 0
    got = case.attend(kernel("paged_attention"), marker=7.0)
    assert (got[9:] == 7).all()
    assert error(got[:9], case.attend(reference("paged_attention"))[:9]) < 2e-6


def test_a_padded_request_with_tokens_but_no_keys_writes_nothing(kernel, paged_case):
    """A captured step may give padding one query token each: seq_len 0 must still end in no division by zero."""
    case = paged_case([5, 0, 0], [1, 1, 1], num_heads=2, num_kv_heads=1, head_dim=16)
    got = case.attend(kernel("paged_attention"), marker=7.0)
    assert got[0].isfinite().all()
    assert (got[1:] == 7).all()


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), GROUPS)
@pytest.mark.parametrize("query_lens", [[1, 1], [3, 2]], ids=["decode", "prefill"])
def test_every_query_head_reads_the_kv_head_of_its_group(
    kernel, paged_case, num_heads, num_kv_heads, query_lens
):
    """K06: group 24 bled into the next KV head, groups over 16 divided by zero (vLLM 47248, 23424)."""
    case = paged_case(
        [5, 3],
        query_lens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=16,
        block_size=2,
    )
    of_head = torch.arange(num_kv_heads, dtype=torch.float32)
    values = case.pool[:, 1, 1]
    values.copy_(torch.where(values.isnan(), values, of_head[:, None, None]))
    got = case.attend(kernel("paged_attention"))
    wanted = torch.arange(num_heads) // (num_heads // num_kv_heads)
    assert error(got, wanted[None, :, None].expand_as(got)) < 1e-5


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), GROUPS)
def test_groups_hold_in_bfloat16(paged_case, num_heads, num_kv_heads):
    """K06 in the dtype that GPUs serve in, whose tiles are others."""
    from rowcast.kernels.paged_attention import paged_attention

    case = paged_case(
        [5, 3],
        [3, 1],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=16,
        block_size=2,
        dtype=torch.bfloat16,
    )
    of_head = torch.arange(num_kv_heads).bfloat16()
    values = case.pool[:, 1, 1]
    values.copy_(torch.where(values.isnan(), values, of_head[:, None, None]))
    got = case.attend(paged_attention).float()
    wanted = (torch.arange(num_heads) // (num_heads // num_kv_heads))[None, :, None].expand_as(got)
    assert torch.equal(got.round(), wanted.float())
    # of the value: the interpreter cuts the weights' last bits off where the hardware rounds them
    assert ((got - wanted).abs() <= 1e-2 * wanted).all()


@pytest.mark.parametrize("head_dim", [1, 7, 41, 48, 64, 80, 96, 112, 128, 160, 192, 256])
def test_any_head_dim(kernel, reference, paged_case, head_dim):
    """K07: padded to a power of two, a kernel read and wrote the neighbour's numbers (SGLang 1159, vLLM 4127).

    Query and output have a gap behind each token, NaN in the one and a marker in the other (`attend` looks).
    """
    case = paged_case([5, 19], [1, 3], num_heads=3, num_kv_heads=1, head_dim=head_dim, block_size=8)
    got = case.attend(kernel("paged_attention"))
    assert got.isfinite().all()
    assert error(got, case.attend(reference("paged_attention"))) < 2e-6


@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 48, 64, 128, 528])
def test_any_block_size_gives_the_same_result_on_the_same_kv(
    kernel, reference, paged_case, block_size
):
    """K08: kernels that took a page for a tile were wrong, or refused, at sizes they were not made for (vLLM 21197)."""
    seq_lens = [max(block_size - 1, 1), block_size, block_size + 1, 2 * block_size]
    case, one_page = (
        paged_case(
            seq_lens, [1, 1, 1, 2], num_heads=2, num_kv_heads=1, head_dim=16, block_size=size
        )
        for size in (block_size, 2048)
    )
    one_page.query.copy_(case.query)
    for batch_index, seq_len in enumerate(seq_lens):
        page = one_page.pool[int(one_page.block_table[batch_index, 0]), 1]
        for position in range(seq_len):
            block_id = int(case.block_table[batch_index, position // block_size])
            page[:, :, position] = case.pool[block_id, 1, :, :, position % block_size]
    got = case.attend(kernel("paged_attention"))
    assert error(got, one_page.attend(reference("paged_attention"))) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_error_is_at_most_twice_torch_s_at_the_same_dtype(paged_case, reference, dtype):
    from rowcast.kernels.paged_attention import paged_attention

    case = paged_case([90], [9], num_heads=7, num_kv_heads=1, head_dim=41, dtype=dtype)
    blocks = case.block_table[0, :6].long()
    keys, values = (case.pool[blocks, 1, which, 0].flatten(0, 1)[:90] for which in (0, 1))
    mask = torch.full((9, 90), -math.inf, dtype=dtype).triu(82)

    def attend_in(kind):
        scores = case.query.to(kind).transpose(0, 1) @ keys.to(kind).T * case.scale
        return (torch.softmax(scores + mask.to(kind), -1) @ values.to(kind)).transpose(0, 1)

    exact = attend_in(torch.float64)
    ours = error(case.attend(paged_attention), exact)
    assert ours <= 2 * error(attend_in(dtype), exact) + 1e-7


@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_large_scores_neither_overflow_nor_vanish(kernel, reference, paged_case, size):
    """At 300 the scores span some 1,000: without the running maximum exp overflows at 89."""
    case = paged_case([140, 140], [1, 4], num_heads=2, num_kv_heads=1, head_dim=16)
    case.query *= size
    got = case.attend(kernel("paged_attention"))
    assert got.isfinite().all()
    assert error(got, case.attend(reference("paged_attention"))) < 2e-6 * max(1.0, size)


def test_offsets_pass_two_to_the_31(kernel, reference, paged_case):
    """Blocks 2**30 numbers apart, in address space that costs nothing until touched (vLLM 47671, SGLang 20389)."""
    small = paged_case([9], [2], num_heads=2, num_kv_heads=1, head_dim=16, block_size=4)
    block_numbers = 2**30
    num_blocks = small.pool.shape[0]
    no_reserve = 0x4000  # MAP_NORESERVE of Linux
    memory = mmap.mmap(
        -1, num_blocks * 4 * block_numbers, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    )
    flat = torch.frombuffer(memory, dtype=torch.float32)
    strides = (block_numbers, *small.pool.stride()[1:])
    pool = flat.as_strided(small.pool.shape, strides)
    pool.copy_(small.pool)
    assert int(small.block_table[0, :3].max()) * block_numbers > 2**31
    wanted = small.attend(reference("paged_attention"))
    small.pool = pool
    assert error(small.attend(kernel("paged_attention")), wanted) < 2e-6


def test_interpreted_triton_and_the_twin_agree_to_float32_rounding(paged_case):
    from rowcast.kernels.cpu.paged_attention import paged_attention as twin
    from rowcast.kernels.paged_attention import paged_attention

    case = paged_case([60, 33, 40], [1, 2, 40], num_heads=9, num_kv_heads=3, head_dim=64)
    triton = case.attend(paged_attention)
    numba = case.attend(
        lambda *args, out, **numbers: twin(
            *(tensor.numpy() for tensor in args), out=out.numpy(), **numbers
        )
    )
    assert error(triton, numba) < 2e-6


def test_the_twin_on_two_threads_gives_the_same_bits(paged_case, numba_threads):
    from rowcast.kernels.cpu import _numba
    from rowcast.kernels.cpu.paged_attention import paged_attention

    if _numba.most_threads() < 2:
        pytest.skip("this process may use one core only")
    case = paged_case([200, 0, 33, 150], [1, 0, 2, 150], num_heads=9, num_kv_heads=3, head_dim=48)
    results = []
    for num_threads in (1, 2):
        numba_threads(num_threads)
        results.append(
            case.attend(
                lambda *args, out, **numbers: paged_attention(
                    *(tensor.numpy() for tensor in args), out=out.numpy(), **numbers
                )
            )
        )
    assert torch.equal(*results)


def test_the_twin_s_softmax_is_exact_from_equal_scores_to_vanishing_ones(paged_case):
    """Two keys whose scores differ by x: the output is exp(-x) / (1 + exp(-x)), down to where float32 ends."""
    from rowcast.kernels.cpu.paged_attention import paged_attention

    case = paged_case([2] * 500, [1] * 500, num_heads=1, num_kv_heads=1, head_dim=1, block_size=2)
    difference = torch.linspace(0, 130, 500)
    blocks = case.block_table[:, 0].long()
    case.query.fill_(1)
    case.pool[blocks, 1, 0, 0, :, 0] = torch.stack([torch.zeros(500), -difference], 1)
    case.pool[blocks, 1, 1, 0, :, 0] = torch.tensor([0.0, 1.0])
    got = case.attend(
        lambda *args, out, **numbers: paged_attention(
            *(tensor.numpy() for tensor in args), out=out.numpy(), **numbers | {"scale": 1.0}
        )
    )[:, 0, 0]
    wanted = torch.exp(-difference.double()) / (1 + torch.exp(-difference.double()))
    normal = difference < 80
    # x itself is rounded on the way to powers of two: up to 80 * 2**-23 of it
    assert ((got - wanted)[normal].abs() <= 2e-5 * wanted[normal]).all()
    assert ((got - wanted)[~normal].abs() <= 1e-34).all()


@pytest.mark.parametrize(
    ("name", "wrong", "told"),
    [
        ("query", torch.zeros(1, 3, 8), "query"),
        ("query", torch.zeros(1, 2, 4), "query"),
        ("query", torch.zeros(1, 2, 8, dtype=torch.float64), "query must be"),
        ("out", torch.zeros(2, 2, 8), "out must be"),
        ("value_cache", torch.zeros(4, 2, 4, 4), "key_cache and value_cache must"),
        ("key_cache", torch.zeros(4, 4, 2, 8).transpose(1, 2), "packed behind"),
        ("seq_lens", torch.zeros(2, dtype=torch.int32), "2 seq_lens need 3 query_start_loc"),
        ("block_table", torch.zeros((1, 2), dtype=torch.int64), "block_table must be"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(kernel, name, wrong, told):
    arguments = {
        "query": torch.zeros(1, 2, 8),
        "key_cache": torch.zeros(4, 2, 4, 8),
        "value_cache": torch.zeros(4, 2, 4, 8),
        "block_table": torch.zeros((1, 2), dtype=torch.int32),
        "seq_lens": torch.ones(1, dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 1], dtype=torch.int32),
        "scale": 1.0,
        "out": torch.zeros(1, 2, 8),
    }
    with pytest.raises(ValueError, match=told):
        kernel("paged_attention")(**(arguments | {name: wrong}))


def test_the_twin_refuses_a_16_bit_cache_in_a_sentence():
    from rowcast.kernels.cpu.paged_attention import paged_attention

    half = torch.zeros(4, 2, 4, 8, dtype=torch.float16).numpy()
    with pytest.raises(ValueError, match="key_cache must be float32, got float16"):
        paged_attention(
            torch.zeros(1, 2, 8).numpy(),
            half,
            half,
            torch.zeros((1, 2), dtype=torch.int32).numpy(),
            torch.ones(1, dtype=torch.int32).numpy(),
            torch.tensor([0, 1], dtype=torch.int32).numpy(),
            scale=1.0,
            out=torch.zeros(1, 2, 8).numpy(),
        )
