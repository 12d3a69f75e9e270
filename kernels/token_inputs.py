"""Token ids, positions and sequence lengths of one step, gathered out of the persistent tables.

    position = num_computed_tokens[row] + flat_token - query_start_loc[batch_index],  row = index_mapping[batch_index]
    input_ids[flat_token] = token_ids[row, position];   seq_lens[batch_index] = num_computed_tokens[row] + query_len

program_id(0) is batch_index; one more program than requests clears the padding behind the real part.
It owns no table: rows and lengths are taken as given, checked where the step's message is.
"""

# pyright: reportArgumentType=false
# (a launch takes plain numbers where the kernel's own signature says tl.constexpr)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._checks import check_int_tensors


# These change from step to step: a form compiled for a 1 or a multiple of 16 would compile while serving.
@triton.jit(do_not_specialize=["num_reqs", "num_input_ids", "num_positions", "num_seq_lens"])
def _token_inputs_kernel(
    index_mapping,  # [num_reqs] int32
    query_start_loc,  # [num_reqs + 1] int32
    num_computed_tokens,  # [max_num_seqs] int32
    token_ids,  # [max_num_seqs, max_model_len] int32
    input_ids,  # [num_input_ids] int32, written
    positions,  # [num_positions] int64, written
    seq_lens,  # [num_seq_lens] int32, written
    num_reqs,
    num_input_ids,
    num_positions,
    num_seq_lens,
    token_ids_stride,  # items from one row to the next
    BLOCK: tl.constexpr,
):
    batch_index = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    if batch_index == num_reqs:
        num_tokens = tl.load(query_start_loc + num_reqs)
        for first in range(num_tokens, num_input_ids, BLOCK):
            index = first + lane
            tl.store(input_ids + index, tl.zeros([BLOCK], tl.int32), mask=index < num_input_ids)
        for first in range(num_tokens, num_positions, BLOCK):
            index = first + lane
            tl.store(positions + index, tl.zeros([BLOCK], tl.int64), mask=index < num_positions)
        for first in range(num_reqs, num_seq_lens, BLOCK):
            index = first + lane
            tl.store(seq_lens + index, tl.zeros([BLOCK], tl.int32), mask=index < num_seq_lens)
        return
    start = tl.load(query_start_loc + batch_index)
    query_len = tl.load(query_start_loc + batch_index + 1) - start
    if query_len == 0:  # a padded request: its row is not to be trusted
        tl.store(seq_lens + batch_index, 0)
        return
    row = tl.load(index_mapping + batch_index).to(tl.int64)
    computed = tl.load(num_computed_tokens + row)
    tl.store(seq_lens + batch_index, computed + query_len)
    for first in range(0, query_len, BLOCK):
        offset = first + lane
        real = offset < query_len
        position = computed + offset
        token = tl.load(token_ids + row * token_ids_stride + position, mask=real, other=0)
        tl.store(input_ids + start + offset, token, mask=real)
        tl.store(positions + start + offset, position.to(tl.int64), mask=real)


def token_inputs(
    index_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Write this step's token ids, positions and sequence lengths; zeros behind the real part.

    Shapes: index_mapping [num_reqs] int32; query_start_loc [num_reqs + 1] int32; num_computed_tokens [max_num_seqs]
        int32; token_ids [max_num_seqs, max_model_len] int32; input_ids [>= num_tokens] int32 and positions
        [>= num_tokens] int64 in flat-token order, seq_lens [>= num_reqs] int32 in batch order: all three written.
    Units: lengths and positions are tokens. A sequence's length counts the tokens of this step.
    Example: index_mapping [7, 6], query_start_loc [0, 1, 9], 31 and 16 tokens computed: positions
        [31, 16, 17, 18, 19, 20, 21, 22, 23], seq_lens [32, 24].
    Raises: ValueError for another dtype, a query_start_loc of another length, or seq_lens too short. That the outputs
        hold query_start_loc[-1] tokens is the caller's to know: asking the device would stop the stream.
    Source: DESIGN.md section 1.
    """
    num_reqs = index_mapping.shape[0]
    check_int_tensors(
        "token_inputs",
        index_mapping=(index_mapping, torch.int32, 1),
        query_start_loc=(query_start_loc, torch.int32, 1),
        num_computed_tokens=(num_computed_tokens, torch.int32, 1),
        token_ids=(token_ids, torch.int32, 2),
        input_ids=(input_ids, torch.int32, 1),
        positions=(positions, torch.int64, 1),
        seq_lens=(seq_lens, torch.int32, 1),
    )
    if query_start_loc.shape[0] != num_reqs + 1:
        raise ValueError(
            f"token_inputs: query_start_loc must have {num_reqs + 1} entries, got {query_start_loc.shape[0]}"
        )
    if seq_lens.shape[0] < num_reqs:
        raise ValueError(
            f"token_inputs: seq_lens must hold {num_reqs} requests, got {seq_lens.shape[0]}"
        )
    _token_inputs_kernel[(num_reqs + 1,)](
        index_mapping,
        query_start_loc,
        num_computed_tokens,
        token_ids,
        input_ids,
        positions,
        seq_lens,
        num_reqs,
        input_ids.shape[0],
        positions.shape[0],
        seq_lens.shape[0],
        token_ids.stride(0),
        BLOCK=256,
    )


def token_inputs_reference(
    index_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """The same, a token at a time."""
    input_ids.zero_()
    positions.zero_()
    seq_lens.zero_()
    for batch_index, row in enumerate(index_mapping.tolist()):
        start, end = query_start_loc[batch_index : batch_index + 2].tolist()
        if start == end:
            continue
        computed = int(num_computed_tokens[row])
        seq_lens[batch_index] = computed + end - start
        for flat_token in range(start, end):
            position = computed + flat_token - start
            positions[flat_token] = position
            input_ids[flat_token] = token_ids[row, position]
