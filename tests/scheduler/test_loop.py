"""The loop between fronts and workers, on queues and a clock that only moves when the loop waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
from rowcast.scheduler import front_messages, messages
from rowcast.scheduler.agreement import StepPlan
from rowcast.scheduler.config import SchedulerConfig
from rowcast.scheduler.front_messages import (
    Abort,
    Ack,
    FinishCode,
    Outputs,
    RefusalReason,
    Refused,
    Register,
    Submit,
    make_submit_key,
)
from rowcast.scheduler.late_ranks import RankProgress
from rowcast.scheduler.loop import SchedulerLoop, WorkerGroupError
from rowcast.scheduler.messages import (
    ControlOperation,
    FrameKind,
    SchedulerOutput,
    StepResult,
    decode_frame,
)
from rowcast.scheduler.sampling_params import SamplingParams
from rowcast.scheduler.scheduler import Scheduler
from rowcast.tests.scheduler.fake_forms import FakeGrammars, form
from rowcast.tests.scheduler.fakes import VOCAB_SIZE, FakeWorker, group, hash_model

EPOCH = 77
FRONT, OTHER = b"front-0", b"front-1"
PARAMS = 9  # their place in an encoded submit


class Queue:
    """Both ends of a channel, as the loop sees it."""

    def __init__(self) -> None:
        self.inbox: deque = deque()
        self.sent: list = []

    def receive(self, timeout_s: float | None):
        assert timeout_s == 0, "the loop blocks in wait alone"
        return self.inbox.popleft() if self.inbox else None

    def send(self, *message) -> None:
        self.sent.append(message if len(message) > 1 else message[0])

    def close(self) -> None:
        raise AssertionError("the channel belongs to whoever made it")


class Rig:
    """A loop, its two channels, ranks that answer when the loop waits, and the clock."""

    def __init__(self, *, num_ranks: int = 2, depth: int = 1, usable: int = 40, **options) -> None:
        config = SchedulerConfig(
            vocab_size=VOCAB_SIZE, max_model_len=64, max_num_seqs=4, max_waiting=4, depth=depth,
            prefix_caching=False,
        )  # fmt: skip
        self.grammars = FakeGrammars(VOCAB_SIZE)
        self.scheduler = Scheduler(
            config,
            (group(4),),
            usable + 1,
            grammars=self.grammars,  # type: ignore[arg-type]
        )
        self.workers, self.fronts = Queue(), Queue()
        self.now = 1000.0
        self.waits: list[float | None] = []
        self.on_wait: Callable[[], None] = self.work
        self.num_ranks = num_ranks
        self.silent: set[int] = set()
        self.fake = FakeWorker(self.scheduler, hash_model)
        self.taken = 0
        self.unmasked: tuple[int, StepPlan, SchedulerOutput] | None = None
        self.tamper = lambda sequence, digests, tokens: (digests, tokens)
        self.loop = SchedulerLoop(
            self.scheduler,
            workers=self.workers,
            fronts=self.fronts,
            wait=self.wait,
            epoch=EPOCH,
            num_ranks=num_ranks,
            clock=lambda: self.now,
            **options,
        )

    def wait(self, timeout_s: float | None) -> None:
        self.waits.append(timeout_s)
        assert len(self.waits) < 10_000, "the loop spins"
        before = len(self.workers.inbox) + len(self.fronts.inbox)
        self.on_wait()
        if len(self.workers.inbox) + len(self.fronts.inbox) == before:
            self.now += 3600.0 if timeout_s is None else timeout_s

    def work(self) -> None:
        """Every rank takes every frame that it has not taken; rank 0 answers steps."""
        while self.taken < len(self.workers.sent):
            frame = decode_frame(self.workers.sent[self.taken])
            self.taken += 1
            for rank in range(self.num_ranks):
                if rank in self.silent:
                    continue
                if frame.kind is FrameKind.HELLO:
                    self.report(messages.encode_ready(epoch=EPOCH, rank=rank))
                elif frame.kind is FrameKind.CONTROL:
                    self.report(
                        messages.encode_bye(epoch=EPOCH, sequence=frame.sequence, rank=rank)
                    )
                elif rank == 0:
                    self.carry_out(frame, self.workers.sent[self.taken - 1])

    def carry_out(self, frame: messages.Frame, message: bytes) -> None:
        """Rank 0's part of a step or mask."""
        if isinstance(frame.body, SchedulerOutput):
            assert self.unmasked is None, "a step came before the mask of the one before"
            plan = self.fake.launch(frame.body)
            digest = self.fake.state.digests.end(message)
            if len(frame.body.masked_rows):
                self.unmasked = frame.sequence, plan, frame.body
                return
            sequence, tokens = frame.sequence, self.fake.sample(plan)
        else:
            assert isinstance(frame.body, messages.Mask)
            assert self.unmasked is not None, "a mask that no step waits for"
            sequence, plan, step = self.unmasked
            assert sequence == frame.body.step_sequence
            self.unmasked = None
            tokens = self.fake.sample(plan, step, frame.body)
            digest = self.fake.state.digests.end(message)
        digests = [digest] * self.num_ranks if (tokens >= 0).any() else []
        digests, tokens = self.tamper(sequence, digests, tokens)
        self.result(tokens, digests, sequence)

    def result(self, tokens: np.ndarray, digests: Sequence[int], sequence: int) -> None:
        result = StepResult(tokens=tokens, digests=np.array(digests, np.uint64).tobytes())
        self.report(messages.encode_result(result, epoch=EPOCH, sequence=sequence))

    def report(self, message: bytes) -> None:
        self.workers.inbox.append(message)

    def say(self, message, front: bytes = FRONT) -> None:
        encoded = message if isinstance(message, bytes) else front_messages.encode(message)
        self.fronts.inbox.append((front, encoded))

    def submit(self, number: int, *, front: bytes = FRONT, prompt=(1, 2, 3), key=None, **params):
        self.say(
            Submit(
                number=number,
                submit_key=make_submit_key(front.ljust(16), number if key is None else key),
                request_id=f"{front.decode()}/{number}",
                prompt_token_ids=np.array(prompt, np.int32),
                seed=number,
                params=SamplingParams(**({"max_tokens": 3, "temperature": 0} | params)),
            ),
            front,
        )

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.loop.turn(0.01)

    def until_idle(self) -> None:
        while self.loop.turn(None):
            pass

    def heard(self, front: bytes = FRONT) -> list[tuple]:
        """What a front was told: (number, token, code), or (number, reason, text) of a refusal."""
        found = []
        for to, message in self.fronts.sent:
            if to != front:
                continue
            decoded = front_messages.decode(message)
            if isinstance(decoded, Refused):
                found.append((decoded.number, decoded.reason, decoded.text))
            else:
                assert isinstance(decoded, Outputs)
                assert decoded.epoch == EPOCH
                found += zip(
                    decoded.numbers.tolist(),
                    decoded.tokens.tolist(),
                    decoded.finish_codes.tolist(),
                    strict=True,
                )
        return found

    def frames(self) -> list[messages.Frame]:
        return [decode_frame(message) for message in self.workers.sent]


