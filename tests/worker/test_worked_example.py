"""The worked example of DESIGN.md section 1, number for number, from the frame's bytes to the input tensors."""

from __future__ import annotations

from rowcast.scheduler.messages import SchedulerOutput, decode_frame, encode_step
from rowcast.tests.worker.steps import make_state, request, step
from rowcast.worker.backend import select_backend
from rowcast.worker.input_batch import InputBuilder


def test_worked_example(kernel_backend: str):
    """Request B is row 7: 31 tokens computed, blocks [37, 12]. Request A is row 6: 16 computed, blocks [81, 44]."""
    state = make_state(16, max_num_seqs=8, max_model_len=64, num_blocks=100)
    builder = InputBuilder(
        state, select_backend(kernel_backend, "cpu"), max_num_batched_tokens=32, device="cpu"
    )
    b_tokens, a_tokens = list(range(300, 332)), list(range(500, 524))
    frame = encode_step(
        step(
            request(7, b_tokens, [37, 12], cached=31, request_id="B"),
            request(6, a_tokens, [81, 44], cached=16, request_id="A"),
            run={6: 8},
        ),
        epoch=1,
        sequence=1,
    )
    decoded = decode_frame(frame).body
    assert isinstance(decoded, SchedulerOutput)
    batch = builder.build(state.apply(decoded))

    assert (batch.num_reqs, batch.num_tokens) == (2, 9)
    assert batch.index_mapping.tolist() == [7, 6]
    assert batch.query_start_loc.tolist() == [0, 1, 9]
    assert batch.positions.tolist() == [31, 16, 17, 18, 19, 20, 21, 22, 23]
    assert batch.seq_lens.tolist() == [32, 24]
    (slot_mapping,) = batch.slot_mappings
    assert slot_mapping.tolist() == [12 * 16 + 15, *range(44 * 16, 44 * 16 + 8)]
    assert slot_mapping.tolist() == [207, 704, 705, 706, 707, 708, 709, 710, 711]
    (input_block_table,) = batch.input_block_tables
    assert input_block_table.tolist() == [[37, 12], [81, 44]]
    assert batch.input_ids.tolist() == [331, *range(516, 524)]
    assert batch.logits_indices.tolist() == [0, 8]
    assert batch.sample_batch_indices.tolist() == [0, 1]
    assert (batch.max_query_len, batch.max_seq_len) == (8, 32)
