"""One written file, made ready for a folder that is renamed into place when it is whole."""

from __future__ import annotations

import os
from typing import IO, Any


def settle(file: IO[Any]) -> None:
    """Readable by everyone whatever the umask, and on the disk before the folder gets its name."""
    file.flush()
    os.fchmod(file.fileno(), 0o644)
    os.fsync(file.fileno())
