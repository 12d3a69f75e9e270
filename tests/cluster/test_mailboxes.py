"""Mailboxes: in order, once, until acknowledged; and nothing left when a client is gone."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from rowcast.cluster.answer_text import AnswerText
from rowcast.cluster.mailboxes import Delivery, Mailboxes, Update
from rowcast.cluster.text import TextProcessor
from rowcast.scheduler.extras import LogprobRows, PromptRows
from rowcast.scheduler.front_messages import FinishCode, Outputs, RefusalReason
from rowcast.scheduler.sampling_params import SamplingParams
from rowcast.tests.scheduler.logprob_rows import some_rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ANNA, BERT = b"a" * 16, b"b" * 16


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    """A tokenizer of single bytes: id i is byte alphabet[i]."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 256}))
    return TextProcessor(folder)


class World:
    def __init__(self, text: TextProcessor) -> None:
        self.text = text
        self.clock = Clock()
        self.boxes = Mailboxes(idle_s=30.0, clock=self.clock)

    def open(self, client: bytes, counter: int, streams: bool = True, **params: Any) -> int | None:
        answer = AnswerText(self.text, [], SamplingParams(**params))
        return self.boxes.open(client, counter, answer=answer, streams=streams)

    def ids(self, words: str) -> list[int]:
        return self.text.encode(words)

    def deliver(
        self, number: int | None, ids: list[int], finish: FinishCode = FinishCode.RUNNING
    ) -> Delivery:
        codes = [0] * (len(ids) - 1) + [int(finish)]
        return self.boxes.deliver(
            Outputs(
                epoch=1,
                numbers=np.array([number] * len(ids), np.int64),
                tokens=np.array(ids, np.int32),
                finish_codes=np.array(codes, np.int8),
            )
        )


def outputs_with_rows(
    number: int, ids: list[int], prompt: tuple[int, list[int]] | None = None
) -> Outputs:
    """Some tokens of one request, each with its row; prompt: a position and the prompt's tokens from there on."""
    return Outputs(
        epoch=1,
        numbers=np.array([number] * len(ids), np.int64),
        tokens=np.array(ids, np.int32),
        finish_codes=np.zeros(len(ids), np.int8),
        logprobs={place: row_of(token) for place, token in enumerate(ids)},
        prompt_logprobs=[]
        if prompt is None
        else [PromptRows(number, prompt[0], some_rows(prompt[1], 2, vocab_size=256))],
    )


def row_of(token: int) -> LogprobRows:
    return some_rows([token], 3, vocab_size=256)


def told(world: World) -> tuple[list[int], list[int] | None, list[int] | None]:
    """Of Anna's only update: its tokens, and the tokens whose rows it has, of the answer and of the prompt."""
    (update,) = world.boxes.news(ANNA)
    rows = update.logprobs
    assert rows is not None
    tokens, prompt = (
        None if one is None else one.token_ids[:, 0].tolist() for one in (rows.tokens, rows.prompt)
    )
    named = {i for one in (rows.tokens, rows.prompt) if one for i in one.token_ids.flat}
    assert rows.texts == {i: world.text.decode([i]) for i in named}
    return np.frombuffer(update.token_ids, "<i4").tolist(), tokens, prompt


def test_log_probabilities_never_part_from_their_tokens(world: World) -> None:
    """A lost answer is given again with its rows; what is acknowledged is forgotten with them."""
    number = world.open(ANNA, 0, logprobs=3, prompt_logprobs=2)
    assert number is not None
    h, i, mark = world.ids("hi!")
    assert world.boxes.deliver(outputs_with_rows(number, [], (1, [i, h]))).clients == set()
    world.boxes.deliver(outputs_with_rows(number, [h], (3, [mark])))
    for _ in range(2):
        assert told(world) == ([h], [h], [i, h, mark])
    world.boxes.deliver(outputs_with_rows(number, [i]))
    assert told(world) == ([h, i], [h, i], [i, h, mark])
    world.boxes.acknowledge(ANNA, [(0, 2)], [])  # whoever has a token has the prompt's rows
    world.boxes.deliver(outputs_with_rows(number, [mark]))
    assert told(world) == ([mark], [mark], None)


def test_a_resubmitted_prompt_that_is_scored_again_has_each_row_once(world: World) -> None:
    number = world.open(ANNA, 0, prompt_logprobs=2, logprobs=0)
    assert number is not None
    h, i, mark = world.ids("hi!")
    world.boxes.deliver(outputs_with_rows(number, [], (1, [i, h])))
    world.boxes.deliver(outputs_with_rows(number, [h], (1, [i, h, mark])))
    assert told(world)[2] == [i, h, mark]


def test_a_stop_string_ends_rows_with_tokens(world: World) -> None:
    """O-02: what comes behind it belongs to no token that is delivered."""
    number = world.open(ANNA, 0, stop="hi", logprobs=3)
    assert number is not None
    h, i, mark = world.ids("hi!")
    assert world.boxes.deliver(outputs_with_rows(number, [h, i, mark])).stopped == [number]
    world.boxes.deliver(outputs_with_rows(number, [mark]))
    assert told(world) == ([h, i], [h, i], None)


