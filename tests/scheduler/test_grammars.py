"""llguidance behind the scheduler's own words, on a tokenizer of bytes: compiling, masks, errors, the pool."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from rowcast.scheduler.grammars import MAX_KEPT, Grammars, Matcher, bits_of
from rowcast.scheduler.structured_outputs import StructuredOutputsParams

EOS = (257, 258)
VOCAB_SIZE = 300  # the tokenizer names 261 of them
TIMEOUT_S = 60


def tokenizer_json() -> str:
    """One id a byte, then `<pad>`, two ends, and two longer tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: index for index, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<end>", "<stop>"])
    tokenizer.add_tokens(["true", "null"])
    return tokenizer.to_str()


class Rig:
    """Grammars whose answers can be waited for."""

    def __init__(
        self,
        vocab_size: int = VOCAB_SIZE,
        tokenizer: Callable[[], str] = tokenizer_json,
        eos: Sequence[int] = EOS,
    ):
        from tokenizers import Tokenizer

        self.text = Tokenizer.from_str(tokenizer_json())
        self.woken = threading.Event()
        self.grammars = Grammars(
            tokenizer, vocab_size=vocab_size, eos_token_ids=eos, wake=self.woken.set
        )

    def compile(self, outputs: Sequence[int] = (), **fields) -> Matcher | str:
        answers: list[Matcher | str] = []
        self.woken.clear()
        self.grammars.start(StructuredOutputsParams(**fields), outputs, answers.append)
        assert self.woken.wait(TIMEOUT_S), "nobody woke the loop"
        (answer,) = answers
        return answer

    def matcher(self, outputs: Sequence[int] = (), **fields) -> Matcher:
        matcher = self.compile(outputs, **fields)
        assert isinstance(matcher, Matcher), matcher
        return matcher

    def ids(self, text: str) -> list[int]:
        return self.text.encode(text).ids

    def allowed(self, *matchers: Matcher) -> list[list[int]]:
        bits = self.grammars.allowed(matchers)
        assert bits.shape == (len(matchers), self.grammars.num_words)
        assert bits.dtype == np.int32
        bits = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
        return [np.flatnonzero(row).tolist() for row in bits]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.grammars.close()


def test_a_mask_allows_what_may_follow_and_the_ends_where_the_form_is_complete(rig: Rig):
    one, other = rig.matcher(regex="ab+"), rig.matcher(regex="ab+")
    (a, b) = rig.ids("ab")
    assert rig.allowed(one) == [[a]]
    one.take([a])
    assert rig.allowed(one, other) == [[b], [a]]
    one.take([b])
    assert rig.allowed(one) == [[b, *EOS]]
    assert not one.finished
    one.take([EOS[1]])
    assert one.finished
    assert one.error == ""


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"json": {"enum": ["x", True]}}, ['"x"', "true"]),
        ({"json_object": True, "disable_any_whitespace": True}, ["{}", '{"a":[null,{}]}']),
        ({"choice": ['say "hi"', "new\nline", "été 😀", "a/b\\c"]}, ['say "hi"', "new\nline", "été 😀", "a/b\\c"]),
        ({"grammar": 'start: "x" (DIGIT | ",")+ "."\nDIGIT: /[0-9]/'}, ["x1,2."]),
        ({"grammar": 'root ::= "x" [0-9] | "y"'}, ["x3", "y"]),
    ],
)  # fmt: skip
def test_each_kind_takes_what_has_its_form_and_is_finished_behind_it(rig: Rig, fields, texts):
    for text in texts:
        matcher = rig.matcher(**fields)
        for place, token in enumerate(ids := rig.ids(text)):
            assert token in rig.allowed(matcher)[0], text[:place]
            assert not matcher.finished
            matcher.take([token])
        assert matcher.finished, (text, ids)
        assert not rig.matcher(**fields).finished


def test_white_space_is_bounded_or_none(rig: Rig):
    """A small model that may go on with new lines does so to its token limit."""
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
    for compact, most in ((False, "\n\r\n" + 32 * " "), (False, 32 * "\t"), (True, "")):
        matcher = rig.matcher(json=schema, disable_any_whitespace=compact)
        matcher.take(rig.ids("{"))
        for token in rig.ids(most):
            assert token in rig.allowed(matcher)[0]
            matcher.take([token])
        assert rig.allowed(matcher) == [rig.ids('"')]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"regex": "a("}, "the regex cannot be compiled: .*unclosed group"),
        ({"regex": "(?=a)b"}, "the regex cannot be compiled: .*look-around"),
        ({"json": {"type": "nonsense"}}, "the json cannot be compiled: .*nonsense"),
        ({"json": {"type": "array", "uniqueItems": True}}, "the json cannot be compiled: .*uniqueItems"),
        ({"json": {"$ref": "#/missing"}}, "the json cannot be compiled: "),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 1}}, "the json cannot be compiled: "),
        ({"grammar": "start: foo"}, "the grammar cannot be compiled: at 1.*foo"),
        ({"json": {"$ref": "#"}}, "the json cannot be compiled: "),
        ({"grammar": "start: start"}, "the grammar cannot be compiled: no answer has it"),
        ({"grammar": 'root ::= root "x"'}, "the grammar cannot be compiled: no answer has it"),
        ({"grammar": "%%%"}, "the grammar cannot be compiled: "),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_is_told_in_one_line(rig: Rig, fields, sentence: str):
    for _ in range(2):  # a failure is not kept
        told = rig.compile(**fields)
        assert isinstance(told, str)
        assert re.match(f"structured_outputs: {sentence}", told), told
        assert "\n" not in told
        assert len(told) < 700
        if "grammar" not in fields:  # its Lark is ours: a user has written none of it
            assert "%" not in told
            assert "at 1(" not in told
    assert len(rig.grammars._kept) <= MAX_KEPT