def started(**options) -> Rig:
    rig = Rig(**options)
    rig.loop.handshake()
    rig.waits.clear()
    rig.say(Register(front_name="f"))
    return rig


# ---------------------------------------------------------------- handshake


def test_hello_is_repeated_until_every_rank_has_answered():
    """W13: what is published before a subscription lands is lost; the first counted frame is sequence 1."""
    rig = Rig(num_ranks=3)
    rig.silent = {1, 2}

    def join() -> None:
        if len(rig.waits) == 4:
            rig.silent = {2}
        if len(rig.waits) == 6:
            rig.silent = set()
        rig.work()

    rig.on_wait = join
    rig.loop.handshake()
    frames = rig.frames()
    assert len(frames) >= 3
    assert all((f.kind, f.sequence, f.epoch) == (FrameKind.HELLO, 0, EPOCH) for f in frames)
    rig.submit(1)
    rig.turns(1)
    assert rig.frames()[-1].sequence == 1


def test_hello_is_sent_at_its_interval_not_in_a_spin():
    rig = Rig(hello_interval_s=0.05, ready_timeout_s=1.0)
    rig.silent = {0, 1}
    with pytest.raises(TimeoutError):
        rig.loop.handshake()
    assert 20 <= len(rig.workers.sent) <= 22
    assert len(rig.waits) <= 22


