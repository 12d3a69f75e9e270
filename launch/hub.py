"""A model by its name on a hub (`org/name`, or `org/name@revision`) -> the folder in which huggingface_hub keeps it.

That library owns the transfer, the cache and its environment variables: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE.
Owns what is asked for (only files that rowcast reads), the bar, and the sentence for everything that goes wrong.
"""

from __future__ import annotations

import errno
import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .progress import Stage, progress_bars

if TYPE_CHECKING:
    from rich.console import Console

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_INDEX = "model.safetensors.index.json"
_ONE_FILE = "model.safetensors"
# Patterns match in subfolders too, where repositories keep the same weights in other forms.
_SUBFOLDERS = "*/*"
_CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOENT}
_BESIDE_THE_WEIGHTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    _INDEX,
)


def is_hub_name(model: str) -> bool:
    """Whether it could be a model's name on a hub; nobody is asked."""
    return _NAME.fullmatch(model) is not None


def fetch(model: str, *, cached_only: bool = False, console: Console | None = None) -> Path:
    """Bring what is missing of a model's files into the cache; its folder there.

    Without a way to the hub, what an earlier call has fetched is used. cached_only: ask nobody. The bar goes to
    `console`; without one, nothing is printed.
    Raises: ValueError, one sentence: no such model or revision, a gated one, no network, no weights in safetensors.
    """
    matched = _NAME.fullmatch(model)
    assert matched is not None, model
    repo = matched["repo"]
    with progress_bars(console) as stage:
        download = _downloader(model, repo, cached_only)
        beside = _bars_of(stage, f"download the tokenizer of {repo}")
        folder = download(matched["revision"] or "main", beside, _BESIDE_THE_WEIGHTS)
        commit = folder.name  # the same files from here on, whatever is pushed meanwhile
        bars = _bars_of(stage, f"download {repo}")
        if (folder / _INDEX).is_file():
            download(commit, bars, _files_of_index(folder / _INDEX))
        else:
            download(commit, bars, [_ONE_FILE])
            if not (folder / _ONE_FILE).exists():
                download(commit, bars, ["*.safetensors"], _SUBFOLDERS)
    if not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{model} has no *.safetensors; rowcast reads those, and .gguf files that lie on this machine"
        )
    return folder


def _files_of_index(index: Path) -> list[str]:
    from ..worker.config_reader import read_json

    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} must hold a weight_map from tensor names to file names")
    return sorted({str(file) for file in weight_map.values()})


def _downloader(model: str, repo: str, cached_only: bool) -> Callable[..., Path]:
    from huggingface_hub import snapshot_download

    def download(
        revision: str, bars: type[Any], patterns: Sequence[str], ignored: str | None = None
    ) -> Path:
        """The revision's folder, with the files in it whose names fit; the others are left where they are."""
        with _sentences(model, repo):
            folder = snapshot_download(
                repo,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=ignored,
                library_name="rowcast",
                tqdm_class=bars,
                local_files_only=cached_only,
            )
        return Path(folder)

    return download


def _bars_of(stage: Callable[[str], Stage], title: str) -> type[Any]:
    """A class for the library's bars: those that count bytes move one stage, opened with the first byte.

    There may be two such bars, for what came and for what is written; the further one counts.
    """
    from tqdm import tqdm

    stages: list[Stage] = []
    shown = [0, 0]

    class Bar(tqdm):
        monitor_interval = 0  # no thread that watches over it

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})

        def display(self, *_: Any, **__: Any) -> None:
            if not self._counts_bytes or not self.n:
                return
            if not stages:
                stages.append(stage(title))
            shown[:] = max(shown[0], int(self.n)), max(shown[1], int(self.total or 0))
            stages[0](*shown)

    return Bar


@contextmanager
def _sentences(model: str, repo: str) -> Iterator[None]:
    """What the library raises, as one sentence with a remedy."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError as error:
        raise ValueError(
            f"{repo} is gated: accept its terms at {hub}/{repo}, and set HF_TOKEN to a token of that account"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"{model} is neither a folder here nor a model at {hub}; check the name, and set HF_TOKEN if it is private"
        ) from error
    except errors.RevisionNotFoundError as error:
        revision = model.rpartition("@")[2]
        raise ValueError(
            f"{repo} has no revision {revision!r} at {hub}; give a branch, a tag or a whole commit hash after the @"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        where = f"not whole in the cache {constants.HF_HUB_CACHE}"
        if constants.is_offline_mode():
            said = f"{model} is {where} and HF_HUB_OFFLINE forbids to fetch it; unset that"
        elif error.__cause__ is None:
            said = f"{model} is {where}; run `rowcast pull {model}`"
        else:
            said = (
                f"{model} is {where} and {hub} does not give it ({_first_line(error.__cause__)}); "
                "check the network, HF_ENDPOINT and HF_TOKEN"
            )
        raise ValueError(f"{said}, or give a model folder") from error
    except Exception as error:
        # Errors of its HTTP client, its storage and its parsers come through as they are, whichever those are.
        if getattr(error, "errno", None) in _CANNOT_WRITE:
            raise ValueError(
                f"cannot write {model} to the cache {constants.HF_HUB_CACHE} ({_first_line(error)}); "
                "set HF_HOME to a folder with room that you own"
            ) from error
        raise ValueError(
            f"cannot fetch {model} from {hub} ({_first_line(error)}); check HF_ENDPOINT and HF_TOKEN, "
            "try again, or give a model folder"
        ) from error


def _first_line(error: BaseException) -> str:
    said = str(error).strip().splitlines()
    return said[0].rstrip(".") if said else type(error).__name__
