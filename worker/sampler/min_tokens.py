"""min_tokens: the ids that would end a request are not chosen before it has so many outputs."""

from __future__ import annotations

import numpy as np

_NONE = np.empty(0, np.int32)


def forbidden(min_tokens: int, ids: np.ndarray, num_outputs: int) -> np.ndarray:
    """Shapes: ids [m] int32; returns [m], or [0] once num_outputs, the outputs so far, are enough."""
    return ids if num_outputs < min_tokens else _NONE
