"""Real Gloo groups between real processes."""

from __future__ import annotations

import pytest
import torch
from rowcast.tests.worker.rank_pool import RankPool
from rowcast.worker.parallel import TensorParallelGroup


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


def test_sums_are_added_in_rank_order_and_the_same_on_every_rank(rank_pool: RankPool):
    """Ranks whose sums differ in the last bit sample different tokens in the end."""
    first, second, third = rank_pool.run(3, uneven_sum)
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


def test_all_gather_stacks_in_rank_order_and_a_group_has_many_lives(rank_pool: RankPool):
    """Each call is a new group in the same processes; torch's default group would refuse the second."""
    for world_size in (2, 3, 2):
        expected = [[[rank, 2**40], [0, -rank]] for rank in range(world_size)]
        assert rank_pool.run(world_size, gathered) == [expected] * world_size
    assert rank_pool.run(2, closed_twice) == ["closed"] * 2


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
