"""A scheduler of random whims, and the worker's state told again in plain lists: what every array must come to.

Shares no code with the worker or with `scheduler/agreement.py` on purpose: it is the second implementation.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from rowcast.scheduler.messages import Features, SchedulerOutput
from rowcast.tests.worker.steps import i32, make_state, request, step
from rowcast.worker.state import WorkerState


@dataclass
class ToyRow:
    request_id: str | None
    tokens: list[int]
    num_prompt: int
    computed: int
    blocks: list[list[int]]  # one list a group
    seed: int
    asked: dict = field(default_factory=dict)  # of sampling, by the names that `request` has


@dataclass
class ToyInputs:
    """What `InputBatch` must hold, in lists."""

    index_mapping: list[int]
    query_start_loc: list[int]
    input_ids: list[int]
    positions: list[int]
    seq_lens: list[int]
    block_tables: list[list[list[int]]]  # [group][batch_index], no padding
    slots: list[list[int]]  # [group][flat_token]
    logits_indices: list[int]
    sample_batch_indices: list[int]


class ToyScheduler:
    """Makes valid steps at random: admits, frees, preempts, chunks, pauses, reuses rows and blocks at once."""

    def __init__(
        self,
        seed: int,
        *block_sizes: int,
        max_num_seqs: int = 8,
        max_model_len: int = 64,
        num_blocks: int = 100,
        vocab_size: int = 1000,
    ) -> None:
        self.random = random.Random(seed)
        self.block_sizes = block_sizes
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        self.num_blocks, self.vocab_size = num_blocks, vocab_size
        self.rows: dict[int, ToyRow] = {}
        self.order: list[tuple[int, int]] = []  # (row, tokens) of the step in hand, in batch order
        self._names = 0

    def next_step(self) -> SchedulerOutput:
        toss = self.random.random
        freed = [row for row in self.rows if toss() < 0.1]
        for row in freed:
            del self.rows[row]
        empty = [row for row in range(self.max_num_seqs) if row not in self.rows]
        self.random.shuffle(empty)
        admitted = [self._admit(row) for row in empty if toss() < 0.3]
        run: dict[int, int] = {}
        pause: list[int] = []
        for row, state in self.rows.items():
            left = len(state.tokens) - state.computed
            if left > 1 and toss() < 0.7:
                whole = len(state.tokens) == self.max_model_len  # full: it may not sample
                most = left - 1 if whole else left
                if toss() < 0.5:
                    most = self.random.randint(1, most)
                run[row] = most
            elif left == 1 and (len(state.tokens) == self.max_model_len or toss() < 0.1):
                pause.append(row)
        exceptions = list(run.items())
        self.random.shuffle(exceptions)  # rows are named in any order
        scheduled = dict(run)
        for row, state in self.rows.items():
            if len(state.tokens) - state.computed == 1 and row not in pause:
                scheduled[row] = 1
        self.order = sorted(
            scheduled.items(), key=lambda item: (item[1], self.rows[item[0]].computed == 0, item[0])
        )
        return step(
            *admitted, free=freed, run=dict(exceptions), pause=pause, grow=self._grow(scheduled)
        )

    def _admit(self, row: int) -> dict:
        length = self.random.choice((1, 2, self.random.randint(1, self.max_model_len)))
        tokens = [self.random.randrange(self.vocab_size) for _ in range(length)]
        cached = self.random.randrange(length) if self.random.random() < 0.3 else 0
        counts = {
            size: -(-cached // size) + (self.random.random() < 0.2 and cached < length - size)
            for size in dict.fromkeys(self.block_sizes)  # groups of one size hold equally many
        }
        blocks = [self._blocks(counts[size]) for size in self.block_sizes]
        self._names += 1
        prompt = self.random.randint(1, length)
        seed = self.random.randrange(2**63)
        asked = self._asked()
        self.rows[row] = ToyRow(
            f"request-{self._names}", tokens, prompt, cached, [list(ids) for ids in blocks], seed,
            asked,
        )  # fmt: skip
        return request(
            row, tokens, *blocks, cached=cached, prompt=prompt, seed=seed,
            request_id=f"request-{self._names}", **asked,
        )  # fmt: skip

    def _asked(self) -> dict:
        """Each option of sampling, or its default, at a whim."""
        draw = self.random
        limits = {
            "temperature": (0, 2), "top_p": (0.1, 1), "min_p": (0, 1), "presence_penalty": (-2, 2),
            "frequency_penalty": (-2, 2), "repetition_penalty": (0.1, 2),
        }  # fmt: skip
        asked: dict = {
            name: draw.uniform(*limit) for name, limit in limits.items() if draw.random() < 0.3
        }
        if draw.random() < 0.3:
            asked["top_k"] = draw.randint(1, 9)
        if draw.random() < 0.4:
            asked["features"] = Features(
                bias_ids=i32(0, draw.randint(1, self.vocab_size - 1)),
                bias=np.array([draw.uniform(-100, 100), 1.5], np.float32),
                allowed=i32(draw.randrange(self.vocab_size)) if draw.random() < 0.5 else None,
                bad_words=tuple(i32(7, draw.randrange(900)) for _ in range(draw.randrange(3))),
                min_tokens=draw.randint(1, 9),
                min_tokens_ids=i32(*range(draw.randint(1, 9))),
                logprobs=draw.choice((None, 0, 20)),
                prompt_logprobs=draw.choice((None, 3)),
            )
        return asked

    def _blocks(self, count: int) -> list[int]:
        return [self.random.randrange(1, self.num_blocks) for _ in range(count)]

    def _grow(self, scheduled: dict[int, int]) -> list[list[int]]:
        grown: list[list[int]] = []
        for group, size in enumerate(self.block_sizes):
            ids: list[int] = []
            for row in sorted(scheduled):
                state = self.rows[row]
                while len(state.blocks[group]) * size < state.computed + scheduled[row]:
                    block = self._blocks(1)
                    state.blocks[group] += block
                    ids += block
            grown.append(ids)
        return grown

    def inputs(self) -> ToyInputs:
        """The inputs of the step in hand, token by token as DESIGN.md section 1 says."""
        starts, ids, positions, lens, logits, sampling = [0], [], [], [], [], []
        slots: list[list[int]] = [[] for _ in self.block_sizes]
        for batch_index, (row, count) in enumerate(self.order):
            state = self.rows[row]
            for position in range(state.computed, state.computed + count):
                ids.append(state.tokens[position])
                positions.append(position)
                for group, size in enumerate(self.block_sizes):
                    block = state.blocks[group][position // size]
                    slots[group].append(block * size + position % size)
            starts.append(len(ids))
            lens.append(state.computed + count)
            if state.computed + count == len(state.tokens):
                logits.append(len(ids) - 1)
                sampling.append(batch_index)
        return ToyInputs(
            index_mapping=[row for row, _ in self.order],
            query_start_loc=starts,
            input_ids=ids,
            positions=positions,
            seq_lens=lens,
            block_tables=[
                [self.rows[row].blocks[group] for row, _ in self.order]
                for group in range(len(self.block_sizes))
            ],
            slots=slots,
            logits_indices=logits,
            sample_batch_indices=sampling,
        )

    def settle(self) -> np.ndarray:
        """Sample at random for the step in hand and take it in: tokens [num_reqs], -1 where a row did not sample."""
        tokens: list[int] = []
        for row, count in self.order:
            state = self.rows[row]
            state.computed += count
            if state.computed == len(state.tokens):
                tokens.append(self.random.randrange(self.vocab_size))
                state.tokens.append(tokens[-1])
            else:
                tokens.append(-1)
        return i32(*tokens)


def churned(seed: int, steps: int) -> tuple[ToyScheduler, WorkerState]:
    """Tables that a random history of valid steps has left; the same for the same numbers."""
    toy = ToyScheduler(seed, 16, 4, max_num_seqs=6, max_model_len=32)
    state = make_state(16, 4, max_num_seqs=6, max_model_len=32)
    for _ in range(steps):
        state.commit(state.apply(toy.next_step()), toy.settle())
    return toy, state