def test_ranks_that_do_not_answer_are_named():
    """W13: both sides waited for ever."""
    rig = Rig(num_ranks=4, ready_timeout_s=2.0)
    rig.silent = {1, 3}
    with pytest.raises(TimeoutError, match=r"ranks \[1, 3\] did not answer hello within 2 s"):
        rig.loop.handshake()


def test_a_rank_that_fails_while_it_joins_is_named():
    rig = Rig()
    rig.report(messages.encode_error(epoch=EPOCH, sequence=0, rank=1, text="out of memory"))
    with pytest.raises(WorkerGroupError, match="rank 1 failed: out of memory"):
        rig.loop.handshake()


def test_a_rank_that_does_not_exist_is_refused():
    rig = Rig(num_ranks=2)
    rig.report(messages.encode_ready(epoch=EPOCH, rank=2))
    with pytest.raises(WorkerGroupError, match="calls itself rank 2, expected 0 to 1"):
        rig.loop.handshake()


def test_answers_of_an_earlier_life_do_not_count():
    rig = Rig(num_ranks=1, ready_timeout_s=1.0)
    rig.silent = {0}
    rig.report(messages.encode_ready(epoch=EPOCH - 1, rank=0))
    with pytest.raises(TimeoutError, match=r"\[0\]"):
        rig.loop.handshake()
    assert rig.loop.snapshot()["dropped_frames"] == 1


# ---------------------------------------------------------------- requests


def test_a_request_from_submit_to_its_last_token():
    rig = started()
    rig.submit(5)
    rig.turns(6)
    prompt = np.array([1, 2, 3])
    first = hash_model(5, prompt)
    second = hash_model(5, np.append(prompt, first))
    third = hash_model(5, np.concatenate((prompt, [first, second])))
    assert rig.heard() == [(5, first, 0), (5, second, 0), (5, third, FinishCode.LENGTH)]
    assert [frame.sequence for frame in rig.frames()[1:]] == [1, 2, 3, 4]
    assert not rig.fake.state.requests.live.any()
    rig.say(Ack(numbers=np.array([5])))
    rig.turns(1)
    assert rig.scheduler.num_remembered == 0


def test_each_front_gets_its_own_tokens_in_one_message_a_step():
    rig = started()
    for number in (1, 2):
        rig.submit(number, max_tokens=1)
        rig.submit(number, front=OTHER, max_tokens=1)
    rig.turns(3)
    assert [to for to, _ in rig.fronts.sent] == [FRONT, OTHER]
    assert [number for number, _, _ in rig.heard(FRONT)] == [1, 2]
    assert [number for number, _, _ in rig.heard(OTHER)] == [1, 2]


def test_the_next_step_leaves_before_the_last_ones_tokens():
    """Workers wait for the step; the fronts' messages are made while they compute."""
    rig = started()
    order = []
    rig.workers.send = lambda message: order.append("step") or rig.workers.sent.append(message)
    rig.fronts.send = lambda *message: order.append("tokens") or rig.fronts.sent.append(message)
    rig.submit(1)
    rig.turns(4)
    assert order == ["step", "step", "tokens", "step", "tokens", "step", "tokens"]


