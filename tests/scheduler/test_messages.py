"""The wire between scheduler and workers: what is written is read back whole, and nothing else is accepted."""

from __future__ import annotations

from dataclasses import fields, replace

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rowcast.scheduler import messages
from rowcast.scheduler.messages import (
    MAX_REQUEST_ID_BYTES,
    PROTOCOL_VERSION,
    Admissions,
    ControlOperation,
    Features,
    FrameKind,
    Mask,
    ProtocolError,
    ResultKind,
    RowExtras,
    SchedulerOutput,
    StepResult,
    decode_frame,
    decode_report,
    peek_report,
)
from rowcast.tests.scheduler.logprob_rows import some_rows
from rowcast.tests.scheduler.mangle import mangled

NUM_BAD_FRAMES = 100_000  # and as many reports; front messages have their own


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def some_features() -> Features:
    return Features(
        bias_ids=i32(0, 7),
        bias=np.array([1.2, -0.1], np.float32),
        allowed=i32(3, 5),
        bad_words=(i32(9), i32(10, 11, 60)),
        min_tokens=5,
        min_tokens_ids=i32(2),
        logprobs=0,
        prompt_logprobs=20,
        prompt_logprobs_from=7,
    )


def two_admissions() -> Admissions:
    return Admissions.of(
        rows=i32(3, 0),
        request_ids=("chat-17", "ü"),
        num_tokens=i32(2, 3),
        token_ids=i32(5, 6, 7, 8, 9),
        num_prompt_tokens=i32(2, 1),
        num_cached_tokens=i32(0, 0),
        seeds=np.array([2**63 - 1, 0]),
        temperature=np.array([0.7, 0], np.float32),
        top_p=np.array([1, 0.9], np.float32),
        top_k=i32(0, 40),
        min_p=np.array([0, 0.1], np.float32),
        presence_penalty=np.array([0, -2], np.float32),
        frequency_penalty=np.array([0.5, 0], np.float32),
        repetition_penalty=np.array([1, 1.9], np.float32),
        features=(None, some_features()),
        num_blocks=(i32(1, 0), i32(0, 2)),
        block_ids=(i32(37), i32(12, 81)),
    )


def full_step() -> SchedulerOutput:
    return SchedulerOutput(
        freed_rows=i32(3, 9),
        admissions=two_admissions(),
        run_rows=i32(3),
        run_counts=i32(2),
        paused_rows=i32(5),
        grown_block_ids=(i32(44, 45), i32()),
        masked_rows=i32(7),
    )


def assert_same(ours, theirs) -> None:
    """Equal in type, dtype and value, all the way down."""
    assert type(ours) is type(theirs)
    for column in fields(ours):
        one, other = getattr(ours, column.name), getattr(theirs, column.name)
        if isinstance(one, Admissions | StepResult):
            assert_same(one, other)
        elif isinstance(one, tuple) and one and isinstance(one[0], np.ndarray):
            assert len(one) == len(other)
            for a, b in zip(one, other, strict=True):
                np.testing.assert_array_equal(a, b, strict=True)
        elif isinstance(one, np.ndarray):
            np.testing.assert_array_equal(one, other, strict=True)
        else:
            assert one == other
            assert type(one) is type(other)


def sent_and_read(step: SchedulerOutput) -> SchedulerOutput:
    frame = decode_frame(messages.encode_step(step, epoch=5, sequence=7))
    assert (frame.epoch, frame.kind, frame.sequence) == (5, FrameKind.STEP, 7)
    assert isinstance(frame.body, SchedulerOutput)
    return frame.body


# ---------------------------------------------------------------- round trips


def columns(dtype: type, length: int) -> st.SearchStrategy[np.ndarray]:
    """Any bits: NaN among the floats, the extremes among the integers."""
    size = length * np.dtype(dtype).itemsize
    return st.binary(min_size=size, max_size=size).map(lambda bits: np.frombuffer(bits, dtype))