@pytest.fixture
def world(text: TextProcessor) -> World:
    return World(text)


def seen(update: Update) -> tuple[int, list[int], str, str | None]:
    ids = np.frombuffer(update.token_ids, "<i4").tolist()
    return update.first, ids, update.text, update.finish_reason


def test_how_much_of_the_prompt_was_cached_comes_with_the_first_token(world: World) -> None:
    """Also when the scheduler told it in a message before, and again with every later answer."""
    number, other = world.open(ANNA, 0), world.open(ANNA, 1)
    none = np.empty(0, np.int64)
    told = Outputs(
        epoch=1, numbers=none, tokens=none.astype(np.int32), finish_codes=none.astype(np.int8),
        cached_numbers=np.array([number, 999]), cached_tokens=np.array([32, 16], np.int32),
    )  # fmt: skip
    assert world.boxes.deliver(told) == (set(), [], [])
    for token in world.ids("hi"):
        world.deliver(number, [token])
        world.deliver(other, [token])
        assert [u.cached_tokens for u in world.boxes.news(ANNA)] == [32, 0]


def test_tokens_come_in_order_with_their_text(world: World) -> None:
    """O-01: each as it comes, the first one alone; the end leaves nothing to come."""
    number = world.open(ANNA, 0)
    h, i, mark = world.ids("hi!")
    assert world.deliver(number, [h]) == ({ANNA}, [], [])
    (update,) = world.boxes.news(ANNA)
    assert seen(update) == (0, [h], "h", None)
    world.deliver(number, [i])
    world.boxes.acknowledge(ANNA, [(0, 1)], [])
    (update,) = world.boxes.news(ANNA)
    assert seen(update) == (1, [i], "i", None)
    world.deliver(number, [mark], FinishCode.LENGTH)
    world.boxes.acknowledge(ANNA, [(0, 2)], [])
    (update,) = world.boxes.news(ANNA)
    assert seen(update) == (2, [mark], "!", "length")


def test_a_lost_answer_is_given_again(world: World) -> None:
    """The cursor of the next poll is what says that an answer arrived."""
    number = world.open(ANNA, 0)
    h, i = world.ids("hi")
    world.deliver(number, [h])
    world.boxes.news(ANNA)  # never reached the client
    world.deliver(number, [i])
    world.boxes.acknowledge(ANNA, [], [])
    (update,) = world.boxes.news(ANNA)
    assert seen(update) == (0, [h, i], "hi", None)
    world.deliver(number, [-1], FinishCode.ABORT)
    for _ in range(2):  # the end too, until it is acknowledged
        world.boxes.acknowledge(ANNA, [(0, 2)], [])
        (update,) = world.boxes.news(ANNA)
        assert seen(update) == (2, [], "", "abort")
    assert world.boxes.acknowledge(ANNA, [], [0]) == [number]
    assert world.boxes.news(ANNA) == []


def test_the_tail_of_a_text_survives_a_lost_answer(world: World) -> None:
    """The end flushes an unfinished character without a token of its own: no cursor can tell that it arrived."""
    number = world.open(ANNA, 0)
    first_byte, *_ = world.ids("é")
    world.deliver(number, [first_byte])
    (update,) = world.boxes.news(ANNA)
    assert seen(update) == (0, [first_byte], "", None)
    world.deliver(number, [-1], FinishCode.ABORT)
    for _ in range(2):
        world.boxes.acknowledge(ANNA, [(0, 1)], [])
        (update,) = world.boxes.news(ANNA)
        assert seen(update) == (1, [], "\ufffd", "abort")


def test_a_cursor_that_no_answer_gave_is_ignored(world: World) -> None:
    number = world.open(ANNA, 0)
    h, i = world.ids("hi")
    world.deliver(number, [h, i])
    world.boxes.news(ANNA)
    for wrong in (1, 3, -1):
        world.boxes.acknowledge(ANNA, [(0, wrong), (77, 1)], [88])
    (update,) = world.boxes.news(ANNA)
    assert seen(update) == (0, [h, i], "hi", None)


def test_the_same_counter_twice_is_the_same_request(world: World) -> None:
    number = world.open(ANNA, 0)
    assert number is not None
    assert world.open(ANNA, 0) is None
    assert world.open(BERT, 0) not in (None, number), "another client's 0 is another request"
    world.deliver(number, world.ids("x"), FinishCode.STOP)
    world.boxes.news(ANNA)
    world.boxes.acknowledge(ANNA, [], [0])
    assert world.open(ANNA, 0) is None, "not even after it ended and was acknowledged"


def test_a_request_that_does_not_stream_tells_everything_at_the_end(world: World) -> None:
    number = world.open(ANNA, 0, streams=False)
    h, i = world.ids("hi")
    assert world.deliver(number, [h]) == (set(), [], [])
    assert not world.boxes.has_news(ANNA)
    assert world.boxes.news(ANNA) == []
    assert world.deliver(number, [i], FinishCode.LENGTH) == ({ANNA}, [], [])
    (update,) = world.boxes.news(ANNA)
    assert seen(update) == (0, [h, i], "hi", "length")


