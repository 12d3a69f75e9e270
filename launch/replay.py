"""A recording run again: a worker's tables rebuilt from the file alone, step by step, and every digest checked.

Worker state is a pure function of the frames and the sampled tokens, and both are recorded. So it needs no model and no
Ray, and a table that an engine had wrong shows at the step where its digest says so. Owns the order of the replay;
`scheduler/recording.py` reads the file, `explain.py` draws a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ..scheduler.agreement import Asked, StepPlan, asked_of_step
from ..scheduler.extras import check_extras
from ..scheduler.messages import (
    Mask,
    ProtocolError,
    ResultKind,
    SchedulerOutput,
    StepResult,
    decode_frame,
    decode_report,
)
from ..scheduler.recording import Life, Record, Recording, RecordKind
from ..scheduler.records import check_tokens
from ..worker.state import WorkerState
from ..worker.step_checks import check_mask

OnStep = Callable[[WorkerState, int, SchedulerOutput, StepPlan], None]
"""Called for a step when its frame was applied and its tokens are still to come: (state, sequence, step, plan)."""


class ReplayMismatch(RuntimeError):
    """What the file holds does not follow from what it held before: says at which step and for which rank."""


@dataclass(kw_only=True, slots=True)
class LifeSummary:
    """What was replayed of one life. Counts; num_unsettled steps were sent and have no result in the file."""

    life: Life
    num_steps: int = 0
    num_tokens: int = 0
    num_requests: int = 0
    num_digests: int = 0
    num_unsettled: int = 0
    last_sequence: int = 0


@dataclass(frozen=True, slots=True)
class _Sent:
    """A step, its frame, and its mask and that one's frame where it waited for one."""

    sequence: int
    step: SchedulerOutput
    message: bytes = field(repr=False)
    mask: Mask | None = None
    mask_message: bytes = field(default=b"", repr=False)


