"""Who runs in a step, and when a request ends. Expected values are worked out in place; block_size is 16."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from rowcast.scheduler.front_messages import FinishCode
from rowcast.scheduler.messages import ProtocolError
from rowcast.tests.scheduler.fakes import Bench, group, hash_model, scripted

EOS = 3


# ---------------------------------------------------------------- admission


@pytest.mark.parametrize("asked", [{}, {"prompt_logprobs": 5}])
def test_everyone_who_fits_starts_in_arrival_order(asked):
    """S-01: a row that is skipped or taken out of order makes a request wait though there is room for it."""
    bench = Bench(prefix_caching=bool(asked))
    for number in range(10):
        bench.add([number] * 10, **asked)
        assert len(bench.waiting) == number + 1
    assert bench.step() == {number: 10 for number in range(10)}
    assert bench.running == list(range(10))
    assert bench.waiting == []
    assert bench.last_step.freed_rows.tolist() == []
    assert bench.last_step.admissions.request_ids == tuple(f"r{number}" for number in range(10))
    assert bench.num_tokens_run == 100


def test_running_and_waiting_are_counted_through_a_life():
    """E-01: a request counted in two queues, or in none, is one that nobody runs or that ends twice."""
    bench = Bench()

    def counts() -> tuple[int, int]:
        assert bench.scheduler.num_unfinished == len(bench.waiting) + len(bench.running)
        return len(bench.waiting), bench.scheduler.num_running

    seen = []
    for num_added in (1, 1, 2):
        for _ in range(num_added):
            bench.add(10)
        seen.append(counts())
        bench.step()
        seen.append(counts())
    assert seen == [(1, 0), (0, 1), (1, 1), (0, 2), (2, 2), (0, 4)]
    bench.run()
    assert counts() == (0, 0)
    bench.check_all_ended()


def test_the_token_budget_bounds_admission():
    """S-03: the third prompt of 50 does not fit a budget of 100, not even in part."""
    bench = Bench(max_num_batched_tokens=100)
    for _ in range(3):
        bench.add(50)
    assert bench.issue() == {0: 50, 1: 50}
    assert (bench.running, bench.waiting) == ([0, 1], [2])


def test_the_row_count_bounds_admission():
    """S-04: two rows, four requests; each end lets exactly one in, in order."""
    bench = Bench(max_num_seqs=2, max_num_batched_tokens=1000)
    for max_tokens in (3, 9, 2, 2):
        bench.add(10, max_tokens=max_tokens)
    assert bench.step() == {0: 10, 1: 10}
    assert bench.waiting == [2, 3]
    assert bench.step() == bench.step() == {0: 1, 1: 1}
    assert bench.ends == {0: FinishCode.LENGTH}
    assert bench.step() == {1: 1, 2: 10}
    assert bench.step() == {1: 1, 2: 1}
    assert bench.step() == {1: 1, 3: 10}


def test_nobody_overtakes_the_head_of_the_queue():
    """S-05: the long head takes what is left of the budget, the short ones behind it wait."""
    bench = Bench(max_num_batched_tokens=1024, max_num_seqs=3, max_model_len=1024)
    for length in (800, 800, 10, 10):
        bench.add(length)
    assert bench.step() == {0: 800, 1: 224}
    assert bench.step() == {0: 1, 1: 576, 2: 10}
    assert bench.waiting == [3]


def test_a_head_that_lacks_blocks_is_not_overtaken():
    """L01: an endless stream of requests of 2 blocks kept one of 40 waiting for ever. Here nobody overtakes it.

    64 blocks, 10 of them free: a ends after its second token and gives 30 back, b after its fifth, 24.
    """
    bench = Bench(usable=64, max_model_len=1024)
    a = bench.add(30 * 16 - 1, max_tokens=2)
    b = bench.add(24 * 16 - 4, max_tokens=5)
    bench.step()
    assert bench.free == 10
    head = bench.add(40 * 16, max_tokens=1)
    small = [bench.add(20, max_tokens=1) for _ in range(2)]
    assert bench.step() == {a: 1, b: 1}
    small.append(bench.add(20, max_tokens=1))
    assert bench.step() == {b: 1, head: 40 * 16}  # 10 + 30 blocks, all of them the head's
    small.append(bench.add(20, max_tokens=1))
    assert bench.step() == {b: 1} | dict.fromkeys(small, 20)
    bench.run()
    bench.check_all_ended()


def test_a_prompt_is_admitted_only_if_all_of_its_blocks_are_free():
    """S03, E-07: B's first chunk fits beside A, B as a whole does not; admitted early it was preempted five times."""
    bench = Bench(usable=20, max_num_batched_tokens=64)
    bench.add(160, max_tokens=16)
    bench.add(200, max_tokens=4)
    bench.run()
    assert bench.scheduler.num_preemptions == 0
    assert bench.issued == {0: 160 + 16 - 1, 1: 200 + 4 - 1}
    bench.check_all_ended()


