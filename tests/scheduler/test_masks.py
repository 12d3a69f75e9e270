"""Requests whose answers must have a form: who waits for it, when a mask is made, and what it follows."""

from __future__ import annotations

import numpy as np
import pytest
from rowcast.scheduler.door import QueueFull
from rowcast.scheduler.front_messages import FinishCode
from rowcast.scheduler.request import RequestStatus
from rowcast.tests.scheduler.fake_forms import form
from rowcast.tests.scheduler.fakes import FRONT, VOCAB_SIZE, Bench

EOS = 3


def bench(**config) -> Bench:
    return Bench(**{"eos_token_ids": (EOS,), "depth": 2, **config})


def masked_rows(bench: Bench) -> list[int]:
    assert bench.last_step is not None
    return bench.last_step.masked_rows.tolist()


def test_answers_have_their_form_at_every_depth():
    """The tokens of a form are those that the request gets alone, whoever else runs and however far ahead."""
    for depth in (1, 2, 3):
        one = bench(depth=depth, max_num_seqs=3, max_num_batched_tokens=8, block_size=4, usable=9)
        for number in range(12):
            one.add(
                number + 1,
                max_tokens=6,
                ignore_eos=bool(number % 2),
                structured_outputs=None if number % 3 == 2 else form(number % 4 + 1, number + 1),
            )
        one.run()
        one.check_all_ended()
        assert one.scheduler.num_preemptions > 0


def test_a_request_waits_for_its_form_outside_the_queue_and_blocks_nobody():
    """A form may take a second to compile: whoever comes later runs meanwhile."""
    one = bench()
    one.grammars.at_once = False
    slow = one.add(4, structured_outputs=form(2, 3))
    free = one.add(4)
    assert (one.scheduler.num_compiling, one.waiting) == (1, [free])
    assert one.step() == {free: 4}
    one.grammars.finish()
    assert one.step() == {free: 1, slow: 4}
    one.run()
    one.check_all_ended()


def test_a_form_that_cannot_be_compiled_ends_its_own_request_alone():
    """E-04. Its key is forgotten with it, so that the client may mend the form and try again."""
    one = bench()
    bad = one.add(4, structured_outputs={"regex": "bad"})
    good = one.add(4, max_tokens=2)
    assert one.step() == {good: 4}
    assert one.scheduler.failed == [(FRONT, bad, "the regex cannot be compiled")]
    one.scheduler.failed.clear()
    one.run()
    del one.submits[bad]
    one.check_all_ended()


def test_a_matcher_that_gives_up_ends_its_own_request_alone():
    """At a limit of the compiler's, in the middle of an answer: the token under way is dropped."""
    one = bench()
    form_of = one.add(4, structured_outputs=form(2, 9), max_tokens=9)
    free = one.add(4, max_tokens=9)
    one.grammars.breaks_after = 3
    while not one.scheduler.failed:
        one.issue()
        one.settle()
    assert one.scheduler.failed == [(FRONT, form_of, "a limit was reached")]
    assert len(one.outputs[form_of]) == 3
    one.scheduler.failed.clear()
    del one.submits[form_of]
    one.run()
    assert one.ends == {free: FinishCode.LENGTH}
    one.check_all_ended()


@pytest.mark.parametrize("compiled", ["before", "after"])
def test_an_abort_while_the_form_is_compiled_leaves_nothing(compiled: str):
    one = bench()
    one.grammars.at_once = False
    number = one.add(4, structured_outputs=form(2, 3))
    if compiled == "before":
        one.grammars.finish()
    assert one.abort(number)
    one.grammars.finish()
    assert one.issue() is None
    one.drain()
    assert one.ends == {number: FinishCode.ABORT}
    one.check_empty()


def test_a_mask_is_made_once_the_tokens_it_follows_have_settled():
    """At once where no step of the row is in flight; and no step leaves before the mask of the one before."""
    one = bench(depth=3)
    number = one.add(4, structured_outputs=form(2, 9))
    one.issue()
    assert (masked_rows(one), one.scheduler._masks.due) == ([0], None)
    one.issue()
    assert masked_rows(one) == [0]
    assert one.scheduler._masks.due is not None
    assert one.scheduler.make_mask() is None
    with pytest.raises(AssertionError, match="waits for its mask"):
        one.scheduler.schedule()
    one.settle()
    assert one.scheduler._masks.due is None
    one.abort(number)
    one.run()
    one.check_all_ended()


