"""The package as pip installs it: everything that the tree has, nothing more, and importable without the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("cluster", "kernels", "launch", "scheduler", "worker")


def tree_files() -> set[str]:
    """Every module of the tree, by its path in the wheel."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    files = {f"rowcast/{path.relative_to(ROOT).as_posix()}" for path in paths}
    return files | {"rowcast/__init__.py"}


def test_the_package_list_is_the_tree():
    """The list is explicit: a new folder that nobody adds would be missing from every install but the editable one."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    in_tree = {name.rsplit("/", 1)[0].replace("/", ".") for name in tree_files()}
    assert sorted(listed) == sorted(in_tree)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built offline from a copy of the sources, so that the checkout gets no build/ folder."""
    copy = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    # What a user may have lying about must not get in.
    (copy / "notes").mkdir()
    (copy / "notes" / "__init__.py").write_text("")
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--disable-pip-version-check", "--quiet", "-w", str(out), str(copy)]
    subprocess.run(command, check=True, timeout=120)
    (built,) = out.glob("rowcast-*.whl")
    return built


def test_the_wheel_holds_exactly_the_tree(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if ".dist-info/" not in name} == tree_files()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_installed_wheel_imports_without_torch_and_without_the_checkout(wheel, tmp_path):
    """Every module that needs no torch, from an installation alone; the editable one is taken off the path."""
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    command += ["--disable-pip-version-check", "--target", str(tmp_path / "site"), str(wheel)]
    subprocess.run(command, check=True, timeout=120)
    program = f"""
import importlib, sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "triton"):
            raise ModuleNotFoundError(f"No module named {{name!r}} (hidden)", name=name.split(".")[0])

sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in repr(f).lower()]
sys.meta_path.insert(0, Hide())
sys.path.insert(0, {str(tmp_path / "site")!r})
imported, need_torch = [], []
for name in {sorted(tree_files())!r}:
    name = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    if name.startswith("rowcast.kernels.cpu."):
        continue  # its __init__ compiles nothing, but Numba is an extra of some machines
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name in ("torch", "triton"), f"{{name}}: {{error}}"
        need_torch.append(name)
        continue
    assert module.__file__.startswith({str(tmp_path / "site")!r}), module.__file__
    imported.append(name)
outside = [n for n in need_torch if not n.startswith(("rowcast.worker", "rowcast.kernels", "rowcast.launch.bench"))]
assert outside == [], f"need torch to be imported: {{outside}}"
assert len(imported) > 20, imported
assert importlib.metadata.version("rowcast")
"""
    program = program.replace("import importlib, sys", "import importlib, importlib.metadata, sys")
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
