"""What is refused at the door, and that what passes can run to its end. block_size is 16."""

from __future__ import annotations

import itertools
import uuid

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rowcast.scheduler.config import SchedulerConfig
from rowcast.scheduler.door import QueueFull
from rowcast.scheduler.front_messages import FinishCode
from rowcast.scheduler.sampling_params import SamplingParams
from rowcast.tests.scheduler.fakes import VOCAB_SIZE, Bench, group


def test_a_request_larger_than_the_pool_is_refused_and_blocks_nobody():
    """S01: it waited at the head of the queue for blocks that do not exist, and everyone behind it too."""
    bench = Bench(usable=10, max_num_batched_tokens=64)
    with pytest.raises(ValueError, match=r"request r0: the prompt has 200 tokens, .* holds 160"):
        bench.add(200, max_tokens=8)
    bench.add(16, max_tokens=4, number=1)
    assert [bench.step() for _ in range(4)] == [{1: 16}, {1: 1}, {1: 1}, {1: 1}]
    assert bench.ends == {1: FinishCode.LENGTH}
    assert bench.free == 10


def test_the_last_token_needs_no_kv():
    """S01's edge: 150 + 11 - 1 = 160 slots exactly; one more is refused with the limit."""
    bench = Bench(usable=10, max_num_batched_tokens=64)
    bench.add(150, max_tokens=11)
    bench.run()
    assert len(bench.outputs[0]) == 11
    with pytest.raises(ValueError, match=r"need KV for 161 tokens, the whole pool holds 160"):
        bench.add(150, max_tokens=12)
    bench.check_all_ended()


def test_the_pool_is_measured_with_all_groups():
    """Blocks of every group come out of one pool: 16 + 8 a token span of 16 takes 1 + 2 blocks."""
    bench = Bench(usable=9, groups=(group(16), group(8)))
    bench.add(48, max_tokens=1)  # 3 + 6 blocks
    bench.run()
    with pytest.raises(ValueError, match="holds 48"):
        bench.add(48, max_tokens=2)
    bench.check_all_ended()


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "num_outputs"),
    [(14, None, 2), (15, 10, 1), (15, None, 1), (10, None, 6)],
)
def test_the_edge_of_max_model_len(num_prompt, max_tokens, num_outputs):
    """S15, S16: ends by length with the 16th token, which is stored and never computed; the table is one block wide."""
    bench = Bench(max_model_len=16)
    bench.add(num_prompt, max_tokens=max_tokens)
    bench.run()
    assert len(bench.outputs[0]) == num_outputs
    assert bench.ends == {0: FinishCode.LENGTH}
    assert bench.issued[0] == 15
    assert bench.worker.state.block_tables.table[0].shape[1] == 1
    bench.check_all_ended()


@pytest.mark.parametrize("num_prompt", [16, 17])
def test_a_prompt_that_leaves_no_room_for_an_output_is_refused(num_prompt):
    """S15: ours refuses 16 of 16; a peer's worker indexed past the row."""
    bench = Bench(max_model_len=16)
    with pytest.raises(ValueError, match=f"has {num_prompt} tokens, max_model_len is 16"):
        bench.add(num_prompt, max_tokens=10)