def test_refusals_say_why_and_whose_fault_it_is():
    rig = started()
    rig.submit(1, prompt=())
    rig.submit(2, prompt=[1] * 64)
    for number in range(3, 8):
        rig.submit(number)
    rig.turns(1)
    refused = {number: (reason, text) for number, reason, text in rig.heard()}
    assert refused[1][0] is refused[2][0] is RefusalReason.INVALID
    assert "the prompt is empty" in refused[1][1]
    assert "max_model_len is 64" in refused[2][1]
    assert refused[7][0] is RefusalReason.OVERLOADED
    assert "try again later" in refused[7][1]
    assert sorted(refused) == [1, 2, 7]


def test_bad_front_messages_are_counted_and_dropped():
    """R16: random bytes, a truncated message, one of the other direction; the engine survives."""
    rig = started()
    rig.say(b"\xc1garbage")
    rig.say(front_messages.encode(Register(front_name="x"))[:-1])
    rig.say(
        Outputs(
            epoch=1,
            numbers=np.array([1]),
            tokens=np.array([1]),
            finish_codes=np.array([0]),
        )
    )
    rig.submit(3)
    rig.turns(6)
    assert rig.loop.snapshot()["bad_front_messages"] == 3
    assert len(rig.heard()) == 3


def test_a_submit_with_a_bad_parameter_is_answered():
    rig = started()
    rig.submit(3)
    front, message = rig.fronts.inbox.pop()
    values = msgpack.unpackb(message)
    values[PARAMS][0] = -1.0
    rig.fronts.inbox.append((front, msgpack.packb(values)))
    rig.turns(1)
    ((number, reason, text),) = rig.heard()
    assert (number, reason) == (3, RefusalReason.INVALID)
    assert "temperature must be" in text


def test_a_bad_repeat_of_a_live_number_does_not_end_the_live_request():
    """The front would take the refusal for its running request's."""
    rig = started()
    rig.submit(3)
    _, good = rig.fronts.inbox[-1]
    rig.turns(1)
    values = msgpack.unpackb(good)
    values[PARAMS] = None
    rig.say(msgpack.packb(values))
    rig.turns(5)
    assert [code for _, _, code in rig.heard()] == [0, 0, FinishCode.LENGTH]
    assert rig.loop.snapshot()["bad_front_messages"] == 1


def test_an_abort_comes_before_the_result_that_arrived_with_it():
    """A-11, S09: both wait in their queues; the request ends as aborted, without the token."""
    rig = started()
    rig.submit(1, max_tokens=1)
    rig.submit(2, max_tokens=1)
    rig.turns(1)
    rig.work()
    rig.say(Abort(numbers=np.array([1, 99])))
    rig.turns(2)
    assert rig.heard()[0] == (1, -1, FinishCode.ABORT)
    assert [number for number, _, _ in rig.heard()] == [1, 2]
    rig.say(Abort(numbers=np.array([1])))
    rig.turns(1)
    assert len(rig.heard()) == 2


def test_a_front_that_registers_again_keeps_its_requests():
    """A reconnect under the same identity is not a new front."""
    rig = started()
    rig.submit(1)
    rig.turns(1)
    rig.say(Register(front_name="f"))
    rig.submit(1)  # resubmitted, to be sure
    rig.turns(5)
    assert [code for _, _, code in rig.heard()] == [0, 0, FinishCode.LENGTH]
    assert rig.loop.snapshot()["fronts"] == 1


def test_a_front_under_the_name_of_another_takes_its_place():
    """A front that died and came back under a new identity: nobody hears its old requests, and nothing of it stays."""
    rig = started()
    rig.submit(1)
    rig.submit(2, front=OTHER)
    rig.turns(1)
    rig.say(Register(front_name="f"), b"risen")
    rig.until_idle()
    assert rig.heard(b"risen") == []
    assert [code for _, _, code in rig.heard(OTHER)] == [0, 0, FinishCode.LENGTH]
    assert rig.loop.snapshot()["fronts"] == 1
    rig.submit(1, front=b"risen")
    rig.until_idle()
    assert [code for _, _, code in rig.heard(b"risen")] == [0, 0, FinishCode.LENGTH]
    rig.say(front_messages.Ack(numbers=np.array([1])), b"risen")
    rig.say(front_messages.Ack(numbers=np.array([2])), OTHER)
    rig.until_idle()
    assert rig.scheduler.num_remembered == 0