def test_a_named_stop_token_is_the_stop_reason(world: World) -> None:
    (x,) = world.ids("x")
    numbers = [world.open(ANNA, 0, stop_token_ids=(x,)), world.open(ANNA, 1)]
    for number in numbers:
        world.deliver(number, [x], FinishCode.STOP)
    assert [u.stop_reason for u in world.boxes.news(ANNA)] == [x, None]


def test_a_stop_string_is_the_end_and_the_scheduler_is_to_be_told_once(world: World) -> None:
    """O-02: what was in flight when the string came is dropped, and so is the scheduler's own end."""
    number = world.open(ANNA, 0, stop="op", stop_token_ids=(5,))
    s, t, o, p, x = world.ids("stopx")
    assert world.deliver(number, [s, t, o]) == ({ANNA}, [], [])
    (update,) = world.boxes.news(ANNA)
    assert seen(update) == (0, [s, t, o], "st", None)
    world.boxes.acknowledge(ANNA, [(0, 3)], [])
    assert world.deliver(number, [p, x, x]) == ({ANNA}, [], [number])
    assert world.deliver(number, [x]) == (set(), [], [])
    assert world.deliver(number, [-1], FinishCode.ABORT) == (set(), [number], [])
    for _ in range(2):
        (update,) = world.boxes.news(ANNA)
        assert seen(update) == (3, [p], "", "stop")
        assert update.stop_reason == "op"


def test_a_stop_string_beats_the_length_and_needs_no_abort(world: World) -> None:
    number = world.open(ANNA, 0, stop="op", include_stop_str_in_output=True, streams=False)
    ids = world.ids("stop")
    assert world.deliver(number, ids, FinishCode.LENGTH) == ({ANNA}, [], [])
    (update,) = world.boxes.news(ANNA)
    assert seen(update) == (0, ids, "stop", "stop")


def test_held_text_comes_with_the_end_and_again_if_its_answer_was_lost(world: World) -> None:
    number = world.open(ANNA, 0, stop="op!")
    o, p = world.ids("op")
    world.deliver(number, [o, p])
    (update,) = world.boxes.news(ANNA)
    assert seen(update) == (0, [o, p], "", None)
    world.deliver(number, [-1], FinishCode.ABORT)
    for _ in range(2):
        world.boxes.acknowledge(ANNA, [(0, 2)], [])
        (update,) = world.boxes.news(ANNA)
        assert seen(update) == (2, [], "op", "abort")


def test_a_refusal_is_the_end(world: World) -> None:
    number = world.open(ANNA, 0)
    assert number is not None
    assert world.boxes.refuse(number, RefusalReason.OVERLOADED, "too many") == ANNA
    (update,) = world.boxes.news(ANNA)
    assert update.finish_reason == "error"
    assert update.error == (RefusalReason.OVERLOADED, "too many")
    assert world.boxes.refuse(number, RefusalReason.INVALID, "again") is None, "one end is enough"


def test_times_are_of_the_request(world: World) -> None:
    number = world.open(ANNA, 0)
    world.clock.now += 0.5
    world.deliver(number, world.ids("h"))
    world.clock.now += 0.25
    world.deliver(number, world.ids("i"), FinishCode.LENGTH)
    (update,) = world.boxes.news(ANNA)
    assert update.first_token_time_s == update.arrival_time_s + 0.5
    assert update.finished_time_s == update.arrival_time_s + 0.75


def test_a_mailbox_that_nobody_polls_is_dropped_with_its_requests(world: World) -> None:
    """R10: a lost client aborts its requests within 30 s, and nothing of it stays."""
    live, over, bert = world.open(ANNA, 0), world.open(ANNA, 1), world.open(BERT, 0)
    assert live is not None
    world.deliver(over, world.ids("x"), FinishCode.STOP)
    world.clock.now += 29.9
    world.boxes.acknowledge(BERT, [], [])
    assert world.boxes.expire() == ([], [], [])
    world.clock.now += 0.1
    assert world.boxes.expire() == ([ANNA], [live], [over])
    assert (world.boxes.num_clients, world.boxes.num_requests) == (1, 1)
    assert not world.boxes.knows(ANNA)
    # Its end arrives later: the scheduler may forget it, nobody else has to know.
    assert world.deliver(live, [-1], FinishCode.ABORT) == (set(), [live], [])
    assert world.boxes.live_numbers(BERT, [0, 5]) == [bert]


def test_nothing_is_kept_of_requests_that_are_over(world: World) -> None:
    """S-08 for the front: a thousand requests of one client leave a mailbox and nothing in it."""
    for counter in range(1000):
        number = world.open(ANNA, counter)
        world.deliver(number, world.ids("ab"), FinishCode.STOP)
        world.boxes.news(ANNA)
        world.boxes.acknowledge(ANNA, [], [counter])
    assert world.boxes.num_requests == 0
    mailbox = world.boxes._mailboxes[ANNA]
    assert (mailbox.entries, mailbox.done, mailbox.all_done_below) == ({}, set(), 1000)
