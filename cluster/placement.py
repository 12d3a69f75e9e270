"""Where the ranks run: one bundle each of a detached placement group, waited for with a deadline and with words."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

FIRST_WORD_S = 3.0
_WORD_EVERY_S = 10.0
_TRY_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """A created placement group: bundle r is rank r's. device is "cpu" or "cuda"."""

    group: Any
    device: str
    bundle: dict[str, float]
    node_ids: tuple[str, ...]


class GroupExists(Exception):
    """A placement group of the engine's name is there: another engine, or what is left of one."""


def group_name(engine_name: str) -> str:
    return f"{engine_name}/workers"


def choose_bundle(device: str, num_ranks: int, cluster: Mapping[str, float]) -> tuple[str, dict]:
    """Device and bundle of each rank. "auto" takes GPUs where the cluster has any.

    Example: 2 ranks on a cluster of 1 CPU -> ("cpu", {"CPU": 0.5}).
    """
    if device == "cuda" or (device == "auto" and cluster.get("GPU", 0) > 0):
        return "cuda", {"GPU": 1.0}
    # Ray counts resources in ten-thousandths; rounding up would make the last bundle wait for ever.
    share = math.floor(min(1.0, cluster.get("CPU", 1.0) / num_ranks) * 10_000) / 10_000
    return "cpu", {"CPU": max(share, 0.01)}


def create(
    engine_name: str,
    *,
    device: str,
    num_ranks: int,
    timeout_s: float,
    on_wait: Callable[[str], None] | None = None,
) -> Placement:
    """Reserve a bundle for each rank.

    on_wait: gets a sentence after a few seconds of waiting, and again every ten.
    Raises: GroupExists if the name is taken; TimeoutError saying what is missing. The group is removed then, and on
        Ctrl-C too.
    """
    import ray.exceptions
    from ray.util.placement_group import placement_group, placement_group_table

    device, bundle = choose_bundle(device, num_ranks, ray.cluster_resources())
    name = group_name(engine_name)
    bundles = [bundle] * num_ranks
    try:
        group = placement_group(bundles, strategy="PACK", name=name, lifetime="detached")
    except ray.exceptions.RayError as error:
        if "already exists" in str(error):
            raise GroupExists(name) from None
        raise
    try:
        began = time.monotonic()
        word_at = began + FIRST_WORD_S
        while not group.wait(_TRY_S):
            now = time.monotonic()
            if now - began >= timeout_s:
                raise TimeoutError(
                    f"{what_is_missing(bundle, num_ranks, group)}; gave up after {timeout_s:g} s"
                )
            if now >= word_at and on_wait is not None:
                on_wait(f"waiting: {what_is_missing(bundle, num_ranks, group)}")
                word_at = now + _WORD_EVERY_S
        table: Any = placement_group_table(group)
        nodes = table["bundles_to_node_id"]
        return Placement(
            group=group,
            device=device,
            bundle=bundle,
            node_ids=tuple(nodes[rank] for rank in range(num_ranks)),
        )
    except BaseException:
        remove_group(group)
        raise


def what_is_missing(bundle: dict[str, float], num_ranks: int, own: Any) -> str:
    """Example: "needs 2 bundles of 1 GPU; the cluster has 1 free of 2 (other/workers holds 1)"."""
    import ray
    from ray.util.placement_group import placement_group_table

    ((kind, amount),) = bundle.items()
    free = ray.available_resources().get(kind, 0.0)
    total = ray.cluster_resources().get(kind, 0.0)
    holders = []
    for identity, entry in placement_group_table().items():
        held = sum(other.get(kind, 0.0) for other in entry["bundles"].values())
        if held and entry["state"] == "CREATED" and identity != own.id.hex():
            holders.append(f"{entry['name'] or identity[:8]} holds {held:g}")
    who = f" ({', '.join(holders)})" if holders else ""
    bundles = "1 bundle" if num_ranks == 1 else f"{num_ranks} bundles"
    return f"needs {bundles} of {amount:g} {kind}; the cluster has {free:g} free of {total:g}{who}"


def remove_group(group: Any) -> None:
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)


def find_group(engine_name: str) -> Any:
    """The engine's placement group, or None."""
    from ray.util.placement_group import get_placement_group

    with contextlib.suppress(ValueError):
        return get_placement_group(group_name(engine_name))
    return None