@st.composite
def some_or_no_features(draw):
    ids = st.sets(st.integers(0, 2**31 - 1), min_size=1, max_size=5).map(lambda v: i32(*sorted(v)))
    asked = {}
    if draw(st.booleans()):
        asked["bias_ids"] = draw(ids)
        size = len(asked["bias_ids"])
        biases = st.lists(st.floats(-100, 100, width=32), min_size=size, max_size=size)
        asked["bias"] = np.array(draw(biases), np.float32)
    if draw(st.booleans()):
        asked["allowed"] = draw(ids)
    if draw(st.booleans()):
        words = st.integers(1, 5).flatmap(lambda length: columns(np.int32, length))
        asked["bad_words"] = tuple(draw(st.lists(words, min_size=1, max_size=4)))
    if draw(st.booleans()):
        asked["min_tokens"] = draw(st.integers(1, 2**31 - 1))
        asked["min_tokens_ids"] = draw(ids)
    return Features(**asked) if asked else None


@st.composite
def admissions(draw, num_groups: int):
    count = draw(st.integers(1, 5))
    lengths = st.lists(st.integers(0, 6), min_size=count, max_size=count).map(lambda v: i32(*v))
    num_tokens = draw(lengths)
    num_blocks = tuple(draw(lengths) for _ in range(num_groups))
    return Admissions.of(
        rows=draw(columns(np.int32, count)),
        request_ids=tuple(draw(st.lists(st.text(max_size=40), min_size=count, max_size=count))),
        num_tokens=num_tokens,
        token_ids=draw(columns(np.int32, int(num_tokens.sum()))),
        num_prompt_tokens=draw(columns(np.int32, count)),
        num_cached_tokens=draw(columns(np.int32, count)),
        seeds=draw(columns(np.int64, count)),
        temperature=draw(columns(np.float32, count)),
        top_p=draw(columns(np.float32, count)),
        top_k=draw(columns(np.int32, count)),
        min_p=draw(columns(np.float32, count)),
        presence_penalty=draw(columns(np.float32, count)),
        frequency_penalty=draw(columns(np.float32, count)),
        repetition_penalty=draw(columns(np.float32, count)),
        features=tuple(draw(st.lists(some_or_no_features(), min_size=count, max_size=count))),
        num_blocks=num_blocks,
        block_ids=tuple(draw(columns(np.int32, int(counts.sum()))) for counts in num_blocks),
    )


@st.composite
def steps(draw):
    num_groups = draw(st.integers(0, 4))
    some = st.integers(0, 20).flatmap(lambda length: columns(np.int32, length))
    num_runs = draw(st.integers(0, 20))
    return SchedulerOutput(
        freed_rows=draw(some),
        admissions=draw(st.none() | admissions(num_groups)),
        run_rows=draw(columns(np.int32, num_runs)),
        run_counts=draw(columns(np.int32, num_runs)),
        paused_rows=draw(some),
        grown_block_ids=tuple(draw(some) for _ in range(num_groups)),
        masked_rows=draw(some),
    )


@given(steps())
@settings(max_examples=200, deadline=None)
def test_a_step_comes_back_as_it_was_sent(step):
    """W12: whatever the scheduler can produce survives unchanged in type and value."""
    assert_same(step, sent_and_read(step))


@pytest.mark.parametrize("count", [0, 1, 31, 32, 255, 256, 65_535, 65_536, 100_000])
def test_lists_of_every_length_class_survive(count):
    """W12: MessagePack changes its header at each of these sizes."""
    ids = np.arange(count, dtype=np.int32) * 20_000
    step = SchedulerOutput(freed_rows=ids, grown_block_ids=(ids, ids[:1]))
    assert_same(step, sent_and_read(step))


def test_numbers_of_other_integer_types_are_sent_as_int32():
    """W12: a numpy.int64 count or a plain list must not fail after the request was accepted."""
    step = SchedulerOutput(
        freed_rows=[1, 2],
        run_rows=np.array([3], np.int64),
        run_counts=np.array([9], np.uint8),
        grown_block_ids=(np.arange(6)[::2],),
    )
    read = sent_and_read(step)
    assert read.freed_rows.tolist() == [1, 2]
    assert read.run_counts.tolist() == [9]
    assert read.grown_block_ids[0].tolist() == [0, 2, 4]


