"""What `generate` accepts as prompts, sampling params and request options."""

from __future__ import annotations

import numpy as np
import pytest
from rowcast import SamplingParams
from rowcast.cluster.prompts import (
    is_one_prompt,
    list_conversations,
    list_options,
    list_params,
    list_prompts,
    one_prompt,
)


@pytest.mark.parametrize(
    ("given", "listed"),
    [
        ("Hi", ["Hi"]),
        ("", [""]),  # empty, which the scheduler's door refuses with its own words
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        (np.array([1, 2], np.int64), [[1, 2]]),
        (["Hi", "Ho"], ["Hi", "Ho"]),
        (["Hi", [1, 2]], ["Hi", [1, 2]]),
        ([[1], (2, 3)], [[1], [2, 3]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([[]], [[]]),
        ([], []),
    ],
)
def test_a_prompt_or_a_list_of_prompts(given, listed):
    result = list_prompts(given)
    assert result == listed
    assert all(
        type(token) is int for prompt in result if isinstance(prompt, list) for token in prompt
    )


@pytest.mark.parametrize("given", ["Hi", "", [1, 2], (1,), np.array([1])])
def test_one_prompt_is_told_from_a_list_of_one(given):
    """An error names the place in a list; one prompt has no place."""
    assert is_one_prompt(given)
    assert not is_one_prompt([given])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (None, "prompts must be a string"),
        (7, "prompts must be a string"),
        ({"a": 1}, "prompts must be a string"),
        (b"bytes", "prompts must be a string"),
        (np.array(7), "prompts must be a string"),  # an array of no dimension has no length
        (["Hi", None], r"prompts\[1\] must be a string or a list of token ids, got None"),
        (["Hi", 7], r"prompts\[1\] must be"),
        ([[1], [2, "3"]], r"prompts\[1\]\[1\] must be a token id"),
        ([[1.5]], r"prompts\[0\]\[0\] must be a token id"),
        ([[True]], r"prompts\[0\]\[0\] must be a token id"),
        ([[2**40]], r"prompts\[0\]\[0\] must be a token id"),
    ],
)
def test_anything_else_is_refused_by_its_place(given, says):
    with pytest.raises(ValueError, match="^" + says):
        list_prompts(given)


@pytest.mark.parametrize("given", ["Hi", "", [], [1, 2], (1,), np.array([1])])
def test_a_single_prompt_is_text_or_token_ids(given):
    result = one_prompt(given)
    assert result == (given if isinstance(given, str) else list(given))
    assert isinstance(result, str) or all(type(token) is int for token in result)


@pytest.mark.parametrize("given", [None, 7, ["Hi"], [[1, 2]], [True], [2**40], {"prompt": "Hi"}])
def test_a_list_of_prompts_or_a_number_is_no_single_prompt(given):
    """7 was taken for the prompt [7], and a list was said to be wrong at prompts[0][0]."""
    with pytest.raises(ValueError, match=r"^prompt must be one prompt, .*, got "):
        one_prompt(given)


def test_a_conversation_or_a_list_of_conversations():
    messages = [{"role": "user", "content": "Hi"}]
    assert list_conversations(messages) == [messages]
    assert list_conversations([messages, messages]) == [messages, messages]
    assert list_conversations([]) == []


@pytest.mark.parametrize("given", [None, "Hi", {"role": "user", "content": "Hi"}, 7])
def test_a_message_alone_is_no_conversation(given):
    with pytest.raises(ValueError, match=r"^messages must be a conversation, a list such as"):
        list_conversations(given)


def test_one_params_serves_all_prompts():
    params = SamplingParams(max_tokens=3)
    assert list_params(params, 2, {}) == [params, params]
    assert list_params([params, params], 2, {}) == [params, params]
    assert list_params(None, 1, {}) == [SamplingParams()]


def test_a_models_recommendation_is_for_who_gives_no_params():
    """vLLM's rule: params that are given stand alone, also where they name nothing."""
    defaults = {"temperature": 0.5, "top_k": 7}
    assert list_params(None, 2, defaults) == [SamplingParams(temperature=0.5, top_k=7)] * 2
    assert list_params(SamplingParams(), 1, defaults) == [SamplingParams()]
    with pytest.raises(ValueError, match=r"generation_config\.json: temperature must be .*got 9"):
        list_params(None, 1, {"temperature": 9})


@pytest.mark.parametrize("given", [[SamplingParams()], {"max_tokens": 3}, [None, None], 3])
def test_other_params_are_refused(given):
    with pytest.raises(ValueError, match=r"^sampling_params"):
        list_params(given, 2, {})


def options(num_prompts: int, **given):
    defaults = {"priority": 0, "user": "", "cache_salt": None}
    return [
        (o.priority, o.user, o.cache_salt) for o in list_options(num_prompts, **(defaults | given))
    ]


def test_options_are_one_for_all_prompts_or_one_each():
    assert options(2) == [(0, "", None)] * 2
    assert options(2, priority=[1, 0], user="anna") == [(1, "anna", None), (0, "anna", None)]
    assert options(2, cache_salt=["x", None], user=("a", "b")) == [(0, "a", "x"), (0, "b", None)]
    assert options(1, priority=np.array([np.int64(-7)]), cache_salt="") == [(-7, "", None)]
    assert options(0, priority=[]) == []
    assert type(list_options(1, priority=np.int64(3), user="", cache_salt=None)[0].priority) is int


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"priority": True}, TypeError, "priority must be a whole number, got True"),
        ({"priority": 1.0}, TypeError, "priority must be a whole number, got 1.0"),
        ({"priority": None}, TypeError, "priority must be a whole number, got None"),
        ({"priority": 2**31}, ValueError, r"priority must be in \[-2\*\*31, 2\*\*31\), got 2147"),
        ({"priority": [0, "high"]}, TypeError, r"prompts\[1\]: priority must be a whole number"),
        ({"priority": [0]}, ValueError, "one for each of the 2, got 1"),
        ({"user": 7}, TypeError, "user must be a string, got 7"),
        ({"user": None}, TypeError, "user must be a string, got None"),
        ({"user": "x" * 257}, ValueError, "user must have at most 256 bytes, got 257"),
        ({"user": "\ud800"}, ValueError, "user '.ud800' is not valid Unicode"),
        ({"cache_salt": 7}, TypeError, "cache_salt must be a string, got 7"),
        ({"cache_salt": b"x"}, TypeError, "cache_salt must be a string, got b'x'"),
        ({"cache_salt": "é" * 129}, ValueError, "cache_salt must have at most 256 bytes, got 258"),
    ],
)
def test_options_out_of_range_are_refused_by_their_name(given, error, says):
    """B06, F06: a salt that is silently dropped isolates nothing; bools are no numbers."""
    with pytest.raises(error, match="^" + says if "one for each" not in says else says):
        options(2, **given)
