"""Log-probabilities on their way through the scheduler: to whom, how often, and with which token.

`Bench` checks every row that is delivered: it belongs to its place, comes once, and with its token.
"""

from __future__ import annotations

import numpy as np
import pytest
from rowcast.launch.bench.fake_logprobs import rows_at
from rowcast.scheduler.extras import LogprobRows, RowExtras
from rowcast.scheduler.front_messages import FinishCode
from rowcast.scheduler.messages import ProtocolError
from rowcast.tests.scheduler.fakes import FRONT, VOCAB_SIZE, Bench


def extras_of(bench: Bench) -> dict[int, RowExtras]:
    """What the oldest step in flight will bring, to be changed."""
    tokens, extras = bench.engine._results[0]
    changed = dict(extras or {})
    bench.engine._results[0] = (tokens, changed)
    return changed


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "asked",
    [
        {"logprobs": 2},
        {"logprobs": 0, "prompt_logprobs": 0},
        {"prompt_logprobs": 20},
    ],
)
def test_preempted_requests_get_each_row_once(depth, asked):
    """P-09, SA-13: a resumed prompt is computed again, but its rows were delivered: no row twice, none missing."""
    bench = Bench(
        usable=13, block_size=4, depth=depth, max_num_batched_tokens=14, prefix_caching=True
    )
    for _ in range(4):
        bench.add(13, max_tokens=12, **asked)
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    bench.check_all_ended()
    expected = {number: 13 for number in range(4)} if "prompt_logprobs" in asked else {}
    assert bench.scored == expected


def test_a_prompt_preempted_between_its_chunks_goes_on_where_its_rows_end():
    """The rows of a chunk in flight at the preemption are kept: the resumed admission asks for those behind them."""
    bench = Bench(usable=16, block_size=4, depth=2, max_num_batched_tokens=8, prefix_caching=True)
    bench.add(30, prompt_logprobs=1, logprobs=1, max_tokens=3)
    assert bench.issue() == {0: 8}
    assert bench.issue() == {0: 8}
    bench.scheduler.reset_prefix_cache(preempt_running=True)
    bench.settle()
    bench.settle()
    assert bench.scored == {0: 17}
    assert bench.issue() == {0: 8}
    assert bench.last_step is not None
    assert bench.last_step.admissions is not None
    (features,) = bench.last_step.admissions.features
    assert features is not None
    assert features.prompt_logprobs_from == 17
    assert not extras_of(bench)  # positions 1 to 8 again: nothing is asked of them
    bench.run()
    bench.check_all_ended()
    assert bench.scored == {0: 30}


def test_prompt_logprobs_compute_what_is_cached_and_publish_it():
    """PC-13, B15: 55 tokens publish 3 blocks; a plain request hits 48 tokens; one that asks hits none, and has rows."""
    bench = Bench(block_size=16, prefix_caching=True)
    prompt = list(range(55))
    first = bench.add(prompt, prompt_logprobs=5, max_tokens=1)
    bench.run()
    plain = bench.add(prompt, max_tokens=1)
    assert bench.step() == {plain: 7}
    again = bench.add(prompt, prompt_logprobs=5, max_tokens=1)
    assert bench.step() == {again: 55}
    other_salt = bench.add(prompt, prompt_logprobs=5, max_tokens=1, submit={"cache_salt": "x"})
    bench.run()
    salted = bench.add(prompt, max_tokens=1, submit={"cache_salt": "x"})
    assert bench.step() == {salted: 7}  # what a request that asks has computed is published
    assert (bench.scored[first], bench.scored[again], bench.scored[other_salt]) == (55, 55, 55)
    assert bench.cached == {plain: 48, salted: 48}
    bench.run()
    bench.check_all_ended()


def test_a_resumed_request_that_has_its_prompts_rows_reads_the_cache():
    bench = Bench(usable=13, block_size=4, prefix_caching=True)
    for number in range(2):
        bench.add(21, number=number, prompt_logprobs=2, max_tokens=20)
    hits = []
    while bench.scheduler.num_unfinished:
        bench.step()
        if bench.last_step is not None and bench.last_step.admissions is not None:
            hits += bench.last_step.admissions.num_cached_tokens.tolist()
    assert hits[:2] == [0, 0]
    assert hits[2] > 0
    bench.run()
    bench.check_all_ended()
    assert bench.scored == {0: 21, 1: 21}


def test_a_request_that_comes_with_outputs_has_the_rows_of_its_prompt():
    """A resubmission: tokens and their rows never part, so whoever holds the first output holds the prompt's rows."""
    bench = Bench()
    outputs = bench.alone(bench.add(9, max_tokens=8))[0]
    bench.run()
    bench.add(
        list(range(9)), outputs=outputs[:3], seed=0, prompt_logprobs=3, logprobs=3, max_tokens=8
    )
    bench.run()
    bench.check_all_ended()
    assert bench.scored == {}


