"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Triton decides when it is first imported whether kernels are interpreted, so this stands before any test imports it;
# what compiles (tests/kernels/test_aot.py) is a process of its own. One thread: torch spins while it waits for more.
os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, pulled once into the user's own cache."""
    from rowcast.launch.pull import pull

    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return pull("smollm2-135m", cache_home=Path(cache_home))