# ---------------------------------------------------------------- waiting


def test_idle_is_one_wait_and_no_frame():
    """R07, S10: after the last request there is nothing to say; the loop sleeps until it is woken."""
    rig = started()
    rig.submit(1)
    rig.until_idle()
    num_frames, num_waits = len(rig.workers.sent), len(rig.waits)
    assert not rig.loop.turn(None)
    assert rig.waits[num_waits:] == [None]
    assert len(rig.workers.sent) == num_frames


def test_there_is_no_wait_while_there_is_work():
    rig = started()
    rig.submit(1)
    assert rig.loop.turn(None)
    assert rig.waits == []


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_at_most_depth_steps_are_unanswered(depth):
    rig = started(depth=depth)
    rig.submit(1, max_tokens=9)
    rig.submit(2, max_tokens=9)
    rig.on_wait = lambda: None
    rig.turns(3)
    assert len(rig.frames()[1:]) == depth == rig.loop.snapshot()["in_flight"]
    rig.on_wait = rig.work
    rig.until_idle()
    assert [code for _, _, code in rig.heard()].count(FinishCode.LENGTH) == 2
    assert len(rig.heard()) == 18


# ---------------------------------------------------------------- what goes wrong


def test_frames_of_another_life_are_dropped_and_counted():
    """W13: a late result of the group that was torn down would settle the wrong step."""
    rig = started()
    rig.submit(1)
    rig.turns(1)
    stale = StepResult(tokens=np.array([9], np.int32))
    rig.report(messages.encode_result(stale, epoch=EPOCH - 1, sequence=1))
    rig.report(messages.encode_error(epoch=EPOCH - 1, sequence=1, rank=0, text="old"))
    rig.report(b"GET / HTTP/1.1")
    rig.turns(6)
    assert rig.loop.snapshot()["dropped_frames"] == 3
    assert [code for _, _, code in rig.heard()] == [0, 0, FinishCode.LENGTH]


def test_late_answers_to_hello_are_ignored():
    rig = started()
    rig.report(messages.encode_ready(epoch=EPOCH, rank=1))
    rig.submit(1)
    rig.turns(6)
    assert len(rig.heard()) == 3


V = messages.PROTOCOL_VERSION


def bad_result(tokens: list[int], sequence: int = 1, digests: Sequence[int] = ()) -> bytes:
    result = StepResult(
        tokens=np.array(tokens, np.int32), digests=np.array(digests, np.uint64).tobytes()
    )
    return messages.encode_result(result, epoch=EPOCH, sequence=sequence)


