"""A rank whose tables, batch, tokens or params are made to differ is named within 16 steps, and the group stops.

Real loops, tables, frames and sampler; ranks are threads, and the model is a function of seed, place and last token.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from rowcast.scheduler import front_messages
from rowcast.scheduler.config import SchedulerConfig
from rowcast.scheduler.front_messages import Outputs, Refused, Submit, make_submit_key
from rowcast.scheduler.kv_groups import AttentionKind
from rowcast.scheduler.loop import SchedulerLoop, WorkerGroupError
from rowcast.scheduler.messages import SchedulerOutput, StepResult
from rowcast.scheduler.sampling_params import SamplingParams
from rowcast.scheduler.scheduler import Scheduler
from rowcast.tests.worker.fake_ranks import FakeGroup
from rowcast.tests.worker.sampling import sampler_of
from rowcast.tests.worker.steps import group
from rowcast.worker.loop import WorkerLoop
from rowcast.worker.sampling_inputs import adjustments, sampling_rows
from rowcast.worker.state import WorkerState

VOCAB_SIZE = 120
EPOCH = 5
NUM_REQUESTS = 18  # so that two rows take their turn in the same step
AT_STEP = 9
GROUPS = (
    group(4),
    replace(group(4), kind=AttentionKind.SLIDING_WINDOW, window=20),
    replace(group(2), kind=AttentionKind.CHUNKED, window=32),
)

Injection = Callable[["Rank"], None]


class Rank:
    """What `ModelRunner` does, with logits out of thin air. before: called once, ahead of step AT_STEP."""

    def __init__(self, parallel: FakeGroup, depth: int) -> None:
        self.state = WorkerState(
            max_num_seqs=20, max_model_len=64, groups=GROUPS, num_blocks=2_000,
            vocab_size=VOCAB_SIZE, depth=depth,
        )  # fmt: skip
        ids = np.array_split(np.arange(VOCAB_SIZE), parallel.world_size)
        parts = tuple(range(part[0], part[-1] + 1) for part in ids)
        self._ids = torch.from_numpy(ids[parallel.rank])
        self._sampler = sampler_of(parts, parallel)
        self.before: Injection | None = None
        self.change_logits: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits
        self.change_sampled: Callable[[np.ndarray], np.ndarray] = lambda tokens: tokens
        self.change_reported: Callable[[np.ndarray], np.ndarray] = lambda tokens: tokens
        self.num_steps = 0

    def execute(self, step: SchedulerOutput, frame: bytes) -> StepResult:
        self.num_steps += 1
        if self.num_steps == AT_STEP and self.before is not None:
            self.before(self)
        plan = self.state.apply(step)
        digest = self.state.digests.end(frame)
        tokens, digests = np.full(plan.num_reqs, -1, np.int32), b""
        if plan.samples.any():
            rows = plan.index_mapping[plan.samples]
            last = self.state.requests.token_ids[rows, plan.seq_lens[plan.samples] - 1]
            places = torch.from_numpy(plan.seq_lens[plan.samples] * 31 + last * 7).unsqueeze(1)
            logits = torch.sin(places * 1.7 + self._ids * (self._ids + places) * 0.37) * 6
            logits = self.change_logits(logits)
            requests = self.state.requests
            sampled = self._sampler.sample(
                logits, sampling_rows(requests, plan), adjustments(requests, plan), digest=digest
            )
            tokens[plan.samples], digests = self.change_sampled(sampled.tokens), sampled.digests
        self.state.commit(plan, tokens)
        return StepResult(tokens=self.change_reported(tokens), digests=digests)


class Wire:
    """Frames to all ranks, reports back; change_frame may give one rank other bytes than the others."""

    def __init__(self, num_ranks: int) -> None:
        self.frames: list[deque[bytes]] = [deque() for _ in range(num_ranks)]
        self.reports: deque[bytes] = deque()
        self.change_frame: dict[int, Callable[[bytes], bytes]] = {}

    def send(self, frame: bytes) -> None:
        for rank, inbox in enumerate(self.frames):
            inbox.append(self.change_frame.get(rank, lambda same: same)(frame))

    def receive(self, timeout_s: float | None) -> bytes | None:
        return self.reports.popleft() if self.reports else None

    def close(self) -> None: ...

    def of_rank(self, rank: int) -> _RankEnd:
        return _RankEnd(self, rank)


class _RankEnd:
    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire, self._rank = wire, rank

    def receive(self, timeout_s: float | None) -> bytes | None:
        inbox = self._wire.frames[self._rank]
        return inbox.popleft() if inbox else None

    def send(self, message: bytes) -> None:
        self._wire.reports.append(message)

    def close(self) -> None: ...


class Fronts:
    def __init__(self) -> None:
        self.inbox: deque[tuple[bytes, bytes]] = deque()
        self.sent: list[Outputs | Refused] = []

    def receive(self, timeout_s: float | None) -> tuple[bytes, bytes] | None:
        return self.inbox.popleft() if self.inbox else None

    def send(self, front_id: bytes, message: bytes) -> None:
        decoded = front_messages.decode(message)
        assert isinstance(decoded, Outputs | Refused)
        self.sent.append(decoded)

    def close(self) -> None: ...


class Engine:
    """A scheduler's loop with its ranks; `run` works until nothing is left or the group has failed."""

    def __init__(self, num_ranks: int, depth: int) -> None:
        config = SchedulerConfig(
            vocab_size=VOCAB_SIZE, max_model_len=64, max_num_seqs=20, max_num_batched_tokens=64,
            depth=depth, prefix_caching=True,
        )  # fmt: skip
        self.wire, self.fronts = Wire(num_ranks), Fronts()
        board: list = [None] * num_ranks
        self._barrier = threading.Barrier(num_ranks)
        groups = [FakeGroup(rank, num_ranks, board, self._barrier) for rank in range(num_ranks)]
        self.ranks = [Rank(parallel, depth) for parallel in groups]
        self._loops = [
            WorkerLoop(executor, self.wire.of_rank(rank), rank=rank, epoch=EPOCH)
            for rank, executor in enumerate(self.ranks)
        ]
        self._pool = ThreadPoolExecutor(num_ranks)
        self.loop = SchedulerLoop(
            Scheduler(config, GROUPS, 2_000), workers=self.wire, fronts=self.fronts,
            wait=self._let_ranks_work, epoch=EPOCH, num_ranks=num_ranks,
        )  # fmt: skip
        self.loop.handshake()
        for number in range(NUM_REQUESTS):
            kinds = ({"temperature": 0}, {"top_k": 5}, {"top_p": 0.8}, {})
            others = {
                4: {"logit_bias": {3: 5.0}, "bad_words_token_ids": ((7,), (9, 11))},
                5: {"min_p": 0.05, "frequency_penalty": 0.5, "repetition_penalty": 1.5},
            }
            submit = Submit(
                number=number,
                submit_key=make_submit_key(bytes(16), number),
                request_id=f"request-{number}",
                prompt_token_ids=(np.arange(6) * 5 + number % 3).astype(np.int32) % VOCAB_SIZE,
                seed=number,
                params=SamplingParams(
                    max_tokens=34,
                    ignore_eos=True,
                    **kinds[number % 4],
                    **others.get(number % 6, {}),
                ),
            )
            self.fronts.inbox.append((b"front", front_messages.encode(submit)))

    def _let_ranks_work(self, timeout_s: float | None) -> None:
        list(self._pool.map(self._turn, self._loops))

    def _turn(self, loop: WorkerLoop) -> None:
        try:
            while loop.turn(0):
                pass
        except Exception:  # it has reported this; its peers must not wait for it
            self._barrier.abort()

    def run(self) -> None:
        try:
            while self.loop.turn(None):
                pass
        finally:
            self._pool.shutdown()

    def tokens(self) -> dict[int, list[int]]:
        tokens: dict[int, list[int]] = {}
        for outputs in self.fronts.sent:
            if isinstance(outputs, Outputs):
                for number, token in zip(outputs.numbers, outputs.tokens, strict=True):
                    tokens.setdefault(int(number), []).append(int(token))
        return tokens


