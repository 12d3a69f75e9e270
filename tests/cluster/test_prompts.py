"""What `generate` accepts as prompts and sampling params."""

from __future__ import annotations

import numpy as np
import pytest
from rowcast import SamplingParams
from rowcast.cluster.prompts import is_one_prompt, list_params, list_prompts


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


def test_one_params_serves_all_prompts():
    params = SamplingParams(max_tokens=3)
    assert list_params(params, 2) == [params, params]
    assert list_params([params, params], 2) == [params, params]
    assert list_params(None, 1) == [SamplingParams()]


@pytest.mark.parametrize("given", [[SamplingParams()], {"max_tokens": 3}, [None, None], 3])
def test_other_params_are_refused(given):
    with pytest.raises(ValueError, match=r"^sampling_params"):
        list_params(given, 2)
