"""The wire between fronts and the scheduler: what is written is read back whole, and nothing else is accepted."""

from __future__ import annotations

from dataclasses import fields

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rowcast.scheduler.extras import PromptRows
from rowcast.scheduler.front_messages import (
    FRONT_PROTOCOL_VERSION as VERSION,
)
from rowcast.scheduler.front_messages import (
    Abort,
    Ack,
    FrontKind,
    Outputs,
    RefusalReason,
    Refused,
    Register,
    Submit,
    decode,
    encode,
    make_submit_key,
    peek_submit_number,
)
from rowcast.scheduler.messages import ProtocolError
from rowcast.scheduler.sampling_params import MAX_SEED, SamplingParams
from rowcast.tests.scheduler.logprob_rows import some_rows
from rowcast.tests.scheduler.mangle import mangled

NUM_BAD_MESSAGES = 100_000


def submit(**changed) -> Submit:
    values = {
        "number": 7,
        "submit_key": make_submit_key(b"u" * 16, 7),
        "request_id": "chat-17",
        "prompt_token_ids": np.array([1, 2, 3], np.int32),
        "output_token_ids": np.array([9], np.int32),
        "seed": 5,
        "n_index": 1,
        "params": SamplingParams(
            temperature=0.5, top_k=4, max_tokens=3, stop_token_ids=(8, 9), min_p=0.1
        ),
        "priority": -3,
        "user": "anna",
        "cache_salt": "salt",
    }
    return Submit(**(values | changed))


def assert_same(ours, theirs) -> None:
    assert type(ours) is type(theirs)
    for column in fields(ours):
        one, other = getattr(ours, column.name), getattr(theirs, column.name)
        if isinstance(one, np.ndarray):
            np.testing.assert_array_equal(one, other, strict=True)
        else:
            assert one == other
            assert type(one) is type(other)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 2**31 - 1),
    max_tokens=st.none() | st.integers(1, 2**31 - 1),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=5),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0, 2, exclude_min=True),
    min_tokens=st.integers(0, 1),
    logit_bias=st.none()
    | st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=5),
    allowed_token_ids=st.none() | st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
    bad_words_token_ids=st.lists(
        st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4), max_size=3
    ),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
)
IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20).map(lambda v: np.array(v, np.int32))
NUMBERS = st.lists(st.integers(0, 2**63 - 1), max_size=9).map(lambda v: np.array(v, np.int64))


@given(
    st.builds(
        Submit,
        number=st.integers(0, 2**63 - 1),
        submit_key=st.binary(min_size=24, max_size=24),
        request_id=st.text(max_size=64),
        prompt_token_ids=IDS,
        output_token_ids=IDS,
        seed=st.integers(0, MAX_SEED),
        n_index=st.integers(0, 2**31 - 1),
        params=PARAMS,
        priority=st.integers(-(2**31), 2**31 - 1),
        user=st.text(max_size=64),
        cache_salt=st.none() | st.text(min_size=1, max_size=64),
    )
    | st.builds(Register, front_name=st.text(max_size=40))
    | st.builds(Abort, numbers=NUMBERS)
    | st.builds(Ack, numbers=NUMBERS)
    | st.builds(
        Refused,
        number=st.integers(0, 2**63 - 1),
        reason=st.sampled_from(RefusalReason),
        text=st.text(max_size=40),
    )
)
@settings(max_examples=300, deadline=None)
def test_a_message_comes_back_as_it_was_sent(message):
    """W12: a value that MessagePack changes on the way fails, or means something else, after it was accepted."""
    assert_same(message, decode(encode(message)))


