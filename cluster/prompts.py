"""What a caller may pass as prompts, sampling params and request options, brought to one form. Owns no ranges and no
tokenizer."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ..scheduler.request_options import RequestOptions
from ..scheduler.sampling_params import SamplingParams

T = TypeVar("T")
Many = T | Sequence[T]  # one for all prompts, or a list of one a prompt
Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]
Conversation = Sequence[Mapping[str, Any]]


def is_one_prompt(prompts: Prompts) -> bool:
    """Whether this is a prompt itself and not a list of prompts. An empty list is a list of none."""
    return isinstance(prompts, str) or (
        _is_list(prompts) and len(prompts) > 0 and all(_is_token_id(value) for value in prompts)
    )


def list_prompts(prompts: Prompts) -> list[Prompt]:
    """Turn what `generate` takes into a list of prompts, each a string or a list of token ids.

    Example: "Hi" -> ["Hi"]; [1, 2] -> [[1, 2]]; ["Hi", [1, 2]] -> itself; [] -> [] (no prompts).
    Raises: ValueError naming the prompt that is neither.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise ValueError(
            "prompts must be a string, a list of token ids, or a list of such, "
            f"got {type(prompts).__name__}"
        )
    values: list[Any] = list(prompts)
    if is_one_prompt(values):
        return [[operator.index(value) for value in values]]
    for index, value in enumerate(values):
        if isinstance(value, str):
            continue
        if not _is_list(value):
            raise ValueError(
                f"prompts[{index}] must be a string or a list of token ids, got {value!r:.60}"
            )
        for place, token_id in enumerate(value):
            if not _is_token_id(token_id):
                raise ValueError(
                    f"prompts[{index}][{place}] must be a token id (a whole number), got {token_id!r:.60}"
                )
        values[index] = [operator.index(token_id) for token_id in value]
    return values


def one_prompt(prompt: Prompt) -> Prompt:
    """Bring a single prompt to a string or a list of token ids.

    Example: "Hi" -> "Hi"; np.array([1, 2]) -> [1, 2].
    Raises: ValueError for anything else, a list of prompts included.
    """
    if not isinstance(prompt, str) and not (_is_list(prompt) and all(map(_is_token_id, prompt))):
        raise ValueError(
            f"prompt must be one prompt, a string or a list of token ids, got {prompt!r:.60}"
        )
    return prompt if isinstance(prompt, str) else [operator.index(value) for value in prompt]


def list_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """Turn what `chat` takes, a conversation or a list of them, into a list. What is in a message is not looked at.

    Raises: ValueError for anything but a list.
    """
    if not _is_list(messages):
        raise ValueError(
            'messages must be a conversation, a list such as [{"role": "user", "content": "Hi"}], or a list of '
            f"such, got {messages!r:.60}"
        )
    listed: list[Any] = list(messages)
    one: Any = messages
    return [one] if listed and isinstance(listed[0], Mapping) else listed


def list_params(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    num_prompts: int,
    defaults: Mapping[str, Any],
) -> list[SamplingParams]:
    """One SamplingParams a prompt; None is the model's default, a single one serves all.

    defaults: the fields in which the model's own default differs (`sampling_defaults.py`). Params that a caller gives
        are his alone: nothing of the model's is mixed in.
    Raises: ValueError for a list of another length or for something else in it.
    """
    if sampling_params is None:
        try:
            sampling_params = SamplingParams(**defaults)
        except ValueError as error:
            raise ValueError(
                f"the model's generation_config.json: {error}; pass sampling_params"
            ) from None
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if not _is_list(sampling_params):
        raise ValueError(
            "sampling_params must be a SamplingParams, or a list of one a prompt, "
            f"got {type(sampling_params).__name__}"
        )
    listed = list(sampling_params)
    if len(listed) != num_prompts:
        raise ValueError(
            f"sampling_params must be one for all prompts or one for each of the {num_prompts}, got {len(listed)}"
        )
    for index, params in enumerate(listed):
        if not isinstance(params, SamplingParams):
            raise ValueError(
                f"sampling_params[{index}] must be a SamplingParams, got {type(params).__name__}"
            )
    return listed


def list_options(
    num_prompts: int, *, priority: Many[int], user: Many[str], cache_salt: Many[str | None]
) -> list[RequestOptions]:
    """One RequestOptions a prompt, of values that are each one for all prompts or a list.

    Example: 2 prompts, priority [1, 0], user "anna" -> priorities 1 and 0, both Anna's.
    Raises: ValueError for a list of another length; what RequestOptions raises, with the prompt's place if need be.
    """
    given = {"priority": priority, "user": user, "cache_salt": cache_salt}
    if not any(_is_list(value) for value in given.values()):
        return [RequestOptions(**given)] * num_prompts  # type: ignore[arg-type]
    columns: list[list[Any]] = []
    for field, value in given.items():
        columns.append(list(value) if _is_list(value) else [value] * num_prompts)  # type: ignore[arg-type]
        if len(columns[-1]) != num_prompts:
            raise ValueError(
                f"{field} must be one for all prompts or one for each of the {num_prompts}, got {len(columns[-1])}"
            )
    options = []
    for index, values in enumerate(zip(*columns, strict=True)):
        try:
            options.append(RequestOptions(**dict(zip(given, values, strict=True))))
        except (TypeError, ValueError) as error:
            raise type(error)(f"prompts[{index}]: {error}") from None
    return options


def _is_list(value: Any) -> bool:
    # NumPy arrays are no Sequence and are welcome, but for those of no dimension; text and dicts are not.
    return (
        hasattr(value, "__iter__")
        and hasattr(value, "__len__")
        and getattr(value, "ndim", 1) > 0
        and not isinstance(value, str | bytes | bytearray | dict | set | frozenset)
    )


def _is_token_id(value: Any) -> bool:
    if isinstance(value, bool) or hasattr(value, "__len__"):  # NumPy's arrays have an __index__
        return False
    try:
        number = operator.index(value)
    except TypeError:
        return False
    # In the wire's int32; whether the vocabulary has it is the scheduler's check.
    return -(2**31) <= number < 2**31
