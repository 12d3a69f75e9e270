"""What it takes a rank to load its shard: bytes read from the files, and the most memory of its own it held meanwhile.

Memory is anonymous memory (RssAnon of /proc/self/status): what a process would have to swap. Pages of the mapped files
that loading has touched are the page cache's: all ranks of a machine share them and the kernel takes them back.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rowcast.worker.model_config import ModelConfig
from rowcast.worker.models.decoder import load_decoder
from rowcast.worker.models.weights import Checkpoint
from rowcast.worker.parallel import TensorParallelGroup
from rowcast.worker.sharding import shard_of_rank
from safetensors import safe_open


@dataclass
class Figures:
    """Units: bytes. peak is growth since before the load."""

    read: int = 0
    peak: int = 0


def load_on_rank(group: TensorParallelGroup, folder: str) -> Figures:
    """A task of the rank pool: load this rank's shard in float32, and say what it took.

    The second of two loads counts: the first brings what a process has once, such as the libraries' own tables.
    """
    figures = Figures()
    for _ in range(2):
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed before must not be found again
        figures = Figures()
        before = _anonymous()
        with torch.inference_mode(), _peak(figures), Checkpoint(folder) as checkpoint:
            load_decoder(
                ModelConfig.from_folder(folder),
                checkpoint,
                parallel=group,
                max_model_len=64,
                dtype=torch.float32,
                device=torch.device("cpu"),
            )
            figures.read = checkpoint.bytes_read
        figures.peak -= before
    return figures


@contextmanager
def _peak(figures: Figures) -> Iterator[None]:
    """Look every fifth of a millisecond: tensors are filled in longer than that."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.0002):
            figures.peak = max(figures.peak, _anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        figures.peak = max(figures.peak, _anonymous())


def _anonymous() -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


@dataclass(frozen=True)
class Expected:
    """What a rank may read at most, by the split that `shard_of_rank` says. Units: bytes as stored."""

    share: int
    replicated: int


def expected_of_rank(folder: Path, rank: int, world_size: int) -> Expected:
    """Each tensor's part by its name, without asking the loader."""
    config = ModelConfig.from_folder(folder)
    shard = shard_of_rank(config, rank, world_size)
    heads = shard.heads
    parts: Mapping[str, tuple[int, int]] = {
        "embed_tokens": (len(shard.vocab_rows), config.vocab_size),
        "lm_head": (len(shard.vocab_rows), config.vocab_size),
        "q_proj": (len(heads.q_heads), config.num_heads),
        "o_proj": (len(heads.q_heads), config.num_heads),
        "k_proj": (len(heads.kv_heads), config.num_kv_heads),
        "v_proj": (len(heads.kv_heads), config.num_kv_heads),
        "qkv_proj": (
            len(heads.q_heads) + 2 * len(heads.kv_heads),
            config.num_heads + 2 * config.num_kv_heads,
        ),
        ".mlp.gate_up_proj": (len(shard.mlp_columns), config.intermediate_size),
        ".mlp.gate_proj": (len(shard.mlp_columns), config.intermediate_size),
        ".mlp.up_proj": (len(shard.mlp_columns), config.intermediate_size),
        ".mlp.down_proj": (len(shard.mlp_columns), config.intermediate_size),
    }
    if config.experts is not None:
        parts = {".experts.": (len(shard.expert_columns), config.experts.width), **parts}
    share = replicated = 0
    for name, num_bytes in stored_bytes(folder).items():
        part = next((part for key, part in parts.items() if key in name), None)
        if part is None or (name.endswith("o_proj.bias") or name.endswith("down_proj.bias")):
            replicated += num_bytes
        else:
            assert num_bytes * part[0] % part[1] == 0, (name, num_bytes, part)
            share += num_bytes * part[0] // part[1]
    return Expected(share, replicated)


def stored_bytes(folder: Path) -> dict[str, int]:
    """Every tensor's bytes, over all files of a folder."""
    sizes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                sizes[name] = file.get_tensor(name).nbytes
    return sizes