def raw(*values) -> bytes:
    return msgpack.packb(values)


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (raw(V, EPOCH, 1, 1, 1, "boom"), "rank 1 failed: boom"),
        (raw(V, EPOCH, 2, 1, 1), "rank 1 left without being told"),
        (raw(V, EPOCH, 2, 1, 1, "more"), "rank 1 sent a bad frame: bye report must carry 1 values"),
        (raw(V, EPOCH, 2, 1, -1), "a rank sent a bad frame: bye report: rank must be"),
        (raw(1, EPOCH, 0, 0, 1), "rank 1 sent a bad frame: report has protocol version 1"),
        (raw(V, EPOCH, 3, 1, b"", b"123", None), "rank 0 sent a bad frame: result: tokens must be"),
        (raw(V, EPOCH, 0, 0, 5), "calls itself rank 5, expected 0 to 1"),
        (
            bad_result([1, 2]),
            "rank 0, step 1: the result carries 0 digests, expected one of each of 2",
        ),
        (bad_result([1, 2], digests=[1]), "step 1: the result carries 1 digests, expected"),
        (bad_result([1, 2], digests=[1, 2, 3]), "step 1: the result carries 3 digests, expected"),
        (
            bad_result([-1, -1], digests=[1, 2]),
            "carries 2 digests, expected .* none of a step that",
        ),
        (bad_result([1, 2], digests=[1, 2]), "ranks 0 and 1 disagree with the scheduler at step 1"),
        (bad_result([1, 2], sequence=2), "the result of step 2, expected that of step 1"),
    ],
)
def test_a_bad_frame_of_a_live_rank_stops_the_group_and_names_it(report, said):
    """T07: only the output rank was listened to; here every stream ends with the sentence."""
    rig = started()
    rig.submit(1)
    rig.submit(2, front=OTHER)
    rig.loop.turn(0.0)
    rig.submit(3)
    rig.report(report)
    with pytest.raises(WorkerGroupError, match=said) as caught:
        rig.loop.turn(0.0)
    assert rig.heard(FRONT) == [
        (1, RefusalReason.ENGINE_FAILED, str(caught.value)),
        (3, RefusalReason.ENGINE_FAILED, str(caught.value)),
    ]
    assert rig.heard(OTHER) == [(2, RefusalReason.ENGINE_FAILED, str(caught.value))]


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([1], "rank 0, step 1: the result carries 1 tokens, its step ran 2"),
        ([1, 500], "rank 0, step 1: the result carries token 500"),
        ([1, -1], "rank 0, step 1: the result carries token -1"),
    ],
)
def test_tokens_that_the_step_cannot_have_sampled_stop_the_group(tokens, said):
    """Also when every digest is right: the tokens of a step are not in its own digest yet."""
    rig = started()
    rig.submit(1)
    rig.submit(2, front=OTHER)
    rig.tamper = lambda step, digests, _: (digests, np.array(tokens, np.int32))
    with pytest.raises(WorkerGroupError, match=said):
        rig.until_idle()
    assert [text for _, _, text in rig.heard()] == [text for _, _, text in rig.heard(OTHER)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("ranks", "who"), [([1], "rank 1 disagrees"), ([0, 2], "ranks 0 and 2 disagree")]
)
def test_a_rank_whose_digest_differs_is_named_and_its_token_is_not_delivered(ranks, who, depth):
    rig = started(num_ranks=3, depth=depth)
    rig.submit(1, max_tokens=9)

    def tamper(step: int, digests: list[int], tokens: np.ndarray):
        wrong = [digest ^ (step == 4 and rank in ranks) for rank, digest in enumerate(digests)]
        return wrong, tokens

    rig.tamper = tamper
    with pytest.raises(WorkerGroupError, match=f"^{who} with the scheduler at step 4: ") as caught:
        rig.until_idle()
    assert str(caught.value).count(". ") == 0, "one sentence"
    assert len(rig.heard()) == 3 + 1
    assert rig.heard()[-1] == (1, RefusalReason.ENGINE_FAILED, str(caught.value))


def test_a_recorder_sees_every_counted_frame_and_every_result():
    seen: list[tuple[str, int, bytes]] = []
    recorder = SimpleNamespace(
        frame=lambda sequence, message: seen.append(("frame", sequence, message)),
        result=lambda sequence, message: seen.append(("result", sequence, message)),
    )
    rig = started(recorder=recorder)
    rig.submit(1)
    rig.until_idle()
    rig.loop.stop()
    rig.loop.run()
    sent = [frame for frame in rig.workers.sent if decode_frame(frame).sequence]
    assert [message for kind, _, message in seen if kind == "frame"] == sent
    kinds = [(kind, sequence) for kind, sequence, _ in seen]
    assert kinds == [(kind, n) for n in (1, 2, 3, 4) for kind in ("frame", "result")] + [
        ("frame", 5)
    ]


def test_a_result_without_a_step_is_a_bad_frame():
    rig = started()
    rig.report(bad_result([]))
    with pytest.raises(WorkerGroupError, match="the result of step 1, expected none"):
        rig.turns(1)


