"""Tiny models, transformers' own tokens for them, and rowcast's: a runner driven by the real scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rowcast.scheduler.agreement import disagreement
from rowcast.scheduler.config import SchedulerConfig
from rowcast.scheduler.extras import LogprobRows
from rowcast.scheduler.front_messages import Submit
from rowcast.scheduler.messages import (
    Mask,
    SchedulerOutput,
    StepResult,
    decode_frame,
    encode_mask,
    encode_step,
)
from rowcast.scheduler.sampling_params import SamplingParams
from rowcast.scheduler.scheduler import Scheduler
from rowcast.tests.scheduler.fake_forms import FakeGrammars
from rowcast.worker.config import WorkerConfig
from rowcast.worker.model_runner import ModelRunner, PendingStep, UnmaskedStep, finish
from rowcast.worker.parallel import TensorParallelGroup


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def make_runner(
    folder: Path | str,
    *,
    parallel: TensorParallelGroup | None = None,
    warm_up: bool = False,
    **options,
) -> ModelRunner:
    """A loaded runner with its pool; options are WorkerConfig's."""
    parallel = parallel or TensorParallelGroup.alone()
    config = WorkerConfig(
        model_dir=str(folder),
        rank=parallel.rank,
        world_size=parallel.world_size,
        **{"max_model_len": 128, "device": "cpu", "max_num_seqs": 32, **options},
    )
    runner = ModelRunner(config, parallel)
    runner.load()
    # Ranks hold different numbers of heads; every rank allocates what the one with the largest blocks can.
    counts = np.array([runner.max_num_blocks])
    if parallel.world_size > 1:
        import torch

        counts = parallel.all_gather(torch.from_numpy(counts)).numpy()
    runner.allocate(int(counts.min()))
    if warm_up:
        runner.warm_up()
    return runner


def generate(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    seeds: Sequence[int] | None = None,
    num_blocks: int | None = None,
    **options,
) -> list[list[int]]:
    """The tokens of each prompt, as `score` makes them."""
    scored = score(runner, prompts, params, seeds=seeds, num_blocks=num_blocks, **options)
    return [one.tokens for one in scored]


@dataclass(kw_only=True)
class Scored:
    """One request's outputs, and the rows that it asked for: one a token; of its prompt from the second one on."""

    tokens: list[int] = field(default_factory=list)
    rows: list[LogprobRows] = field(default_factory=list)
    prompt_rows: list[LogprobRows] = field(default_factory=list)

    @property
    def logprobs(self) -> LogprobRows | None:
        return LogprobRows.join(self.rows)

    @property
    def prompt(self) -> LogprobRows | None:
        return LogprobRows.join(self.prompt_rows)


def score(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    seeds: Sequence[int] | None = None,
    num_blocks: int | None = None,
    **options,
) -> list[Scored]:
    """What each prompt gets, as many steps ahead as the runner's config says; every rank's digest is checked.

    num_blocks below the runner's own makes the scheduler preempt. options are SchedulerConfig's.
    """
    runner._reset_tables()  # a new scheduler is a new life of the group
    config = runner.config
    scheduler = Scheduler(
        SchedulerConfig(
            vocab_size=runner.model_config.vocab_size,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            eos_token_ids=runner.model_config.eos_token_ids,
            depth=config.depth,
            **options,
        ),
        runner.group_specs,
        num_blocks or runner.state.num_blocks,
        grammars=FakeGrammars(  # type: ignore[arg-type]
            runner.model_config.vocab_size, runner.model_config.eos_token_ids
        ),
    )
    if isinstance(params, SamplingParams):
        params = [params] * len(prompts)
    for number, prompt in enumerate(prompts):
        scheduler.add(
            b"test",
            Submit(
                number=number,
                submit_key=bytes(16) + number.to_bytes(8, "little"),
                request_id=f"request-{number}",
                prompt_token_ids=np.array(prompt, np.int32),
                seed=seeds[number] if seeds is not None else number,
                params=params[number],
            ),
        )
    scored = [Scored() for _ in prompts]
    sequence = 0
    in_flight: deque[tuple[int, StepResult | PendingStep | UnmaskedStep]] = deque()
    while True:
        while True:
            if in_flight and isinstance(unmasked := in_flight[-1][1], UnmaskedStep):
                if (made := scheduler.make_mask()) is None:
                    break
                sequence += 1
                mask = Mask(step_sequence=sequence - 1, rows=made[0], bits=made[1])
                frame = encode_mask(mask, epoch=1, sequence=sequence)
                body = decode_frame(frame).body
                assert isinstance(body, Mask)
                in_flight[-1] = (scheduler.digests.end(frame), unmasked.take_mask(body, frame))
            if len(in_flight) == config.depth or (step := scheduler.schedule()) is None:
                break
            sequence += 1
            frame = encode_step(step, epoch=1, sequence=sequence)
            body = decode_frame(frame).body
            assert isinstance(body, SchedulerOutput)
            in_flight.append((scheduler.digests.end(frame), runner.execute(body, frame)))
        if not in_flight:
            break
        digest, outcome = in_flight.popleft()
        result = finish(outcome)
        assert len(result.digests) == 8 * config.world_size * bool((result.tokens >= 0).any())
        assert disagreement(digest, result.digests) is None
        deliveries = scheduler.settle(result.tokens, result.extras)
        for _, (number, _, rows) in deliveries.prompt_logprobs:
            scored[number].prompt_rows.append(rows)
        entries = zip(deliveries.numbers.tolist(), deliveries.tokens.tolist(), strict=True)
        for place, (number, token) in enumerate(entries):
            if token >= 0:
                scored[number].tokens.append(token)
            if place in deliveries.logprobs:
                scored[number].rows.append(deliveries.logprobs[place])
    return scored


def make_llama(folder: Path, *, seed: int = 0, **sizes) -> Path:
    """Save a random Llama whose logits are far enough apart that rounding decides nothing."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": 199,
            "hidden_size": 64,
            "intermediate_size": 120,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.2,
            **sizes,
        }
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # biases and norms start at 0 and 1, where a mistake would not show
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


def transformers_tokens(
    folder: Path | str, prompts: Sequence[Sequence[int]], max_tokens: int, **options
) -> list[list[int]]:
    """What transformers' own greedy generate gives in float32, the prompts padded on the left into one batch.

    options are from_pretrained's.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    model.generation_config.eos_token_id = None
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    real = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        real[row, longest - len(prompt) :] = 1
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=real, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
        )
    return out[:, longest:].tolist()


def random_prompts(
    count: int, *, vocab_size: int, seed: int = 0, longest: int = 40
) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, count)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]
