"""A small tensor on its way to the host, fetched when it is needed."""

from __future__ import annotations

import numpy as np
import torch


class HostCopy:
    """Starts the copy at once and waits for nothing; on a CPU it is there already."""

    def __init__(self, words: torch.Tensor) -> None:
        self._arrived = None
        self._host = words
        if words.is_cuda:
            self._host = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
            self._host.copy_(words, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(words.device))

    def ready(self) -> bool:
        """Whether `fetch` would return at once."""
        return self._arrived is None or self._arrived.query()

    def fetch(self) -> np.ndarray:
        """Wait until it is here."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.numpy()