def failure(engine: Engine) -> tuple[str, int]:
    """Run until the group fails: its sentence, and how many steps rank 0 had taken by then."""
    with pytest.raises(WorkerGroupError) as caught:
        engine.run()
    said = str(caught.value)
    refused = [answer for answer in engine.fronts.sent if isinstance(answer, Refused)]
    assert len(refused) == NUM_REQUESTS, "every request ends with the sentence"
    assert all(answer.text == said for answer in refused)
    assert said.count(". ") == 0
    return said, max(rank.num_steps for rank in engine.ranks)


def token_cell(rank: Rank) -> None:
    rank.state.requests.token_ids[17, 2] += 1


def last_known_token(rank: Rank) -> None:
    row = 16
    rank.state.requests.token_ids[row, rank.state.requests.num_tokens[row] - 1] ^= 1


def block_cell(rank: Rank) -> None:
    rank.state.block_tables.table[0][15, 0] += 1


def window_block_cell(rank: Rank) -> None:
    table = rank.state.block_tables.table[1]
    table[14, rank.state.block_tables.num_blocks[1][14] - 1] += 1


def chunk_block_cell(rank: Rank) -> None:
    table = rank.state.block_tables.table[2]
    table[3, rank.state.block_tables.num_blocks[2][3] - 1] += 1


def swapped_tables(rank: Rank) -> None:
    table = rank.state.block_tables.table[0]
    table[[2, 12]] = table[[12, 2]]


def computed_count(rank: Rank) -> None:
    rank.state.requests.num_computed_tokens[7] -= 1


def length(rank: Rank) -> None:
    rank.state.requests.num_tokens[8] += 1


def count_of_blocks(rank: Rank) -> None:
    rank.state.block_tables.num_blocks[0][9] -= 1


def liveness(rank: Rank) -> None:
    rank.state.requests.live[4] = False


def swapped_mapping(rank: Rank) -> None:
    previous = rank.state._previous
    assert previous is not None
    assert previous.batch.is_steady, "the mapping is only kept from step to step in steady state"
    mapping = previous.batch.index_mapping
    mapping[[0, 5]] = mapping[[5, 0]]


