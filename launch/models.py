"""MODEL on the command line or in `LLM(...)` -> a Hugging Face folder that can be served.

MODEL is a name that `rowcast pull` knows, a model folder, a `.gguf` file (converted once, into the cache), or a model's
name on a hub (`hub.py`). Owns that choice and the sentences for everything else; loads no weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .hub import fetch, is_hub_name
from .model_cache import build_once, missing_parts, models_folder
from .progress import progress_bars
from .pull import PULLED_MODELS, pull

if TYPE_CHECKING:
    from rich.console import Console

_SAMPLE_BYTES = 1 << 20
_MAX_HEADER_BYTES = 100_000_000  # what the safetensors library itself accepts


def default_cache_home(environment: Mapping[str, str] = os.environ) -> Path:
    """XDG_CACHE_HOME, or ~/.cache where it is unset or not absolute (the XDG rule)."""
    configured = environment.get("XDG_CACHE_HOME", "")
    return Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"


def resolve_model(
    model: str | Path,
    *,
    cache_home: Path,
    pull_missing: bool = False,
    console: Console | None = None,
) -> Path:
    """The folder of a model: config.json and *.safetensors are there and whole.

    A known name means the pulled model, also when a folder of that name lies here (write `./name` for the folder); a
    folder comes before a hub's model. `pull_missing` pulls what is not in the cache; otherwise that is an error that
    says to do so. Progress of a pull or a conversion goes to `console`.

    Raises: ValueError, one sentence.
    """
    name = str(model)
    if name in PULLED_MODELS:
        if pull_missing:
            return pull(name, cache_home=cache_home, console=console)
        folder = models_folder(cache_home) / name
        if missing_parts(folder):
            raise ValueError(
                f"model {name!r} is not in the cache {models_folder(cache_home)}; run `rowcast pull {name}`"
            )
        return folder
    path = Path(name).expanduser() if name else Path()
    if name and path.is_dir():
        _check_folder(path)
        return path.resolve()
    if path.suffix.lower() == ".gguf":
        return _converted(path, cache_home=cache_home, console=console)
    if is_hub_name(name):
        folder = fetch(name, cached_only=not pull_missing, console=console)
        _check_folder(folder)
        return folder
    raise ValueError(
        f"unknown model {name!r}; known names: {', '.join(sorted(PULLED_MODELS))}; or give a folder with config.json "
        "and *.safetensors, a .gguf file, or a hub's org/name"
    )


def _check_folder(folder: Path) -> None:
    missing = missing_parts(folder)
    if missing:
        raise ValueError(
            f"model folder {folder} has no {' and no '.join(missing)}; {_advice(folder)}"
        )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {folder / 'config.json'}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(
            f"{folder / 'config.json'} must hold a JSON object, got {type(config).__name__}"
        )
    for file in sorted(folder.glob("*.safetensors")):
        _check_safetensors(file)


def _advice(folder: Path) -> str:
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        return f"give the file {ggufs[0]} instead"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        return "rowcast reads safetensors, not pickled weights: save the model as safetensors"
    return "give a whole Hugging Face model folder"


def _check_safetensors(file: Path) -> None:
    """A cut file is found here, with a sentence, and not by a worker in the middle of loading.

    The format: 8 bytes little-endian header length, a JSON header, and exactly the bytes that the header announces.
    """
    num_bytes = 0
    try:
        with open(file, "rb") as opened:
            num_bytes = os.fstat(opened.fileno()).st_size
            header_bytes = int.from_bytes(opened.read(8), "little")
            if header_bytes > min(_MAX_HEADER_BYTES, max(num_bytes - 8, 0)):
                raise ValueError("its header does not fit")
            header = json.loads(opened.read(header_bytes))
            ends = [entry["data_offsets"][1] for key, entry in header.items() if key[:2] != "__"]
            if 8 + header_bytes + max(ends, default=0) != num_bytes:
                raise ValueError(f"its tensors need {8 + header_bytes + max(ends, default=0)}")
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(
            f"{file} is truncated or damaged ({num_bytes} bytes are there, {error}); download it again"
        ) from error


def _converted(path: Path, *, cache_home: Path, console: Console | None) -> Path:
    """The folder made from a .gguf file; made once for each content of the file."""
    from .convert_gguf import convert_gguf  # imports gguf: other models do not need it

    name = _cache_name(path)

    def build(folder: Path) -> None:
        with progress_bars(console) as stage:
            convert_gguf(path, folder, stage(f"convert {path.name}"))

    def say_waiting() -> None:
        if console is not None:
            console.print(
                f"another process is converting {path.name}; waiting for it", highlight=False
            )

    return build_once(name, build, cache_home=cache_home, on_wait=say_waiting)


def _cache_name(path: Path) -> str:
    """A folder name for a file's content: its size, its time of change, its first and last MiB.

    Hashing all of a file of gigabytes at each start would cost more than the conversion saves.
    """
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            digest = hashlib.sha256(f"{status.st_size} {status.st_mtime_ns} ".encode())
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, status.st_size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ValueError(f"cannot read model file {path}: {error.strerror or error}") from error
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip(".-") or "model"
    return f"{stem[:80]}-{digest.hexdigest()[:16]}"
