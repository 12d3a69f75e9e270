"""Bad words as the sampler knows them: sequences of token ids, made where the tokenizer is."""

from __future__ import annotations

from dataclasses import replace

from ..scheduler.sampling_params import SamplingParams
from .text import TextProcessor


def with_bad_words(params: SamplingParams, text: TextProcessor) -> SamplingParams:
    """Fill in bad_words_token_ids: each word as it begins a text, and as it follows a space.

    Example: "cat" -> the ids of "cat" and of " cat", where these differ.
    Raises: ValueError if a user gave the ids, or a word that cannot be made ids.
    """
    if params.bad_words_token_ids:
        raise ValueError("bad_words_token_ids is made from bad_words; give the words themselves")
    if not params.bad_words:
        return params
    sequences: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        bare = word.lstrip() or word
        for spelled in (bare, f" {bare}"):
            ids = tuple(text.encode(spelled, add_special_tokens=False))
            if not ids:
                raise ValueError(f"bad_words: the tokenizer has no token for {spelled!r:.60}")
            sequences[ids] = None
    return replace(params, bad_words_token_ids=tuple(sequences))
