"""What this machine remembers of one engine: `XDG_STATE_HOME/rowcast/<name>.json`, mode 0600, written in one go.

It holds the Ray head that rowcast started for the engine, if it did, so that `rowcast stop` in another process ends
that one and no other. An engine on a cluster that was already there has a file without a head.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadRecord:
    """A Ray head that rowcast started. start_time tells its pid from the same number used again later.

    temp_dir: the folder made for this head alone; removed with it. client_address is `ray://...`.
    """

    pid: int
    start_time: float
    address: str
    client_address: str
    temp_dir: str
    log_file: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRecord:
    """address is where the engine's Ray cluster answers: host:port, or `ray://host:port`."""

    name: str
    address: str
    head: HeadRecord | None = None
    model_name: str = ""


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of all engines' files, made on the first call, for its owner alone.

    Raises: ValueError, one sentence, when it cannot be made.
    """
    home = environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    folder = Path(home) / "rowcast"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ValueError(_unwritable(folder, error)) from None
    return folder


def _unwritable(path: Path, error: OSError) -> str:
    return f"cannot write {path}: {error.strerror}; set XDG_STATE_HOME to a folder that you can write to"


def _path(name: str) -> Path:
    return state_folder() / f"{name}.json"


@contextmanager
def records_locked() -> Iterator[None]:
    """Keep other processes from the same: of two starts of one name, one sees what the other wrote."""
    folder = os.open(state_folder(), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def write_record(record: EngineRecord) -> None:
    """Replace the engine's file; a reader sees the old one or the new one, whole.

    Raises: ValueError, one sentence, when the folder cannot be written to.
    """
    path = _path(record.name)
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{record.name}-", dir=path.parent)  # 0600
    except OSError as error:
        raise ValueError(_unwritable(path, error)) from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(asdict(record), file, indent=1)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_record(name: str) -> EngineRecord | None:
    """The engine's file, or None when there is none.

    Raises: ValueError for a file that this version cannot read.
    """
    path = _path(name)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        head = values.pop("head")
        return EngineRecord(head=None if head is None else HeadRecord(**head), **values)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise ValueError(
            f"cannot read {path}: {error}; remove it once no engine {name!r} runs"
        ) from error


def remove_record(name: str) -> None:
    _path(name).unlink(missing_ok=True)


def known_engines() -> list[str]:
    """Names of the engines that this machine has a file of, as they are given to `rowcast stop --name`."""
    return sorted(path.stem for path in state_folder().glob("[!.]*.json"))
