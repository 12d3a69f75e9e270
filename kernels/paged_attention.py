"""Causal attention over the paged KV cache, prefill and decode in one call, any group size, head_dim and block_size.

    out[token, head] = softmax(scale * q[token, head] . K[first .. position]) @ V[first .. position]
    position of a request's query j = seq_len - query_len + j,  kv_head = head // group
    first = 0;  with a window max(0, position - window + 1);  with chunks position // chunk * chunk
    with a soft cap the scores are softcap * tanh(scale * q . K / softcap), before any of them is masked

program_id(0) is a tile of query tokens, counted over all requests as `run_of_tile` says; one without work returns.
program_id(1) is (KV head, tile of the heads of its group). A tile's rows are (token, head). Keys come BLOCK_N at a
time, each key's page looked up on its own, so a page may have any size. A tile begins at the first key that its first
token sees and ends at the last that its last token sees. What lies outside (NaN in pages used before, blocks that the
window has left, their stale table entries, junk, block 0) is never touched; what a single row of the tile does not see
is masked in its scores.

WINDOW, CHUNK and CAP_LOG2 are compiled in: attention without them then pays nothing for them, and a chunk that is a
power of two needs no division. The model fixes them for each layer, so warm-up, which runs every layer on a prefill and
on a decode, has compiled all that serving will launch.

Layout: query and out packed behind dimension 0, caches as in kv_write.py. Sources: online softmax, Milakov and
Gimelshein 2018 (arXiv 1805.02867); tiles of (token, head) rows over pages, Kwon et al. 2023 (arXiv 2309.06180).
"""

# pyright: reportArgumentType=false
# (a launch takes plain numbers where the kernel's own signature says tl.constexpr)

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ._checks import check_cache, check_int_tensors, is_packed
from ._tiles import run_of_tile

LOG2_E = math.log2(math.e)
MAX_HEADS_A_TILE = 64


