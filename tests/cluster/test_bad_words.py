"""Bad words made token ids: with and without a space before them, and nothing that the tokenizer cannot say."""

from __future__ import annotations

from pathlib import Path

import pytest
from rowcast.cluster.bad_words import with_bad_words
from rowcast.cluster.text import TextProcessor
from rowcast.scheduler.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def text(smollm2_dir: Path) -> TextProcessor:
    return TextProcessor(smollm2_dir)


def test_a_word_is_forbidden_bare_and_after_a_space(text):
    """In this vocabulary most words are another token after a space; one spelling alone lets the word through."""
    params = with_bad_words(SamplingParams(bad_words=["cat", " cat", "Zyzzyx"]), text)
    spelled = [text.decode(ids) for ids in params.bad_words_token_ids]
    assert spelled == ["cat", " cat", "Zyzzyx", " Zyzzyx"]  # " cat" is "cat", said again
    assert any(len(ids) > 1 for ids in params.bad_words_token_ids)
    assert params.bad_words == ("cat", " cat", "Zyzzyx")


def test_a_word_of_spaces_is_itself(text):
    params = with_bad_words(SamplingParams(bad_words=[" "]), text)
    assert [text.decode(ids) for ids in params.bad_words_token_ids] == [" ", "  "]


def test_nothing_is_looked_up_for_nothing(tmp_path):
    """A folder without a tokenizer serves whoever sends ids, as long as no text is asked for."""
    params = SamplingParams(temperature=0)
    assert with_bad_words(params, TextProcessor(tmp_path)) is params
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        with_bad_words(SamplingParams(bad_words=["cat"]), TextProcessor(tmp_path))


def test_a_users_own_ids_are_refused(text):
    with pytest.raises(ValueError, match="made from bad_words; give the words themselves"):
        with_bad_words(SamplingParams(bad_words=["cat"], bad_words_token_ids=[[5]]), text)
