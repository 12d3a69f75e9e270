"""The walls between the folders (DESIGN.md, section 2): who imports whom, and what no process may load.

The first half reads the source, so it also sees imports inside functions. The second half imports for real, in
processes where what must not be needed cannot be found.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("cluster", "kernels", "launch", "scheduler", "worker")
SHARED_SCHEDULER_FILES = {"messages", "sampling_params", "kv_groups", "agreement"}

# What each folder may import of the others; a set of file names where only those are shared.
MAY_IMPORT = {
    "scheduler": {},
    "kernels": {},
    "worker": {"kernels": None, "scheduler": SHARED_SCHEDULER_FILES},
    "cluster": {"scheduler": None, "worker": None},  # worker: in worker_actor.py alone, see below
    "launch": {folder: None for folder in FOLDERS},
}


# The argument of an `import_module("..kernels.cpu", __package__)`.
_DYNAMIC = re.compile(rf"\.\.({'|'.join(FOLDERS)})(\.\w+)*")


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(found) > len(folders), f"no sources in {folders}: this test would pass on nothing"
    return found


def imported_modules(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(full name, line, whether at module level) of all that a file imports: `rowcast.scheduler.messages`, `torch.nn`.

    What `if TYPE_CHECKING:` holds is never imported at run time and is left out.
    """
    package = ("rowcast", *path.relative_to(ROOT).parts[:-1])

    def walk(node: ast.AST, at_module_level: bool) -> Iterator[tuple[str, int, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                for other in child.orelse:
                    yield from walk(other, at_module_level)
            elif isinstance(child, ast.Import):
                for alias in child.names:
                    yield alias.name, child.lineno, at_module_level
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else ()
                module = ".".join((*base, *filter(None, [child.module])))
                yield module, child.lineno, at_module_level
                for alias in child.names:  # `from ..scheduler import messages` names a file too
                    yield f"{module}.{alias.name}", child.lineno, at_module_level
            elif isinstance(child, ast.Constant) and _DYNAMIC.fullmatch(str(child.value)):
                yield f"rowcast.{str(child.value).lstrip('.')}", child.lineno, False
            else:
                inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(child, at_module_level and not inner)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), True)


def folder_imports(path: Path) -> Iterator[tuple[str, str, int]]:
    """(folder, file in it, line) for each import of one of our own folders; file is "" for the folder itself."""
    for module, line, _ in imported_modules(path):
        parts = module.split(".")
        if parts[0] == "rowcast" and len(parts) > 1 and parts[1] in FOLDERS:
            yield parts[1], parts[2] if len(parts) > 2 else "", line


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_the_folders_it_may(folder):
    allowed = MAY_IMPORT[folder]
    wrong = []
    for path in sources(folder):
        for other, file, line in folder_imports(path):
            if other == folder:
                continue
            files = allowed.get(other, set())
            if files is not None and file not in files and not (files and file == ""):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {other}/{file}")
    assert wrong == []


def test_in_cluster_only_worker_actor_imports_the_worker():
    importers = {
        path.name
        for path in sources("cluster")
        if any(folder == "worker" for folder, _, _ in folder_imports(path))
    }
    assert importers <= {"worker_actor.py"}


def test_only_cluster_and_launch_import_ray():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sources("scheduler", "worker", "kernels")
        for module, line, _ in imported_modules(path)
        if module.split(".")[0] == "ray"
    ]
    assert wrong == []


def test_only_worker_and_kernels_import_torch_or_triton():
    """`launch/` may import torch where it converts a model or measures a kernel; nothing else there may."""
    exempt = {"launch/convert_gguf.py"} | {
        f"launch/bench/{name}.py" for name in ("kernels", "kernel_cases", "control_plane")
    }
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sources("scheduler", "cluster", "launch")
        for module, line, _ in imported_modules(path)
        if module.split(".")[0] in ("torch", "triton") and str(path.relative_to(ROOT)) not in exempt
    ]
    assert wrong == []


def test_kernels_import_numba_only_in_their_cpu_folder():
    """A GPU machine may lack Numba: a Triton kernel's file must not need its twin."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sources("kernels", "worker")
        if "cpu" not in path.relative_to(ROOT).parts
        for module, line, at_module_level in imported_modules(path)
        if module.split(".")[0] == "numba" and at_module_level
    ]
    assert wrong == []


def test_one_file_of_the_worker_imports_the_kernels():
    importers = {
        path.relative_to(ROOT).as_posix()
        for path in sources("worker")
        if any(folder == "kernels" for folder, _, _ in folder_imports(path))
    }
    assert importers == {"worker/backend.py"}


def test_folders_import_each_other_relatively():
    """A bare `import rowcast` inside the package works until two copies of a class meet."""
    ours = {"rowcast", *FOLDERS}
    wrong = []
    for path in sources(*FOLDERS):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            else:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.split(".")[0] in ours for name in names):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert wrong == []


def test_tests_never_import_relatively():
    wrong = [
        str(path.relative_to(ROOT))
        for path in sources("tests")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert wrong == []


# ---------------------------------------------------------------- for real


def modules(folder: str) -> list[str]:
    """Every module of a folder, by its full name."""
    names = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(("rowcast", *parts)).removesuffix(".__init__"))
    return names


def run_python(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_client_front_and_scheduler_load_no_torch():
    """torch costs 2 to 4 seconds and 200 MB in each process that loads it; only a worker may."""
    names = [
        *modules("scheduler"),
        *(name for name in modules("cluster") if not name.endswith(".worker_actor")),
    ]
    run_python(
        f"""
        import importlib, sys
        import rowcast
        assert "ray" not in sys.modules and "numpy" not in sys.modules, "import rowcast loads too much"
        for name in {names!r}:
            importlib.import_module(name)
            for heavy in ("torch", "transformers", "triton", "numba"):
                assert heavy not in sys.modules, f"{{name}} loads {{heavy}}"
        rowcast.Client, rowcast.SamplingParams, rowcast.RequestOutput
        assert "torch" not in sys.modules, "rowcast.Client loads torch"
        """
    )


def test_the_scheduler_loads_neither_ray_nor_sockets():
    run_python(
        f"""
        import importlib, sys
        for name in {modules("scheduler")!r}:
            importlib.import_module(name)
        for heavy in ("ray", "zmq", "tokenizers", "llguidance", "rowcast.cluster", "rowcast.worker"):
            assert heavy not in sys.modules, f"the scheduler loads {{heavy}}"
        """
    )


def test_a_worker_needs_only_torch_triton_numpy_safetensors_and_msgpack():
    """A bare GPU machine: everything else that the environment has is hidden from the import."""
    names = [*modules("worker"), *(n for n in modules("kernels") if ".cpu" not in n)]
    run_python(
        f"""
        import importlib, sys

        HIDDEN = (
            "ray", "zmq", "numba", "llvmlite", "llguidance", "transformers", "tokenizers", "gguf", "typer", "rich",
            "jinja2",
        )

        class Hide:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in HIDDEN:
                    raise ModuleNotFoundError(f"No module named {{name!r}} (hidden)", name=name)

        sys.meta_path.insert(0, Hide())
        for name in {names!r}:
            importlib.import_module(name)
        assert "torch" in sys.modules and "rowcast.cluster" not in sys.modules
        """
    )


def test_the_command_line_shows_its_help_without_loading_an_engine():
    run_python(
        """
        import sys
        import rowcast.launch.cli
        for heavy in ("ray", "torch", "transformers", "numba", "zmq", "tokenizers"):
            assert heavy not in sys.modules, f"the command line loads {heavy} before it knows the command"
        """
    )
