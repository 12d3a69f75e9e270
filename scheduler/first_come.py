"""First come, first served."""

from __future__ import annotations

import numpy as np

from .fixed_order import FixedOrder
from .request import RequestTable
from .waiting_queue import arrival


class FirstComeFirstServed(FixedOrder):
    """Arrival order in everything; the newest running request gives way.

    Nobody overtakes: a head that does not fit blocks the queue until it does. So the oldest running request is never
    preempted in favour of another, and everyone's turn comes.
    """

    def __init__(self) -> None:
        super().__init__(arrival)

    def prompt_order(self, table: RequestTable, rows: np.ndarray) -> np.ndarray:
        return rows[np.argsort(table.arrival[rows])]

    def victim(self, table: RequestTable) -> int:
        rows = np.flatnonzero(table.live)
        return int(rows[np.argmax(table.arrival[rows])])
