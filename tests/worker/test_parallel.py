"""Real groups between real processes, over shared memory and over Gloo."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from rowcast.tests.worker.rank_pool import RankPool
from rowcast.worker import same_host
from rowcast.worker.parallel import TensorParallelGroup
from rowcast.worker.same_host import SameHostGroup


def uneven_sum(group: TensorParallelGroup) -> tuple[list[float], list[float]]:
    """A sum that shows its order: float32 loses the ones beside 1e8, unless the big ones cancel first."""
    parts = torch.tensor([[1e8, 1.0, 3.0], [1.0, 1e8, 1e-7], [-1e8, -1e8, 3.0]])
    generator = torch.Generator().manual_seed(group.rank)
    many = torch.randn(1000, generator=generator) * 10 ** torch.randint(
        -4, 5, (1000,), generator=generator
    )
    tensor = torch.cat((parts[group.rank], many))
    out = group.sum_(tensor)
    assert out is tensor
    return out[:3].tolist(), out.tolist()


def gathered(group: TensorParallelGroup) -> list:
    tensor = torch.tensor([[group.rank, 2**40], [0, -group.rank]])
    return group.all_gather(tensor).tolist()


def closed_twice(group: TensorParallelGroup) -> str:
    group.barrier()
    group.close()
    group.close()
    return "closed"


def many_sizes(group: TensorParallelGroup) -> list[bool]:
    """Sums and gathers of every size in turn, some larger than a slot of shared memory, some empty."""
    right = []
    for turn, size in enumerate([3, 300_000, 0, 1, 700_001, 262_144, 262_145, 5] * 3):
        base = torch.arange(size, dtype=torch.float32) % 1000
        total = group.sum_(base * (group.rank + 1) + turn)
        ranks = range(group.world_size)
        expected = sum(r + 1 for r in ranks) * base + group.world_size * turn
        right.append(torch.equal(total, expected))
        wide = group.all_gather(torch.arange(size) * 2**33 + group.rank)
        right += [torch.equal(wide[r], torch.arange(size) * 2**33 + r) for r in ranks]
        if turn % 5 == 0:
            group.barrier()
    return right


def left_alone(group: TensorParallelGroup) -> str:
    if group.rank == 1:
        group.close()
        return ""
    try:
        group.barrier()
        group.all_gather(torch.ones(3))
    except RuntimeError as error:
        return str(error)
    return "nothing was noticed"


def kept_waiting(group: TensorParallelGroup, done: str) -> str:
    """Rank 1 stays away from the collective until rank 0 has given up."""
    if group.rank == 1:
        while not Path(done).exists():
            time.sleep(0.01)
        return ""
    try:
        group.barrier()
    except RuntimeError as error:
        return str(error)
    finally:
        Path(done).touch()
    return "nothing was noticed"


TRANSPORTS = pytest.mark.parametrize("share_memory", [True, False], ids=["memory", "gloo"])


@TRANSPORTS
def test_sums_are_added_in_rank_order_and_the_same_on_every_rank(
    rank_pool: RankPool, share_memory: bool
):
    """Ranks whose sums differ in the last bit sample different tokens in the end."""
    first, second, third = rank_pool.run(3, uneven_sum, share_memory=share_memory)
    # (1e8 + 1) + -1e8 = 0, (1 + 1e8) + -1e8 = 0, (3 + 1e-7) + 3 = 6
    assert first[0] == [0.0, 0.0, 6.0]
    assert first == second == third
    parts = []
    for rank in range(3):
        generator = torch.Generator().manual_seed(rank)
        parts.append(
            torch.randn(1000, generator=generator)
            * 10 ** torch.randint(-4, 5, (1000,), generator=generator)
        )
    assert first[1][3:] == ((parts[0] + parts[1]) + parts[2]).tolist()


@TRANSPORTS
def test_all_gather_stacks_in_rank_order_and_a_group_has_many_lives(
    rank_pool: RankPool, share_memory: bool
):
    """Each call is a new group in the same processes; torch's default group would refuse the second."""
    for world_size in (2, 3, 2):
        expected = [[[rank, 2**40], [0, -rank]] for rank in range(world_size)]
        assert (
            rank_pool.run(world_size, gathered, share_memory=share_memory)
            == [expected] * world_size
        )
    assert rank_pool.run(2, closed_twice, share_memory=share_memory) == ["closed"] * 2


def test_device_auto_means_the_cpu_where_there_is_no_gpu(rank_pool: RankPool):
    """It once meant NCCL, whatever the machine had."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert rank_pool.run(2, closed_twice, device="auto") == ["closed"] * 2


@TRANSPORTS
def test_every_size_goes_through(rank_pool: RankPool, share_memory: bool):
    for right in rank_pool.run(3, many_sizes, share_memory=share_memory):
        assert all(right)


def test_a_rank_that_leaves_is_named(rank_pool: RankPool):
    """A dead rank must not cost the others a time-out of minutes."""
    first, _, third = rank_pool.run(3, left_alone)
    assert "rank 0 lost rank 1" in first
    assert "lost rank" in third  # rank 1, or rank 0 who left because of it


def test_a_rank_that_stays_silent_is_named(rank_pool: RankPool, tmp_path: Path):
    first, _ = rank_pool.run(2, kept_waiting, str(tmp_path / "done"), timeout_s=0.5)
    assert first == "rank 0 waited 0.5 s for rank 1 in a collective"


def test_ranks_of_other_hosts_do_not_share_memory(monkeypatch: pytest.MonkeyPatch):
    """Decided alike on every rank: one rank alone in shared memory would wait for ever."""
    store = torch.distributed.HashStore()
    identities = iter(["one host", "another host", "one host"])
    monkeypatch.setattr(same_host, "host_identity", lambda: next(identities))
    with ThreadPoolExecutor(3) as pool:
        groups = list(pool.map(lambda r: SameHostGroup.connect(store, r, 3, 20.0), range(3)))
    assert groups == [None, None, None]


def test_a_rank_that_never_comes_is_a_sentence():
    """With torch's own time-out, the other ranks would wait for half an hour."""
    port = TensorParallelGroup.pick_port("127.0.0.1")
    named = r"rank 0 could not meet the other 1 ranks at 127\.0\.0\.1:\d+ within 1 s"
    with pytest.raises(RuntimeError, match=named):
        TensorParallelGroup.create(0, 2, address=f"127.0.0.1:{port}", interface="lo", timeout_s=1.0)


def test_one_rank_alone_needs_no_sockets():
    group = TensorParallelGroup.create(0, 1, address="nowhere:1")
    tensor = torch.ones(3)
    assert group.sum_(tensor) is tensor
    assert group.all_gather(tensor).shape == (1, 3)
    group.barrier()
    group.close()


@pytest.mark.parametrize(
    ("rank", "address", "interface", "named"),
    [
        (2, "127.0.0.1:1", "lo", "rank must be in"),
        (0, "127.0.0.1", "lo", "address must be host:port"),
        (0, "127.0.0.1:1", "nonesuch0", "network interface 'nonesuch0' is not on this machine"),
    ],
)
def test_bad_arguments_are_refused(rank, address, interface, named):
    with pytest.raises(ValueError, match=named):
        TensorParallelGroup.create(rank, 2, address=address, interface=interface)