@triton.jit
def _first_visible(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first key that the token at `position` sees."""
    if WINDOW > 0:
        first = tl.maximum(position - (WINDOW - 1), 0)
    elif CHUNK > 0:
        first = position // CHUNK * CHUNK
    else:
        first = position * 0
    return first


@triton.jit
def _tanh(x):
    """Good to some 3 units in the last place; exp overflows nowhere, as its argument is never above 0."""
    size = tl.abs(x)
    left = tl.exp2(size * -2.8853900817779268)  # exp(-2 |x|)
    far = (1.0 - left) / (1.0 + left)
    # Near 0 the difference 1 - left cancels. Taylor's series: the first term left out is below 2**-26 of the sum.
    square = x * x
    near = size * (
        1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    )
    size = tl.where(size < 0.25, near, far)
    return tl.where(x < 0, -size, size)


# These change from step to step: a form compiled for a 1 or a multiple of 16 would compile while serving.
@triton.jit(do_not_specialize=["num_reqs", "block_table_stride"])
def _paged_attention_kernel(
    query,  # [num_tokens, num_heads, head_dim]
    key_cache,  # [num_blocks, num_kv_heads, block_size, head_dim]
    value_cache,  # [num_blocks, num_kv_heads, block_size, head_dim]
    block_table,  # [num_reqs, max_blocks] int32
    seq_lens,  # [num_reqs] int32
    query_start_loc,  # [num_reqs + 1] int32
    out,  # [num_tokens, num_heads, head_dim], written
    scale_log2,  # scale * log2(e): the softmax is taken in powers of two
    num_reqs,
    query_stride,  # items from one token to the next
    out_stride,
    key_cache_stride,  # items from one block to the next
    value_cache_stride,
    block_table_stride,  # items from one request to the next
    GROUP: tl.constexpr,  # query heads a KV head
    HEADS: tl.constexpr,  # of them in one tile
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,  # next power of two, at least 16
    BLOCK_SIZE: tl.constexpr,  # tokens a page
    WINDOW: tl.constexpr,  # keys that a token sees, itself included; 0: all
    CHUNK: tl.constexpr,  # keys are seen from the last multiple of this on; 0: from the first
    CAP_LOG2: tl.constexpr,  # the soft cap * log2(e); 0: none
    TILE_TOKENS: tl.constexpr,  # query tokens a tile
    BLOCK_M: tl.constexpr,  # rows a tile, >= TILE_TOKENS * HEADS
    BLOCK_N: tl.constexpr,  # keys an iteration
    WIDE_DOT: tl.constexpr,  # multiply in float32: Triton's interpreter multiplies bfloat16's bits as integers
):
    tile = tl.program_id(0)
    head_tiles: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // head_tiles
    first_head = (tl.program_id(1) % head_tiles) * HEADS  # within the group

    batch_index = run_of_tile(query_start_loc, num_reqs, tile, TILE_TOKENS)
    start = tl.load(query_start_loc + batch_index)
    query_len = tl.load(query_start_loc + batch_index + 1) - start
    first_token = (tile - (start // TILE_TOKENS + batch_index)) * TILE_TOKENS
    seq_len = tl.load(seq_lens + batch_index)
    if (first_token >= query_len) | (seq_len <= 0):
        return

    m = tl.arange(0, BLOCK_M)
    token = first_token + m // HEADS  # within the request
    head = first_head + m % HEADS  # within the group
    row_real = (m // HEADS < TILE_TOKENS) & (token < query_len) & (head < GROUP)
    d = tl.arange(0, HEAD_DIM_PADDED)
    d_real = d < HEAD_DIM
    row_item = (kv_head * GROUP + head) * HEAD_DIM
    flat_token = (start + token).to(tl.int64)
    q_mask = row_real[:, None] & d_real[None, :]
    q = tl.load(
        query + (flat_token * query_stride + row_item)[:, None] + d[None, :], mask=q_mask, other=0.0
    )

    if WIDE_DOT:
        q = q.to(tl.float32)

    # Rows that are padding see what the tile's last token sees, so that no row is without a key.
    last_token = tl.minimum(first_token + TILE_TOKENS, query_len) - 1
    position = seq_len - query_len + tl.minimum(token, last_token)
    num_keys = seq_len - query_len + last_token + 1
    tile_first = _first_visible(seq_len - query_len + first_token, WINDOW, CHUNK)
    row_first = _first_visible(position, WINDOW, CHUNK)

    # Finite: a window's later rows may see no key of the first turns, and -inf - -inf would make them NaN for good.
    row_max = tl.full([BLOCK_M], -3.4028234663852886e38, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], tl.float32)
    pages = block_table + batch_index.to(tl.int64) * block_table_stride
    head_offset = kv_head * (BLOCK_SIZE * HEAD_DIM)
    n = tl.arange(0, BLOCK_N)
    for first_key in range(tile_first, num_keys, BLOCK_N):
        key_position = first_key + n
        key_real = key_position < num_keys
        block_id = tl.load(pages + key_position // BLOCK_SIZE, mask=key_real, other=0).to(tl.int64)
        in_block = head_offset + (key_position % BLOCK_SIZE) * HEAD_DIM
        k = tl.load(
            key_cache + (block_id * key_cache_stride + in_block)[None, :] + d[:, None],
            mask=key_real[None, :] & d_real[:, None],
            other=0.0,
        )
        if WIDE_DOT:
            k = k.to(tl.float32)
        scores = tl.dot(q, k, input_precision="ieee") * scale_log2
        if CAP_LOG2 > 0:
            scores = CAP_LOG2 * _tanh(scores / CAP_LOG2)
        seen = key_position[None, :] <= position[:, None]
        if WINDOW > 0 or CHUNK > 0:
            seen = seen & (key_position[None, :] >= row_first[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, axis=1)
        row_max = new_max
        v = tl.load(
            value_cache + (block_id * value_cache_stride + in_block)[:, None] + d[None, :],
            mask=key_real[:, None] & d_real[None, :],
            other=0.0,
        )
        acc = acc * shrink[:, None]
        weights = weights.to(v.dtype)
        if WIDE_DOT:
            weights = weights.to(tl.float32)
            v = v.to(tl.float32)
        acc = tl.dot(weights, v, acc, input_precision="ieee")

    acc = acc / row_sum[:, None]
    tl.store(
        out + (flat_token * out_stride + row_item)[:, None] + d[None, :],
        acc.to(out.dtype.element_ty),
        mask=q_mask,
    )


def _power_of_two(count: int) -> int:
    """The smallest power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


def paged_attention_config(
    *, num_tokens: int, num_reqs: int, group: int, head_dim: int, itemsize: int
) -> dict[str, int]:
    """The tile sizes and launch options for a step of this shape; fixed, since tuning while serving looks like a hang.

    Units: num_tokens counts padding too; itemsize is bytes.
    Example: 32 decoding requests, group 3, head_dim 64 in bf16: 16 rows of 5 tokens by 3 heads, 64 keys a turn.
    """
    padded = max(16, _power_of_two(head_dim))
    # The largest tiles whose accumulator stays in registers (`ptxas -v` for sm_80 to sm_100 shows next to no spills),
    # with K and V of two pipeline stages within gfx942's 64 KiB. float32 has no tensor cores to multiply with (tf32
    # would drop 13 bits), so there a thread holds whole rows and columns.
    if itemsize == 4:
        max_rows = 64 if padded <= 128 else 16
        block_n = max(16, 2048 // padded)
        wide = 64 * 64
    else:
        max_rows = 128 if padded <= 128 else 64
        block_n = max(16, min(64, 8192 // padded))
        wide = 128 * 128
    head_tiles = -(-group // min(max_rows, MAX_HEADS_A_TILE))
    heads = -(-group // head_tiles)
    # Only decode: as few rows as the tensor cores take. Some prefill: rows enough to use each key often.
    rows = 16 if num_tokens <= num_reqs else max_rows
    block_m = max(rows, _power_of_two(heads))
    return {
        "HEADS": heads,
        "HEAD_DIM_PADDED": padded,
        "TILE_TOKENS": block_m // heads,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "num_warps": 8 if block_m * padded >= wide else 4,
        "num_stages": 2,
    }


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
) -> None:
    """Attend from this step's queries to all keys of their requests, whose K and V are in the cache already.

    Shapes: query, out [num_tokens, num_heads, head_dim], out is written; key_cache, value_cache [num_blocks,
        num_kv_heads, block_size, head_dim], packed behind the first dimension; block_table [num_reqs, max_blocks],
        seq_lens [num_reqs], query_start_loc [num_reqs + 1] int32, in batch order.
    Units: seq_lens counts the tokens of this step. A request of seq_len 0 reads and writes nothing; rows of out at
        and behind query_start_loc[-1] keep what they held. window and chunk are tokens, 0 is off: the token at
        position p sees no key before p - window + 1, or before p // chunk * chunk. Blocks and table entries left of
        what a request's first query token sees are not read. softcap bounds scores smoothly to (-softcap, softcap),
        0 is off.
    Example: seq_lens [32, 24], query_start_loc [0, 1, 9]: token 0 sees 32 keys, tokens 1 to 8 see 17 to 24. With
        window 20 token 0 sees keys 12 to 31, tokens 1 to 8 see 17, 18, 19, 20, 20, 20, 20, 20 keys.
    Raises: ValueError for shapes, strides, dtypes or devices that do not fit together, window with chunk, or a softcap
        that is negative or not finite.
    Source: see the module.
    """
    check_int_tensors(
        "paged_attention",
        block_table=(block_table, torch.int32, 2),
        seq_lens=(seq_lens, torch.int32, 1),
        query_start_loc=(query_start_loc, torch.int32, 1),
    )
    check_cache("paged_attention", key_cache, value_cache)
    if window < 0 or chunk < 0 or (window and chunk):
        raise ValueError(
            f"paged_attention: at most one of window and chunk may be above 0, got {window} and {chunk}"
        )
    if not 0 <= softcap < math.inf:
        raise ValueError(f"paged_attention: softcap must be a number, 0 or above, got {softcap}")
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    num_reqs = seq_lens.shape[0]
    if query_start_loc.shape[0] != num_reqs + 1 or block_table.shape[0] < num_reqs:
        raise ValueError(
            f"paged_attention: {num_reqs} seq_lens need {num_reqs + 1} query_start_loc and {num_reqs} "
            f"block_table rows, got {query_start_loc.shape[0]} and {block_table.shape[0]}"
        )
    if query.dim() != 3 or query.shape[2] != head_dim or query.shape[1] % num_kv_heads:
        raise ValueError(
            f"paged_attention: query must be [num_tokens, a multiple of {num_kv_heads}, {head_dim}] as the cache "
            f"says, got {tuple(query.shape)}"
        )
    for name, tensor in (("query", query), ("out", out)):
        if tensor.shape != query.shape or not is_packed(tensor):
            raise ValueError(
                f"paged_attention: {name} must be {tuple(query.shape)} packed behind its first dimension, got "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}"
            )
        if tensor.dtype != key_cache.dtype or tensor.device != key_cache.device:
            raise ValueError(
                f"paged_attention: {name} must be {key_cache.dtype} on {key_cache.device} as the cache is, got "
                f"{tensor.dtype} on {tensor.device}"
            )
    num_tokens, num_heads, _ = query.shape
    if num_tokens == 0 or num_reqs == 0:
        return
    group = num_heads // num_kv_heads
    config = paged_attention_config(
        num_tokens=num_tokens,
        num_reqs=num_reqs,
        group=group,
        head_dim=head_dim,
        itemsize=query.element_size(),
    )
    # The last request's first tile is at most num_tokens // TILE_TOKENS + num_reqs - 1; one more closes its last.
    num_tiles = num_tokens // config["TILE_TOKENS"] + num_reqs
    head_tiles = -(-group // config["HEADS"])
    _paged_attention_kernel[(num_tiles, num_kv_heads * head_tiles)](
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        scale * LOG2_E,
        num_reqs,
        query.stride(0),
        out.stride(0),
        key_cache.stride(0),
        value_cache.stride(0),
        block_table.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=window,
        CHUNK=chunk,
        CAP_LOG2=softcap * LOG2_E,
        WIDE_DOT=query.dtype == torch.bfloat16
        and not isinstance(_paged_attention_kernel, triton.JITFunction),
        **config,
    )


def paged_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
) -> None:
    """The same, a query token at a time, in float64 (float32 does for the 16-bit types)."""
    _, num_kv_heads, block_size, _ = key_cache.shape
    group = query.shape[1] // num_kv_heads
    wide = torch.float64 if query.dtype == torch.float32 else torch.float32
    for batch_index, seq_len in enumerate(seq_lens.tolist()):
        start, end = query_start_loc[batch_index : batch_index + 2].tolist()
        if seq_len == 0:
            continue
        lowest = _first_visible_reference(seq_len - (end - start), window, chunk)
        slots = [
            (int(block_table[batch_index, position // block_size]), position % block_size)
            for position in range(lowest, seq_len)
        ]
        # [seq_len - lowest, num_kv_heads, head_dim], each KV head repeated for the query heads of its group
        keys = torch.stack([key_cache[block, :, offset] for block, offset in slots]).to(wide)
        values = torch.stack([value_cache[block, :, offset] for block, offset in slots]).to(wide)
        keys = keys.repeat_interleave(group, dim=1)
        values = values.repeat_interleave(group, dim=1)
        for flat_token in range(start, end):
            position = seq_len - (end - flat_token)
            first = _first_visible_reference(position, window, chunk)
            seen = slice(first - lowest, position + 1 - lowest)
            scores = torch.einsum("hd,khd->hk", query[flat_token].to(wide), keys[seen]) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            weights = torch.softmax(scores, dim=-1)
            out[flat_token] = torch.einsum("hk,khd->hd", weights, values[seen]).to(out.dtype)


def _first_visible_reference(position: int, window: int, chunk: int) -> int:
    if window:
        return max(0, position - window + 1)
    return position // chunk * chunk if chunk else 0
