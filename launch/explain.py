"""One step as people draw it: the four index spaces, the block tables and the slots, out of a worker's real tables.

`rowcast explain` shows the worked example of the design this way, `rowcast replay --explain` any step of a recording.
Owns the picture alone: the numbers come from `worker/state.py` and `worker/input_batch.py`, as every rank makes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..scheduler.agreement import StepPlan
from ..scheduler.kv_groups import AttentionKind, KVGroupSpec, first_needed_block
from ..scheduler.messages import Admissions, SchedulerOutput
from ..worker.state import WorkerState

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_MAX_TOKENS = 48  # rows of the token table; what is between the first and the last of them is counted, not listed
_MAX_BLOCKS = 12  # of one request and group in the block table


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPicture:
    """Everything that a step's inputs say, as plain arrays.

    Shapes: names of the requests num_reqs strings; query_start_loc [num_reqs + 1]; seq_lens [num_reqs]; input_ids and
        positions [num_tokens]; block_tables and slot_mappings one a KV group, [num_reqs, width] and [num_tokens].
    """

    sequence: int
    step: SchedulerOutput
    plan: StepPlan
    groups: tuple[KVGroupSpec, ...]
    request_ids: tuple[str, ...]
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    input_ids: np.ndarray
    positions: np.ndarray
    block_tables: tuple[np.ndarray, ...]
    slot_mappings: tuple[np.ndarray, ...]

    @property
    def batch_index_of_token(self) -> np.ndarray:
        """[num_tokens]: flat_token_index -> batch_index."""
        return np.repeat(np.arange(self.plan.num_reqs), self.plan.num_scheduled_tokens)

    def to_json(self) -> dict[str, Any]:
        """The same as numbers and lists alone."""
        return {
            "step": self.sequence,
            "freed_rows": self.step.freed_rows.tolist(),
            "request_ids": list(self.request_ids),
            "index_mapping": self.plan.index_mapping.tolist(),
            "query_start_loc": self.query_start_loc.tolist(),
            "seq_lens": self.seq_lens.tolist(),
            "input_ids": self.input_ids.tolist(),
            "positions": self.positions.tolist(),
            "samples": self.plan.samples.tolist(),
            "grown_block_ids": [ids.tolist() for ids in self.step.grown_block_ids],
            "input_block_tables": [table.tolist() for table in self.block_tables],
            "slot_mapping": [slots.tolist() for slots in self.slot_mappings],
        }


class StepExplainer:
    """Makes pictures of the steps of one rank's state. Needs torch and the CPU's input kernels, but no model."""

    def __init__(self, state: WorkerState, *, max_num_batched_tokens: int) -> None:
        from ..worker.backend import select_backend
        from ..worker.input_batch import InputBuilder

        self._state = state
        self._builder = InputBuilder(
            state,
            select_backend("cpu", "cpu"),
            max_num_batched_tokens=max_num_batched_tokens,
            device="cpu",
        )

    def picture(self, sequence: int, step: SchedulerOutput, plan: StepPlan) -> StepPicture:
        """Call it between `state.apply`, which gave the plan, and `state.commit`."""
        batch = self._builder.build(plan)
        names = self._state.requests.request_ids
        return StepPicture(
            sequence=sequence,
            step=step,
            plan=plan,
            groups=self._state.groups,
            request_ids=tuple(str(names[row]) for row in plan.index_mapping.tolist()),
            query_start_loc=batch.query_start_loc.numpy().copy(),
            seq_lens=batch.seq_lens.numpy().copy(),
            input_ids=batch.input_ids.numpy().copy(),
            positions=batch.positions.numpy().copy(),
            block_tables=tuple(table.numpy().copy() for table in batch.input_block_tables),
            slot_mappings=tuple(slots.numpy().copy() for slots in batch.slot_mappings),
        )


def show(picture: StepPicture, console: Console) -> None:
    """Print a picture as tables."""
    for part in _parts(picture):
        console.print(part)
        console.print()


def worked_example() -> StepPicture:
    """The example of DESIGN.md section 1: one token of B (row 7), eight of A (row 6), block_size 16."""
    state = WorkerState(
        max_num_seqs=8,
        max_model_len=64,
        groups=(KVGroupSpec(block_size=16, num_kv_heads=1, head_dim=64, layers=(0,)),),
        num_blocks=100,
        vocab_size=1000,
    )
    step = SchedulerOutput(
        admissions=Admissions.of(
            rows=np.array([7, 6], np.int32),
            request_ids=("B", "A"),
            num_tokens=np.array([32, 24], np.int32),
            token_ids=np.concatenate((np.arange(300, 332), np.arange(500, 524))).astype(np.int32),
            num_prompt_tokens=np.array([32, 24], np.int32),
            num_cached_tokens=np.array([31, 16], np.int32),
            seeds=np.zeros(2, np.int64),
            temperature=np.zeros(2, np.float32),
            top_p=np.ones(2, np.float32),
            top_k=np.zeros(2, np.int32),
            min_p=np.zeros(2, np.float32),
            presence_penalty=np.zeros(2, np.float32),
            frequency_penalty=np.zeros(2, np.float32),
            repetition_penalty=np.ones(2, np.float32),
            features=(None, None),
            num_blocks=(np.array([2, 2], np.int32),),
            block_ids=(np.array([37, 12, 81, 44], np.int32),),
        ),
        run_rows=np.array([6], np.int32),
        run_counts=np.array([8], np.int32),
        grown_block_ids=(np.empty(0, np.int32),),
    )
    explainer = StepExplainer(state, max_num_batched_tokens=16)
    return explainer.picture(1, step, state.apply(step))


# ---------------------------------------------------------------- the parts of a picture


def _parts(picture: StepPicture) -> Iterator[RenderableType]:
    from rich.console import Group

    yield _change(picture)
    if not picture.plan.num_reqs:
        yield "No request runs in this step: it only carries the change above."
        return
    yield Group("[bold]index_mapping: batch_index -> row[/bold]", _requests(picture))
    for group in range(len(picture.groups)):
        yield Group(_group_title(picture, group), _block_table(picture, group))
    chain = "flat_token_index -> position -> block_index, block_offset -> block_id -> slot_id"
    yield Group(f"[bold]{chain}[/bold]", _tokens(picture))


def _table(*columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        justify = "left" if column in ("request_id", "blocks", "samples") else "right"
        table.add_column(column, justify=justify)
    return table


def _change(picture: StepPicture) -> str:
    """What the frame said, in a sentence or two: everything else below was derived."""
    step, said = picture.step, []
    if len(step.freed_rows):
        said.append(f"frees rows {step.freed_rows.tolist()}")
    if step.admissions is not None:
        admitted = zip(
            step.admissions.rows.tolist(),
            step.admissions.request_ids,
            step.admissions.num_tokens.tolist(),
            step.admissions.num_cached_tokens.tolist(),
            strict=True,
        )
        rows = (f"{r} ({name}: {n} tokens, {cached} cached)" for r, name, n, cached in admitted)
        said.append(f"admits rows {', '.join(rows)}")
    if len(step.run_rows):
        runs = zip(step.run_rows.tolist(), step.run_counts.tolist(), strict=True)
        said.append("runs " + ", ".join(f"{count} tokens of row {row}" for row, count in runs))
    if len(step.paused_rows):
        said.append(f"pauses rows {step.paused_rows.tolist()}")
    if len(step.masked_rows):
        said.append(f"lets rows {step.masked_rows.tolist()} sample by a mask")
    grown = [len(ids) for ids in step.grown_block_ids]
    if sum(grown):
        said.append(f"brings {' + '.join(map(str, grown))} new blocks")
    told = "; ".join(said) if said else "nothing: every row runs the token that it sampled last"
    return f"[bold]Step {picture.sequence}[/bold] says: {_plain(told)}."


def _plain(text: str) -> str:
    """Text that rich must not read as markup: a request id may hold brackets."""
    return text.replace("[", "\\[")


def _requests(picture: StepPicture) -> RenderableType:
    table = _table(
        "batch_index",
        "row",
        "request_id",
        "computed before",
        "runs",
        "seq_len",
        "flat tokens",
        "samples",
    )
    plan, starts = picture.plan, picture.query_start_loc
    for i, name in enumerate(picture.request_ids):
        table.add_row(
            str(i),
            str(plan.index_mapping[i]),
            _plain(name),
            str(plan.num_computed_tokens[i]),
            str(plan.num_scheduled_tokens[i]),
            str(picture.seq_lens[i]),
            _plain(f"[{starts[i]}, {starts[i + 1]})"),
            "yes" if plan.samples[i] else "no",
        )
    return table


def _group_title(picture: StepPicture, group: int) -> str:
    spec = picture.groups[group]
    seen, legend = str(spec.kind).replace("_", " "), "green: new in this step"
    if spec.kind is not AttentionKind.FULL:
        seen, legend = f"{seen} of {spec.window} tokens", f"{legend}; ·: left of what is seen"
    layers = f"layer{'s' if len(spec.layers) > 1 else ''} {_ranges(spec.layers)}"
    return (
        f"[bold]block table of KV group {group}[/bold] ({seen}, block_size {spec.block_size}, {layers}; "
        f"{legend})"
    )


def _block_table(picture: StepPicture, group: int) -> RenderableType:
    spec = picture.groups[group]
    table = _table("batch_index", "row", "blocks")
    new = set(picture.step.grown_block_ids[group].tolist())
    for i, row in enumerate(picture.plan.index_mapping.tolist()):
        width = -(-int(picture.seq_lens[i]) // spec.block_size)
        first = int(first_needed_block(spec, int(picture.plan.num_computed_tokens[i])))
        blocks = picture.block_tables[group][i, :width].tolist()
        cells = ["·" if place < first else _block(b, new) for place, b in enumerate(blocks)]
        if len(cells) > _MAX_BLOCKS:
            half = _MAX_BLOCKS // 2
            cells = [*cells[:half], f"… {len(cells) - 2 * half} more …", *cells[-half:]]
        table.add_row(str(i), str(row), " ".join(cells))
    return table


def _block(block: int, new: set[int]) -> str:
    return f"[green]{block}[/green]" if block in new else str(block)


def _ranges(numbers: Sequence[int]) -> str:
    """Example: (0, 1, 2, 6) -> "0-2, 6"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


