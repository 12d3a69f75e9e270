"""An answer's text up to a stop string: the numbers of the collected cases, and that no cut into tokens changes it."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
from rowcast.cluster.answer_text import AnswerText
from rowcast.cluster.stop_strings import StopStrings
from rowcast.cluster.text import IncrementalDetokenizer, TextProcessor
from rowcast.scheduler.front_messages import FinishCode
from rowcast.scheduler.sampling_params import SamplingParams
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

RUNNING, STOP, LENGTH = FinishCode.RUNNING, FinishCode.STOP, FinishCode.LENGTH
PIECES = [
    "DEF", "G", "HI", "J", "X", "xDEFGHIJy", "He", "ll", "o ", "wor", "ld", "\n", "a", "b", "c",
]  # fmt: skip
CONTROL = len(PIECES)
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
# Printable bytes stand for themselves, the others for the characters from 256 on: GPT-2's way.
SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
HIDDEN = [byte for byte in range(256) if byte not in SHOWN]
ID_OF_BYTE = {byte: ALPHABET.index(chr(byte)) for byte in SHOWN} | {
    byte: ALPHABET.index(chr(256 + place)) for place, byte in enumerate(HIDDEN)
}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    """A tokenizer whose ids are PIECES, joined as they are, and one control token."""
    folder = tmp_path_factory.mktemp("words")
    tokenizer = Tokenizer(models.WordLevel({p: i for i, p in enumerate(PIECES)}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": CONTROL + 1}))
    return TextProcessor(folder)


@pytest.fixture(scope="module")
def text_of_bytes(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    """A tokenizer whose ids are the places of the byte alphabet's characters."""
    folder = tmp_path_factory.mktemp("bytes")
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 256}))
    return TextProcessor(folder)


class Answer:
    """Feeds one answer piece by piece and keeps what was released after each."""

    def __init__(self, processor: TextProcessor, **params) -> None:
        self.text = AnswerText(processor, [], SamplingParams(max_tokens=100, **params))
        self.released = ""

    def say(self, *pieces: str, finish: FinishCode = RUNNING) -> list[str]:
        """All that was released after each piece; `finish` comes with the last."""
        seen = []
        for number, piece in enumerate(pieces, start=1):
            token_id = CONTROL if piece == "<end>" else PIECES.index(piece)
            last = number == len(pieces)
            self.released += self.text.append([token_id], finish if last else RUNNING)
            seen.append(self.released)
        return seen


# ---------------------------------------------------------------- F01: "DEFGHIJ"


def test_a_stop_string_across_tokens_shows_nothing_of_itself(words: TextProcessor) -> None:
    """F01 (a)."""
    answer = Answer(words, stop="DEFGHIJ")
    assert answer.say("DEF", "G", "HI", "J") == ["", "", "", ""]
    assert answer.text.stop_string == answer.text.stop_reason == "DEFGHIJ"
    assert answer.say("X", finish=LENGTH) == [""], "nothing comes after a stop"


def test_what_was_no_stop_string_comes_as_soon_as_that_is_clear(words: TextProcessor) -> None:
    """F01 (b): six characters at most are held, and none that cannot begin the string."""
    answer = Answer(words, stop="DEFGHIJ")
    assert answer.say("DEF", "G", "X") == ["", "", "DEFGX"]
    assert answer.text.stop_string is None


def test_what_was_held_comes_with_the_end(words: TextProcessor) -> None:
    """F01 (c)."""
    answer = Answer(words, stop="DEFGHIJ")
    assert answer.say("DEF", "G", finish=LENGTH) == ["", "DEFG"]
    assert answer.text.stop_reason is None


@pytest.mark.parametrize(("include", "expected"), [(False, "x"), (True, "xDEFGHIJ")])
def test_a_stop_string_inside_one_token(words: TextProcessor, include, expected) -> None:
    """F01 (d)."""
    answer = Answer(words, stop=["DEFGHIJ"], include_stop_str_in_output=include)
    assert answer.say("xDEFGHIJy", "X") == [expected, expected]


# ---------------------------------------------------------------- O-02, O-03, O-04, S18