def test_an_empty_prompt_is_refused_and_the_next_is_served():
    """S14: one request without tokens killed the server."""
    bench = Bench()
    with pytest.raises(ValueError, match="request r0: the prompt is empty"):
        bench.add([])
    bench.add([5], max_tokens=1, number=1)
    assert bench.step() == {1: 1}
    bench.run()
    bench.check_all_ended()


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, VOCAB_SIZE + 50_000])
def test_ids_outside_the_vocabulary_are_refused(token):
    """F06: an embedding lookup outside the table is a device assert that kills every request."""
    bench = Bench()
    for bad in ({"prompt": [1, token]}, {"prompt": [1], "outputs": [2, token]}):
        with pytest.raises(ValueError, match=rf"token id {token} .* \[0, {VOCAB_SIZE}\)"):
            bench.add(**bad)
    if token > 0:
        with pytest.raises(ValueError, match=f"stop_token_ids: token id {token}"):
            bench.add([1], stop_token_ids=(5, token))
        for name, value in (
            ("logit_bias", {5: 1.0, token: 5}),
            ("allowed_token_ids", [5, token]),
            ("bad_words", ((5, 6), (7, token, 8))),
        ):
            field = "bad_words_token_ids" if name == "bad_words" else name
            with pytest.raises(ValueError, match=f"{name}: token id {token}"):
                bench.add([1], **{field: value})
    assert bench.issue() is None
    assert bench.scheduler.num_remembered == 0


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_max_tokens_below_one_is_refused(max_tokens):
    """S16: 0 and -1 reached the scheduler, which found no last token to stop at."""
    with pytest.raises(ValueError, match="max_tokens must be an integer, at least 1"):
        Bench().add(10, max_tokens=max_tokens)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        *[("temperature", value, r"a number in \[0, 2\]") for value in (-0.1, 2.1, "hot", True)],
        *[("temperature", value, r"a number in \[0, 2\]") for value in (np.nan, np.inf)],
        *[("top_p", value, r"a number in \(0, 1\]") for value in (0, -1, 1.5, np.nan, "1")],
        *[("min_p", value, r"a number in \[0, 1\]") for value in (-0.1, 1.1, np.nan, None)],
        *[("presence_penalty", value, r"a number in \[-2, 2\]") for value in (3, -2.1, np.nan)],
        *[("frequency_penalty", value, r"a number in \[-2, 2\]") for value in (2.1, -3, np.inf)],
        *[("repetition_penalty", value, r"a number in \(0, 2\]") for value in (0, -1, 2.1, "x")],
        *[("top_k", value, "an integer, at least 1, or 0 or -1") for value in (-2, 1.0, True)],
        *[("max_tokens", value, "an integer, at least 1") for value in (0, -1, 1.5, True)],
        *[("min_tokens", value, "an integer, at least 0 and at most") for value in (-1, 17, 1.0)],
        ("seed", 2**64, r"an integer in \[0, 2\*\*63\)"),
        ("logit_bias", {"AI": -100}, "a dict of token id"),
        ("logit_bias", {5: 101}, r"a number in \[-100, 100\], got 101.0 for token id 5"),
        ("logit_bias", {5: np.nan}, "a dict of token id"),
        ("logit_bias", {-1: 1}, "a dict of token id"),
        ("logit_bias", {True: 1}, "a dict of token id"),
        ("logit_bias", [1, 2], "a dict of token id"),
        ("logit_bias", dict.fromkeys(range(1025), 1.0), "at most 1024 entries, got 1025"),
        ("allowed_token_ids", [], "at least one token id, or be None"),
        ("allowed_token_ids", [-1], "a list of token ids"),
        ("allowed_token_ids", "12", "a list of token ids"),
        ("allowed_token_ids", 5, "a list of token ids"),
        ("bad_words", "cat", "a list of strings of 1 to 256 characters"),
        ("bad_words", [""], "a list of strings of 1 to 256 characters"),
        ("bad_words", [3], "a list of strings of 1 to 256 characters"),
        ("bad_words", ["a" * 257], "a list of strings of 1 to 256 characters"),
        ("bad_words", ["a\ud800"], "valid Unicode, got 'a"),
        ("bad_words", ["a"] * 257, "at most 256 entries, got 257"),
        ("allowed_token_ids", range(10**12), "at most 1048576 entries, got 1000000000000"),
        ("stop_token_ids", np.array(1), "a list of token ids"),
        ("stop_token_ids", itertools.count(), "at most 256 entries, got more"),
        ("bad_words_token_ids", [[]], "a list of lists of 1 to"),
        ("bad_words_token_ids", [5], "a list of lists of 1 to"),
    ],
)
def test_an_option_out_of_range_is_refused_with_field_and_range(field, value, allowed):
    """SA-14, F06, SA-11: named before anything is queued, whatever it is and however much. Bools are no numbers."""
    with pytest.raises(ValueError, match=rf"{field}.*{allowed}") as caught:
        SamplingParams(**{field: value})
    assert len(str(caught.value)) < 300


