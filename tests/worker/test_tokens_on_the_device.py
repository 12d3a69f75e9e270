"""The next step's inputs come from the device, where the last tokens are before the host has seen them (A-08)."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from rowcast.scheduler.agreement import StepPlan
from rowcast.scheduler.sampling_params import SamplingParams
from rowcast.tests.worker.generation import (
    generate,
    greedy,
    make_llama,
    make_runner,
    random_prompts,
)
from rowcast.tests.worker.steps import i32, make_state, request, step
from rowcast.tests.worker.toy_scheduler import ToyScheduler
from rowcast.worker.backend import select_backend
from rowcast.worker.input_batch import InputBuilder
from rowcast.worker.model_runner import PendingStep
from rowcast.worker.state import WorkerState

A, B, C, D = 2, 1, 0, 3  # rows: a later request takes a lower one, so that places in the batch move


class Device:
    """Builds inputs, and 'samples' a token that encodes its row and position; the host gets none of them."""

    def __init__(self, state: WorkerState) -> None:
        backend = select_backend("triton", "cpu")
        self.builder = InputBuilder(state, backend, max_num_batched_tokens=64, device="cpu")
        self.state = state

    def run(self, plan: StepPlan) -> list[int]:
        """The step's input ids, in flat order."""
        batch = self.builder.build(plan)
        input_ids = batch.input_ids.tolist()
        rows = batch.index_mapping[batch.sample_batch_indices]
        places = batch.seq_lens[batch.sample_batch_indices]
        self.builder.append_tokens(batch, rows * 100 + places)
        self.state.advance(plan)
        return input_ids


def test_a_step_uses_tokens_that_the_host_has_not_seen():
    """Also where a request's place in the batch moved, and where another was in the middle of its prompt."""
    state = make_state(16, max_num_seqs=4)
    device = Device(state)
    first = step(request(A, [11, 12, 13], [1]), request(B, [21, 22], [2]), run={A: 3, B: 2})
    assert device.run(state.apply(first)) == [21, 22, 11, 12, 13]
    # Order now: B (row 1), A (row 2). Both tokens are on the device alone.
    assert device.run(state.apply(step())) == [B * 100 + 2, A * 100 + 3]
    assert state.requests.token_ids[A].tolist()[:5] == [11, 12, 13, 0, 0]
    # C comes in ahead of both, D begins a prompt of 6 with 2 of it.
    third = step(request(C, [31], [3]), request(D, [41, 42, 43, 44, 45, 46], [4]), run={D: 2})
    assert device.run(state.apply(third)) == [B * 100 + 3, A * 100 + 4, 31, 41, 42]
    # D goes on, A pauses.
    fourth = step(run={D: 3}, pause=[A])
    assert device.run(state.apply(fourth)) == [C * 100 + 1, B * 100 + 4, 43, 44, 45]
    assert device.run(state.apply(step())) == [C * 100 + 2, B * 100 + 5, A * 100 + 5, 46]
    tokens = [
        i32(B * 100 + 2, A * 100 + 3),
        i32(B * 100 + 3, A * 100 + 4),
        i32(B * 100 + 4, A * 100 + 5, C * 100 + 1, -1),
        i32(C * 100 + 2, B * 100 + 5, -1),
        i32(C * 100 + 3, B * 100 + 6, A * 100 + 6, D * 100 + 6),
    ]
    for late in tokens:
        state.take_tokens(late)
    assert state.requests.token_ids[A, :8].tolist() == [11, 12, 13, 203, 204, 205, 206, 0]
    assert state.requests.token_ids[D, :8].tolist() == [41, 42, 43, 44, 45, 46, 306, 0]


@pytest.mark.parametrize("behind", [1, 2])
def test_any_churn_gives_the_inputs_that_a_host_with_all_tokens_gives(behind: int):
    """Rows freed and taken again while their last token is still under way."""
    toy, state = ToyScheduler(11, 16, 4), make_state(16, 4)
    builder = InputBuilder(
        state, select_backend("triton", "cpu"), max_num_batched_tokens=600, device="cpu"
    )
    unseen: deque[np.ndarray] = deque()
    for _ in range(40):
        plan = state.apply(toy.next_step())
        expected = toy.inputs()
        batch = builder.build(plan)
        assert batch.input_ids.tolist() == expected.input_ids
        assert batch.positions.tolist() == expected.positions
        assert [slots.tolist() for slots in batch.slot_mappings] == expected.slots
        tokens = toy.settle()
        builder.append_tokens(batch, torch.from_numpy(tokens[plan.samples]))
        state.advance(plan)
        unseen.append(tokens)
        if len(unseen) > behind:
            state.take_tokens(unseen.popleft())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


def test_a_model_gives_the_same_tokens_whether_or_not_the_host_waits(folder: Path, monkeypatch):
    """The whole runner, interpreted: a step is launched before the one before it is asked for its tokens."""
    order: list[str] = []
    result, advance = PendingStep.result, WorkerState.advance
    monkeypatch.setattr(PendingStep, "result", lambda self: (order.append("wait"), result(self))[1])
    monkeypatch.setattr(
        WorkerState, "advance", lambda self, plan: (order.append("launch"), advance(self, plan))[1]
    )
    prompts = random_prompts(3, vocab_size=199, longest=7)
    params = [
        greedy(4),
        SamplingParams(temperature=1, max_tokens=4, ignore_eos=True),
        SamplingParams(temperature=1, top_k=7, top_p=0.9, max_tokens=4, ignore_eos=True),
    ]
    options = {"max_num_seqs": 3, "max_model_len": 32, "max_num_batched_tokens": 6}
    ahead = make_runner(folder, kernel_backend="triton", depth=2, **options)
    order.clear()
    tokens = generate(ahead, prompts, params)
    assert order[:5] == ["launch", "launch", "wait", "launch", "wait"]
    assert tokens == generate(make_runner(folder, depth=1, **options), prompts, params)