class LifeReplay:
    """The tables of one life of a worker group, driven by its records."""

    def __init__(self, life: Life, on_step: OnStep | None = None) -> None:
        self.summary = LifeSummary(life=life)
        self.state = WorkerState(
            max_num_seqs=life.max_num_seqs,
            max_model_len=life.max_model_len,
            groups=life.groups,
            num_blocks=life.num_blocks,
            vocab_size=life.vocab_size,
            depth=life.depth,
        )
        self._on_step = on_step
        self._sent: deque[_Sent] = deque()

    def frame(self, record: Record) -> None:
        """Take a frame; its step is applied when its result comes, as lookahead sends frames before that."""
        summary = self.summary
        expected = summary.last_sequence + 1
        try:
            frame = decode_frame(record.payload)
        except ProtocolError as error:
            raise ReplayMismatch(f"step {record.sequence}: {error}") from None
        if frame.epoch != summary.life.epoch or frame.sequence != record.sequence:
            raise ReplayMismatch(
                f"step {record.sequence}: its frame is of epoch {frame.epoch} and sequence {frame.sequence}, "
                f"expected epoch {summary.life.epoch}"
            )
        if record.sequence != expected:
            raise ReplayMismatch(
                f"step {record.sequence}: expected step {expected}; frames are missing from the file"
            )
        summary.last_sequence = record.sequence
        if isinstance(frame.body, SchedulerOutput):
            self._sent.append(_Sent(record.sequence, frame.body, record.payload))
        elif isinstance(frame.body, Mask):
            self._note_mask(frame.body, record)

    def _note_mask(self, mask: Mask, record: Record) -> None:
        """Keep a mask for its step, which is always the latest."""
        latest = self._sent[-1] if self._sent else None
        if latest is None or latest.sequence != mask.step_sequence or latest.mask is not None:
            raise ReplayMismatch(
                f"step {record.sequence}: a mask of step {mask.step_sequence}, which does not wait for one"
            )
        self._sent[-1] = replace(latest, mask=mask, mask_message=record.payload)

    def result(self, record: Record) -> None:
        """Apply the oldest step, check what the ranks said of it, and take its tokens."""
        if not self._sent or self._sent[0].sequence != record.sequence:
            expected = f"that of step {self._sent[0].sequence}" if self._sent else "none"
            raise ReplayMismatch(
                f"step {record.sequence}: a result, expected {expected}; records are missing from the file"
            )
        result = self._result_of(record)
        plan, digest = self._apply(self._sent.popleft())
        summary = self.summary
        said = np.frombuffer(result.digests, "<u8").tolist()
        if said and len(said) != summary.life.world_size:
            raise ReplayMismatch(
                f"step {record.sequence}: {len(said)} digests, expected one from each of "
                f"{summary.life.world_size} ranks"
            )
        wrong = [rank for rank, value in enumerate(said) if value != digest]
        if wrong:
            ranks = f"rank{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))}"
            raise ReplayMismatch(
                f"step {record.sequence}: {ranks} reported a digest of {said[wrong[0]]:016x}, the replayed tables "
                f"give {digest:016x}"
            )
        try:
            check_tokens(result.tokens, plan, summary.life.vocab_size)
            check_extras(result.extras, self._asked(plan), result.tokens, summary.life.vocab_size)
        except ProtocolError as error:
            raise ReplayMismatch(f"step {record.sequence}: {error}") from None
        self.state.commit(plan, result.tokens)
        summary.num_steps += 1
        summary.num_digests += len(said)
        summary.num_tokens += int(plan.samples.sum())

    def _asked(self, plan: StepPlan) -> Sequence[Asked] | None:
        """The log-probabilities that a step was asked for."""
        requests = self.state.requests
        return asked_of_step(requests.asking, requests.token_ids, requests.num_prompt_tokens, plan)

    def _take_mask(self, sent: _Sent, digest: int) -> int:
        """Check a step's mask and fold it; a step that the file ends with may have none."""
        if sent.mask is None:
            if self.summary.last_sequence == sent.sequence:
                return digest
            raise ReplayMismatch(f"step {sent.sequence}: its mask is missing from the file")
        try:
            check_mask(sent.mask, sent.step.masked_rows, self.summary.life.vocab_size)
        except ProtocolError as error:
            raise ReplayMismatch(f"step {sent.sequence}: {error}") from None
        return self.state.digests.end(sent.mask_message)

    def finish(self) -> LifeSummary:
        """End the life: the first of the steps that have no result is applied too, the others cannot be."""
        self.summary.num_unsettled = len(self._sent)
        if self._sent:
            self._apply(self._sent.popleft())
            self._sent.clear()
        return self.summary

    def _result_of(self, record: Record) -> StepResult:
        try:
            report = decode_report(record.payload)
        except ProtocolError as error:
            raise ReplayMismatch(f"step {record.sequence}: {error}") from None
        if (
            report.kind is not ResultKind.RESULT
            or report.result is None
            or report.sequence != record.sequence
            or report.epoch != self.summary.life.epoch
        ):
            raise ReplayMismatch(f"step {record.sequence}: the record holds no result of it")
        return report.result

    def _apply(self, sent: _Sent) -> tuple[StepPlan, int]:
        try:
            plan = self.state.apply(sent.step)
        except ProtocolError as error:
            raise ReplayMismatch(f"step {sent.sequence}: {error}") from None
        digest = self.state.digests.end(sent.message)
        if len(sent.step.masked_rows):
            digest = self._take_mask(sent, digest)
        if sent.step.admissions is not None:
            self.summary.num_requests += len(sent.step.admissions.rows)
        if self._on_step is not None:
            self._on_step(self.state, sent.sequence, sent.step, plan)
        return plan, digest


def replay(
    recording: Recording, on_life: Callable[[Life], OnStep | None] | None = None
) -> Iterator[LifeSummary]:
    """Replay all lives of a recording; yields each one's summary when it is over.

    on_life: asked at the start of each life for what to call at its steps.
    Raises: ReplayMismatch naming the step at which the file contradicts itself; DamagedRecording and OSError as
        `Recording` does.
    """
    current: LifeReplay | None = None
    for record in recording:
        if record.life is not None:
            if current is not None:
                yield current.finish()
            current = LifeReplay(record.life, None if on_life is None else on_life(record.life))
        elif current is None:
            raise ReplayMismatch(
                f"step {record.sequence}: comes before the beginning of any life; the file has lost its start"
            )
        elif record.kind is RecordKind.FRAME:
            current.frame(record)
        else:
            current.result(record)
    if current is not None:
        yield current.finish()


def open_recording(path: str | Path) -> Recording:
    """A recording to read. Raises: ValueError, one sentence, if there is no such file."""
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder; give the file that was recorded to")
    if not Path(path).is_file():
        raise ValueError(
            f"no recording {path}; make one with `rowcast serve MODEL --record {Path(path).name}`"
        )
    return Recording(path)
