"""The same with two real ranks: processes with a model, both kinds of CPU collectives, and the cluster's sockets."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from rowcast.cluster.channel import GroupAddresses, PublishPullChannel, SubscribePushChannel
from rowcast.cluster.first_cause import FirstCause
from rowcast.scheduler import front_messages
from rowcast.scheduler.config import SchedulerConfig
from rowcast.scheduler.front_messages import Outputs, Submit, make_submit_key
from rowcast.scheduler.loop import SchedulerLoop, WorkerGroupError
from rowcast.scheduler.messages import SchedulerOutput, StepResult
from rowcast.scheduler.sampling_params import SamplingParams
from rowcast.scheduler.scheduler import Scheduler
from rowcast.tests.worker.generation import make_llama, make_runner
from rowcast.tests.worker.rank_pool import RankPool
from rowcast.worker.layer_groups import group_specs
from rowcast.worker.loop import WorkerLoop
from rowcast.worker.model_config import ModelConfig
from rowcast.worker.model_runner import ModelRunner
from rowcast.worker.parallel import TensorParallelGroup

EPOCH = 3
MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS, MAX_NUM_SEQS = 64, 4, 60, 4
AT_STEP = 6
NUM_REQUESTS, MAX_TOKENS = 3, 40
KINDS = ["temperature", "seed", "computed_count", "token_cell", "block_cell", "sampled_token"]


class DifferingRunner:
    """A runner that is made to differ ahead of step AT_STEP."""

    def __init__(self, runner: ModelRunner, kind: str) -> None:
        self._runner, self._kind = runner, kind
        self.num_steps = 0

    def execute(self, step: SchedulerOutput, frame: bytes) -> StepResult:
        self.num_steps += 1
        if self.num_steps == AT_STEP and self._kind:
            self._inject()
        return self._runner.execute(step, frame)

    def _inject(self) -> None:
        requests, tables = self._runner.state.requests, self._runner.state.block_tables
        if self._kind == "temperature":
            requests.temperature[1] = 0.5
        elif self._kind == "seed":
            requests.seeds[2] += 1
        elif self._kind == "computed_count":
            requests.num_computed_tokens[0] -= 1
        elif self._kind == "token_cell":
            requests.token_ids[2, 1] += 1
        elif self._kind == "block_cell":
            tables.table[0][1, 0] += 1
        else:
            sampler = self._runner._sampler
            assert sampler is not None
            choose = sampler.choose

            def once(*args: Any, **kwargs: Any) -> Any:
                sampler.choose = choose  # type: ignore[method-assign]
                choice = choose(*args, **kwargs)
                sampled = choice.fetch()
                sampled.tokens[0] ^= 1
                choice.fetch = lambda: sampled  # type: ignore[method-assign]
                return choice

            sampler.choose = once  # type: ignore[method-assign]


def serve(
    parallel: TensorParallelGroup, folder: str, addresses: GroupAddresses, kind: str
) -> tuple[int, str]:
    """One rank until it ends: how many steps it took, and what ended it. Rank 1 alone is made to differ."""
    runner = make_runner(
        folder,
        parallel=parallel,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        block_size=BLOCK_SIZE,
    )
    differing = DifferingRunner(runner, kind if parallel.rank == 1 else "")
    context = zmq.Context()
    channel = SubscribePushChannel(context, addresses)
    try:
        WorkerLoop(differing, channel, rank=parallel.rank, epoch=EPOCH).run()
        return differing.num_steps, ""
    except Exception as error:
        return differing.num_steps, str(error)
    finally:
        channel.close()
        context.term()


class Fronts:
    def __init__(self) -> None:
        self.inbox: deque[tuple[bytes, bytes]] = deque()
        self.tokens: dict[int, list[int]] = {}

    def receive(self, timeout_s: float | None) -> tuple[bytes, bytes] | None:
        return self.inbox.popleft() if self.inbox else None

    def send(self, front_id: bytes, message: bytes) -> None:
        outputs = front_messages.decode(message)
        if isinstance(outputs, Outputs):
            for number, token in zip(outputs.numbers, outputs.tokens, strict=True):
                self.tokens.setdefault(int(number), []).append(int(token))

    def close(self) -> None: ...


class Engine:
    """The scheduler's side, in this process, and two ranks of the pool in theirs."""

    def __init__(self, pool: RankPool, folder: Path, kind: str, **group_options: Any) -> None:
        self._context = zmq.Context()
        self._channel = PublishPullChannel(self._context, "127.0.0.1")
        self.answers: list[tuple[int, str]] = []
        self._ranks = threading.Thread(
            target=lambda: self.answers.extend(
                pool.run(2, serve, str(folder), self._channel.addresses, kind, **group_options)
            )
        )
        self._ranks.start()
        config = SchedulerConfig(
            vocab_size=199, max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_NUM_SEQS, depth=2
        )
        specs = group_specs(ModelConfig.from_folder(str(folder)), BLOCK_SIZE)
        first = FirstCause(self._channel, self._wait, hold_s=0.5)
        self.fronts = Fronts()
        self.loop = SchedulerLoop(
            Scheduler(config, specs, NUM_BLOCKS), workers=first, fronts=self.fronts,
            wait=first.wait, epoch=EPOCH, num_ranks=2, step_deadline_s=20.0,
        )  # fmt: skip
        self.loop.handshake()
        for number in range(NUM_REQUESTS):
            submit = Submit(
                number=number,
                submit_key=make_submit_key(bytes(16), number),
                request_id=f"request-{number}",
                prompt_token_ids=np.arange(5, dtype=np.int32) + number,
                seed=number,
                params=SamplingParams(
                    max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0 if number == 1 else 1
                ),
            )
            self.fronts.inbox.append((b"front", front_messages.encode(submit)))

    def _wait(self, timeout_s: float | None) -> None:
        self._channel.readable.poll(50 if timeout_s is None else min(50, 1000 * timeout_s))

    def run(self) -> None:
        try:
            while self.loop.snapshot()["tokens_out"] < NUM_REQUESTS * MAX_TOKENS:
                self.loop.turn(0.05)
            self.loop.stop()
            self.loop.run()
        finally:
            self._ranks.join(60)
            self._channel.close()
            self._context.term()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("share_memory", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_rank_that_differs_is_named_and_its_peer_is_not_left_waiting(
    rank_pool: RankPool, folder: Path, kind: str, share_memory: bool
):
    """A rank with another batch or other params would send messages of another size: Gloo and NCCL never recover."""
    engine = Engine(rank_pool, folder, kind, share_memory=share_memory)
    with pytest.raises(WorkerGroupError, match=r"^rank 1 (failed: digest|disagrees)") as caught:
        engine.run()
    assert str(caught.value).count(". ") == 0
    (_, other), (num_steps, said) = engine.answers
    assert AT_STEP <= num_steps <= AT_STEP + 16
    assert said.startswith("digest ")
    assert other, "rank 0 must have ended too"


def test_two_ranks_that_agree_give_the_tokens_of_one(rank_pool: RankPool, folder: Path):
    """E-05: over sockets, two steps ahead, greedy and sampled."""
    from rowcast.tests.worker.generation import generate

    engine = Engine(rank_pool, folder, "")
    engine.run()
    assert [said for _, said in engine.answers] == ["", ""]
    runner = make_runner(
        folder, max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_NUM_SEQS, block_size=BLOCK_SIZE
    )
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, temperature=temperature)
        for temperature in (1, 0, 1)
    ]
    prompts = [(np.arange(5) + number).tolist() for number in range(NUM_REQUESTS)]
    assert engine.fronts.tokens == dict(enumerate(generate(runner, prompts, params)))
