"""The choice of kernels: what runs where, and one sentence when it cannot."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from rowcast.worker.backend import select_backend


def test_auto_takes_the_numba_twins_on_a_cpu():
    backend = select_backend("auto", "cpu")
    assert (backend.name, backend.uses_mirror) == ("cpu", False)
    assert backend.token_inputs.__name__ == "token_inputs"


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch):
    assert select_backend("triton", "cpu").uses_mirror
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="kernel_backend triton needs a GPU and the device is cpu"):
        select_backend("triton", "cpu")


def test_the_cpu_twins_do_not_run_on_a_gpu():
    with pytest.raises(ValueError, match="kernel_backend cpu needs device cpu"):
        select_backend("cpu", torch.device("cuda", 0))


def test_an_unknown_backend_is_refused_by_name():
    with pytest.raises(ValueError, match="one of auto, triton, cpu, got 'cuda'"):
        select_backend("cuda", "cpu")


def test_the_twins_thread_count_is_set(monkeypatch: pytest.MonkeyPatch):
    """Numba takes all cores whatever OMP_NUM_THREADS says: beside other ranks that is several threads a core."""
    numba_settings = pytest.importorskip("rowcast.kernels.cpu._numba")
    asked: list[int] = []
    monkeypatch.setattr(numba_settings, "set_threads", asked.append)
    select_backend("cpu", "cpu", num_threads=2)
    assert asked == [2]


def test_twins_write_into_the_tensors_they_are_given():
    """Zero-copy: a twin that got a copy would leave the tensor as it was."""
    backend = select_backend("cpu", "cpu")
    out = torch.full((4,), 99, dtype=torch.int64)
    backend.slot_mapping(
        torch.tensor([1], dtype=torch.int32),
        torch.tensor([0, 2], dtype=torch.int32),
        torch.tensor([3, 4]),
        torch.tensor([[0, 0], [7, 8]], dtype=torch.int32),
        block_size=4,
        out=out,
    )
    assert out.tolist() == [7 * 4 + 3, 8 * 4, -1, -1]


@pytest.mark.parametrize(
    ("missing", "kernel_backend", "sentence"),
    [
        ("numba", "cpu", "the cpu kernels need the package numba, which is not installed; pip install numba"),
        ("triton", "triton", "the triton kernels need the package triton, which is not installed; pip install"),
    ],
)  # fmt: skip
def test_a_missing_package_is_named(missing: str, kernel_backend: str, sentence: str):
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from rowcast.worker.backend import select_backend\n"
        f"try: select_backend({kernel_backend!r}, 'cpu')\n"
        "except ValueError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert sentence in done.stdout


def test_each_side_is_imported_only_when_it_is_chosen():
    """A GPU machine may lack Numba; a worker on a CPU need not load Triton's kernels."""
    program = (
        "import sys\n"
        "from rowcast.worker.backend import select_backend\n"
        "assert not any(name.startswith('rowcast.kernels') for name in sys.modules)\n"
        "select_backend('triton', 'cpu')\n"
        "assert 'numba' not in sys.modules and 'rowcast.kernels.slot_mapping' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
