"""Where compiled twins are kept, and how many threads they take."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import pytest
from rowcast.kernels.cpu import _numba

KERNELS = Path(__file__).parents[2] / "kernels"


def run(code, **environment):
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def test_another_process_loads_the_twins_and_compiles_none():
    code = (
        "from rowcast.kernels.cpu import paged_attention, slot_mapping\n"
        "for f in (paged_attention._serial, paged_attention._parallel, slot_mapping._slot_mapping):\n"
        "    print(sum(f.stats.cache_hits.values()), sum(f.stats.cache_misses.values()))"
    )
    run(code)  # compiles what an earlier test of this session did not
    assert run(code).splitlines() == ["1 0"] * 3


def test_an_edited_helper_moves_the_cache(tmp_path):
    """Numba looks only at the file of the function itself: its callers in other files would run the old helper."""
    package = tmp_path / "twins"
    shutil.copytree(KERNELS, package, ignore=shutil.ignore_patterns("__pycache__"))
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from twins.cpu import _numba; print(_numba.CACHE_DIR)"
    folders = {run(code, XDG_CACHE_HOME=str(tmp_path / "cache"))}
    assert Path(*folders).parent == tmp_path / "cache" / "rowcast" / "numba"
    for edited in ("cpu/_views.py", "_noise.py"):
        with (package / edited).open("a") as helper:
            helper.write("\n# edited\n")
        folders.add(run(code, XDG_CACHE_HOME=str(tmp_path / "cache")))
    assert len(folders) == 3


def test_a_home_that_cannot_be_written_is_no_obstacle(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    found = run(
        "from rowcast.kernels.cpu import _numba; print(_numba.CACHE_DIR)",
        XDG_CACHE_HOME=str(blocked),
        TMPDIR=str(tmp_path),
    )
    assert Path(found).is_relative_to(tmp_path)


def test_other_users_of_numba_keep_their_cache_folder():
    assert str(_numba.CACHE_DIR) != numba.config.CACHE_DIR


def test_threads_are_one_until_somebody_says_how_many():
    assert run("from rowcast.kernels.cpu import _numba; print(_numba.get_threads())") == "1"


@pytest.mark.parametrize("num_threads", [0, -1, 10**6])
def test_an_impossible_thread_count_is_refused(numba_threads, num_threads):
    with pytest.raises(ValueError, match=f"num_threads must be between 1 and .*got {num_threads}"):
        numba_threads(num_threads)
