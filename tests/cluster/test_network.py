"""Addresses and interfaces come from Ray's node IP."""

from __future__ import annotations

import socket

import psutil
import pytest
from rowcast.cluster.network import interface_of, meeting_host
from rowcast.cluster.placement import choose_bundle


def test_one_node_meets_on_loopback() -> None:
    assert meeting_host("10.0.0.4", ["10.0.0.4", "10.0.0.4"]) == "127.0.0.1"


def test_several_nodes_meet_where_the_scheduler_is() -> None:
    assert meeting_host("10.0.0.4", ["10.0.0.5", "10.0.0.4"]) == "10.0.0.4"


def test_loopback_with_several_nodes_is_refused() -> None:
    """R04: gloo falls back to 127.0.0.1, and a late time-out says nothing."""
    with pytest.raises(ValueError, match=r"rank 1 .*127\.0\.0\.1.*--node-ip-address"):
        meeting_host("10.0.0.4", ["10.0.0.4", "127.0.0.1"])
    with pytest.raises(ValueError, match=r"the scheduler .*127\.0\.0\.1"):
        meeting_host("127.0.0.1", ["10.0.0.4"])


def test_the_interface_of_every_address_of_this_machine() -> None:
    names = {name for _, name in socket.if_nameindex()}
    checked = 0
    for interface, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET and interface in names:
                assert interface_of(address.address) == interface
                checked += 1
    assert checked
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None


@pytest.mark.parametrize(
    ("device", "ranks", "cluster", "expected"),
    [
        ("auto", 2, {"CPU": 2.0}, ("cpu", {"CPU": 1.0})),
        ("auto", 2, {"CPU": 1.0}, ("cpu", {"CPU": 0.5})),
        ("auto", 3, {"CPU": 2.0}, ("cpu", {"CPU": 0.6666})),  # 3 * 0.6667 would not fit
        ("auto", 2, {"CPU": 8.0, "GPU": 2.0}, ("cuda", {"GPU": 1.0})),
        ("cpu", 1, {"CPU": 8.0, "GPU": 2.0}, ("cpu", {"CPU": 1.0})),
        ("cuda", 1, {"CPU": 8.0}, ("cuda", {"GPU": 1.0})),
    ],
)
def test_what_a_rank_asks_for(
    device: str, ranks: int, cluster: dict[str, float], expected: tuple[str, dict[str, float]]
) -> None:
    assert choose_bundle(device, ranks, cluster) == expected
