"""The tensor-parallel group of one life: its ranks, and the collectives that the decoder and the sampler use.

NCCL on GPUs; on CPUs shared memory where all ranks are on one host (`same_host.py`), else Gloo. They meet through a
store at the address, and use the network interface, that `cluster/` names. The process group is built directly, never
as torch's default group: a second life in the same process has its own store, its own sockets and no leftovers. What a
rank owns of the model is `sharding.py`.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from .device import resolve_device
from .same_host import SameHostGroup

dist: Any = torch.distributed  # its stubs leave out the process-group classes


class TensorParallelGroup:
    """`world_size` ranks that run the same collectives in the same order.

    Made by `alone` (one rank, no sockets) or `create`.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        process_group: Any = None,
        same_host: SameHostGroup | None = None,
        store: Any = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._process_group: Any = process_group
        self._same_host = same_host
        self._store = store

    @classmethod
    def alone(cls) -> TensorParallelGroup:
        return cls(0, 1)

    @classmethod
    def create(
        cls,
        rank: int,
        world_size: int,
        *,
        address: str,
        interface: str | None = None,
        timeout_s: float = 120.0,
        device: str = "cpu",
        share_memory: bool = True,
    ) -> TensorParallelGroup:
        """Meet the other ranks. Rank 0 listens at `address` ("host:port", `pick_port` on its node); others connect.

        interface: the network interface of the collectives ("eth0"); None lets the library guess, which on hosts whose
            name resolves to 127.0.0.1 guesses wrongly.
        timeout_s: for meeting, and for every collective later.
        device: as in WorkerConfig; auto is the GPU where there is one.
        share_memory: False makes CPU ranks on one host use Gloo too.
        Raises: RuntimeError, one sentence, if the ranks do not meet within timeout_s; ValueError for bad arguments.
        """
        if world_size == 1:
            return cls.alone()
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"address must be host:port, got {address!r}")
        names = [name for _, name in socket.if_nameindex()]
        if interface and interface not in names:
            raise ValueError(
                f"network interface {interface!r} is not on this machine; it has {', '.join(names)}"
            )
        on_gpu = resolve_device(device).type == "cuda"
        timeout = timedelta(seconds=timeout_s)
        try:
            store = dist.TCPStore(
                host.strip("[]"),
                int(port),
                world_size,
                is_master=rank == 0,
                timeout=timeout,
                wait_for_workers=True,
                master_listen_fd=_listen(host.strip("[]"), int(port)) if rank == 0 else None,
            )
            group = same_host = None
            if on_gpu:
                group = _nccl(store, rank, world_size, interface, timeout)
            elif share_memory:
                same_host = SameHostGroup.connect(store, rank, world_size, timeout_s)
            if group is None and same_host is None:
                group = _gloo(store, rank, world_size, interface, timeout)
        except (
            RuntimeError,
            ValueError,
            OSError,
        ) as error:  # torch's DistError family is a RuntimeError
            raise RuntimeError(
                f"rank {rank} could not meet the other {world_size - 1} ranks at {address} within {timeout_s:g} s: "
                f"{_first_line(error)}"
            ) from error
        return cls(rank, world_size, process_group=group, same_host=same_host, store=store)

    @staticmethod
    def pick_port(host: str) -> int:
        """A TCP port that is free on this node's address `host` now, for rank 0's store."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((host, 0))
            return listener.getsockname()[1]

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace `tensor` (contiguous) by its sum over the ranks, the same to the last bit on every rank.

        On a CPU the parts are added in rank order, ((r0 + r1) + r2) + ..., so the result is also the same from one
        run to the next. NCCL reduces each element in one place and hands that out.
        """
        if self.world_size == 1:
            return tensor
        if self._same_host is not None:
            self._same_host.sum_(tensor)
            return tensor
        if tensor.is_cuda:
            self._process_group.allreduce([tensor]).wait()
            return tensor
        parts = self.all_gather(tensor)
        torch.add(parts[0], parts[1], out=tensor)
        for part in parts[2:]:
            tensor.add_(part)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's `tensor` (contiguous, one shape and dtype everywhere), in rank order: [world_size, *shape]."""
        if self.world_size == 1:
            return tensor.unsqueeze(0)
        gathered = torch.empty(
            (self.world_size, *tensor.shape), dtype=tensor.dtype, device=tensor.device
        )
        if self._same_host is not None:
            self._same_host.all_gather(tensor, gathered)
            return gathered
        self._process_group._allgather_base(gathered.view(-1), tensor.view(-1)).wait()
        return gathered

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self._same_host is not None:
            self._same_host.barrier()
        elif self.world_size > 1:
            self._process_group.barrier().wait()

    def close(self) -> None:
        """Leave the group; a collective after this fails. Safe to call twice."""
        group, self._process_group, self._store = self._process_group, None, None
        same_host, self._same_host = self._same_host, None
        if same_host is not None:
            same_host.close()
        if group is not None and hasattr(group, "shutdown"):
            group.shutdown()


def _gloo(store: Any, rank: int, world_size: int, interface: str | None, timeout: timedelta) -> Any:
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface  # for whatever else in this process uses Gloo
        device = dist.ProcessGroupGloo.create_device(interface=interface)
    else:
        device = dist.ProcessGroupGloo.create_default_device()
    options = dist.ProcessGroupGloo._Options()
    options._devices = [device]
    options._timeout = timeout
    options._threads = 2
    return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, world_size, options)


def _nccl(store: Any, rank: int, world_size: int, interface: str | None, timeout: timedelta) -> Any:
    if interface:
        os.environ["NCCL_SOCKET_IFNAME"] = (
            f"={interface}"  # "=": this one, not every name that begins so
        )
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, world_size, options)


def _listen(host: str, port: int) -> int:
    """A socket that listens on this one address: torch's own takes every interface, and its store asks for no key."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family).detach()


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
