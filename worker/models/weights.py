"""Read the parts of a safetensors checkpoint that this rank owns, and nothing else of it.

Files are memory-mapped: a slice costs its own bytes, and no memory before it is copied to where it belongs. Owns the
folder's index, shapes and dtypes, and the sentences for what is missing or damaged; `decoder.py` says where tensors go.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

_INDEX = "model.safetensors.index.json"
_DTYPES = ("F32", "BF16", "F16")


class Checkpoint:
    """An open Hugging Face folder: one *.safetensors file, several, or several with model.safetensors.index.json.

    bytes_read counts what was taken out of the files so far. Use as a context manager; tensors outlive it.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        paths, promised = _weight_files(self._folder)
        self._files = {path: _open(path) for path in paths}
        self._taken: set[str] = set()
        self.bytes_read = 0
        held = {path: set(file.keys()) for path, file in self._files.items()}
        for name, path in promised.items():
            if name not in held[path]:
                raise ValueError(
                    f"{path} lacks the tensor {name} that {_INDEX} promises; download it again"
                )
        # A tensor that an index leaves out is one to be asked for too, or to be refused as unread.
        self._file_of = dict(promised)
        for path, names in held.items():
            for name in sorted(names):  # a set would tell one error today and another tomorrow
                other = self._file_of.setdefault(name, path)
                if other != path and name not in promised:
                    raise ValueError(
                        f"{other} and {path} both hold the tensor {name}; remove the file that is out of date"
                    )

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._file_of

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the files."""
        self._files.clear()

    def read(
        self,
        name: str,
        shape: Sequence[int],
        *,
        rows: range | None = None,
        columns: range | None = None,
        out: torch.Tensor,
    ) -> None:
        """Copy a tensor, or a range of its rows or of its columns, into `out`, converted to out's dtype.

        Shapes: as `view`; out has the slice's shape.
        Raises: as `view`.
        """
        out.copy_(self.view(name, shape, rows=rows, columns=columns))

    def view(
        self,
        name: str,
        shape: Sequence[int],
        *,
        rows: range | None = None,
        columns: range | None = None,
    ) -> torch.Tensor:
        """A tensor, or a range of its rows or of its columns, as it lies in the mapped file. Not to be written to.

        Shapes: shape is what the whole tensor must have, [..., rows, columns] or [rows].
        Raises: ValueError naming file and tensor if it is missing, or has another shape or an unknown dtype.
        """
        path = self._file_of.get(name)
        if path is None:
            raise ValueError(
                f"the weights in {self._folder} lack the tensor {name}; download the model again"
            )
        try:
            whole = self._files[path].get_slice(name)
            stored_shape, stored_dtype = tuple(whole.get_shape()), whole.get_dtype()
            if stored_shape != tuple(shape):
                raise ValueError(
                    f"{path}: tensor {name} must have shape {tuple(shape)} as config.json says, got {stored_shape}"
                )
            if stored_dtype not in _DTYPES:
                raise ValueError(
                    f"{path}: tensor {name} has dtype {stored_dtype}, rowcast reads {', '.join(_DTYPES)} so far"
                )
            if rows is not None:
                taken = slice(rows.start, rows.stop)
                part = whole[:, taken] if len(shape) == 3 else whole[taken]
            elif columns is not None:
                part = whole[..., columns.start : columns.stop]
            else:
                part = whole[:]
        except SafetensorError as error:
            raise ValueError(
                f"{path}: cannot read tensor {name} ({error}); download it again"
            ) from error
        self._taken.add(name)
        self.bytes_read += part.nbytes
        return part

    def refuse_unread(self, *, ignored: Callable[[str], bool]) -> None:
        """After loading: a tensor that nobody asked for is a feature that was not computed.

        Raises: ValueError naming the first such tensor, unless `ignored` says that it changes nothing.
        """
        for name, path in self._file_of.items():
            if name not in self._taken and not ignored(name):
                raise ValueError(
                    f"{path}: tensor {name} belongs to no part of the architecture in config.json; "
                    "rowcast would ignore it and give wrong text"
                )


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """The files that hold the model, and in which of them an index says that each tensor is.

    Beside model.safetensors or an index lie other forms of the same weights, under other names: they are passed over.
    """
    index, whole = folder / _INDEX, folder / "model.safetensors"
    if index.exists():
        promised = _read_index(index)
        paths = sorted(set(promised.values()))
        if whole.exists() and whole not in paths:
            raise ValueError(
                f"model folder {folder} has {whole.name}, and {index.name} that does not name it; "
                "remove the one that is out of date"
            )
        return paths, promised
    paths = [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ValueError(
            f"model folder {folder} has no *.safetensors file; give a whole Hugging Face model folder"
        )
    return paths, {}


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except FileNotFoundError:
        raise ValueError(
            f"model folder {path.parent} lacks the file {path.name}; download it again"
        ) from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or damaged ({error}); download it again") from error


def _read_index(index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): index.parent / Path(file).name for name, file in weight_map.items()}
    except OSError as error:
        raise ValueError(f"cannot read {index}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{index} must hold a weight_map from tensor names to file names ({error!r}); download it again"
        ) from error
