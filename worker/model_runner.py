"""One rank's whole step: delta -> tables -> inputs -> forward -> sample -> result. Nothing else.

Owns the order of start (load, allocate, warm up) and of a step. The parts are its neighbours' files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from ..scheduler.agreement import StepPlan
from ..scheduler.kv_groups import KVGroupSpec
from ..scheduler.messages import Mask, SchedulerOutput, StepResult
from .backend import Backend, select_backend
from .config import WorkerConfig
from .device import resolve_device, resolve_dtype
from .input_batch import InputBatch, InputBuilder
from .kv_cache import KVCache, max_num_blocks, pool_block_bytes
from .layer_groups import group_specs
from .logprobs import Scorer, StepScores
from .memory import kv_cache_bytes
from .model_config import ModelConfig
from .models.decoder import Decoder, load_decoder
from .models.weights import Checkpoint
from .parallel import TensorParallelGroup
from .sampler.adjustments import Adjustments
from .sampler.sampler import Choice, Sampler
from .sampling_inputs import adjustments as adjustments_of
from .sampling_inputs import needs_tokens, sampling_rows
from .sharding import check_tensor_parallel_size, shard_of_rank, vocab_rows_of_ranks
from .state import WorkerState
from .step_checks import check_mask
from .warm_up import warm_up_steps


class PendingStep:
    """A step that was launched; its tokens may still be on the device."""

    def __init__(
        self,
        state: WorkerState,
        plan: StepPlan,
        choice: Choice | None,
        wanted: StepScores | None,
    ) -> None:
        self._state = state
        self._plan = plan
        self._choice = choice
        self._wanted = wanted
        self._result: StepResult | None = None

    def ready(self) -> bool:
        """Whether the tokens are here."""
        if self._wanted is not None and not self._wanted.ready():
            return False
        return self._choice is None or self._choice.ready()

    def result(self) -> StepResult:
        """Wait for the tokens and take them into the tables, in step order; asked again, the same.

        Raises: RuntimeError if the scores were NaN.
        """
        if self._result is not None:
            return self._result
        tokens, digests = np.full(self._plan.num_reqs, -1, np.int32), b""
        if self._choice is not None:
            sampled = self._choice.fetch()
            tokens[self._plan.samples], digests = sampled.tokens, sampled.digests
        extras = None if self._wanted is None else self._wanted.extras()
        self._state.take_tokens(tokens)
        self._result = StepResult(tokens=tokens, digests=digests, extras=extras)
        return self._result


class UnmaskedStep:
    """A step whose logits are computed, or launched, and whose sampling waits for its mask."""

    def __init__(
        self,
        masked_rows: np.ndarray,
        state: WorkerState,
        sample: Callable[[int, Mask], StepResult | PendingStep],
    ) -> None:
        self._masked_rows = masked_rows
        self._state = state
        self._sample = sample

    def take_mask(self, mask: Mask, frame: bytes) -> StepResult | PendingStep:
        """Sample, as `ModelRunner.execute` does. frame: the message that brought the mask; the digest covers it.

        Raises: ProtocolError if the mask does not fit the step; nothing has changed then.
        """
        check_mask(mask, self._masked_rows, self._state.vocab_size)
        return self._sample(self._state.digests.end(frame), mask)


class ModelRunner:
    """A rank. Call load, allocate and warm_up once, in this order and on every rank, then execute step by step.

    Made from a config and the group of its ranks (None: one rank alone). Sets torch's and the kernels' thread counts
    for the whole process on a CPU.
    Raises: ValueError, one sentence, for a model or an option that cannot run.
    """

    def __init__(self, config: WorkerConfig, parallel: TensorParallelGroup | None = None) -> None:
        self._parallel = parallel if parallel is not None else TensorParallelGroup.alone()
        if (self._parallel.rank, self._parallel.world_size) != (config.rank, config.world_size):
            raise ValueError(
                f"rank {config.rank} of {config.world_size} was given the group of rank {self._parallel.rank} of "
                f"{self._parallel.world_size}; make it with TensorParallelGroup.create"
            )
        self.config = config
        self.model_config = ModelConfig.from_folder(config.model_dir)
        check_tensor_parallel_size(self.model_config, config.world_size)
        if config.max_model_len > self.model_config.longest_model_len:
            raise ValueError(
                f"max_model_len must be at most the model's {self.model_config.longest_model_len} positions, "
                f"got {config.max_model_len}"
            )
        self.device = resolve_device(config.device)
        if self.device.type == "cpu":
            torch.set_num_threads(config.num_threads)
        self._backend: Backend = select_backend(
            config.kernel_backend, self.device, num_threads=config.num_threads
        )
        self.dtype = resolve_dtype(
            config.dtype,
            self.model_config.torch_dtype,
            self.device,
            kernel_backend=self._backend.name,
        )
        self.group_specs: tuple[KVGroupSpec, ...] = group_specs(
            self.model_config, config.block_size
        )
        self._shard = shard_of_rank(self.model_config, config.rank, config.world_size)
        self._decoder: Decoder | None = None
        self._sampler: Sampler | None = None
        self._scorer: Scorer | None = None
        self._cache: KVCache | None = None
        self._state: WorkerState | None = None
        self._inputs: InputBuilder | None = None
        self._under_way: deque[PendingStep] = deque(maxlen=config.depth)

    def load(self, progress: Callable[[float], None] | None = None) -> None:
        """Read this rank's shard; progress is called with the share done."""
        with torch.inference_mode(), Checkpoint(self.config.model_dir) as checkpoint:
            self._decoder = load_decoder(
                self.model_config,
                checkpoint,
                parallel=self._parallel,
                max_model_len=self.config.max_model_len,
                dtype=self.dtype,
                device=self.device,
                progress=progress,
            )
        vocab_rows = vocab_rows_of_ranks(self.model_config, self.config.world_size)
        self._sampler = Sampler(vocab_rows, self._parallel, self._backend)
        self._scorer = Scorer(vocab_rows, self._parallel, self._backend)

    @property
    def max_num_blocks(self) -> int:
        """KV blocks that this rank can hold, the null block included. Ask after `load`: a GPU counts what is left."""
        return max_num_blocks(
            self.group_specs,
            memory_bytes=kv_cache_bytes(
                self.config, self.model_config, self._shard, self.dtype, self.device
            ),
            block_bytes=self.block_bytes,
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=self.config.max_model_len,
            # All unsettled steps may run tokens of one prompt.
            max_tokens_in_flight=self.config.depth * self.config.max_num_batched_tokens,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one pool block on this rank."""
        return pool_block_bytes(self.group_specs, self._num_kv_heads, self.dtype.itemsize)

    @property
    def _num_kv_heads(self) -> list[int]:
        return [len(self._shard.heads.kv_heads)] * len(self.group_specs)

    def allocate(self, num_blocks: int) -> None:
        """Make the pool, the tables and the input buffers. num_blocks is what all ranks agreed on."""
        with torch.inference_mode():
            self._cache = KVCache(
                self.group_specs,
                num_kv_heads=self._num_kv_heads,
                num_blocks=num_blocks,
                dtype=self.dtype,
                device=self.device,
            )
        self._reset_tables()

    def _reset_tables(self) -> None:
        assert self._cache is not None, "call allocate first"
        self._state = WorkerState(
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=self.config.max_model_len,
            groups=self.group_specs,
            num_blocks=self._cache.num_blocks,
            vocab_size=self.model_config.vocab_size,
            depth=self.config.depth,
        )
        self._inputs = InputBuilder(
            self._state,
            self._backend,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            device=self.device,
        )

    def warm_up(self) -> None:
        """Run every kind of step once, so that nothing is compiled or first touched while serving; then forget them."""
        assert self._cache is not None, "call allocate first"
        for step in warm_up_steps(self.config, self.group_specs, self._cache.num_blocks):
            finish(self.execute(step, b""))
        with torch.inference_mode():
            self._cache.clear()
        self._reset_tables()

    @property
    def state(self) -> WorkerState:
        """The tables, for whoever checks them; changed by `execute` alone."""
        assert self._state is not None, "call allocate first"
        return self._state

    def execute(
        self, step: SchedulerOutput, frame: bytes
    ) -> StepResult | PendingStep | UnmaskedStep:
        """Apply one step and sample; every rank returns the same tokens, and all ranks' digests if it sampled any.

        A step with masked rows is not sampled yet: that is left to the UnmaskedStep that is returned.

        With a device mirror the tokens are written there, for the next step to read, and the result may be fetched
        after that step was launched; on a CPU it is there at once.

        frame: the message that brought the step; the digest covers it.

        Raises: ProtocolError if the step does not fit the tables, which are then untouched.
        """
        state, inputs = self.state, self._inputs
        decoder, scorer, cache = self._decoder, self._scorer, self._cache
        assert decoder is not None, "call load first"
        assert scorer is not None, "call load first"
        assert inputs is not None, "call allocate first"
        assert cache is not None, "call allocate first"
        plan = state.apply(step)
        digest = state.digests.end(frame)
        scores = wanted = None
        if state.requests.asking:
            wanted = scorer.of_step(state.requests, plan)
        if plan.num_reqs:
            with torch.inference_mode():
                batch = inputs.build(plan)
                hidden = decoder.forward(batch, cache, self._backend)
                if wanted is not None:
                    wanted.score_prompts(decoder, hidden)
                if len(batch.logits_indices):
                    scores = batch, decoder.logits(hidden, batch.logits_indices)
        if len(step.masked_rows):
            return UnmaskedStep(
                step.masked_rows, state, partial(self._sample, plan, scores, wanted)
            )
        return self._sample(plan, scores, wanted, digest)

    def _sample(
        self,
        plan: StepPlan,
        scores: tuple[InputBatch, torch.Tensor] | None,
        wanted: StepScores | None,
        digest: int,
        mask: Mask | None = None,
    ) -> StepResult | PendingStep:
        """The second half of a step. scores: its batch and logits, None if no row samples.

        wanted: the log-probabilities that are to be reported with its tokens, None for none.
        """
        state, inputs, sampler = self.state, self._inputs, self._sampler
        assert inputs is not None, "call allocate first"
        assert sampler is not None, "call load first"
        choice = None
        if scores is not None:
            batch, logits = scores
            with torch.inference_mode():
                adjustments = self._adjustments(plan, mask)
                if wanted is not None:
                    wanted.keep(logits, adjusted=adjustments is not None)
                rows = sampling_rows(state.requests, plan)
                choice = sampler.choose(logits, rows, adjustments, digest=digest)
                inputs.append_tokens(batch, choice.tokens)
                if wanted is not None:
                    wanted.score_sampled(choice.tokens)
        state.advance(plan)
        pending = PendingStep(state, plan, choice, wanted)
        if not self._backend.uses_mirror:
            return pending.result()
        self._under_way.append(pending)
        return pending

    def _adjustments(self, plan: StepPlan, mask: Mask | None) -> Adjustments | None:
        """What rows ask for that depends on their outputs needs all of them on the host: the device is waited for."""
        if needs_tokens(self.state.requests):
            for step in self._under_way:
                step.result()
        return adjustments_of(self.state.requests, plan, mask)

    def close(self) -> None:
        """Give up the pool and the weights, and leave the group."""
        self._decoder = self._sampler = self._scorer = self._cache = self._inputs = self._state = (
            None
        )
        self._parallel.close()


def finish(outcome: StepResult | PendingStep | UnmaskedStep) -> StepResult:
    """The result of a step without masked rows, waited for if need be."""
    assert not isinstance(outcome, UnmaskedStep), "the step waits for its mask"
    return outcome.result() if isinstance(outcome, PendingStep) else outcome
