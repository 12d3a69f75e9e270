"""The checks of the other tests can fail: each fault that they look for is made here by hand, and found."""

from __future__ import annotations

import numpy as np
import pytest
from rowcast.launch.bench.prefix_memory import Violation, first_seen
from rowcast.scheduler.messages import ProtocolError
from rowcast.tests.scheduler.fakes import Bench, group


def decoding(**config) -> Bench:
    """Two requests of 10 tokens that decode, block size 4: rows 0 and 1, three blocks each."""
    bench = Bench(block_size=4, **config)
    bench.add(10)
    bench.add(10)
    bench.step()
    return bench


def test_a_wrong_cell_of_a_row_whose_turn_it_is_stops_the_rank():
    """The digest of step 1 covers rows 1, 17, ...: the worker refuses the step before it reads anything."""
    bench = decoding()
    bench.worker.state.block_tables.table[0][1, 1] = 2
    with pytest.raises(ProtocolError, match="is not the scheduler's"):
        bench.issue()


def test_what_a_token_sees():
    positions = np.arange(10)
    assert first_seen(group(4), positions).tolist() == [0] * 10
    assert first_seen(group(4, window=4), positions).tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 5, 6]
    assert first_seen(group(4, chunk=4), positions).tolist() == [0, 0, 0, 0, 4, 4, 4, 4, 8, 8]


def test_a_wrong_cell_of_the_workers_table_is_found_by_the_read_and_by_the_comparison():
    bench = decoding()
    bench.worker.state.block_tables.table[0][0, 1] = 6  # row 1's
    with pytest.raises(Violation, match=r"block table 0 here and at the worker.*\[\[0, 1\]\]"):
        bench.check()
    with pytest.raises(Violation, match=r"position 4 of KV group 0, block 6, holds another prefix"):
        bench.issue()


def test_a_block_that_two_rows_write_is_found():
    bench = decoding()
    bench.worker.state.block_tables.table[0][0, 2] = bench.worker.state.block_tables.table[0][1, 2]
    with pytest.raises(Violation, match="are written twice in one step"):
        bench.issue()


def test_a_block_of_another_prefix_is_found():
    """The same tokens behind other ones are another prefix: their keys were computed elsewhere."""
    bench = Bench(block_size=4)
    bench.add([5, 6, 7, 8, 9])
    bench.add([1, 2, 3, 4, 5, 6, 7, 8, 9])
    bench.step()
    tables = bench.worker.state.block_tables.table[0]
    tables[0, 0] = tables[1, 1]  # tokens 5 6 7 8 too, but at positions 4 to 7
    with pytest.raises(Violation, match=r"row 0 .*position 0 .*holds another prefix"):
        bench.issue()


def test_a_window_block_that_was_overwritten_too_early_is_found():
    """Window 4 at position 10 sees 7 to 10: block 1 (positions 4 to 7) is still read; at 11 only block 2 is."""
    bench = Bench(groups=(group(4, window=4),))
    bench.add(10)
    bench.step()
    table, slots = bench.worker.state.block_tables.table[0], bench.worker.memory.slots
    assert bench.scheduler.blocks.block_ids[0][0, :3].tolist() == [0, 2, 3]
    slots[table[0, 0]] = 0
    assert bench.step() == {0: 1}
    slots[table[0, 1]] = 0
    assert bench.step() == {0: 1}
    slots[table[0, 2]] = 0
    with pytest.raises(Violation, match="position 9 of KV group 0"):
        bench.step()


@pytest.mark.parametrize(
    "column", ["num_tokens", "num_computed_tokens", "seeds", "num_prompt_tokens"]
)
def test_a_wrong_length_or_seed_at_the_worker_is_found(column):
    bench = decoding()
    getattr(bench.worker.state.requests, column)[1] += 1
    with pytest.raises(Violation, match="at the worker"):
        bench.check()


def test_a_wrong_token_at_the_worker_is_found():
    bench = decoding()
    bench.worker.state.requests.token_ids[1, 3] += 1
    with pytest.raises(Violation, match="token ids here and at the worker differ in rows: 1"):
        bench.check()


def test_a_lost_and_a_doubly_held_block_are_found():
    bench = decoding()
    bench.scheduler.pool.allocate(1)
    with pytest.raises(Violation, match="reference counts differ"):
        bench.check()
    bench = decoding()
    bench.scheduler.blocks.block_ids[0][0, 0] = bench.scheduler.blocks.block_ids[0][1, 0]
    with pytest.raises(Violation, match="reference counts differ"):
        bench.check()


def test_a_request_in_two_places_is_found():
    bench = decoding(max_num_seqs=2)
    bench.add(10)
    bench.scheduler.waiting.add(bench.scheduler.table.occupant(0))
    with pytest.raises(Violation, match="a waiting request"):
        bench.check()


def test_something_that_waits_for_nothing_is_found():
    """S01: a head that can never start. The door refuses it; here it is slipped in behind the door."""
    bench = Bench(usable=3)
    bench.add(10)
    bench.scheduler.waiting.head().tokens = np.zeros(100, np.int32)
    assert bench.issue() is None
    with pytest.raises(Violation, match="nothing of what waits is scheduled: r0"):
        bench.issue()