@given(
    tokens=st.integers(0, 30).flatmap(lambda length: columns(np.int32, length)),
    digests=st.integers(0, 5).map(lambda n: b"\x01" * (8 * n)),
    with_extras=st.booleans(),
)
@settings(deadline=None)
def test_a_result_comes_back_as_it_was_sent(tokens, digests, with_extras):
    """W12: extras is a map with integer keys, which msgpack refuses unless told otherwise."""
    extras = (
        {
            place: RowExtras(
                logprobs=None if place % 3 == 1 else some_rows([place], place % 4),
                prompt_logprobs=some_rows([5, 7], 2) if place % 3 else None,
            )
            for place in range(len(tokens))
        }
        if with_extras
        else None
    ) or None
    result = StepResult(tokens=tokens, digests=digests, extras=extras)
    report = decode_report(messages.encode_result(result, epoch=2**62, sequence=2**40))
    assert (report.epoch, report.sequence, report.kind, report.rank) == (
        2**62,
        2**40,
        ResultKind.RESULT,
        0,
    )
    assert_same(result, report.result)


def test_the_small_messages_come_back_as_they_were_sent():
    hello = decode_frame(messages.encode_hello(epoch=9))
    assert (hello.kind, hello.sequence, hello.body) == (FrameKind.HELLO, 0, None)
    stop = decode_frame(messages.encode_control(ControlOperation.STOP, epoch=9, sequence=4))
    assert (stop.kind, stop.sequence, stop.body) == (FrameKind.CONTROL, 4, ControlOperation.STOP)
    ready = decode_report(messages.encode_ready(epoch=9, rank=3))
    assert (ready.kind, ready.sequence, ready.rank) == (ResultKind.READY, 0, 3)
    bye = decode_report(messages.encode_bye(epoch=9, sequence=4, rank=3))
    assert (bye.kind, bye.sequence, bye.rank) == (ResultKind.BYE, 4, 3)
    error = decode_report(messages.encode_error(epoch=9, sequence=4, rank=3, text="x" * 99_999))
    assert (error.kind, error.rank, len(error.text)) == (
        ResultKind.ERROR,
        3,
        messages.MAX_ERROR_TEXT,
    )


def test_an_error_that_quotes_anything_at_all_is_reported():
    """W12: a rank whose error names a file that is not valid Unicode died in silence, and the others waited."""
    text = "cannot read model-\udcff.safetensors"
    report = decode_report(messages.encode_error(epoch=9, sequence=4, rank=3, text=text))
    assert report.text == "cannot read model-\\udcff.safetensors"


def test_a_mask_comes_back_as_it_was_sent():
    mask = Mask(step_sequence=6, rows=i32(4, 1), bits=i32(1, -1, 2, -(2**31), 0, 7).reshape(2, 3))
    frame = decode_frame(messages.encode_mask(mask, epoch=1, sequence=7))
    assert frame.kind is FrameKind.MASK
    assert_same(mask, frame.body)


# ---------------------------------------------------------------- what is refused


def packed(*values) -> bytes:
    return msgpack.packb(list(values))


STEP_BODY = [b"", None, b"", b"", b"", [b""], b"", b""]


