"""The model cache's one promise: a model folder is there whole, or it is not there.

Layout under the cache home (XDG_CACHE_HOME, by default ~/.cache):

    rowcast/models/<name>/                     a whole model folder
    rowcast/models/.<name>.partial-<random>/   one being built, or what a killed build left
    rowcast/models/.<name>.lock                held (flock) by the process that builds <name>

Owns the lock, the temporary folder and the rename. What goes into the folder is the caller's.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.1


def models_folder(cache_home: Path) -> Path:
    return Path(cache_home) / "rowcast" / "models"


def missing_parts(folder: Path) -> list[str]:
    """What a model folder lacks to be served; empty when it is whole."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if not any(folder.glob("*.safetensors")):
        return [*missing, "*.safetensors"]
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        shards = set(index["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return missing  # One file, or an index that the loader will complain about.
    return missing + sorted(str(s) for s in shards if not (folder / str(s)).is_file())


def build_once(
    name: str,
    build: Callable[[Path], None],
    *,
    cache_home: Path,
    on_wait: Callable[[], None] | None = None,
) -> Path:
    """Return the model folder `name` of the cache, building it first when it is not there.

    `build` fills an empty folder and flushes the files it writes; then the folder gets its name by one rename. Two
    callers at once: the second calls `on_wait`, waits for the first and finds its folder. Killed at any moment, the
    cache holds the whole folder or none; what a killed build left behind is removed by the next one.

    Raises: ValueError when the cache cannot be written; whatever `build` raises, with nothing left behind.
    """
    parent = models_folder(cache_home)
    final = parent / name
    if _is_whole(final):
        return final
    try:
        parent.mkdir(parents=True, exist_ok=True)
        lock_file = os.open(parent / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ValueError(
            f"cannot write the model cache {parent}: {error.strerror or error}; set XDG_CACHE_HOME to a folder you own"
        ) from error
    try:
        _wait_for_lock(lock_file, on_wait)
        if _is_whole(final):
            return final
        # The lock is ours, so nobody is building: every partial folder belongs to a process that died.
        _remove_partials(parent, name)
        with _partial_folder(parent, name) as partial:
            build(partial)
            os.chmod(partial, 0o755)
            _fsync_folder(partial)
            if final.exists():
                # Not whole (someone deleted files from it): out of the way, under a name that is cleaned up.
                os.rename(final, partial.with_name(partial.name + "-replaced"))
            os.rename(partial, final)
            _fsync_folder(parent)
        _remove_partials(parent, name)
        return final
    finally:
        os.close(
            lock_file
        )  # Releases the lock. The file stays: removing it would let two holders in.


def _is_whole(folder: Path) -> bool:
    return folder.is_dir() and not missing_parts(folder)


def _wait_for_lock(lock_file: int, on_wait: Callable[[], None] | None) -> None:
    told = False
    while True:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not told and on_wait is not None:
                on_wait()
            told = True
            time.sleep(_POLL_S)


@contextmanager
def _partial_folder(parent: Path, name: str) -> Iterator[Path]:
    partial = Path(tempfile.mkdtemp(prefix=f".{name}.partial-", dir=parent))
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # Not there any more after the rename.


def _remove_partials(parent: Path, name: str) -> None:
    for leftover in parent.glob(f".{name}.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