def test_a_step_past_its_deadline_stops_the_group():
    """T07: peers of a failed rank sit in a collective for ever; the loop does not."""
    rig = started(step_deadline_s=30.0)
    rig.silent = {0}
    rig.submit(1)
    with pytest.raises(WorkerGroupError, match="step 1 has no result after 30 s"):
        rig.until_idle()
    assert max(wait for wait in rig.waits) <= 30.0
    assert rig.heard()[0][:2] == (1, RefusalReason.ENGINE_FAILED)


def test_past_its_deadline_the_rank_that_is_silent_is_named():
    """T08: the others wait for it in a collective; they answer when they are asked by another way, it does not."""
    asked = []

    def ask() -> list[RankProgress | None]:
        asked.append(1)
        return [RankProgress(1, 0), None]

    rig = started(step_deadline_s=30.0, ask_ranks=ask)
    rig.silent = {0}
    rig.submit(1)
    with pytest.raises(
        WorkerGroupError, match=r"^step 1 has no result after 30 s; rank 1 does not answer"
    ):
        rig.until_idle()
    assert asked == [1]


def test_tokens_that_settled_reach_their_front_before_the_failure():
    rig = started()
    rig.submit(1)
    rig.turns(1)
    rig.work()
    rig.report(messages.encode_error(epoch=EPOCH, sequence=1, rank=1, text="boom"))
    with pytest.raises(WorkerGroupError):
        rig.turns(1)
    assert [entry[:2] for entry in rig.heard()] == [
        (1, hash_model(1, np.array([1, 2, 3]))),
        (1, RefusalReason.ENGINE_FAILED),
    ]


# ---------------------------------------------------------------- the end


def test_stop_ends_requests_and_collects_byes():
    rig = started()
    rig.submit(1)
    rig.turns(1)
    rig.loop.stop()
    rig.loop.run()
    last = rig.frames()[-1]
    assert (last.kind, last.body) == (FrameKind.CONTROL, ControlOperation.STOP)
    assert [frame.sequence for frame in rig.frames()[1:]] == [1, 2]
    assert rig.heard()[-1] == (1, RefusalReason.ENGINE_FAILED, "the engine is stopping")
    assert not rig.workers.inbox


def test_stop_does_not_wait_for_ever_for_a_bye():
    rig = started(bye_timeout_s=5.0)
    rig.silent = {1}
    rig.loop.stop()
    began = rig.now
    rig.loop.run()
    assert 5.0 <= rig.now - began < 6.0


def test_run_serves_until_it_is_stopped():
    rig = started()
    rig.submit(1)
    work = rig.work

    def stop_when_done() -> None:
        work()
        if len(rig.heard()) == 3:
            rig.loop.stop()

    rig.on_wait = stop_when_done
    rig.loop.run()
    assert [code for _, _, code in rig.heard()] == [0, 0, FinishCode.LENGTH]


def test_the_snapshot_counts_what_happened():
    rig = started()
    rig.submit(1, max_tokens=2)
    rig.turns(1)
    assert {
        "running": 1,
        "waiting": 0,
        "in_flight": 1,
        "free_blocks": 39,
    }.items() <= rig.loop.snapshot().items()
    rig.turns(4)
    assert rig.loop.snapshot() == {
        "policy": "fcfs",
        "running": 0,
        "waiting": 0,
        "compiling": 0,
        "free_blocks": 40,
        "usable_blocks": 40,
        "steps": 3,
        "preemptions": 0,
        "prefix_cache_queries": 0,
        "prefix_cache_hits": 0,
        "in_flight": 0,
        "tokens_computed": 4,
        "tokens_out": 2,
        "dropped_frames": 0,
        "bad_front_messages": 0,
        "fronts": 1,
    }


# ---------------------------------------------------------------- masks


def sent_kinds(rig: Rig) -> list[tuple[FrameKind, int]]:
    return [(f.kind, f.sequence) for f in rig.frames() if f.kind is not FrameKind.HELLO]