def test_two_prompts_of_six_tenths_of_the_pool_run_one_after_the_other():
    """E-07: admitted by their first chunks, they computed against each other and neither came to an end."""
    bench = Bench(usable=10, max_num_batched_tokens=32)
    for _ in range(2):
        bench.add(6 * 16, max_tokens=4)
    bench.run()
    assert bench.scheduler.num_preemptions == 0
    assert bench.issued == {0: 96 + 3, 1: 96 + 3}
    bench.check_all_ended()


def test_blocks_of_a_running_prompts_later_chunks_are_promised_to_it():
    """S03: r0 has 2 of its 7 blocks after its first chunk. 8 of 10 are free, and 3 of them for others: r1 needs 4.

    Admitted, r1 ran its prompt and was preempted by r0's last chunk, or r0 waited for it.
    """
    bench = Bench(usable=10, max_num_batched_tokens=64, long_prefill_token_threshold=32)
    bench.add(7 * 16, max_tokens=2)
    bench.add(4 * 16, max_tokens=2)
    bench.add(3 * 16, max_tokens=2)
    assert bench.step() == {0: 32}
    assert bench.free == 8
    assert [bench.step() for _ in range(3)] == [{0: 32}, {0: 32}, {0: 16}]
    assert bench.step() == {0: 1}  # its eighth block leaves two
    assert bench.step() == {1: 32, 2: 32}
    bench.run()
    assert bench.scheduler.num_preemptions == 0
    bench.check_all_ended()


# ---------------------------------------------------------------- chunks


def test_long_prompts_share_a_step():
    """C-01 without a cap per request: 800 + 224, then what is left of the second and a part of the third."""
    bench = Bench(max_num_batched_tokens=1024, max_model_len=1024)
    for _ in range(3):
        bench.add(800)
    assert bench.step() == {0: 800, 1: 224}
    assert set(bench.outputs) == {0}
    assert bench.step() == {0: 1, 1: 576, 2: 1024 - 577}
    assert set(bench.outputs) == {0, 1}
    assert bench.step() == {0: 1, 1: 1, 2: 800 - 447}
    assert {number: len(tokens) for number, tokens in bench.outputs.items()} == {0: 3, 1: 2, 2: 1}


def test_long_prompts_share_a_step_up_to_their_cap():
    """C-01 as it stands: cap 400. The first step samples for nobody, the second not for r2, the third for all."""
    bench = Bench(max_num_batched_tokens=1024, max_model_len=1024, long_prefill_token_threshold=400)
    for _ in range(3):
        bench.add(800)
    assert bench.step() == {0: 400, 1: 400, 2: 224}
    assert bench.outputs == {}
    assert bench.step() == {0: 400, 1: 400, 2: 224}
    assert set(bench.outputs) == {0, 1}
    assert bench.step() == {0: 1, 1: 1, 2: 352}
    assert {number: len(tokens) for number, tokens in bench.outputs.items()} == {0: 2, 1: 2, 2: 1}


def test_a_lone_request_has_no_cap():
    """C-07: nobody waits behind it. With two requests each takes 16 of its 33 tokens."""
    bench = Bench(long_prefill_token_threshold=16)
    bench.add(33)
    assert bench.step() == {0: 33}
    bench = Bench(long_prefill_token_threshold=16)
    bench.add(33)
    bench.add(33)
    assert [bench.step() for _ in range(3)] == [{0: 16, 1: 16}] * 2 + [{0: 1, 1: 1}]


