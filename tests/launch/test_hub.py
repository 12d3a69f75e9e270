"""Models by their name on a hub: what is fetched, from where, and a sentence for whatever cannot be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rowcast.launch.hub import is_hub_name
from rowcast.tests.launch.fake_hub import TOKEN, Hub, Repo, fake_hub
from safetensors.numpy import load, save

# huggingface_hub reads its environment once, when it is imported: so each environment is a process, asked many times.
_CHILD = """
import json, os, sys
from pathlib import Path
from rowcast.launch.models import resolve_model

for line in sys.stdin:
    question = json.loads(line)
    os.environ.pop("HF_TOKEN", None)
    os.environ.update(question["environment"])
    try:
        folder = resolve_model(question["model"], cache_home=Path(sys.argv[1]), pull_missing=True)
        answer = {"folder": str(folder)}
    except ValueError as error:
        answer = {"refused": str(error)}
    print(json.dumps(answer), flush=True)
"""


class Child:
    """A process with an environment of its own that says what each MODEL becomes there."""

    def __init__(self, home: Path, **environment: str):
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE_"))}
        kept |= {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(home / "cache")],
            env=kept | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def resolve(self, model: str, **environment: str) -> dict[str, str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        question = {"model": model, "environment": environment}
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def refused(self, model: str, **environment: str) -> str:
        answer = self.resolve(model, **environment)
        assert "refused" in answer, answer
        assert "\n" not in answer["refused"]
        return answer["refused"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[[Path], Path]) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def files(tiny: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in tiny.iterdir()}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with fake_hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hf-home")


@pytest.fixture(scope="module")
def online(hub: Hub, home: Path) -> Iterator[Child]:
    child = Child(home, HF_ENDPOINT=hub.address)
    yield child
    child.close()


def shards(files: dict[str, bytes]) -> dict[str, bytes]:
    """The model as large ones come: an index and two files."""
    tensors = load(files["model.safetensors"])
    names = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    index = {"weight_map": {key: names[n % 2] for n, key in enumerate(tensors)}}
    kept = {name: data for name, data in files.items() if name != "model.safetensors"}
    weights = {
        name: save({key: tensors[key] for key, file in index["weight_map"].items() if file == name})
        for name in names
    }
    return kept | weights | {"model.safetensors.index.json": json.dumps(index).encode()}


OTHERS = {
    "pytorch_model.bin": b"pickled",
    "model.Q4_K_M.gguf": b"GGUF",
    "original/consolidated.00.pth": b"pickled",
    "README.md": b"# A model",
    ".gitattributes": b"",
}


def test_only_what_rowcast_reads_is_fetched_and_only_once(
    hub: Hub, online: Child, files: dict[str, bytes]
) -> None:
    """A repository often holds the same weights three times: gigabytes that nobody reads."""
    more = {"consolidated.safetensors": b"other names", "original/model.safetensors": b"once more"}
    hub.repos["org/whole"] = Repo(files | OTHERS | more)
    folder = Path(online.resolve("org/whole")["folder"])
    assert sorted(hub.files_sent) == sorted(files)
    assert {path.name for path in folder.iterdir()} == set(files)
    assert folder.name == "a" * 40
    hub.files_sent.clear()
    assert online.resolve("org/whole") == {"folder": str(folder)}
    assert online.resolve("org/whole@v1") == {"folder": str(folder)}
    assert online.resolve(f"org/whole@{'a' * 40}") == {"folder": str(folder)}
    assert hub.files_sent == []


def test_the_files_of_an_index_are_fetched(
    hub: Hub, online: Child, files: dict[str, bytes]
) -> None:
    expected = shards(files)
    hub.repos["org/sharded"] = Repo(expected | {"consolidated.safetensors": b"other names"})
    hub.files_sent.clear()
    folder = Path(online.resolve("org/sharded")["folder"])
    assert sorted(hub.files_sent) == sorted(expected)
    assert {path.name for path in folder.iterdir()} == set(expected)


def test_weights_of_another_name_are_fetched(
    hub: Hub, online: Child, files: dict[str, bytes]
) -> None:
    named = {
        ("weights.safetensors" if n == "model.safetensors" else n): d for n, d in files.items()
    }
    hub.repos["org/named"] = Repo(named | {"onnx/other.safetensors": b"not this one"})
    folder = Path(online.resolve("org/named")["folder"])
    assert {path.name for path in folder.iterdir()} == set(named)


def test_a_token_opens_what_is_gated_or_private(
    hub: Hub, online: Child, files: dict[str, bytes]
) -> None:
    hub.repos["org/gated"] = Repo(files, gated=True)
    hub.repos["org/private"] = Repo(files, private=True)
    said = online.refused("org/gated")
    assert f"org/gated is gated: accept its terms at {hub.address}/org/gated" in said
    assert "HF_TOKEN" in said
    assert "HF_TOKEN if it is private" in online.refused("org/private")
    for model in ("org/gated", "org/private"):
        assert "folder" in online.resolve(model, HF_TOKEN=TOKEN)


def test_what_the_hub_has_not_gets_a_sentence(
    hub: Hub, online: Child, files: dict[str, bytes]
) -> None:
    hub.repos["org/known"] = Repo(files)
    said = online.refused("org/nothing")
    assert f"org/nothing is neither a folder here nor a model at {hub.address}" in said
    assert "org/known has no revision 'v7'" in online.refused("org/known@v7")
    hub.repos["org/pickled"] = Repo({"config.json": b"{}", **OTHERS})
    assert "org/pickled has no *.safetensors; rowcast reads those" in online.refused("org/pickled")
    hub.repos["org/bare"] = Repo({"model.safetensors": files["model.safetensors"]})
    assert "has no config.json" in online.refused("org/bare")
    hub.repos["org/cut"] = Repo({**files, "model.safetensors": files["model.safetensors"][:99]})
    assert "truncated or damaged" in online.refused("org/cut")
    assert "cannot fetch org/a..b" in online.refused(
        "org/a..b"
    )  # the library's own rules for names
    hub.repos["org/page"] = Repo(files, is_a_page=True)
    assert f"cannot fetch org/page from {hub.address}" in online.refused("org/page")
    bad = {**shards(files), "model.safetensors.index.json": b"[]"}
    hub.repos["org/garbled"] = Repo(bad)
    assert "must hold a JSON object" in online.refused("org/garbled")


def test_without_the_hub_the_cache_serves(
    hub: Hub, online: Child, home: Path, files: dict[str, bytes]
) -> None:
    """A machine without a network starts what it has started before; what it has not, it names."""
    hub.repos["org/kept"] = Repo(files)
    folder = online.resolve("org/kept")["folder"]
    asked = hub.asked
    offline = Child(home, HF_ENDPOINT=hub.address, HF_HUB_OFFLINE="1")
    nowhere = Child(home, HF_ENDPOINT="http://127.0.0.1:9")
    try:
        for child in (offline, nowhere):
            assert child.resolve("org/kept") == {"folder": folder}
        said = offline.refused("org/elsewhere")
        assert "org/elsewhere is not whole in the cache" in said
        assert "HF_HUB_OFFLINE forbids to fetch it" in said
        said = nowhere.refused("org/elsewhere")
        assert "http://127.0.0.1:9 does not give it" in said
        assert "check the network" in said
        # Only the weights are missing: an interrupted fetch, later a flight.
        os.unlink(Path(folder) / "model.safetensors")
        assert "org/kept is not whole in the cache" in offline.refused("org/kept")
    finally:
        offline.close()
        nowhere.close()
    assert hub.asked == asked


def test_a_folder_comes_before_a_hub(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rowcast.launch.models import resolve_model

    shutil.copytree(tiny, tmp_path / "org" / "whole")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/whole", cache_home=tmp_path) == tmp_path / "org" / "whole"


@pytest.mark.parametrize(
    ("model", "is_name"),
    [
        ("HuggingFaceTB/SmolLM2-135M", True),
        ("org/name@v1.0", True),
        ("org/name@refs/pr/3", True),
        ("org/name@", False),
        ("/org/name", False),
        ("./org/name", False),
        ("~/models/name", False),
        ("org/name/more", False),
        ("smollm2-135m", False),
        ("", False),
    ],
)
def test_which_texts_are_a_hubs_names(model: str, is_name: bool) -> None:
    assert is_hub_name(model) is is_name


def test_the_command_line_pulls_a_hubs_model_and_names_what_there_is_not(
    hub: Hub, home: Path, files: dict[str, bytes], command_line: Any
) -> None:
    hub.repos["org/run"] = Repo(files)
    environment = {
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    done = command_line.run("pull", "org/run", **environment)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.splitlines()[-1]).name == "a" * 40
    assert "download org/run" in done.stderr  # rich prints a bar once where there is no terminal
    done = command_line.run("run", "org/no", "-p", "hello", **environment)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    *_, said = done.stderr.strip().splitlines()
    assert said.startswith("rowcast: org/no is neither a folder here nor a model at")