def test_a_mask_follows_its_step_once_the_step_before_has_settled():
    """Depth 2: two steps are on their way; the later one's mask waits for the earlier one's tokens."""
    rig = started(depth=2)
    rig.on_wait = lambda: None
    rig.submit(1, max_tokens=3, structured_outputs=form(5, 9))
    rig.turns(3)
    step, mask = FrameKind.STEP, FrameKind.MASK
    assert sent_kinds(rig) == [(step, 1), (mask, 2), (step, 3)]
    rig.work()
    rig.turns(1)
    assert sent_kinds(rig)[3:] == [(mask, 4), (step, 5)]
    rig.on_wait = rig.work
    rig.until_idle()
    assert [token % 5 for _, token, _ in rig.heard()] == [0, 1, 2]
    assert rig.loop.snapshot()["steps"] == 4


def test_a_form_that_fails_is_refused_and_the_others_go_on():
    """E-04, at the front: one sentence for its own request."""
    rig = started()
    rig.submit(1, structured_outputs={"regex": "bad"})
    rig.submit(2)
    rig.until_idle()
    said = [entry for entry in rig.heard() if entry[0] == 1]
    assert said == [(1, RefusalReason.INVALID, "the regex cannot be compiled")]
    assert [code for number, _, code in rig.heard() if number == 2] == [0, 0, FinishCode.LENGTH]
    rig.submit(1, structured_outputs=form(2, 1))  # mended, under the same key
    rig.until_idle()
    number, token, code = rig.heard()[-1]
    assert (number, token % 2, code) == (1, 0, FinishCode.STOP)


def test_the_loop_sleeps_while_a_form_is_compiled():
    """It is woken by whoever compiles; with nothing else to do it waits for ever, and never spins."""
    rig = started()
    rig.grammars.at_once = False
    rig.submit(1, structured_outputs=form(2, 1))
    rig.loop.turn(None)
    assert rig.loop.snapshot()["compiling"] == 1
    rig.loop.turn(None)
    assert rig.waits[-1] is None
    rig.on_wait = lambda: (rig.grammars.finish(), rig.work())[0]
    rig.until_idle()
    assert [code for _, _, code in rig.heard()] == [FinishCode.STOP]


def test_a_rank_that_samples_before_its_mask_stops_the_group():
    rig = started(depth=2)
    rig.on_wait = lambda: None
    rig.submit(1, structured_outputs=form(5, 9))
    rig.turns(2)
    rig.work()
    (first,) = rig.workers.inbox
    rig.workers.inbox.clear()
    rig.report(first)
    rig.result(np.array([7], np.int32), [1, 1], 3)
    rig.scheduler.make_mask = lambda: None  # its turn has not come
    with pytest.raises(WorkerGroupError, match="result of step 3, which waits for its mask"):
        rig.turns(1)


def test_the_digest_covers_the_mask():
    """A rank that was sent other bits would choose another token: it is named before a token is taken in."""
    rig = started(num_ranks=2)
    end = rig.fake.state.digests.end
    rig.fake.state.digests.end = lambda frame: end(
        frame[:-1] if frame[3] == FrameKind.MASK else frame
    )
    rig.submit(1, structured_outputs=form(5, 9))
    with pytest.raises(WorkerGroupError, match=r"disagree with the scheduler, .* at step 1"):
        rig.until_idle()


def test_stop_between_a_step_and_its_mask_ends_like_any_other():
    rig = started(depth=2)
    rig.on_wait = lambda: None
    rig.submit(1, structured_outputs=form(5, 9))
    rig.turns(2)
    rig.loop.stop()
    rig.on_wait = lambda: [
        rig.report(messages.encode_bye(epoch=EPOCH, sequence=9, rank=r)) for r in (0, 1)
    ]
    rig.loop.run()
    assert rig.frames()[-1].kind is FrameKind.CONTROL
    assert rig.heard()[-1][1] is RefusalReason.ENGINE_FAILED
