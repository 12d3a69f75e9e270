"""Which address and which network interface this node is reached by: Ray's node IP decides, not the host's name."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

_SIOCGIFADDR = 0x8915
LOOPBACK = "127.0.0.1"


def is_loopback(ip: str) -> bool:
    return ipaddress.ip_address(ip).is_loopback


def meeting_host(scheduler_ip: str, rank_ips: Sequence[str]) -> str:
    """The address at which the scheduler listens for its ranks and fronts.

    On one node that is loopback: nobody else has to reach it. Example: "10.0.0.4", ["10.0.0.5"] -> "10.0.0.4".
    Raises: ValueError, one sentence, when Ray knows one of several nodes by a loopback address.
    """
    if {scheduler_ip, *rank_ips} == {scheduler_ip}:
        return LOOPBACK
    whose = {"the scheduler": scheduler_ip} | {f"rank {r}": ip for r, ip in enumerate(rank_ips)}
    for who, ip in whose.items():
        if is_loopback(ip):
            raise ValueError(
                f"{who} runs on a node that Ray knows as {ip}, which the other nodes cannot reach; "
                "start Ray there with --node-ip-address"
            )
    return scheduler_ip


def free_port(host: str) -> int:
    """A TCP port that nobody listens at on this node's address `host` now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        return listener.getsockname()[1]


def interface_of(ip: str) -> str | None:
    """The network interface that owns an address of this node ("eth0"); None when none of them does.

    Example: "127.0.0.1" -> "lo".
    """
    address = ipaddress.ip_address(ip)
    for _, name in socket.if_nameindex():
        if address.version == 4 and _ipv4_of(name) == ip:
            return name
    return _ipv6_interface(address) if address.version == 6 else None


def _ipv4_of(interface: str) -> str | None:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(
                probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15])
            )
        except OSError:  # an interface without an IPv4 address
            return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6_interface(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    table = Path("/proc/net/if_inet6")
    if table.exists():
        for line in table.read_text().splitlines():
            digits, *_, name = line.split()
            if int(digits, 16) == int(address):
                return name
    return None
