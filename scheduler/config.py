"""Limits that the scheduler keeps. Frozen; composed in `launch/config.py`."""

from __future__ import annotations

from dataclasses import dataclass

# Each step under way keeps its batch in memory; more than 2 gains nothing.
MAX_DEPTH = 64
SCHEDULING_POLICIES = ("fcfs", "priority", "fair")


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Units: max_num_seqs rows; max_num_batched_tokens tokens a step; max_model_len tokens of one request, prompt
    and outputs together; max_waiting requests queued beyond the running ones; depth steps issued and not settled;
    long_prefill_token_threshold prompt tokens of one request a step, 0 for no cap (a lone request has none).
    prefix_caching: whether blocks of settled tokens are found again by later requests.
    scheduling_policy: one of SCHEDULING_POLICIES, see `policy.py`.
    eos_token_ids: every id that ends a request unless it ignores EOS.
    """

    vocab_size: int
    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_waiting: int = 8192
    depth: int = 2
    prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_waiting",
            "depth",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.depth > MAX_DEPTH:
            raise ValueError(f"depth must be at most {MAX_DEPTH}, got {self.depth}")
        if self.long_prefill_token_threshold < 0:
            raise ValueError(
                f"long_prefill_token_threshold must be at least 0, got {self.long_prefill_token_threshold}"
            )
        if self.scheduling_policy not in SCHEDULING_POLICIES:
            raise ValueError(
                f"scheduling_policy must be one of {', '.join(SCHEDULING_POLICIES)}, got {self.scheduling_policy!r}"
            )
        for token in self.eos_token_ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"EOS id {token} lies outside the vocabulary [0, {self.vocab_size}); "
                    "check eos_token_id in generation_config.json and config.json"
                )

    @property
    def max_tokens_in_flight(self) -> int:
        """Bound the tokens of one request that are scheduled and not settled: whole steps of it alone."""
        return self.depth * self.max_num_batched_tokens