def test_an_integer_that_python_will_not_write_is_refused_by_its_field():
    """Python's own ValueError came out instead, about digits and sys.set_int_max_str_digits."""
    for field, allowed in (("seed", r"an integer in \[0, 2\*\*63\)"), ("top_p", "a number in")):
        with pytest.raises(ValueError, match=rf"{field} must be {allowed}.* of 16610 bits"):
            SamplingParams(**{field: 10**5000})


def test_none_is_no_list_of_ids_strings_or_words():
    """Scripts written for vLLM say so."""
    assert SamplingParams(stop_token_ids=None, stop=None, bad_words=None) == SamplingParams()


def test_two_keys_of_one_token_id_are_refused():
    """JSON has strings for keys: "7" is 7, and must not come beside it."""
    assert SamplingParams(logit_bias={"7": 1, 3: 2}).logit_bias == {3: 2.0, 7: 1.0}
    with pytest.raises(ValueError, match="names token id 7 twice"):
        SamplingParams(logit_bias={"7": 1, 7: 2})


def test_params_with_lists_can_be_compared_and_hashed():
    """Callers keep them in sets and dicts; a list of ids in any order is the same list."""
    one = SamplingParams(allowed_token_ids=[7, 3, 3], logit_bias={3: 1}, bad_words=["cat"])
    other = SamplingParams(allowed_token_ids=(3, 7), logit_bias={"3": 1.0}, bad_words=("cat",))
    assert one == other
    assert len({one, other}) == 1
    assert one != SamplingParams(allowed_token_ids=[3, 7], logit_bias={3: 2}, bad_words=["cat"])


@given(
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(-1, 2**31 - 1),
    seed=st.integers(0, 2**63 - 1),
    min_p=st.floats(0, 1),
    presence=st.floats(-2, 2),
    repetition=st.floats(0, 2, exclude_min=True),
    bias=st.floats(-100, 100),
)
@example(1.0, 5e-324, 2**31 - 1, 2**63 - 1, 1 - 2**-53, 2 - 2**-52, 5e-324, 5e-324)
@example(5e-324, 1 - 2**-53, -1, 0, 5e-324, -2, 2 - 2**-52, -100)
@settings(max_examples=60, deadline=None)
def test_what_the_door_takes_the_workers_take(
    temperature, top_p, top_k, seed, min_p, presence, repetition, bias
):
    """F06: top_p 1e-50 passed the door, became 0 as float32 on the wire, and the workers' refusal ended the engine."""
    bench = Bench(max_num_seqs=1)
    bench.add(
        2, max_tokens=1, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed,
        min_p=min_p, presence_penalty=presence, frequency_penalty=-presence,
        repetition_penalty=repetition, logit_bias={5: bias, 0: -bias}, allowed_token_ids=[9, 1],
        bad_words_token_ids=[[4], [2, 1]], min_tokens=1,
    )  # fmt: skip
    assert bench.step() == {0: 2}
    requests = bench.worker.state.requests
    assert 0 <= requests.min_p[0] <= 1
    assert 0 < requests.repetition_penalty[0] <= 2
    assert requests.features[0].allowed.tolist() == [1, 9]
    assert 0 < bench.worker.state.requests.top_p[0] <= 1
    assert 0 <= bench.worker.state.requests.temperature[0] <= 2
    assert bench.worker.state.requests.seeds[0] == seed


def test_the_least_top_p_is_a_float32():
    assert SamplingParams(top_p=5e-324).top_p == np.finfo(np.float32).tiny
    assert SamplingParams(top_p=0.25).top_p == 0.25