def step_with(place: int, value) -> bytes:
    body = [*STEP_BODY]
    body[place] = value
    return packed(PROTOCOL_VERSION, 5, FrameKind.STEP, 7, *body)


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (b"", "no MessagePack"),
        (b"\xc1", "no MessagePack"),
        (packed(PROTOCOL_VERSION, 5, 1, 7)[:-1], "no MessagePack"),
        (packed(PROTOCOL_VERSION, 5, 0, 0) + b"\x00", "no MessagePack"),
        (msgpack.packb({}), "an array of at least 4"),
        (packed(PROTOCOL_VERSION, 5, 0), "an array of at least 4"),
        (
            packed(PROTOCOL_VERSION + 1, 5, 0, 0),
            f"has protocol version {PROTOCOL_VERSION + 1}, this side speaks {PROTOCOL_VERSION}",
        ),
        (packed(True, 5, 0, 0), "has protocol version True"),
        (packed(float(PROTOCOL_VERSION), 5, 0, 0), "has protocol version 4.0"),
        (packed(PROTOCOL_VERSION, -5, 0, 0), "epoch must be an integer"),
        (packed(PROTOCOL_VERSION, 2**63, 0, 0), "epoch must be an integer"),
        (packed(PROTOCOL_VERSION, 5, 0, True), "sequence must be an integer"),
        (packed(PROTOCOL_VERSION, 5, 4, 7), "unknown kind 4"),
        (packed(PROTOCOL_VERSION, 5, 1.0, 7, *STEP_BODY), "unknown kind 1.0"),
        (packed(PROTOCOL_VERSION, 5, [], 7), r"unknown kind \[\]"),
        (packed(PROTOCOL_VERSION, 5, 0, 1), "hello frame cannot have sequence 1"),
        (packed(PROTOCOL_VERSION, 5, 1, 0, *STEP_BODY), "step frame cannot have sequence 0"),
        (packed(PROTOCOL_VERSION, 5, 0, 0, None), "hello frame must carry 0 values, got 1"),
        (
            packed(PROTOCOL_VERSION, 5, 1, 7, *STEP_BODY[1:]),
            "step frame must carry 8 values, got 7",
        ),
        (packed(PROTOCOL_VERSION, 5, 3, 7, 1), "unknown operation 1"),
        (step_with(0, b"\x01\x02\x03"), "freed_rows must be bin of a multiple of 4 bytes, got 3"),
        (step_with(0, "ab"), "freed_rows must be bin"),
        (step_with(2, b"\0" * 8), "run_counts must have 2 entries, got 0"),
        (step_with(5, {}), "grown_block_ids must be an array"),
        (step_with(5, [b"\0"]), "grown_block_ids of group 0 must be bin"),
        (step_with(1, []), "admissions must carry 8 values"),
        (step_with(7, b"1234567"), "digest must be bin of 0 or 8 bytes"),
        (step_with(7, "12345678"), "digest must be bin of 0 or 8 bytes"),
        (step_with(7, None), "digest must be bin of 0 or 8 bytes"),
    ],
)
def test_a_frame_that_is_not_exactly_one_is_refused(frame, said):
    """A reader takes nothing on trust, and says what is wrong."""
    with pytest.raises(ProtocolError, match=said):
        decode_frame(frame)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"request_ids": ("a",)}, "request_ids must have 2 entries, got 1"),
        ({"request_ids": ("a", "x" * (MAX_REQUEST_ID_BYTES + 1))}, "strings of at most 256"),
        (
            {"token_ids": i32(5, 6, 7, 8)},
            "token_ids must have 5 entries as its lengths say, got 4",
        ),
        ({"numbers": two_admissions().numbers - i32(0, 4)}, "a length is negative"),
        ({"seeds": np.array([1])}, "seeds must have 2 entries, got 1"),
        ({"features": (None,)}, "features must have 2 entries, got 1"),
        ({"numbers": np.zeros((9, 2))}, "numbers must have 20 entries, got 18"),
        ({"numbers": np.zeros((10, 3))}, "numbers must have 20 entries, got 30"),
        ({"num_blocks": (i32(1, 0),)}, "num_blocks must have 2 KV groups, got 1"),
        ({"block_ids": (i32(37), i32(12))}, "block_ids of group 1 must have 2 entries"),
        ({"num_blocks": (i32(1), i32(0, 2))}, "num_blocks of group 0 must have 2 entries, got 1"),
    ],
)
def test_admissions_whose_columns_do_not_fit_are_refused(changed, said):
    step = replace(full_step(), admissions=replace(two_admissions(), **changed))
    with pytest.raises(ProtocolError, match=said):
        decode_frame(messages.encode_step(step, epoch=5, sequence=7))


IDS, HALF = i32(3, 5).tobytes(), np.array([0.5, 0.5], np.float32).tobytes()


