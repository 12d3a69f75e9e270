"""Bad words: the last id of a word is not chosen where the outputs end in the others. A prompt does not count."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def forbidden(words: Sequence[np.ndarray], outputs: np.ndarray) -> np.ndarray:
    """The ids that would complete a word.

    Shapes: words one [length] int32 each; outputs [num_outputs] int32, so far; returns [m] int32.
    Example: outputs [10, 11]: the word [10, 11, 60] forbids 60, [11, 11, 50] nothing, [7] always 7.
    """
    last = outputs[-1] if len(outputs) else -1
    ids = [
        word[-1]
        for word in words
        if len(word) == 1 or (word[-2] == last and _ends_in(outputs, word[:-1]))
    ]
    return np.array(ids, np.int32)


def _ends_in(outputs: np.ndarray, others: np.ndarray) -> bool:
    return np.array_equal(outputs[-len(others) :], others)
