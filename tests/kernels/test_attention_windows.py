"""Attention that sees a sliding window or a chunk: interpreted Triton, the Numba twin and the reference.

`paged_case` fills the cache with NaN wherever no key or value belongs, and `give_back` does the same to everything
that the step's queries do not see: what the scheduler has given to somebody else by then. A block id left there is one
that no cache has, so that reading through it ends the process.
"""

from __future__ import annotations

import math

import pytest
import torch

JUNK_BLOCK = 2**31 - 1
VISIBLE = [(1, 0), (13, 0), (64, 0), (400, 0), (0, 1), (0, 5), (0, 64)]


def error(got, wanted):
    return (got.double() - wanted.double()).abs().max().item()


def seen_keys(kernel, paged_case, *, seq_len, query_len, block_size=4, **visible):
    """By query, the keys that it sees, all with the same weight: the queries are 0 and V[p] is one at p alone."""
    case = paged_case(
        [seq_len], [query_len], num_heads=1, num_kv_heads=1, head_dim=32, block_size=block_size
    )
    case.query.fill_(0)
    for position in range(seq_len):
        block_id = int(case.block_table[0, position // block_size])
        case.pool[block_id, 1, 1, 0, position % block_size] = torch.eye(32)[position]
    case.give_back(**visible, left_over=0)
    got = case.attend(kernel("paged_attention"), **visible)[:, 0]
    seen = [row.nonzero().flatten().tolist() for row in got]
    for row, keys in zip(got, seen, strict=True):
        assert error(row[keys], torch.full((len(keys),), 1 / len(keys))) < 1e-6
    return seen


@pytest.mark.parametrize(
    ("window", "keys"),
    [
        (8, range(12, 20)),
        (6, range(14, 20)),  # half a block
        (1, [19]),
        (20, range(20)),
        (64, range(20)),
    ],
)
def test_a_decode_sees_the_last_keys_of_its_window(kernel, paged_case, window, keys):
    """K02: off by one, and V of blocks given back read as 0 * NaN (vLLM 30887, 24390, 31984).

    Block 4, position 19; whole blocks left of the window are the null block, which holds NaN.
    """
    assert seen_keys(kernel, paged_case, seq_len=20, query_len=1, window=window) == [list(keys)]


def test_each_query_of_a_prefill_has_its_own_window(kernel, paged_case):
    """K02: 5 new tokens behind 15 cached ones, window 8."""
    got = seen_keys(kernel, paged_case, seq_len=20, query_len=5, window=8)
    assert got == [list(range(max(0, i - 7), i + 1)) for i in range(15, 20)]


def test_the_window_counts_the_token_itself(kernel, paged_case):
    """K-02: key > position - window."""
    assert seen_keys(kernel, paged_case, seq_len=5, query_len=1, window=2) == [[3, 4]]
    assert seen_keys(kernel, paged_case, seq_len=5, query_len=3, window=2) == [
        [1, 2],
        [2, 3],
        [3, 4],
    ]


def test_a_chunk_begins_anew_at_each_multiple(kernel, paged_case):
    assert seen_keys(kernel, paged_case, seq_len=9, query_len=1, chunk=4) == [[8]]
    assert seen_keys(kernel, paged_case, seq_len=8, query_len=1, chunk=4) == [[4, 5, 6, 7]]
    assert seen_keys(kernel, paged_case, seq_len=10, query_len=4, chunk=4) == [
        [4, 5, 6],
        [4, 5, 6, 7],
        [8],
        [8, 9],
    ]
    assert seen_keys(kernel, paged_case, seq_len=10, query_len=3, chunk=3) == [
        [6, 7],
        [6, 7, 8],
        [9],
    ]


def test_the_reference_sees_the_same(reference, paged_case):
    assert seen_keys(reference, paged_case, seq_len=5, query_len=3, window=2) == [
        [1, 2],
        [2, 3],
        [3, 4],
    ]
    assert seen_keys(reference, paged_case, seq_len=10, query_len=4, chunk=4) == [
        [4, 5, 6],
        [4, 5, 6, 7],
        [8],
        [8, 9],
    ]


@pytest.mark.parametrize(("window", "chunk"), VISIBLE)
@pytest.mark.parametrize(
    ("seq_lens", "query_lens"),
    [
        pytest.param([1, 5, 130, 300], [1, 1, 1, 1], id="decode"),
        pytest.param([7, 41, 9], [7, 41, 9], id="prefill"),
        pytest.param([33, 1, 150, 257], [1, 1, 5, 140], id="mixed, chunked prefill last"),
    ],
)
def test_equals_the_reference_though_nothing_unseen_can_be_read(
    kernel, reference, paged_case, seq_lens, query_lens, window, chunk
):
    """K-05: NaN left of the window, in blocks half left, behind the last key, and ids that end the process."""
    case = paged_case(seq_lens, query_lens, num_heads=9, num_kv_heads=3, head_dim=16)
    case.give_back(window=window, chunk=chunk)
    got = case.attend(kernel("paged_attention"), window=window, chunk=chunk)
    wanted = case.attend(reference("paged_attention"), window=window, chunk=chunk)
    assert error(got, wanted) < 2e-6


@pytest.mark.parametrize("left_over", [0, JUNK_BLOCK])
def test_gemma_3_270m_s_own_shape(kernel, paged_case, left_over):
    """4 query heads on 1 KV head of 256, window 512, blocks of 16; torch's own attention does the checking."""
    window = 512
    case = paged_case([600, 520], [1, 20], num_heads=4, num_kv_heads=1, head_dim=256)
    wanted = []
    for batch_index, (first, end) in enumerate([(0, 1), (1, 21)]):
        seq_len = int(case.seq_lens[batch_index])
        blocks = case.block_table[batch_index, : -(-seq_len // 16)].long()
        keys, values = (  # [1, seq_len, head_dim]
            case.pool[blocks, 1, which].transpose(0, 1).flatten(1, 2)[:, :seq_len]
            for which in (0, 1)
        )
        position = torch.arange(seq_len - (end - first), seq_len)[:, None]
        key = torch.arange(seq_len)[None, :]
        wanted.append(
            torch.nn.functional.scaled_dot_product_attention(
                case.query[first:end].transpose(0, 1),
                keys.expand(4, -1, -1),
                values.expand(4, -1, -1),
                attn_mask=(key <= position) & (key > position - window),
                scale=case.scale,
            ).transpose(0, 1)
        )
    case.give_back(window=window, left_over=left_over)
    got = case.attend(kernel("paged_attention"), window=window)
    assert error(got, torch.cat(wanted)) < 2e-6


@pytest.mark.parametrize("visible", [{"window": 3}, {"chunk": 3}], ids=str)
def test_rows_that_see_no_key_of_a_tile_s_first_turns_stay_finite(
    kernel, reference, paged_case, visible
):
    """K03: a turn without a visible key has a maximum of -inf, and exp(-inf - -inf) is NaN for good.

    A prefill of 150 tokens has tiles longer than 3 keys and a turn together: in Triton 64 tokens of 16 keys a turn, in
    the twin 48 tokens whose turns end at 128.
    """
    case = paged_case([190], [150], num_heads=1, num_kv_heads=1, head_dim=128)
    case.give_back(**visible)
    got = case.attend(kernel("paged_attention"), **visible)
    assert got.isfinite().all()
    assert error(got, case.attend(reference("paged_attention"), **visible)) < 2e-6


@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 48, 64, 128, 528])
@pytest.mark.parametrize("visible", [{"window": 7}, {"window": 129}, {"chunk": 24}], ids=str)
def test_any_block_size_gives_the_same_result_on_the_same_kv(
    kernel, reference, paged_case, block_size, visible
):
    """K08, with windows smaller and larger than a block and chunks that no block size divides."""
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
    case.give_back(**visible)
    got = case.attend(kernel("paged_attention"), **visible)
    assert error(got, one_page.attend(reference("paged_attention"), **visible)) < 2e-6


@pytest.mark.parametrize("head_dim", [7, 64, 80, 96, 112, 160, 192, 256])
def test_any_head_dim(kernel, reference, paged_case, head_dim):
    """K07, with a window."""
    case = paged_case([5, 39], [1, 3], num_heads=4, num_kv_heads=1, head_dim=head_dim, block_size=8)
    case.give_back(window=9)
    got = case.attend(kernel("paged_attention"), window=9)
    assert error(got, case.attend(reference("paged_attention"), window=9)) < 2e-6


def test_each_group_s_call_has_its_own_geometry(kernel, reference, paged_case):
    """K13: a call kept what fitted the group before it (vLLM 56996).

    Its batch and head sizes; a quarter of its heads, as the interpreter runs them one after the other.
    """
    seq_lens = list(range(1, 25))
    sliding = paged_case(seq_lens, [1] * 24, num_heads=2, num_kv_heads=2, head_dim=256)
    full = paged_case(
        seq_lens, [1] * 24, num_heads=1, num_kv_heads=1, head_dim=512, block_size=32, seed=1
    )
    before = sliding.attend(kernel("paged_attention"), window=9)
    for case, window in ((full, 0), (sliding, 9)):
        got = case.attend(kernel("paged_attention"), window=window)
        # scores are sums of up to 512 products
        assert error(got, case.attend(reference("paged_attention"), window=window)) < 5e-6
    assert torch.equal(got, before)


def test_padded_requests_are_neither_read_nor_written(kernel, reference, paged_case):
    case = paged_case(
        [32, 0, 24, 0], [1, 0, 8, 0], num_heads=3, num_kv_heads=1, head_dim=16, padding_tokens=5
    )
    case.block_table[[1, 3]] = 0
    got = case.attend(kernel("paged_attention"), window=6, marker=7.0)
    assert (got[9:] == 7).all()
    assert error(got[:9], case.attend(reference("paged_attention"), window=6)[:9]) < 2e-6


MIXED = [(1, 1328), (5, 18), (129, 463)]  # (query_len, seq_len)
DECODE = [(1, 523), (1, 37), (1, 2011)]


@pytest.mark.parametrize("window", [0, 64, 128, 256])
@pytest.mark.parametrize("lengths", [MIXED, DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (8, 2), (5, 1)])
def test_the_twin_over_a_peer_s_grid(
    reference, paged_case, window, lengths, num_heads, num_kv_heads
):
    """K-01's sequences, heads and windows, with the smaller head size for the mixed list."""
    from rowcast.kernels.cpu.paged_attention import paged_attention

    case = paged_case(
        [seq_len for _, seq_len in lengths],
        [query_len for query_len, _ in lengths],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128 if lengths is MIXED else 256,
    )
    if window:
        case.give_back(window=window)
    got = case.attend(
        lambda *args, out, **numbers: paged_attention(
            *(tensor.numpy() for tensor in args), out=out.numpy(), **numbers
        ),
        window=window,
    )
    assert error(got, case.attend(reference("paged_attention"), window=window)) < 2e-6


@pytest.mark.parametrize("lengths", [MIXED, DECODE], ids=["mixed", "decode"])
def test_bfloat16_over_a_peer_s_lists(reference, paged_case, lengths):
    """K-01 at its own dtype and tolerance; the interpreter is too slow for the whole grid."""
    from rowcast.kernels.paged_attention import paged_attention

    case = paged_case(
        [seq_len for _, seq_len in lengths],
        [query_len for query_len, _ in lengths],
        num_heads=5,
        num_kv_heads=1,
        head_dim=128,
        dtype=torch.bfloat16,
    )
    case.give_back(window=128)
    got = case.attend(paged_attention, window=128)
    wanted = case.attend(reference("paged_attention"), window=128)
    torch.testing.assert_close(got, wanted, atol=1.5e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_error_is_at_most_twice_torch_s_at_the_same_dtype(paged_case, dtype):
    from rowcast.kernels.paged_attention import paged_attention

    case = paged_case([90], [9], num_heads=4, num_kv_heads=1, head_dim=256, dtype=dtype)
    blocks = case.block_table[0, :6].long()
    keys, values = (case.pool[blocks, 1, which, 0].flatten(0, 1)[:90] for which in (0, 1))
    outside = torch.ones(9, 90, dtype=torch.bool)
    for row in range(9):
        outside[row, 81 + row - 19 : 81 + row + 1] = False

    def attend_in(kind):
        scores = case.query.to(kind).transpose(0, 1) @ keys.to(kind).T * case.scale
        weights = torch.softmax(scores.masked_fill(outside, -math.inf), -1)
        return (weights @ values.to(kind)).transpose(0, 1)

    exact = attend_in(torch.float64)
    case.give_back(window=20)
    ours = error(case.attend(paged_attention, window=20), exact)
    assert ours <= 2 * error(attend_in(dtype), exact) + 1e-7


def test_the_twin_on_two_threads_gives_the_same_bits(paged_case, numba_threads):
    from rowcast.kernels.cpu import _numba
    from rowcast.kernels.cpu.paged_attention import paged_attention

    if _numba.most_threads() < 2:
        pytest.skip("this process may use one core only")
    case = paged_case([200, 0, 33, 150], [1, 0, 2, 150], num_heads=9, num_kv_heads=3, head_dim=48)
    case.give_back(window=70)

    def attend():
        return case.attend(
            lambda *args, out, **numbers: paged_attention(
                *(tensor.numpy() for tensor in args), out=out.numpy(), **numbers
            ),
            window=70,
        )

    results = []
    for num_threads in (1, 2):
        numba_threads(num_threads)
        results.append(attend())
    assert torch.equal(*results)


@pytest.mark.parametrize(("window", "chunk"), [(8, 8), (-1, 0), (0, -4)])
def test_a_window_with_a_chunk_or_below_zero_is_refused(kernel, paged_case, window, chunk):
    case = paged_case([5], [1], num_heads=1, num_kv_heads=1, head_dim=16)
    with pytest.raises(ValueError, match="at most one of window and chunk may be above 0, got"):
        case.attend(kernel("paged_attention"), window=window, chunk=chunk)