@given(
    st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(-1, 2**31 - 1), st.integers(0, 4))),
    st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(1, 2**31 - 1))),
)
@settings(deadline=None)
def test_outputs_come_back_as_they_were_sent(entries, cached):
    numbers, tokens, codes = zip(*entries, strict=True) if entries else ((), (), ())
    cached_numbers, cached_tokens = zip(*cached, strict=True) if cached else ((), ())
    outputs = Outputs(
        epoch=2**62,
        numbers=np.array(numbers, np.int64),
        tokens=np.array(tokens, np.int32),
        finish_codes=np.array(codes, np.int8),
        cached_numbers=np.array(cached_numbers, np.int64),
        cached_tokens=np.array(cached_tokens, np.int32),
    )
    assert_same(outputs, decode(encode(outputs)))


def some_outputs(**changes) -> Outputs:
    """Two tokens, of which the second and a prompt have their log-probabilities with them."""
    values = {
        "epoch": 1,
        "numbers": np.array([1, 2]),
        "tokens": np.array([5, 6], np.int32),
        "finish_codes": np.array([0, 3], np.int8),
        "logprobs": {1: some_rows([6], 4)},
        "prompt_logprobs": [PromptRows(2, 1, some_rows([8, 3], 0))],
    }
    return Outputs(**(values | changes))


def test_outputs_with_log_probabilities_come_back_as_they_were_sent():
    outputs = some_outputs()
    read = decode(encode(outputs))
    assert isinstance(read, Outputs)
    assert dict(read.logprobs) == outputs.logprobs
    assert list(read.prompt_logprobs) == outputs.prompt_logprobs


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"logprobs": {2: some_rows([6], 4)}}, "logprobs of entry 2 are of no token there"),
        ({"logprobs": {0: some_rows([6], 4)}}, "logprobs of entry 0 are of no token there"),
        ({"logprobs": {0: some_rows([5, 5], 4)}}, "logprobs must have one row each"),
        ({"logprobs": {-1: some_rows([5], 4)}}, "logprobs: places must be"),
        ({"prompt_logprobs": [PromptRows(2, 0, some_rows([8], 0))]}, "first token has no log-prob"),
    ],
)
def test_outputs_with_rows_of_nothing_are_refused(changes, said):
    with pytest.raises(ProtocolError, match=said):
        decode(encode(some_outputs(**changes)))


@pytest.mark.parametrize("seed", [-1, -(2**63) - 1, 2**63, 2**64])
def test_a_seed_that_no_int64_holds_is_refused_before_it_is_sent(seed):
    """W12: an OverflowError after the request was accepted killed the engine."""
    with pytest.raises(ValueError, match=r"seed must be an integer in \[0, 2\*\*63\)"):
        SamplingParams(seed=seed)


def test_the_largest_seed_comes_back_as_it_was_sent():
    """W12: 2**63 - 1 is the last that int64 holds, and a double would round it up."""
    message = submit(seed=2**63 - 1, params=SamplingParams(seed=np.int64(2**63 - 1)))
    assert decode(encode(message)).seed == message.params.seed == 2**63 - 1


def test_an_error_text_of_any_kind_can_be_sent():
    """W12: an error that quotes a file name which is not valid Unicode could not be told to anyone."""
    text = "cannot read model-\udcff.safetensors"
    refused = decode(encode(Refused(number=3, reason=RefusalReason.ENGINE_FAILED, text=text)))
    assert refused.text == "cannot read model-\\udcff.safetensors"
    assert (
        len(decode(encode(Refused(number=3, reason=RefusalReason.INVALID, text="x" * 2**21))).text)
        < 2**20
    )


@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "top_k", "max_tokens", "seed", "ignore_eos"]
)
def test_the_error_of_a_bad_parameter_does_not_echo_it(field):
    """F10: a megabyte sent is a megabyte told, to whoever reads the error and in every log."""
    with pytest.raises(ValueError, match=field) as caught:
        SamplingParams(**{field: "hot" * 400_000})
    assert len(str(caught.value)) < 200


NO_MORE = (0.0, 0.0, 0.0, 1.0, 0, None)  # of params, from min_p on


def with_more(**changed) -> list:
    """Good params on the wire, some from min_p on replaced."""
    penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    names = ("min_p", *penalties, "min_tokens", "rare")
    more = dict(zip(names, NO_MORE, strict=True)) | changed
    return [1.0, 1.0, 0, 5, False, [], *more.values()]


