"""The most urgent first."""

from __future__ import annotations

import numpy as np

from .fixed_order import FixedOrder
from .request import Request, RequestTable


class Priority(FixedOrder):
    """By the request's priority, the smaller the more urgent; among equals by arrival.

    It orders the waiting, and the prompts that share a step. A waiting request, however urgent, displaces no running
    one: it is next when a row and blocks are free. When blocks run out the least urgent running request gives way, the
    newest of equals. While urgent requests keep coming the others wait: that is what was asked for.
    """

    def __init__(self) -> None:
        super().__init__(_urgency)

    def prompt_order(self, table: RequestTable, rows: np.ndarray) -> np.ndarray:
        return rows[np.lexsort((table.arrival[rows], table.priority[rows]))]

    def victim(self, table: RequestTable) -> int:
        rows = np.flatnonzero(table.live)
        return int(self.prompt_order(table, rows)[-1])


def _urgency(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival
