"""How the Numba twins are compiled, cached and threaded. It holds no kernel.

The cache lies under XDG_CACHE_HOME/rowcast/numba, in a folder keyed by a hash of every source in kernels/cpu. Numba
itself looks only at the file that holds a function: an edited helper would leave its callers' cached code stale, and
beside the sources (its default place) a read-only install cannot write.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core import config

numba_config: Any = config  # its names are made at run time

# What a twin may assume of floating point: sums may be reordered and multiplied-added in one step, as any BLAS does.
# NaN and infinity keep their meaning ("nnan" and "ninf" are left out), so a NaN that leaks stays visible.
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}

# Of Numba's thread pools, the one that sleeps while it waits. The OpenMP pool spins, and it is not torch's own: two
# pools of two threads that spin on two cores made a step ten times slower. The choice falls with the process's first
# parallel call, and a pool that the user has chosen is kept.
if numba_config.THREADING_LAYER == "default":
    numba_config.THREADING_LAYER = "workqueue"

# That pool ends the process when two threads call it at once, so every parallel call of ours holds this.
parallel_lock = threading.Lock()

_threads = 1


def _sources_digest() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    here = Path(__file__).parent
    for path in (*sorted(here.glob("*.py")), here.parent / "_noise.py"):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "rowcast" / "numba" / _sources_digest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # no home to write to: compile again in each boot rather than not at all
        user = os.getuid() if hasattr(os, "getuid") else "user"
        folder = Path(tempfile.gettempdir()) / f"rowcast-numba-{user}" / folder.name
        folder.mkdir(parents=True, exist_ok=True)
    return folder


CACHE_DIR = _cache_dir()


def is_compiled() -> bool:
    """Whether an earlier process left compiled twins of these very sources: if not, importing them takes a while."""
    return any(CACHE_DIR.rglob("*.nbc"))


def jit(
    *signature: str, parallel: bool = False, exact: bool = False, **options: Any
) -> Callable[[Callable], Any]:
    """`numba.njit` with our cache folder and floating-point rules; a signature compiles at import.

    exact: each operation rounds as IEEE 754 says, in the order written: for what must have the same bits elsewhere.

    The folder is set for the length of this call only, so that other users of Numba in this process keep theirs.
    """

    njit: Any = numba.njit

    def decorate(function: Callable) -> Any:
        before = numba_config.CACHE_DIR
        numba_config.CACHE_DIR = str(CACHE_DIR)
        try:
            return njit(
                *signature,
                cache=True,
                nogil=True,
                boundscheck=False,
                error_model="numpy",
                fastmath=False if exact else FASTMATH,
                parallel=parallel,
                **options,
            )(function)
        finally:
            numba_config.CACHE_DIR = before

    return decorate


def set_threads(num_threads: int) -> None:
    """Say how many threads the parallel twins use in this process; 1 (the start value) selects the serial ones.

    Left alone Numba takes every core, for each rank, whatever OMP_NUM_THREADS says.

    Raises: ValueError if num_threads is below 1 or above what Numba can start in this process.
    """
    global _threads
    most = most_threads()
    if not 1 <= num_threads <= most:
        raise ValueError(
            f"num_threads must be between 1 and {most} (the cores this process may use), got {num_threads}"
        )
    _threads = num_threads


def most_threads() -> int:
    """The largest count that `set_threads` takes: the cores that this process may use."""
    return numba_config.NUMBA_NUM_THREADS


def get_threads() -> int:
    """The thread count last given to `set_threads`."""
    return _threads


def is_packed(array: np.ndarray) -> bool:
    """Whether everything behind the first dimension lies without gaps.

    A dimension of length 1 may have any stride, and so may all of an empty array, whose strides NumPy makes 0.
    """
    if array.size == 0:
        return True
    items = array.itemsize
    for size, stride in zip(reversed(array.shape[1:]), reversed(array.strides[1:]), strict=True):
        if size != 1 and stride != items:
            return False
        items *= size
    return True


def refuse(kernel: str, **arrays: tuple[np.ndarray, str, int]) -> ValueError:
    """Name the argument that no compiled version of `kernel` takes: each value is (array, dtype wanted, dimensions)."""
    for name, (array, dtype, ndim) in arrays.items():
        if not isinstance(array, np.ndarray):
            return ValueError(f"{kernel}: {name} must be a NumPy array, got {type(array).__name__}")
        if array.dtype != np.dtype(dtype):
            return ValueError(f"{kernel}: {name} must be {dtype}, got {array.dtype}")
        if array.ndim != ndim:
            return ValueError(
                f"{kernel}: {name} must have {ndim} dimensions, got shape {array.shape}"
            )
        if ndim == 1 and not array.flags.c_contiguous:
            return ValueError(f"{kernel}: {name} must be contiguous, got strides {array.strides}")
    return ValueError(f"{kernel}: sizes must be whole numbers and arrays writable")
