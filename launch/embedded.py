"""The embedded engine: scheduler and one worker in this process and thread, no Ray and no sockets.

The two loops are the cluster's own. Queues carry their messages, and every delta is really encoded and decoded, so what
is true here is true there. Owns the queues, the turns and the requests' text; decides and computes nothing itself.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..cluster.answer_text import AnswerText
from ..cluster.answers import params_of_answers
from ..cluster.bad_words import with_bad_words
from ..cluster.outputs import RequestMetrics
from ..cluster.text import TextProcessor
from ..scheduler.door import Door
from ..scheduler.front_messages import (
    Abort,
    Ack,
    FinishCode,
    Outputs,
    RefusalReason,
    Refused,
    Register,
    Submit,
    decode,
    encode,
    make_submit_key,
)
from ..scheduler.grammars import Grammars
from ..scheduler.kv_groups import agree_on_groups
from ..scheduler.loop import SchedulerLoop, WorkerGroupError
from ..scheduler.recording import Life, open_recorder
from ..scheduler.request_options import RequestOptions
from ..scheduler.sampling_params import MAX_SEED, SamplingParams
from ..scheduler.scheduler import Scheduler
from ..worker.loop import WorkerLoop
from .config import EnginePlan
from .embedded_request import Request
from .interrupts import interrupts_held

_FRONT = b"embedded"
_COMPILE_TURN_S = (
    0.1  # how long a turn waits for a compiler: other threads want their turns, and Ctrl-C is held
)


class QueueChannel:
    """One end of a pair of queues: what one side sends, the other receives."""

    def __init__(self, inbox: deque[bytes], outbox: deque[bytes]):
        self._inbox = inbox
        self._outbox = outbox

    @classmethod
    def pair(cls) -> tuple[QueueChannel, QueueChannel]:
        one: deque[bytes] = deque()
        other: deque[bytes] = deque()
        return cls(one, other), cls(other, one)

    def receive(self, timeout_s: float | None) -> bytes | None:
        # Never waits: the other side is this same thread.
        return self._inbox.popleft() if self._inbox else None

    def send(self, message: bytes) -> None:
        self._outbox.append(message)

    def close(self) -> None:
        self._inbox.clear()


class QueueFronts:
    """The scheduler's view of its only front."""

    def __init__(self, channel: QueueChannel):
        self._channel = channel

    def receive(self, timeout_s: float | None) -> tuple[bytes, bytes] | None:
        message = self._channel.receive(timeout_s)
        return None if message is None else (_FRONT, message)

    def send(self, front_id: bytes, message: bytes) -> None:
        self._channel.send(message)

    def close(self) -> None:
        self._channel.close()