def temperature(rank: Rank) -> None:
    rank.state.requests.temperature[0] = (
        0.5  # a greedy row: the others now offer another kind of candidate
    )


def top_k(rank: Rank) -> None:
    rank.state.requests.top_k[3] = 2


def top_p(rank: Rank) -> None:
    rank.state.requests.top_p[6] = 0.79


def least_p(rank: Rank) -> None:
    rank.state.requests.min_p[5] = 0.5  # a row of all ids: the others offer it another way


def repetition(rank: Rank) -> None:
    rank.state.requests.repetition_penalty[11] = 1.75


def rare_features(rank: Rank) -> None:
    rank.state.requests.feature_checksums[10] ^= 1


def seed(rank: Rank) -> None:
    rank.state.requests.seeds[11] ^= 1 << 40


def sampled_token(rank: Rank) -> None:
    def change(tokens: np.ndarray) -> np.ndarray:
        rank.change_sampled = lambda same: same
        changed = tokens.copy()
        changed[2] ^= 1
        return changed

    rank.change_sampled = change


INJECTIONS = [
    token_cell, last_known_token, block_cell, window_block_cell, chunk_block_cell, swapped_tables,
    computed_count, length, count_of_blocks, liveness, swapped_mapping,
    temperature, top_k, top_p, least_p, repetition, rare_features, seed,
]  # fmt: skip


@pytest.mark.parametrize(
    ("num_ranks", "which", "depth"), [(1, 0, 1), (2, 0, 2), (2, 1, 1), (2, 1, 2), (3, 1, 2)]
)
@pytest.mark.parametrize("inject", INJECTIONS, ids=lambda inject: inject.__name__)
def test_a_rank_that_is_made_to_differ_is_named_within_16_steps(
    inject: Injection, num_ranks: int, which: int, depth: int
):
    engine = Engine(num_ranks, depth)
    engine.ranks[which].before = inject
    said, num_steps = failure(engine)
    assert said.startswith((f"rank {which} failed: ", f"rank {which} disagrees ")), said
    assert AT_STEP <= num_steps <= AT_STEP + 16


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("num_ranks", "which"), [(2, 1), (3, 1), (3, 2)])
def test_a_rank_that_samples_another_token_is_named_when_the_scheduler_knows_it(
    num_ranks: int, which: int, depth: int
):
    """T04: one authority a token. The others go on from rank 0's; the one that differs is found `depth` steps later."""
    engine = Engine(num_ranks, depth)
    engine.ranks[which].before = sampled_token
    said, num_steps = failure(engine)
    assert said.startswith(f"rank {which} "), said
    assert num_steps == AT_STEP + depth


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_logits_that_differ_in_their_last_bits_split_no_ranks(num_ranks: int):
    """T04: ties and near-ties are decided from the numbers that all have gathered, not from each rank's own."""
    engine = Engine(num_ranks, 2)
    for number, rank in enumerate(engine.ranks):
        rank.change_logits = lambda logits, n=number: (logits.round() * (1 + n * 2**-23)).float()
    engine.run()
    stored = [rank.state.requests.columns.words.tobytes() for rank in engine.ranks]
    assert len(set(stored)) == 1
    assert [len(tokens) for tokens in engine.tokens().values()] == [34] * NUM_REQUESTS


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_rank_0_that_reports_another_token_than_it_stored_is_named(num_ranks: int):
    engine = Engine(num_ranks, 2)

    def inject(rank: Rank) -> None:
        def change(tokens: np.ndarray) -> np.ndarray:
            rank.change_reported = lambda same: same
            changed = tokens.copy()
            changed[0] ^= 1
            return changed

        rank.change_reported = change

    engine.ranks[0].before = inject
    said, num_steps = failure(engine)
    if num_ranks == 1:
        assert said.startswith("rank 0 failed: digest "), said
    assert num_steps == AT_STEP + 2


def test_frames_that_differ_are_noticed_in_the_next_step():
    """A byte that changed on the way to one rank, where what it says is still possible."""
    engine = Engine(2, 2)
    changed = []

    def change(frame: bytes) -> bytes:
        values = bytearray(frame)
        place = frame.find(b"request-3")
        if place < 0:
            return frame
        values[place + 8] = ord("x")  # only a name, which no table of the digest holds
        changed.append(frame)
        return bytes(values)

    engine.wire.change_frame[1] = change
    said, num_steps = failure(engine)
    assert said.startswith(
        ("rank 1 failed: digest ", "rank 1 disagrees with the scheduler at step")
    )
    assert len(changed) == 1
    assert num_steps <= 3


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_that_agree_go_on_to_the_end(num_ranks: int):
    """And give the same tokens whatever their number and the depth."""
    expected = None
    for depth in (1, 2):
        engine = Engine(num_ranks, depth)
        engine.run()
        tokens = engine.tokens()
        assert [len(tokens[number]) for number in range(NUM_REQUESTS)] == [34] * NUM_REQUESTS
        expected = expected or tokens
        assert tokens == expected
    alone = Engine(1, 1)
    alone.run()
    assert alone.tokens() == expected