def test_a_cap_lets_a_newcomer_start_beside_the_long_prompt():
    """S19 as it stands: N's first token comes after two steps, and D has one in each, also with another long prompt."""
    for num_long in (1, 2):
        bench = Bench(max_num_batched_tokens=16, long_prefill_token_threshold=8)
        decode = bench.add(4, max_tokens=40)
        bench.step()
        long = [bench.add(160) for _ in range(num_long)]
        steps = [bench.step()]
        newcomer = bench.add(8)
        steps += [bench.step(), bench.step()]
        if num_long == 1:
            assert steps == [
                {decode: 1, long[0]: 8},
                {decode: 1, newcomer: 7, long[0]: 8},
                {decode: 1, newcomer: 1, long[0]: 8},
            ]
            assert len(bench.outputs[newcomer]) == 1
        assert [step[decode] for step in steps] == [1, 1, 1]


def test_the_last_chunk_is_the_remainder():
    """C-03: budget 50, prompt 80. No token after the first step, one after the second."""
    bench = Bench(max_num_batched_tokens=50)
    bench.add(80)
    assert bench.step() == {0: 50}
    assert bench.outputs == {}
    assert bench.step() == {0: 30}
    assert len(bench.outputs[0]) == 1
    assert bench.step() == {0: 1}


def test_a_long_prompt_does_not_starve_a_decode():
    """C-04, S19: the decode keeps its token in every step, and the prompt takes the rest."""
    bench = Bench(max_num_batched_tokens=50)
    bench.add(4)
    bench.step()
    bench.add(80)
    assert bench.step() == {0: 1, 1: 49}
    assert bench.step() == {0: 1, 1: 31}
    assert bench.step() == {0: 1, 1: 1}


def test_a_newcomer_waits_for_the_long_prompt_before_it():
    """S19: without a cap per request the default is arrival order. N first runs in step 12; D never misses a token."""
    bench = Bench(max_num_batched_tokens=16)
    decode = bench.add(4, max_tokens=40)
    bench.step()
    long = bench.add(160)
    steps = [bench.step()]
    newcomer = bench.add(8)
    steps += [bench.step() for _ in range(11)]  # the first of them is step 3
    assert steps[:10] == [{decode: 1, long: 15}] * 10
    assert steps[10] == {decode: 1, newcomer: 5, long: 10}
    assert steps[11] == {decode: 1, long: 1, newcomer: 3}
    assert (len(bench.outputs[newcomer]), len(bench.outputs[decode])) == (1, 13)


@pytest.mark.parametrize("budget", [1, 7, 16, 17, 48])
@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_chunk_and_block_sizes_do_not_change_tokens(budget, block_size):
    """C-06: a chunk that starts at the wrong position reads another history."""
    bench = Bench(max_num_batched_tokens=budget, block_size=block_size, eos_token_ids=(EOS,))
    for length in (1, 15, 16, 17, 33, 50):
        bench.add(length, max_tokens=12)
    bench.run()
    bench.check_all_ended()


def test_more_groups_of_other_block_sizes_share_the_pool():
    """Every group has its own table; one pool gives to all, and takes all back."""
    bench = Bench(groups=(group(16), group(32), group(8)), usable=40, max_num_batched_tokens=30)
    for length in (40, 5, 64, 33):
        bench.add(length, max_tokens=20)
    bench.step()
    held = [table[0] for table in bench.scheduler.blocks.num_blocks]
    assert held == [2, 1, 4]  # 30 tokens: ceil(30 / 16), ceil(30 / 32), ceil(30 / 8)
    assert [len(ids) for ids in bench.last_step.grown_block_ids] == [2, 1, 4]
    bench.run()
    bench.check_all_ended()


# ---------------------------------------------------------------- fewer tokens than rows


def test_a_budget_below_the_row_count_serves_rows_in_turn():
    """Always the first rows, and the last ones starve: five rows, two tokens a step, all served within three steps."""
    bench = Bench()
    for _ in range(5):
        bench.add(3, max_tokens=20)
    bench.step()
    ran = []
    for _ in range(5):
        ran.append(sorted(bench.issue(token_budget=2)))
        bench.settle()
    assert ran == [[0, 1], [2, 3], [0, 4], [1, 2], [3, 4]]
    assert sorted(bench.last_step.paused_rows.tolist()) == [0, 1, 2]
    bench.run()
    bench.check_all_ended()