def test_a_prompt_of_one_token_has_no_rows():
    bench = Bench()
    bench.add(1, prompt_logprobs=3, max_tokens=2)
    bench.run()
    bench.check_all_ended()
    assert bench.scored == {}


def test_what_was_aborted_gets_no_rows_and_the_next_occupant_of_its_row_none_of_its():
    """Late rows of an ended request are dropped with its tokens, also where its row has changed hands."""
    bench = Bench(depth=2, max_num_seqs=1, max_num_batched_tokens=8)
    bench.add(20, prompt_logprobs=1, logprobs=1, max_tokens=5)
    bench.issue()
    bench.issue()
    bench.abort(0)
    bench.add(6, logprobs=3, max_tokens=3)
    bench.run()
    assert bench.ends == {0: FinishCode.ABORT, 1: FinishCode.LENGTH}
    assert bench.scored == {}
    bench.check_empty()


def test_a_token_in_flight_behind_the_end_is_dropped_with_its_row():
    """Depth 2: a row found to have stopped has run once more; a row that ends by length has left its row."""
    for params in ({"stop_token_ids": (17,)}, {}):
        bench = Bench(depth=2, model=lambda seed, tokens: 17 if len(tokens) > 5 else 3)
        bench.add(4, logprobs=1, prompt_logprobs=1, max_tokens=8, **params)
        bench.run()
        assert len(bench.outputs[0]) == (3 if params else 8)
        bench.check_all_ended()


def test_rows_go_to_the_fronts_of_their_requests():
    bench = Bench()
    for number, front in ((0, FRONT), (1, b"other"), (2, FRONT)):
        bench.add(5, number=number, front=front, logprobs=number, prompt_logprobs=1, max_tokens=1)
    bench.issue()
    tokens, extras = bench.engine._results.popleft()
    bench.engine._in_flight.popleft()
    parts = {part.front: part for part in bench.scheduler.settle(tokens, extras).by_front()}
    assert [rows.number for rows in parts[FRONT].prompt_logprobs] == [0, 2]
    assert [rows.number for rows in parts[b"other"].prompt_logprobs] == [1]
    for part in parts.values():
        for place, row in part.logprobs.items():
            assert row.num_best == part.numbers[place]
            assert row.token_ids[0, 0] == part.tokens[place]
        assert len(part.logprobs) == len(part.numbers)


def changed(rows: LogprobRows, **fields) -> LogprobRows:
    values = {name: getattr(rows, name) for name in ("token_ids", "logprobs", "ranks")}
    return LogprobRows(**(values | fields))


def test_a_result_with_other_rows_than_were_asked_for_is_refused():
    """The frame's own checks know no step: whether rows are those that it was asked for is told here."""
    bench = Bench()
    bench.add(6, logprobs=2, prompt_logprobs=1, max_tokens=4)
    bench.add(3, max_tokens=4)
    bench.issue()
    (asked, good), other = next(iter(extras_of(bench).items())), 0
    token = int(bench.engine._results[0][0][asked])
    prompt = good.prompt_logprobs
    assert asked == 1
    assert prompt is not None
    high = rows_at(np.array([6]), np.array([token]), 2, VOCAB_SIZE + 1)
    bad = [
        (None, "extras of batch indices"),
        ({asked: good, other: good}, "extras of batch indices"),
        ({other: good}, "extras of batch indices"),
        ({asked: RowExtras(prompt_logprobs=prompt)}, "logprobs: missing"),
        ({asked: RowExtras(logprobs=good.logprobs)}, "prompt_logprobs: missing"),
        ({asked: RowExtras(logprobs=good.logprobs, prompt_logprobs=prompt[1:])}, "4 rows with 1"),
        ({asked: RowExtras(logprobs=good.logprobs, prompt_logprobs=prompt.best(0))}, "5 rows wi"),
        (
            {asked: RowExtras(logprobs=rows_at(np.array([6]), np.array([token ^ 1]), 2, 101), prompt_logprobs=prompt)},
            "other tokens",
        ),
        (
            {asked: RowExtras(logprobs=changed(high, ranks=high.ranks + 200), prompt_logprobs=prompt)},
            "exceeds the vocabulary",
        ),
    ]  # fmt: skip
    tokens = bench.engine._results[0][0]
    for extras, said in bad:
        with pytest.raises(ProtocolError, match=said):
            bench.scheduler.settle(tokens, extras)
    bench.run()  # nothing has changed
    bench.check_all_ended()
    nobody = Bench()
    nobody.add(3)
    nobody.issue()
    with pytest.raises(ProtocolError, match="extras of batch indices"):
        nobody.scheduler.settle(nobody.engine._results[0][0], {0: good})