def test_a_token_that_does_not_follow_is_an_error_and_allows_nothing(rig: Rig):
    matcher = rig.matcher(regex="ab")
    matcher.take(rig.ids("b"))
    assert matcher.error.startswith("structured_outputs: the answer cannot go on: ")
    assert "doesn't satisfy the grammar" in matcher.error
    assert not matcher.finished
    assert rig.allowed(matcher) == [[]]


def test_earlier_outputs_are_taken_first(rig: Rig):
    matcher = rig.matcher(rig.ids("ab"), regex="abc")
    assert rig.allowed(matcher) == [rig.ids("c")]
    assert rig.matcher(rig.ids("abc"), regex="abc").finished
    assert rig.matcher([*rig.ids("abc"), EOS[0], 5, 6], regex="abc").finished
    told = rig.compile(rig.ids("ax"), regex="abc")
    assert isinstance(told, str)
    assert told.startswith("structured_outputs: the answer cannot go on: ")


def test_an_answer_never_moves_another_of_the_same_form(rig: Rig):
    one = rig.matcher(regex="abc")
    one.take(rig.ids("a"))
    assert rig.allowed(rig.matcher(regex="abc"), one) == [rig.ids("a"), rig.ids("b")]


def test_the_latest_forms_are_kept_and_no_more(rig: Rig):
    for number in range(MAX_KEPT + 5):
        rig.matcher(regex=f"x{number}")
    assert len(rig.grammars._kept) == MAX_KEPT
    kept = rig.grammars._kept[StructuredOutputsParams(regex="x7")]
    rig.matcher(regex="x7")
    assert rig.grammars._kept[StructuredOutputsParams(regex="x7")] is kept
    assert next(reversed(rig.grammars._kept)) == StructuredOutputsParams(regex="x7")


@pytest.mark.parametrize("vocab_size", [259, 288, 300])
def test_no_bit_lies_beyond_the_vocabulary(vocab_size: int):
    """A model's head may have more rows than the tokenizer names, or fewer: then the last names cannot be chosen."""
    rig = Rig(vocab_size)
    matcher = rig.matcher(regex="(?s:.)*")
    (ids,) = rig.allowed(matcher)
    # every byte that may begin a character, no <pad>, the ends
    longer = [token for token in (259, 260) if token < vocab_size]
    assert {*EOS, *longer, *rig.ids("az~")} <= set(ids)
    assert 256 not in ids
    assert max(ids) == max(EOS[-1], *longer, 0)
    assert (
        rig.grammars.all_ones.tolist()
        == bits_of(range(vocab_size), len(rig.grammars.all_ones)).tolist()
    )
    rig.grammars.close()


def test_a_model_without_an_end_token_ends_where_nothing_may_follow():
    """llguidance then takes id 0 for one, which is a letter: it would end the answer, and stand in its text."""
    rig = Rig(eos=())
    matcher = rig.matcher(regex="ab+c?")
    matcher.take(rig.ids("ab"))
    assert rig.allowed(matcher) == [rig.ids("bc")]
    matcher.take(rig.ids("c"))
    assert matcher.finished
    rig.grammars.close()


def test_a_model_without_a_usable_tokenizer_says_so():
    def missing() -> str:
        raise ValueError("/models/x has no tokenizer.json")

    assert Rig(tokenizer=missing).compile(regex="a") == "/models/x has no tokenizer.json"
    told = Rig(tokenizer=lambda: "{}").compile(regex="a")
    assert isinstance(told, str)
    assert told.startswith("structured_outputs: the model's tokenizer cannot be used: ")


def test_who_asks_never_waits_and_a_closed_pool_answers_nobody_new():
    """The loop goes on while a form is compiled; the engine may stop meanwhile."""
    go, begun = threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        assert go.wait(TIMEOUT_S)
        return tokenizer_json()

    rig = Rig(tokenizer=slow)
    rig.grammars._threads = 1
    answers: list[Matcher | str] = []
    for regex in ("a", "b"):
        rig.grammars.start(StructuredOutputsParams(regex=regex), (), answers.append)
    assert begun.wait(TIMEOUT_S)
    assert answers == []
    rig.grammars.close()
    go.set()
    assert rig.woken.wait(TIMEOUT_S)
    assert len(answers) == 1


@pytest.mark.parametrize("text", ["<end>", "x<stop>y", "<pad>a"])
@pytest.mark.parametrize("kind", ["choice", "regex", "json", "grammar"])
def test_a_text_that_looks_like_a_special_token_is_spelled(rig: Rig, kind: str, text: str):
    """The special token was asked for, which has no text: the answer could not go on."""
    quoted = json.dumps(text)
    form = {
        "choice": [text],
        "regex": re.escape(text),
        "json": {"const": text},
        "grammar": f"start: {quoted}",
    }[kind]
    matcher = rig.matcher(**{kind: form})
    for character in quoted if kind == "json" else text:
        (token,) = rig.ids(character)
        assert token in rig.allowed(matcher)[0]
        matcher.take([token])
    assert (matcher.finished, matcher.error) == (True, "")


def test_thousands_of_choices_are_one_lexeme(rig: Rig):
    """As rules side by side they pass the parser's limit at the first token."""
    choices = [f"choice {number}" for number in range(4096)]
    matcher = rig.matcher(choice=choices)
    matcher.take(rig.ids("choice 409"))
    assert rig.allowed(matcher) == [sorted([*rig.ids("012345"), *EOS])]
    matcher.take(rig.ids("5"))
    assert matcher.finished