def test_prompts_take_their_turn_too_when_rows_are_served_in_turn():
    """A prompt in the middle of its chunks has no turn if only decodes go round."""
    bench = Bench(max_num_batched_tokens=10)
    bench.add(3, max_tokens=30)
    bench.add(4, max_tokens=30)
    bench.add(20, max_tokens=30)
    assert bench.step() == {0: 3, 1: 4, 2: 3}
    seen = []
    for _ in range(3):
        seen.append(bench.issue(token_budget=1))
        bench.settle()
    assert seen == [{0: 1}, {1: 1}, {2: 1}]
    bench.run()
    bench.check_all_ended()


def test_nothing_is_said_of_a_steady_row():
    """A decode step names no row: its frame holds new blocks alone, whatever the number of rows."""
    bench = Bench(max_num_seqs=64)
    for _ in range(64):
        bench.add(20, max_tokens=100)
    bench.step()
    sizes = []
    for _ in range(30):
        bench.step()
        step = bench.last_step
        assert step.admissions is None
        fields = (step.freed_rows, step.run_rows, step.run_counts, step.paused_rows)
        assert not any(len(column) for column in fields)
        sizes.append((len(step.grown_block_ids[0]), len(bench.last_frame)))
    # 20 tokens hold 2 blocks; the 13th decode computes token 33 and opens a third block in every row
    assert [grown for grown, _ in sizes] == [0] * 12 + [64] + [0] * 15 + [64, 0]
    assert max(size for grown, size in sizes if not grown) < 40


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize(
    ("params", "fed", "delivered", "code"),
    [
        ({}, [EOS, 10], [EOS], FinishCode.STOP),
        ({"stop_token_ids": (42, 43)}, [10, 42, 12], [10, 42], FinishCode.STOP),
        ({"max_tokens": 2}, [10, 11, 12], [10, 11], FinishCode.LENGTH),
        ({"ignore_eos": True}, [EOS, 10, 11], [EOS, 10, 11], None),
        ({"max_tokens": 1}, [EOS], [EOS], FinishCode.STOP),
        ({"max_tokens": 1, "stop_token_ids": (42,)}, [42], [42], FinishCode.STOP),
        ({"max_tokens": 1, "ignore_eos": True}, [EOS], [EOS], FinishCode.LENGTH),
        ({"ignore_eos": True, "stop_token_ids": (EOS,)}, [EOS], [EOS], FinishCode.STOP),
        ({"min_tokens": 5}, [10, 11, EOS, 12, EOS], [10, 11, EOS, 12, EOS], FinishCode.STOP),
        (
            {"min_tokens": 3, "stop_token_ids": (42,)},
            [42, 42, 10, 42],
            [42, 42, 10, 42],
            FinishCode.STOP,
        ),
        ({"min_tokens": 3, "max_tokens": 3}, [EOS, 10, 11], [EOS, 10, 11], FinishCode.LENGTH),
    ],
)
def test_how_a_request_ends(params, fed, delivered, code):
    """S-10, S-11, S-12: EOS, then stop ids, then length; the neighbour in the same step is untouched.

    The ranks choose no end before min_tokens; where one comes all the same it is not taken for one.
    """
    neighbour = [20, 21, 22, 23, 24, 25, 26]
    model = scripted({0: fed, 1: neighbour}, {0: 5, 1: 5})
    bench = Bench(model=model, eos_token_ids=(EOS,))
    bench.add(5, **({"max_tokens": 16} | params))
    bench.add(5)
    for _ in delivered:
        bench.step()
    assert bench.outputs[0] == delivered
    assert bench.ends == ({} if code is None else {0: code})
    bench.step()
    assert bench.outputs[1] == neighbour[: len(bench.outputs[1])]
    assert len(bench.outputs[1]) == len(delivered) + 1
    freed = bench.last_step.freed_rows.tolist()
    assert freed == ([] if code is None else [0])
    bench.step()
    assert bench.last_step.freed_rows.tolist() == []


def test_a_stop_id_of_one_request_does_not_end_another():
    """The table over the vocabulary is shared; whose id it is is looked up."""
    model = scripted({0: [42] * 3, 1: [42] * 3, 2: [42] * 3}, {0: 2, 1: 2, 2: 2})
    bench = Bench(model=model)
    bench.add(2, max_tokens=3)
    bench.add(2, max_tokens=3, stop_token_ids=(42,))
    bench.add(2, max_tokens=3, stop_token_ids=(42, 7))
    bench.run()
    assert {number: len(tokens) for number, tokens in bench.outputs.items()} == {0: 3, 1: 1, 2: 1}