@pytest.mark.parametrize(
    ("features", "said"),
    [
        (None, "features must be bin"),
        ({"allowed": IDS}, "features must be bin"),
        (b"\xc1", "features: is no MessagePack"),
        (packed(1), "features: must be a map of some of"),
        (msgpack.packb({}), "features: must be a map of some of"),
        (msgpack.packb({"mask": 1}), "features: must be a map of some of"),
        (msgpack.packb({"bias": IDS}), "bias: must be an array of 2"),
        (msgpack.packb({"bias": [IDS, HALF[:4]]}), "as many values as ids"),
        (msgpack.packb({"bias": [IDS, HALF[:5]]}), "bias: must be bin of a multiple of 4"),
        (msgpack.packb({"bias": [IDS, b"\xff" * 8]}), "bias: must be finite"),
        (msgpack.packb({"allowed": b""}), "allowed: must have at least one id"),
        (msgpack.packb({"allowed": i32(5, 3).tobytes()}), "at least one id, at least 0, ascending"),
        (msgpack.packb({"allowed": i32(3, 3).tobytes()}), "ascending"),
        (msgpack.packb({"allowed": i32(-1, 3).tobytes()}), "at least 0"),
        (msgpack.packb({"bad_words": []}), "bad_words: must be an array of at least one"),
        (msgpack.packb({"bad_words": [b""]}), "bad_words: must have at least one id each"),
        (msgpack.packb({"bad_words": [7]}), "bad_words: must be bin"),
        (msgpack.packb({"min_tokens": [0, IDS]}), "min_tokens: must be an integer in"),
        (msgpack.packb({"min_tokens": [True, IDS]}), "min_tokens: must be an integer in"),
        (msgpack.packb({"min_tokens": [3, b""]}), "min_tokens: must have at least one id"),
    ],
)
def test_features_that_are_not_exactly_some_are_refused(features, said):
    message = messages.encode_step(full_step(), epoch=5, sequence=7)
    values = msgpack.unpackb(message)
    values[5][5] = [b"", features]
    with pytest.raises(ProtocolError, match=said):
        decode_frame(msgpack.packb(values))


def test_the_checksum_of_features_tells_them_apart():
    """The digest covers it: a row with another's bad words is a row that differs."""
    one = some_features()
    assert one.checksum == some_features().checksum
    assert 0 < one.checksum < 2**31
    for changed in (
        {"bias": np.array([1.2, 0.1], np.float32)},
        {"allowed": None},
        {"bad_words": (i32(9),)},
        {"min_tokens": 4},
        {"min_tokens_ids": i32(3)},
    ):
        assert replace(one, **changed).checksum != one.checksum, changed


def test_admissions_that_admit_nobody_are_refused():
    """Two ways to say nothing would be two ways to disagree."""
    nobody = Admissions.of(
        rows=i32(),
        request_ids=(),
        num_tokens=i32(),
        token_ids=i32(),
        num_prompt_tokens=i32(),
        num_cached_tokens=i32(),
        seeds=i32(),
        temperature=i32(),
        top_p=i32(),
        top_k=i32(),
        min_p=i32(),
        presence_penalty=i32(),
        frequency_penalty=i32(),
        repetition_penalty=i32(),
        features=(),
        num_blocks=(i32(), i32()),
        block_ids=(i32(), i32()),
    )
    step = replace(full_step(), admissions=nobody)
    with pytest.raises(ProtocolError, match="at least one row, or be nil"):
        decode_frame(messages.encode_step(step, epoch=5, sequence=7))


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (packed(PROTOCOL_VERSION, 5, 4, 7, 0), "unknown kind 4"),
        (packed(PROTOCOL_VERSION, 5, 0, 0), "ready report must carry 1 values, got 0"),
        (packed(PROTOCOL_VERSION, 5, 0, 0, -1), "rank must be an integer"),
        (packed(PROTOCOL_VERSION, 5, 1, 0, 0), "error report must carry 2 values"),
        (packed(PROTOCOL_VERSION, 5, 1, 0, 0, b"x"), "text must be a string"),
        (packed(PROTOCOL_VERSION, 5, 3, 7, b"1234567", b"", None), "digests must be bin of 8"),
        (packed(PROTOCOL_VERSION, 5, 3, 7, b"", b"123", None), "tokens must be bin"),
        (packed(PROTOCOL_VERSION, 5, 3, 7, b"", b"1234", []), "extras must be a map of at least"),
        (packed(PROTOCOL_VERSION, 5, 3, 7, b"", b"1234", {}), "extras must be a map of at least"),
        (packed(PROTOCOL_VERSION, 5, 3, 7, b"", b"1234", {1: 0}), "a key of extras"),
        (packed(PROTOCOL_VERSION, 5, 3, 7, b"", b"1234", {"0": 0}), "a key of extras"),
    ],
)
def test_a_report_that_is_not_exactly_one_is_refused(report, said):
    with pytest.raises(ProtocolError, match=said):
        decode_report(report)