class EmbeddedEngine:
    """Scheduler and worker of one plan. Belongs to one thread at a time: `embedded_llm.py` holds a lock."""

    def __init__(
        self,
        plan: EnginePlan,
        text: TextProcessor,
        *,
        on_load: Callable[[float], None] | None = None,
    ):
        # Before torch loads: OpenMP threads that wait sleep. Spinning, they take the cores from Numba's threads.
        os.environ.setdefault("GOMP_SPINCOUNT", "0")
        from ..worker.model_runner import ModelRunner  # loads torch

        # Before the model: a file that cannot be written to is known at once.
        self._recorder = None if plan.record is None else open_recorder(plan.record)
        self.text = text
        self._runner = ModelRunner(plan.worker)
        self._runner.load(on_load)
        groups, num_blocks = agree_on_groups(
            [self._runner.group_specs], [self._runner.max_num_blocks]
        )
        self.groups = groups
        self._runner.allocate(num_blocks)
        self._runner.warm_up()
        self._compiled = (
            threading.Event()
        )  # a form that a request waits for has been compiled, since it was cleared
        self._grammars = Grammars(
            text.tokenizer_json,
            vocab_size=plan.scheduler.vocab_size,
            eos_token_ids=plan.scheduler.eos_token_ids,
            wake=self._compiled.set,
        )
        scheduler = Scheduler(plan.scheduler, groups, num_blocks, grammars=self._grammars)
        self._scheduler = scheduler
        self._door = Door(plan.scheduler, groups, scheduler.pool.usable)

        epoch = time.time_ns()
        to_workers, of_worker = QueueChannel.pair()
        fronts, self._front = QueueChannel.pair()
        self._worker_loop = WorkerLoop(
            self._runner, of_worker, rank=0, epoch=epoch, depth=plan.worker.depth
        )
        self._worker_error: Exception | None = None
        self._scheduler_loop = SchedulerLoop(
            scheduler,
            workers=to_workers,
            fronts=QueueFronts(fronts),
            wait=self._let_worker_turn,
            epoch=epoch,
            num_ranks=1,
            recorder=self._recorder,
        )
        if self._recorder is not None:
            life = Life.of(scheduler, epoch=epoch, model=plan.options.model, world_size=1)
            self._recorder.life(life)
        self._scheduler_loop.handshake()
        self._front.send(encode(Register(front_name="embedded")))
        self._client_uuid = os.urandom(16)
        self._numbers = itertools.count(1)
        self._requests: dict[int, Request] = {}
        self._failed: str | None = None

    # Requests

    def prepare(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        options: RequestOptions | None = None,
        *,
        prompt: str | None,
        request_id: str | None = None,
    ) -> list[Request]:
        """Make requests that the scheduler will take, one for each of the n answers; nothing is queued yet.

        Raises: ValueError, one sentence, for what the scheduler would refuse.
        """
        wanted = params_of_answers(with_bad_words(params, self.text))
        numbers = [next(self._numbers) for _ in wanted]
        # One that no caller would choose: a made-up name must never clash with one that somebody gave.
        made_up = f"{self._client_uuid.hex()[:12]}-{numbers[0]}"
        name = made_up if request_id is None else request_id
        said = options or RequestOptions()
        ids = np.array(prompt_token_ids, np.int32)
        draw = random.SystemRandom().randint
        submits = [
            Submit(
                number=number,
                submit_key=make_submit_key(self._client_uuid, numbers[0]),
                request_id=name,
                prompt_token_ids=ids,
                seed=draw(0, MAX_SEED) if one.seed is None else one.seed,
                n_index=n_index,
                params=one,
                priority=said.priority,
                user=said.user,
                cache_salt=said.cache_salt,
            )
            for n_index, (number, one) in enumerate(zip(numbers, wanted, strict=True))
        ]
        try:
            self._door.check(_FRONT, submits[0])
        except ValueError as error:
            # The caller knows its prompts by their place, not by the name that was just made up.
            raise ValueError(str(error).removeprefix(f"request {name}: ")) from None
        return [
            Request(
                submit=submit,
                prompt=prompt,
                prompt_token_ids=prompt_token_ids,
                answer=AnswerText(self.text, prompt_token_ids, submit.params),
            )
            for submit in submits
        ]

    def queue(self, request: Request) -> None:
        """Hand a prepared request to the scheduler."""
        self._refuse_if_failed()
        with interrupts_held():
            request.metrics = RequestMetrics(arrival_time_s=time.monotonic())
            self._requests[request.submit.number] = request
            self._front.send(encode(request.submit))

    def abort(self, requests: Sequence[Request]) -> None:
        """End requests at once and wait until the scheduler has let go of them. Finished ones are left as they are."""
        numbers = [request.submit.number for request in requests]
        live = [number for number in numbers if number in self._requests]
        if not live or self._failed is not None:
            return
        self._front.send(encode(Abort(numbers=np.array(live, np.int64))))
        while any(number in self._requests for number in live):
            self.step()

    @property
    def num_live(self) -> int:
        return len(self._requests)

    # The engine's turns

    def step(self) -> None:
        """One turn of the worker and one of the scheduler; then every request has what came of it.

        Raises: RuntimeError, one sentence, when the engine failed; it stays unusable.
        """
        self._refuse_if_failed()
        with interrupts_held():
            self._step()

    def _step(self) -> None:
        try:
            # In this order a step's tokens are out before the next step runs, however many are under way.
            moved = self._worker_turn()
            self._compiled.clear()
            moved = self._scheduler_loop.turn(0.0) or moved
            moved = self._take_outputs() or moved
        except WorkerGroupError as error:
            self._failed = str(error)
            raise RuntimeError(self._failed) from self._worker_error
        except BaseException as error:
            self._failed = f"a step ended in the middle ({type(error).__name__}: {error})"
            raise
        if not moved and self._scheduler.num_compiling:
            self._compiled.wait(_COMPILE_TURN_S)
            return
        assert moved or not self._requests, (
            f"no progress with {len(self._requests)} live requests: {self._scheduler_loop.snapshot()}"
        )

    def _let_worker_turn(self, timeout_s: float | None) -> None:
        """What the scheduler waits for is the worker, which is this same thread."""
        self._worker_turn()

    def _worker_turn(self) -> bool:
        if self._worker_error is not None:
            return False
        try:
            return self._worker_loop.turn(0.0)
        except Exception as error:
            # It has reported the error as a message too: the scheduler ends every request and says so.
            self._worker_error = error
            return True

    def _take_outputs(self) -> bool:
        ended: list[int] = []
        stopped: list[int] = []
        moved = False
        while (message := self._front.receive(0.0)) is not None:
            moved = True
            received = decode(message)
            if isinstance(received, Refused):
                request = self._requests.pop(received.number, None)
                if request is not None:
                    invalid = received.reason is RefusalReason.INVALID
                    request.error = (ValueError if invalid else RuntimeError)(received.text)
                    request.finish = FinishCode.ERROR
                continue
            assert isinstance(received, Outputs), f"front got {type(received).__name__}"
            cached = (received.cached_numbers.tolist(), received.cached_tokens.tolist())
            for number, count in zip(*cached, strict=True):
                self._requests[number].cached_tokens = count
            for number, first, rows in received.prompt_logprobs:
                if number in self._requests:
                    self._requests[number].rows.take_prompt(first, rows)
            now = time.monotonic()
            columns = (received.numbers, received.tokens, received.finish_codes)
            entries = zip(*(c.tolist() for c in columns), strict=True)
            for place, (number, token, code) in enumerate(entries):
                row = received.logprobs.get(place)
                if self._requests[number].take(token, FinishCode(code), now, row):
                    stopped.append(number)
                if code != FinishCode.RUNNING:
                    del self._requests[number]
                    ended.append(number)
        if stopped:
            self._front.send(encode(Abort(numbers=np.array(stopped, np.int64))))
        if ended:
            self._front.send(encode(Ack(numbers=np.array(ended, np.int64))))
        return moved

    def _refuse_if_failed(self) -> None:
        if self._failed is not None:
            raise RuntimeError(f"the engine has stopped: {self._failed}; make a new LLM")

    def snapshot(self) -> dict[str, Any]:
        """The scheduler's counts: running, waiting, free_blocks and so on."""
        return self._scheduler_loop.snapshot()

    def close(self) -> None:
        """Give the model's memory back. Requests that still run are dropped."""
        self._failed = self._failed or "it was closed"
        self._requests.clear()
        self._grammars.close()
        self._runner.close()
        if self._recorder is not None:
            self._recorder.close()