def wire(message) -> list:
    return msgpack.unpackb(encode(message))


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (0, VERSION + 1, f"version {VERSION + 1}, this side speaks {VERSION}"),
        (0, True, "version True"),
        (0, 1.0, "version 1.0"),
        (1, 77, "unknown kind 77"),
        (1, True, "unknown kind True"),
        (2, -1, "submit: number must be an integer"),
        (2, 2**63, "submit: number must be an integer"),
        (3, b"short", "submit_key must be bin of 24 bytes"),
        (3, "k" * 24, "submit_key must be bin of 24 bytes"),
        (4, "x" * 257, "request_id must be a string of at most 256 bytes"),
        (4, "é" * 129, "request_id must be a string of at most 256 bytes"),
        (4, 12345, "request_id must be a string"),
        (4, b"chat-17", "request_id must be a string"),
        (5, b"123", "prompt_token_ids must be bin"),
        (5, [1, 2], "prompt_token_ids must be bin"),
        (7, 2**63, "submit: seed"),
        (7, None, "submit: seed"),
        (8, -1, "n_index"),
        (9, [1, 2], "params must be an array of 12"),
        (9, [-0.5, 1.0, 0, 5, False, [], *NO_MORE], r"temperature must be a number in \[0, 2\]"),
        (9, [float("nan"), 1.0, 0, 5, False, [], *NO_MORE], "temperature"),
        (9, ["hot", 1.0, 0, 5, False, [], *NO_MORE], "temperature"),
        (9, [1.0, 0.0, 0, 5, False, [], *NO_MORE], r"top_p must be a number in \(0, 1\]"),
        (9, [1.0, 1.0, -2, 5, False, [], *NO_MORE], "top_k"),
        (9, [1.0, 1.0, 0, 0, False, [], *NO_MORE], "max_tokens"),
        (9, [1.0, 1.0, 0, True, False, [], *NO_MORE], "max_tokens"),
        (9, [1.0, 1.0, 0, 5, 1, [], *NO_MORE], "ignore_eos"),
        (9, [1.0, 1.0, 0, 5, False, [-1], *NO_MORE], "stop_token_ids"),
        (9, [1.0, 1.0, 0, 5, False, 3, *NO_MORE], "stop_token_ids"),
        (9, with_more(min_p=1.5), r"min_p must be a number in \[0, 1\], got 1.5"),
        (9, with_more(presence_penalty=-2.1), r"presence_penalty must be a number in \[-2, 2\]"),
        (9, with_more(frequency_penalty="2"), r"frequency_penalty must be a number in \[-2, 2\]"),
        (9, with_more(repetition_penalty=0.0), r"repetition_penalty must be a number in \(0, 2\]"),
        (
            9,
            with_more(min_tokens=6),
            "min_tokens must be an integer, at least 0 and at most max_tok",
        ),
        (9, with_more(rare={}), "rare params must be nil or a map of some of"),
        (9, with_more(rare=[]), "rare params must be nil or a map of some of"),
        (9, with_more(rare={"bad_words": ["x"]}), "rare params must be nil or a map of some of"),
        (9, with_more(rare={"logit_bias": [b"", b"12345678"]}), "one value for each of its ids"),
        (9, with_more(rare={"logit_bias": [b"1234" * 2, b"12345678" * 2]}), "for each of its ids"),
        (9, with_more(rare={"logit_bias": b""}), "logit_bias must be an array of 2"),
        (9, with_more(rare={"allowed_token_ids": b""}), "allowed_token_ids must name at least one"),
        (9, with_more(rare={"allowed_token_ids": b"\xff" * 4}), "allowed_token_ids must be a list"),
        (9, with_more(rare={"allowed_token_ids": [1]}), "allowed_token_ids must be bin"),
        (
            9,
            with_more(rare={"bad_words_token_ids": [b""]}),
            "bad_words_token_ids must be a list of",
        ),
        (9, with_more(rare={"bad_words_token_ids": b""}), "bad_words_token_ids must be an array"),
        (9, with_more(rare={"logprobs": 21}), r"logprobs must be an integer in \[0, 20\]"),
        (9, with_more(rare={"prompt_logprobs": -1}), r"prompt_logprobs must be an integer in"),
        (10, True, "priority must be a whole number"),
        (10, 1.0, "priority must be a whole number"),
        (10, None, "priority must be a whole number"),
        (10, 2**31, r"priority must be in \[-2\*\*31, 2\*\*31\), got 2147483648"),
        (10, -(2**31) - 1, "priority must be in"),
        (11, None, "user must be a string"),
        (11, b"anna", "user must be a string"),
        (11, "é" * 129, "user must have at most 256 bytes, got 258"),
        (12, 7, "cache_salt must be a string"),
        (12, "x" * 257, "cache_salt must have at most 256 bytes, got 257"),
    ],
)
def test_a_submit_that_is_not_exactly_one_is_refused(place, value, said):
    """F06, SA-14: a step never sees an unchecked request."""
    values = wire(submit())
    values[place] = value
    with pytest.raises(ProtocolError, match=said):
        decode(msgpack.packb(values))


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (b"", "front message of 0 bytes"),
        (msgpack.packb([]), "at least 2 values"),
        (msgpack.packb([VERSION, 0]), "register must carry 1 values, got 0"),
        (msgpack.packb([VERSION, 2, b"1234567"]), "abort: numbers must be bin"),
        (
            msgpack.packb([VERSION, 10, 5, b"", b"1234", b"", b"", b"", None, None]),
            "differ in length",
        ),
        (
            msgpack.packb([VERSION, 10, 5, b"", b"", b"", b"12345678", b"", None, None]),
            "differ in length",
        ),
        (msgpack.packb([VERSION, 11, 5, 99, "text"]), "99 is not a valid RefusalReason"),
        (bytes([0x93, VERSION, 2]) + b"\x91" * 900 + b"\x00", "bin"),
    ],
)
def test_other_messages_that_are_not_exactly_one_are_refused(message, said):
    with pytest.raises(ProtocolError, match=said):
        decode(message)