def _tokens(picture: StepPicture) -> RenderableType:
    table = _table("flat_token", "batch_index", "position", "input_id")
    for group in range(len(picture.groups)):
        name = "" if len(picture.groups) == 1 else f" ({group})"
        table.add_column(f"block_index, offset{name}", justify="right")
        table.add_column(f"block_id{name}", justify="right")
        table.add_column(f"slot_id{name}", justify="right")
    total = len(picture.positions)
    half = _MAX_TOKENS // 2
    listed = range(total) if total <= _MAX_TOKENS else [*range(half), *range(total - half, total)]
    batch_index = picture.batch_index_of_token
    last = -1
    for flat_token in listed:
        if flat_token != last + 1:
            table.add_row(f"… {flat_token - last - 1} more …")
        last = flat_token
        table.add_row(
            str(flat_token),
            str(batch_index[flat_token]),
            str(picture.positions[flat_token]),
            str(picture.input_ids[flat_token]),
            *_slots(picture, flat_token, int(batch_index[flat_token])),
        )
    return table


def _slots(picture: StepPicture, flat_token: int, batch_index: int) -> Iterator[str]:
    position = int(picture.positions[flat_token])
    for spec, table, slots in zip(
        picture.groups, picture.block_tables, picture.slot_mappings, strict=True
    ):
        block_index, offset = divmod(position, spec.block_size)
        yield f"{block_index}, {offset}"
        yield str(table[batch_index, block_index])
        yield str(slots[flat_token])