def test_no_more_is_held_than_may_begin_the_stop_string(words: TextProcessor) -> None:
    """O-04: it allows len("stop") - 1 characters to be held, which here are none; "sto" itself is."""
    least = ["", "H", "Hel", "Hello ", "Hello wo"]
    seen = Answer(words, stop="stop").say("He", "ll", "o ", "wor", "ld")
    assert all(released.startswith(bound) for released, bound in zip(seen, least, strict=True))
    assert seen[-1] == "Hello world"
    seen = Answer(words, stop="orlo").say("He", "ll", "o ", "wor", "ld")
    assert seen == ["He", "Hell", "Hello ", "Hello w", "Hello world"]


@pytest.mark.parametrize(("include", "num_words"), [(False, 5), (True, 6)])
def test_the_sixth_word_as_a_stop_string_leaves_five(words: TextProcessor, include, num_words):
    """O-02."""
    said = ["He", "ll", "o ", "wor", "ld", "G", "X"]
    answer = Answer(words, stop="G", include_stop_str_in_output=include)
    answer.say(*said)
    assert answer.released == "".join(said[:num_words])


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "He"),
        ({"skip_special_tokens": False}, "He"),
        ({"include_stop_str_in_output": True}, "He"),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "He<end>"),
    ],
)
@pytest.mark.parametrize("stop", [(), ("never",)])
def test_a_stop_token_has_no_text_unless_asked_for(words: TextProcessor, params, text, stop):
    """O-03: whether or not stop strings are looked for beside it."""
    answer = Answer(words, stop_token_ids=[CONTROL], stop=stop, **params)
    answer.say("He", "<end>", finish=STOP)
    assert (answer.released, answer.text.stop_reason) == (text, CONTROL)


def test_the_models_own_end_is_no_stop_reason_and_past_it_both_tokens_are_kept(words):
    answer = Answer(words, skip_special_tokens=False)
    assert answer.say("He", "<end>", finish=STOP)[-1] == "He"
    assert answer.text.stop_reason is None
    ignored = Answer(words, skip_special_tokens=False, ignore_eos=True)
    assert ignored.say("He", "<end>", "<end>", finish=LENGTH)[-1] == "He<end><end>"


def test_stop_strings_are_looked_for_after_min_tokens(words: TextProcessor) -> None:
    """S18: the first newline stays in the text, the sixth token's ends it."""
    answer = Answer(words, stop=["\n"], min_tokens=5)
    answer.say("a", "\n", "b", "c", "a", "\n", "b")
    assert (answer.released, answer.text.stop_reason) == ("a\nbca", "\n")


def test_a_stop_string_that_begins_before_min_tokens_and_ends_after_counts(words) -> None:
    answer = Answer(words, stop=["aa"], min_tokens=2)
    assert answer.say("a", "a", "a") == ["", "a", "a"]
    assert answer.text.stop_string == "aa"


def test_without_detokenizing_there_is_no_text(words: TextProcessor) -> None:
    """O-08."""
    answer = Answer(words, detokenize=False, stop_token_ids=[CONTROL])
    assert answer.say("He", "<end>", finish=STOP) == ["", ""]
    assert answer.text.stop_reason == CONTROL


def test_stop_strings_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    """F03: nothing would ever be found."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 8}))
    with pytest.raises(ValueError, match=r"has no tokenizer\.json; use stop_token_ids"):
        AnswerText(TextProcessor(tmp_path), [1], SamplingParams(stop="a"))
    AnswerText(TextProcessor(tmp_path), [1], SamplingParams(stop=None))


# ---------------------------------------------------------------- the search itself


def first_end(text: str, strings: list[str]) -> tuple[int, str] | None:
    """By trying every end, the nearest first, and of one end the longest string."""
    for end in range(len(text) + 1):
        found = [string for string in strings if text[:end].endswith(string)]
        if found:
            return end, max(found, key=len)
    return None


def test_the_first_complete_string_is_found_however_the_text_is_cut() -> None:
    """Against trying every end, on a small alphabet where strings overlap themselves and each other."""
    rng = random.Random(3)
    found_some = 0
    for _ in range(500):
        strings = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(3)]
        text = "".join(rng.choices("abc", k=12))
        cuts = sorted(rng.choices(range(13), k=4))
        stops, before, found = StopStrings(strings), 0, None
        for start, end in itertools.pairwise([0, *cuts, 12]):
            found = stops.find(text[start:end])
            if found is not None:
                before = start
                break
            held = text[end - stops.num_begun : end]
            assert stops.num_begun < max(map(len, strings))
            assert not held or any(string.startswith(held) for string in strings)
        expected = first_end(text, strings)
        assert (found and (before + found[0], found[1])) == expected
        found_some += expected is not None
    assert 100 < found_some < 500


def test_the_text_is_the_same_however_the_tokens_come(text_of_bytes: TextProcessor) -> None:
    """O-01: one, 5, 10 or all tokens at a time, single bytes, some broken: the pieces add up to the whole text.

    The reference cuts the whole text at the first stop, by trying every end.
    """
    rng = random.Random(11)
    stopped = 0
    for _ in range(200):
        said = "".join(rng.choices("ab\n é🙂", k=12)).encode()
        data = bytes(byte if rng.random() > 0.05 else 0xF0 for byte in said)
        stop = ["".join(rng.choices("ab\n é🙂", k=rng.randint(1, 3))) for _ in range(3)]
        min_tokens, include = rng.choice([0, 0, 5, 20]), rng.random() < 0.5
        params = SamplingParams(
            stop=stop, min_tokens=min_tokens, include_stop_str_in_output=include, max_tokens=100
        )
        ids = [ID_OF_BYTE[byte] for byte in data]
        # The reference: after how many tokens each character is there, and the first stop that may count.
        plain, whole, came_with = IncrementalDetokenizer(text_of_bytes, []), "", []
        for number, token_id in enumerate(ids, start=1):
            whole += plain.append([token_id], number == len(ids))
            came_with += [number] * (len(whole) - len(came_with))
        ends = (
            (end, string)
            for end in range(1, len(whole) + 1)
            for string in sorted(stop, key=len, reverse=True)
            if whole[:end].endswith(string) and came_with[end - 1] > min_tokens
        )
        end, string = next(ends, (len(whole), None))
        expected = whole[: end - len(string) * (not include)] if string else whole
        stopped += string is not None
        for size in (1, 5, 10, len(ids)):
            answer, released = AnswerText(text_of_bytes, [], params), ""
            for start in range(0, len(ids), size):
                over = start + size >= len(ids)
                released += answer.append(ids[start : start + size], LENGTH if over else RUNNING)
                assert expected.startswith(released)
            assert (released, answer.stop_reason) == (expected, string)
    assert 50 < stopped < 200


@pytest.mark.parametrize(
    ("stop", "says"),
    [
        ("", "none of them empty"),
        ([""], "got the entry ''"),
        (["a", ""], "got the entry ''"),
        (["a"] * 5, "got 5 entries"),
        (["a"] * 500_000, "got 500000 entries"),
        ([3], "got the entry 3"),
        (3, "got 3"),
        (b"ab", "got b'ab'"),
        ("a\ud83d", "remove the lone surrogate"),
    ],
)
def test_bad_stop_values_are_refused(stop, says) -> None:
    """F03. Null, as JSON has it, is fine."""
    with pytest.raises(ValueError, match=rf"^stop must be .*{says}"):
        SamplingParams(stop=stop)
    assert SamplingParams(stop=None).stop == ()


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"n": 0}, r"^n must be an integer in \[1, 1024\], got 0"),
        ({"n": -1}, "^n must be"),
        ({"n": 100_000}, "^n must be"),
        ({"n": 2, "temperature": 0}, "^n must be 1 when temperature is 0"),
        ({"min_tokens": -1}, "^min_tokens must be"),
        ({"min_tokens": 17}, "^min_tokens must be .* at most max_tokens, got 17"),
        ({"detokenize": 1}, "^detokenize must be True or False"),
        ({"skip_special_tokens": None}, "^skip_special_tokens must be True or False"),
        ({"include_stop_str_in_output": "yes"}, "^include_stop_str_in_output must be"),
        ({"stop": "a", "detokenize": False}, "need detokenize=True"),
    ],
)
def test_bad_text_params_are_refused_by_their_name(params, says) -> None:
    """SA-14, F06."""
    with pytest.raises(ValueError, match=says):
        SamplingParams(**params)
