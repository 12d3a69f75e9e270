"""How a model samples when its caller does not say: what generation_config.json recommends, by vLLM's rule.

The rule: the file counts only for a call without any SamplingParams. Its `do_sample` is not looked at, and what it does
not name has rowcast's own default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FIELD_OF = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> value of the SamplingParams fields that the file names. Values are not checked here.

    Example: {"temperature": 0.6, "top_p": null, "max_new_tokens": 256} -> {"temperature": 0.6, "max_tokens": 256}.
    """
    return {
        field: generation_config[name]
        for name, field in _FIELD_OF.items()
        if generation_config.get(name) is not None
    }