@pytest.mark.parametrize(
    ("request_id", "error", "said"),
    [
        (12345, TypeError, "request_id must be a string, got 12345"),
        (uuid.UUID(int=7), TypeError, "request_id must be a string, got UUID"),
        (b"bytes", TypeError, "request_id must be a string, got b'bytes'"),
        ("", ValueError, "must have 1 to 256 bytes, got 0"),
        ("x" * 1_000_000, ValueError, "must have 1 to 256 bytes, got 1000000"),
        ("é" * 129, ValueError, "must have 1 to 256 bytes, got 258"),
        ("id-\ud800", ValueError, "is not valid Unicode"),
    ],
    ids=["int", "UUID", "bytes", "empty", "1 MB", "two bytes each", "surrogate"],
)
def test_a_request_id_that_the_wire_cannot_carry_is_refused(request_id, error, said):
    """E-03, S12, W12: accepted, it failed when the step that admits it was encoded, and took everyone down."""
    bench = Bench()
    with pytest.raises(error, match=said) as caught:
        bench.add(5, request_id=request_id)
    assert len(str(caught.value)) < 200, "an error must not echo the id"
    assert bench.scheduler.num_remembered == 0
    bench.add(5, number=1, max_tokens=1, request_id="x" * 256)
    assert bench.step() == {1: 5}


def test_a_refused_request_takes_nobody_down():
    """E-04: one that cannot be prepared ended the engine; the healthy one added next runs in the following step."""
    bench = Bench()
    bench.add(5, max_tokens=5)
    bench.step()
    with pytest.raises(ValueError, match="empty"):
        bench.add([], number=1)
    bench.add(5, number=2)
    assert bench.step() == {0: 1, 2: 5}


def test_a_full_queue_is_not_the_requests_fault():
    """L02: answered at once, as overload; those that run do not count as waiting."""
    bench = Bench(max_num_seqs=2, max_waiting=4)
    for _ in range(2):
        bench.add(5)
    bench.step()
    for _ in range(4):
        bench.add(5)
    with pytest.raises(QueueFull, match="4 requests wait already, the queue holds 4"):
        bench.add(5)
    bench.abort(3)
    bench.add(5, number=9)
    assert bench.waiting == [2, 4, 5, 9]


# ---------------------------------------------------------------- who is who


def test_a_live_request_id_is_refused_and_the_first_goes_on():
    """S12 (a), E-03: two clients' states merged under one id."""
    bench = Bench()
    bench.add(5, request_id="dup", max_tokens=4)
    with pytest.raises(ValueError, match="request dup: a live request has this id"):
        bench.add(7, request_id="dup", number=1)
    bench.run()
    bench.add(7, request_id="dup", number=1, max_tokens=4)
    bench.run()
    bench.check_all_ended()


def test_a_request_id_is_free_again_in_the_message_that_frees_its_row():
    """S12 (b): the worker removes the old x, then adds the new x, with nothing of the old."""
    bench = Bench(max_num_seqs=1)
    bench.add(40, request_id="x", max_tokens=1)
    bench.step()
    bench.add(5, request_id="x", number=1, max_tokens=3)
    assert bench.step() == {1: 5}
    step = bench.last_step
    assert (step.freed_rows.tolist(), step.admissions.request_ids) == ([0], ("x",))
    assert bench.worker.state.block_tables.num_blocks[0].tolist() == [1]
    bench.run()
    bench.check_all_ended()


def test_the_same_submit_key_is_the_same_request():
    """DESIGN.md 7: a client that is not sure submits again, and nothing runs twice, live or ended."""
    bench = Bench()
    bench.add(5, max_tokens=2)
    bench.add(5, number=0, max_tokens=2)
    assert bench.waiting == [0]
    bench.step()
    bench.add(5, number=0, max_tokens=2)
    bench.run()
    bench.add(5, number=0, max_tokens=2)
    assert bench.scheduler.num_unfinished == 0
    bench.check_all_ended()


