"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, pulled once into the user's own cache."""
    from rowcast.launch.pull import pull

    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return pull("smollm2-135m", cache_home=Path(cache_home))