def test_a_step_without_tokens_tells_workers_who_ended():
    """S13: with nothing else to do, the last end still has to reach the workers: "no requests" once meant no update."""
    bench = Bench()
    bench.add(5, max_tokens=1)
    assert bench.step() == {0: 5}
    assert bench.worker.state.requests.live.sum() == 1
    assert bench.step() == {}
    assert bench.last_step.freed_rows.tolist() == [0]
    assert bench.issue() is None
    bench.check_all_ended()


def test_a_thousand_requests_one_after_another_leave_nothing():
    """S13: workers kept the rows of requests that ended before an idle time; half of these end after a single token."""
    bench = Bench(max_num_seqs=4, usable=20)
    for number in range(1000):
        bench.add(3 + number % 40, max_tokens=1 if number % 2 else 3)
        bench.run()
        assert not bench.worker.state.requests.live.any()
        assert bench.free == 20
        bench.scheduler.forget(b"front", [number])
        assert bench.scheduler.num_remembered == 0
    bench.check_all_ended()


def test_an_end_that_is_not_acknowledged_stays_known():
    """The key of a request whose end the front may not have seen keeps a resubmission from running again."""
    bench = Bench()
    bench.add(5, max_tokens=1)
    bench.run()
    assert bench.scheduler.num_remembered > 0
    bench.add(5, number=0, max_tokens=1)
    assert bench.waiting == []
    bench.check_empty()


def test_overlapping_requests_leave_nothing():
    """S-08: one added per step, five in all; each gives its row, blocks and entries back while others run."""
    bench = Bench(vocab_size=1001, model=lambda seed, tokens: 1000)
    for _ in range(5):
        bench.add(10, max_tokens=10)
        bench.step()
    bench.run()
    assert bench.outputs == {number: [1000] * 10 for number in range(5)}
    assert bench.free == 9_999
    assert not bench.scheduler.pool.ref_counts.any()
    assert not any(counts.any() for counts in bench.scheduler.blocks.num_blocks)
    bench.check_all_ended()


# ---------------------------------------------------------------- a result that cannot be


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([1], "carries 1 tokens, its step ran 2"),
        ([1, 101], r"carries token 101, expected one in \[0, 101\)"),
        ([1, -1], "carries token -1"),
        ([], "carries 0 tokens"),
    ],
)
def test_a_result_that_its_step_cannot_give_is_refused_and_changes_nothing(tokens, said):
    bench = Bench()
    bench.add(4)
    bench.add(5)
    bench.issue()
    with pytest.raises(ProtocolError, match=said):
        bench.scheduler.settle(np.array(tokens, np.int32))
    bench.settle()
    assert all(len(tokens) == 1 for tokens in bench.outputs.values())


def test_a_token_of_a_row_that_did_not_sample_is_refused():
    """Settled by place alone, a chunk's garbage would become its request's first output."""
    bench = Bench(max_num_batched_tokens=10)
    bench.add(40)
    bench.issue()
    with pytest.raises(ProtocolError, match="did not sample"):
        bench.scheduler.settle(np.array([5], np.int32))


def frames_of_a_busy_run() -> list[bytes]:
    bench = Bench(usable=12, max_num_batched_tokens=20, eos_token_ids=(EOS,))
    frames = []
    for number in range(12):
        bench.add(7 * number % 30 + 1, request_id=f"id-{number * 7919}", stop_token_ids=(9, 8))
    bench.abort(4)
    while bench.step() is not None:
        frames.append(bench.last_frame)
    return frames


def test_identical_inputs_give_identical_frames_in_every_process():
    """W-15: hash order of strings differs between processes; nothing here may depend on it."""
    frames = frames_of_a_busy_run()
    assert len(frames) > 20
    code = (
        "import hashlib, rowcast.tests.scheduler.test_scheduler as t;"
        "print(hashlib.sha256(b''.join(t.frames_of_a_busy_run())).hexdigest())"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    assert found == [hashlib.sha256(b"".join(frames)).hexdigest()] * 2


def test_hash_model_notices_order_place_and_seed():
    """The fake model is what makes 'equal to alone' mean something."""
    tokens = np.array([4, 9, 4])
    results = {
        hash_model(1, tokens),
        hash_model(2, tokens),
        hash_model(1, tokens[::-1] + 1),
        hash_model(1, np.array([9, 4, 4])),
        hash_model(1, tokens[:2]),
    }
    assert len(results) > 3