def test_a_key_that_comes_back_elsewhere_goes_on_there():
    """A front died and its client resubmits through another, with the two tokens that it holds."""
    bench = Bench()
    bench.add(5, max_tokens=6, request_id="a")
    bench.step()
    bench.step()
    held = bench.outputs[0]
    prompt = bench.submits[0].prompt_token_ids.tolist()
    bench.add(
        prompt, number=1, key=0, seed=0, outputs=held, front=b"new", request_id="a", max_tokens=6
    )
    assert bench.step() == {1: 7}
    bench.run()
    assert 0 not in bench.ends
    assert len(bench.outputs[1]) == 6 - len(held)
    bench.submits.pop(0)
    bench.scheduler.forget(b"new", [1])
    bench.check_all_ended()


def test_a_number_is_used_once():
    bench = Bench()
    bench.add(5, max_tokens=1)
    with pytest.raises(ValueError, match="number 0 already"):
        bench.add(5, number=0, key=77, request_id="other")
    bench.run()
    with pytest.raises(ValueError, match="number 0 already"):
        bench.add(5, number=0, key=77, request_id="other")
    bench.add(5, number=0, key=78, request_id="other", front=b"elsewhere", max_tokens=1)
    assert bench.waiting == [0]


@pytest.mark.parametrize(
    ("outputs", "params", "code"),
    [
        ([7, 8], {"max_tokens": 2}, FinishCode.LENGTH),
        ([7, 42], {"max_tokens": 9, "stop_token_ids": (42,)}, FinishCode.STOP),
        ([7, 3], {"max_tokens": 9}, FinishCode.STOP),
    ],
)
def test_a_request_resubmitted_with_all_its_tokens_ends_without_a_step(outputs, params, code):
    """The end was lost on the way, not the tokens: running it again would add one too many."""
    bench = Bench(eos_token_ids=(3,))
    bench.add(5, outputs=outputs, **params)
    assert bench.issue() is None
    assert bench.drain() == [(0, -1)]
    assert bench.ends == {0: code}
    bench.check_empty()


def test_more_outputs_than_allowed_are_refused():
    with pytest.raises(ValueError, match=r"prompt 5 and 3 earlier outputs exceed the 7 tokens"):
        Bench().add(5, outputs=[1, 2, 3], max_tokens=2)


def test_a_resubmitted_request_goes_on_from_its_tokens():
    """DESIGN.md 7: prompt length stays the prompt's, and max_tokens counts the outputs it already has."""
    whole = Bench()
    whole.add(5, max_tokens=6)
    whole.run()
    bench = Bench()
    bench.add(5, outputs=whole.outputs[0][:4], max_tokens=6)
    assert bench.step() == {0: 9}
    assert bench.last_step.admissions.num_prompt_tokens.tolist() == [5]
    bench.run()
    assert bench.outputs[0] == whole.outputs[0][4:]
    bench.check_all_ended()


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_a_priority_that_has_no_effect_is_refused(policy):
    """Ignored, its owner would wait and never learn why."""
    bench = Bench(scheduling_policy=policy)
    with pytest.raises(
        ValueError, match=f"priority 3 has no effect under the scheduling policy {policy}"
    ):
        bench.add(5, submit={"priority": 3})
    bench.add(5, submit={"priority": 0, "user": "anna"})


def test_limits_that_make_no_sense_are_refused():
    good = {"vocab_size": 10, "max_model_len": 16}
    SchedulerConfig(**good)
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting", "depth", "vocab_size"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            SchedulerConfig(**(good | {name: 0}))
    with pytest.raises(ValueError, match="depth must be at most 64, got 65"):
        SchedulerConfig(**good, depth=65)
    with pytest.raises(ValueError, match="long_prefill_token_threshold must be at least 0, got -1"):
        SchedulerConfig(**good, long_prefill_token_threshold=-1)
    with pytest.raises(
        ValueError, match="scheduling_policy must be one of fcfs, priority, fair, got 'lottery'"
    ):
        SchedulerConfig(**good, scheduling_policy="lottery")
    with pytest.raises(ValueError, match=r"EOS id 10 lies outside the vocabulary \[0, 10\)"):
        SchedulerConfig(**good, eos_token_ids=(2, 10))