def test_only_rows_that_sample_are_masked_in_batch_order():
    one = bench(depth=1, max_num_batched_tokens=8)
    one.add(2, structured_outputs=form(2, 9))
    one.add(2)
    one.step()
    assert masked_rows(one) == [0]
    late = one.add(20, structured_outputs=form(2, 9))
    assert one.step() == {0: 1, 1: 1, late: 6}  # a chunk of a prompt samples nothing
    assert masked_rows(one) == [0]
    for _ in range(3):
        one.step()
    assert masked_rows(one) == [0, 2]
    one.run()
    one.check_all_ended()


def made(one: Bench) -> list[list[int]]:
    """The ids of each row of the mask that is due."""
    mask = one.scheduler.make_mask()
    assert mask is not None
    ids = np.unpackbits(mask[1].view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in ids]


def test_a_row_whose_token_will_be_dropped_gets_all_ones():
    """The request ended in the step before, or was aborted: the row runs once more, and something must be chosen."""
    one = bench(depth=2)
    ends, goes, leaves = (one.add(4, structured_outputs=form(5, n)) for n in (1, 9, 9))
    scheduler = one.scheduler
    first = scheduler.schedule()
    assert first is not None
    assert first.masked_rows.tolist() == [0, 1, 2]
    start = [token for token in range(VOCAB_SIZE) if token % 5 == 0 and token != EOS]
    assert made(one) == [start] * 3
    second = scheduler.schedule()
    assert second is not None
    assert second.masked_rows.tolist() == [0, 1, 2]
    scheduler.abort(FRONT, leaves)
    scheduler.settle(np.array([5, 10, 15], np.int32))
    assert not scheduler.is_live(FRONT, ends)
    everything = list(range(VOCAB_SIZE))
    follows = [token for token in range(VOCAB_SIZE) if token % 5 == 1]
    assert made(one) == [everything, follows, everything]
    deliveries = scheduler.settle(np.array([7, 11, 8], np.int32))
    assert list(zip(deliveries.numbers, deliveries.tokens, strict=True)) == [(goes, 11)]


def test_a_request_that_loses_its_row_keeps_the_token_under_way_and_so_its_mask():
    one = bench(depth=2)
    number = one.add(4, structured_outputs=form(5, 9))
    one.issue()
    one.issue()
    assert one.scheduler._masks.due is not None
    assert one.scheduler.reset_prefix_cache(preempt_running=True)
    request = next(iter(one.scheduler.waiting))
    assert request.status is RequestStatus.WAITING
    one.settle()
    one.settle()
    assert [token % 5 for token in one.outputs[number]] == [0, 1]
    one.run()
    one.check_all_ended()


def test_an_ignored_eos_is_allowed_only_where_nothing_else_is():
    one = bench(depth=1)
    one.add(4, structured_outputs=form(1, 9), ignore_eos=True, max_tokens=9)
    one.add(4, structured_outputs=form(1, 9), max_tokens=9)
    for count in range(3):
        step = one.scheduler.schedule()
        assert step is not None
        ignores, takes = made(one)
        assert (EOS in ignores, EOS in takes) == (False, count >= 2)
        one.scheduler.settle(np.array([8, 8], np.int32))


def test_a_resubmitted_answer_goes_on_in_its_form_and_a_complete_one_ends():
    one = bench()
    half = one.add(4, outputs=(10, 21), structured_outputs=form(10, 4), max_tokens=9)
    whole = one.add(4, outputs=(10, 21), structured_outputs=form(10, 2), max_tokens=9)
    wrong = one.add(4, outputs=(10, 25), structured_outputs=form(10, 4), max_tokens=9)
    one.run()
    assert [token % 10 for token in one.outputs[half]][:1] in ([2], [EOS])
    assert (one.outputs.get(whole), one.ends[whole]) == (None, FinishCode.STOP)
    assert one.scheduler.failed == [(FRONT, wrong, "token 25 does not follow")]


def test_requests_that_wait_for_their_form_are_bounded_too():
    one = bench(max_waiting=2)
    one.grammars.at_once = False
    for _ in range(2):
        one.add(4, structured_outputs=form(2, 3))
    with pytest.raises(QueueFull, match="the queue holds 2"):
        one.add(4, structured_outputs=form(2, 3))


def test_an_engine_without_a_tokenizer_refuses_a_form_at_the_door():
    one = bench()
    one.scheduler._masks.grammars = None
    with pytest.raises(
        ValueError, match=r"request r0: structured_outputs need the model's tokenizer"
    ):
        one.add(4, structured_outputs=form(2, 3))
    assert one.scheduler.num_unfinished == 0
