"""What the kernel tests share: each kernel as interpreted Triton and as Numba twin, and a paged cache to attend to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch

JUNK_BLOCK = 2**31 - 1  # a block id that no cache has: reading through it ends the process


def launcher(implementation: str, name: str) -> Callable[..., None]:
    """`name` as "triton", "numba" or "reference", taking torch tensors in each case."""
    if implementation == "numba":
        twin = getattr(import_module(f"rowcast.kernels.cpu.{name}"), name)

        def as_array(value: Any) -> Any:
            return value.numpy() if isinstance(value, torch.Tensor) else value

        return lambda *args, **kwargs: twin(
            *map(as_array, args), **{key: as_array(value) for key, value in kwargs.items()}
        )
    suffix = "_reference" if implementation == "reference" else ""
    return getattr(import_module(f"rowcast.kernels.{name}"), name + suffix)


@pytest.fixture(params=["triton", "numba"])
def kernel(request: pytest.FixtureRequest) -> Callable[[str], Callable[..., None]]:
    """kernel("slot_mapping") is that kernel, interpreted in one run of the test and the Numba twin in the other."""
    return lambda name: launcher(request.param, name)


@pytest.fixture
def reference() -> Callable[[str], Callable[..., None]]:
    return lambda name: launcher("reference", name)


@dataclass(kw_only=True)
class PagedCase:
    """Requests with their KV in a paged cache whose every other number is NaN."""

    query: torch.Tensor  # [num_tokens, num_heads, head_dim], NaN in the gap behind each token
    pool: torch.Tensor  # [num_blocks, layers, K and V, num_kv_heads, block_size, head_dim]
    block_table: torch.Tensor  # [num_reqs, max_blocks] int32, JUNK_BLOCK behind the last block
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    scale: float

    def attend(
        self,
        paged_attention: Callable[..., None],
        *,
        marker: float = 7.0,
        window: int = 0,
        chunk: int = 0,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """The kernel's output; asserts that it wrote nothing into the gap behind each token."""
        num_tokens, num_heads, head_dim = self.query.shape
        storage = torch.full((num_tokens, num_heads * head_dim + 3), marker, dtype=self.query.dtype)
        out = storage[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))
        paged_attention(
            self.query,
            self.pool[:, 1, 0],
            self.pool[:, 1, 1],
            self.block_table,
            self.seq_lens,
            self.query_start_loc,
            scale=self.scale,
            out=out,
            window=window,
            chunk=chunk,
            softcap=softcap,
        )
        assert (storage[:, num_heads * head_dim :] == marker).all()
        return out

    def give_back(self, *, window: int = 0, chunk: int = 0, left_over: int = JUNK_BLOCK) -> None:
        """Leave nothing of what no query of this step sees: NaN keys and values, `left_over` for whole blocks' ids."""
        block_size = self.pool.shape[4]
        for batch_index, seq_len in enumerate(self.seq_lens.tolist()):
            start, end = self.query_start_loc[batch_index : batch_index + 2].tolist()
            position = seq_len - (end - start)  # of the first query
            first = max(0, position - window + 1) if window else position // chunk * chunk
            whole_blocks, rest = divmod(first, block_size)
            ids = self.block_table[batch_index, : whole_blocks + 1]
            self.pool[ids[:whole_blocks].long()] = float("nan")
            if rest:
                self.pool[int(ids[whole_blocks]), ..., :rest, :] = float("nan")
            ids[:whole_blocks] = left_over


def paged_case(
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    padding_tokens: int = 0,
) -> PagedCase:
    """Normal Q, K and V in shuffled blocks; block 0, unused blocks, tails of last blocks and layer 0 hold NaN."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    blocks_of = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = 1 + sum(blocks_of) + 2
    max_blocks = max(max(blocks_of) + 1, 2)
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    pool = torch.full(
        (num_blocks, 2, 2, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype
    )
    table = torch.full((len(seq_lens), max_blocks), JUNK_BLOCK, dtype=torch.int32)
    for batch_index, seq_len in enumerate(seq_lens):
        keys_values = normal(seq_len, 2, num_kv_heads, head_dim)
        for block_index in range(blocks_of[batch_index]):
            block_id = order.pop()
            table[batch_index, block_index] = block_id
            part = keys_values[block_index * block_size : (block_index + 1) * block_size]
            pool[block_id, 1, :, :, : part.shape[0]] = part.permute(1, 2, 0, 3)
    starts = [0]
    for query_len in query_lens:
        starts.append(starts[-1] + query_len)
    num_tokens = starts[-1] + padding_tokens
    storage = torch.full((num_tokens, num_heads * head_dim + 5), float("nan"), dtype=dtype)
    query = storage[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))
    query[: starts[-1]] = normal(starts[-1], num_heads, head_dim)
    return PagedCase(
        query=query,
        pool=pool,
        block_table=table,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        scale=head_dim**-0.5,
    )


@pytest.fixture(name="paged_case")
def paged_case_fixture() -> Callable[..., PagedCase]:
    return paged_case


@pytest.fixture
def numba_threads() -> Any:
    """`set_threads`, undone after the test."""
    from rowcast.kernels.cpu import _numba

    before = _numba.get_threads()
    yield _numba.set_threads
    _numba.set_threads(before)
