"""Every Triton kernel compiled for GPUs that are not here, in a process that does not interpret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"
TARGETS = {"sm_80", "sm_90", "sm_100", "gfx942"}


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    process = subprocess.run(
        [sys.executable, "-m", "rowcast.kernels.aot"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def test_every_kernel_compiles_for_every_target(records):
    kernels = {
        path.stem
        for path in KERNELS.glob("*.py")
        if not path.stem.startswith("_") and path.stem != "aot"
    }
    compiled = {(record["kernel"].split()[0], record["target"]) for record in records}
    assert compiled == {(kernel, target) for kernel in kernels for target in TARGETS}
    assert all(record["binary_bytes"] > 0 for record in records)


def test_attention_compiles_for_decode_and_prefill_in_bfloat16_and_float32(records):
    kinds = {
        tuple(record["kernel"].split()[1:3])
        for record in records
        if record["kernel"].startswith("paged_attention")
    }
    assert kinds == {("decode", "bf16"), ("prefill", "bf16"), ("decode", "fp32")}


def test_attention_compiles_with_a_window_with_chunks_and_with_a_soft_cap(records):
    """In the forms that the interpreter cannot judge: 16-bit dots of a masked tile, for each target's own layout."""
    seen = {
        (" ".join(record["kernel"].split()[-2:]), record["target"])
        for record in records
        if record["kernel"].startswith("paged_attention")
    }
    kinds = {"window 512", "chunk 8192", "softcap 50"}
    assert kinds == {kind for kind, _ in seen if not kind.startswith("block")}
    assert {(kind, target) for kind in kinds for target in TARGETS} <= seen


def test_float32_is_not_multiplied_as_tf32(records):
    """`tl.dot` drops 13 bits unless told not to, and the interpreter hides it."""
    assert {record["tf32"] for record in records} == {False}


def test_interpreting_and_compiling_do_not_mix():
    from rowcast.kernels.aot import aot

    with pytest.raises(ValueError, match="run it without TRITON_INTERPRET"):
        aot(targets=["sm_90"])


def test_the_noise_is_not_fused(records):
    """A multiplication fused with an addition rounds once: the noise would have other bits than on a CPU."""
    fused = {record["fused"] for record in records if record["kernel"].startswith("gumbel_argmax")}
    assert fused == {False}