def test_the_sender_of_a_bad_report_can_be_told():
    """Whether a bad report stops the group depends on whose it is."""
    good = messages.encode_error(epoch=5, sequence=1, rank=3, text="boom")
    assert peek_report(good) == (5, 3)
    assert peek_report(messages.encode_result(StepResult(tokens=i32(1)), epoch=5, sequence=1)) == (
        5,
        0,
    )
    assert peek_report(packed(99, 5, 0, 0, 2, "more than there should be")) == (5, 2)
    for nobody in (b"", b"\xc1", b"GET / HTTP/1.1", packed(1, "5", 0, 0), packed(1, True, 0, 0, 0)):
        assert peek_report(nobody)[0] is None


@pytest.mark.parametrize("depth", [100, 511, 900, 1100, 100_000])
def test_a_deeply_nested_message_is_refused(depth):
    """repr() of a thousand nested lists is a RecursionError, out of the very code that reports the bad frame."""
    nested = b"\x91" * depth + b"\x00"
    for message in (
        nested,
        b"\x95\x01\x05" + nested + b"\x07\x00",
        b"\x94" + nested + b"\x05\x01\x07",
    ):
        with pytest.raises(ProtocolError):
            decode_frame(message)
        with pytest.raises(ProtocolError):
            decode_report(message)
        peek_report(message)


GOOD_FRAMES = [
    messages.encode_hello(epoch=5),
    messages.encode_control(ControlOperation.STOP, epoch=5, sequence=3),
    messages.encode_step(full_step(), epoch=5, sequence=7),
    messages.encode_step(SchedulerOutput(grown_block_ids=(i32(1, 2),)), epoch=5, sequence=8),
    messages.encode_mask(
        Mask(step_sequence=6, rows=i32(4), bits=i32(1).reshape(1, 1)), epoch=5, sequence=9
    ),
]
SOME_EXTRAS = {
    0: RowExtras(logprobs=some_rows([4], 3)),
    1: RowExtras(prompt_logprobs=some_rows([9, 8, 7], 1)),
    2: RowExtras(logprobs=some_rows([6], 0), prompt_logprobs=some_rows([5], 20)),
}
GOOD_REPORTS = [
    messages.encode_ready(epoch=5, rank=1),
    messages.encode_bye(epoch=5, sequence=2, rank=1),
    messages.encode_error(epoch=5, sequence=2, rank=1, text="boom"),
    messages.encode_result(
        StepResult(tokens=i32(4, -1, 6), digests=b"12345678", extras=SOME_EXTRAS),
        epoch=5,
        sequence=2,
    ),
]


@pytest.mark.parametrize(
    ("decode", "good"), [(decode_frame, GOOD_FRAMES), (decode_report, GOOD_REPORTS)]
)
def test_no_bytes_raise_anything_but_the_one_exception(decode, good):
    """Random, truncated, bit-flipped and value-swapped messages: read, or ProtocolError, never anything else."""
    for message in good:
        decode(message)
    refused = longest = 0
    for message in mangled(good, NUM_BAD_FRAMES, seed=2026):
        peek_report(message)
        try:
            decode(message)
        except ProtocolError as error:
            refused += 1
            longest = max(longest, len(str(error)))
    assert longest < 500, "an error must not echo the message"
    assert refused > NUM_BAD_FRAMES * 0.7


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=13) | st.dictionaries(st.integers(0, 5), inner, max_size=3)
    ),
    max_leaves=30,
)


@given(st.binary(max_size=60) | VALUES.map(msgpack.packb))
@settings(max_examples=250, deadline=None)
def test_no_shape_raises_anything_but_the_one_exception(message):
    for decode in (decode_frame, decode_report):
        try:
            decode(message)
        except ProtocolError:
            continue