def test_the_number_of_a_bad_submit_can_be_told():
    """So that its client hears of it, instead of waiting for ever."""
    values = wire(submit())
    values[9] = [99.0, 1.0, 0, 5, False, [], *NO_MORE]
    assert peek_submit_number(msgpack.packb(values)) == 7
    values[2] = "7"
    assert peek_submit_number(msgpack.packb(values)) is None
    for other in (b"", b"\xc1", msgpack.packb([1, FrontKind.ABORT, 7]), msgpack.packb([1, 1])):
        assert peek_submit_number(other) is None


def test_no_bytes_raise_anything_but_the_one_exception():
    """Random, truncated, bit-flipped and value-swapped messages: read, or ProtocolError, never anything else."""
    good = [
        encode(Register(front_name="front-0")),
        encode(submit()),
        encode(Abort(numbers=np.array([1, 2]))),
        encode(Ack(numbers=np.array([3]))),
        encode(
            Outputs(
                epoch=1,
                numbers=np.array([1, 2]),
                tokens=np.array([5, -1]),
                finish_codes=np.array([0, 3]),
                cached_numbers=np.array([2]),
                cached_tokens=np.array([32]),
            )
        ),
        encode(some_outputs()),
        encode(Refused(number=3, reason=RefusalReason.INVALID, text="no")),
    ]
    for message in good:
        decode(message)
    refused = longest = 0
    for message in mangled(good, NUM_BAD_MESSAGES, seed=2027):
        peek_submit_number(message)
        try:
            decode(message)
        except ProtocolError as error:
            refused += 1
            longest = max(longest, len(str(error)))
    assert longest < 1000, "an error must not echo the message"
    assert refused > NUM_BAD_MESSAGES * 0.6
