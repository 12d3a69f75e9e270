"""The door: what a submitted request must be before the scheduler takes it. A step never sees an unchecked request."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from .config import SchedulerConfig
from .features import Features
from .front_messages import Submit
from .kv_groups import KVGroupSpec, most_blocks
from .request import Request
from .request_options import RequestOptions, check_text


class QueueFull(ValueError):
    """Too many requests wait: not the request's fault, try again later."""


class Door:
    """Checks requests against the vocabulary, the model's length and the whole pool.

    max_kv_tokens: tokens of one request whose KV the empty pool holds. A request needs KV for prompt + outputs - 1
        tokens, since its last token is never computed.
    """

    def __init__(self, config: SchedulerConfig, groups: Sequence[KVGroupSpec], usable: int) -> None:
        self._config = config
        self.max_kv_tokens = _most_tokens(config, groups, usable)

    def check(self, front: Hashable, submit: Submit) -> Request:
        """Turn a submit into a request that can run to its end.

        max_tokens None asks for as many as fit: up to max_model_len or the whole pool, whichever is less. A request
        that asks for more than max_model_len allows ends there by length; one that asks for more than the pool is
        refused.
        Raises: ValueError naming the limit; TypeError if request_id, user or cache_salt is no string.
        """
        # It travels to every worker: what the wire cannot carry would fail after the request was accepted.
        check_text("request_id", submit.request_id, min_bytes=1)
        options = RequestOptions(
            priority=submit.priority, user=submit.user, cache_salt=submit.cache_salt
        )
        if options.priority and self._config.scheduling_policy != "priority":
            raise ValueError(
                f"request {submit.request_id}: priority {options.priority} has no effect under the scheduling policy "
                f"{self._config.scheduling_policy}; leave it out, or start the engine with --scheduling-policy priority"
            )
        max_model_len, who = self._config.max_model_len, f"request {submit.request_id}"
        num_prompt = len(submit.prompt_token_ids)
        if not num_prompt:
            raise ValueError(f"{who}: the prompt is empty; give at least one token")
        self._in_vocabulary(submit.prompt_token_ids, f"{who}: prompt")
        self._in_vocabulary(submit.output_token_ids, f"{who}: earlier outputs")
        self._in_vocabulary(
            np.array(submit.params.stop_token_ids, np.int64), f"{who}: stop_token_ids"
        )
        features = Features.of(submit.params, self._config.eos_token_ids)
        if features is not None:
            if len(submit.output_token_ids):  # a prompt's rows come no later than the first output
                features = replace(features, prompt_logprobs_from=num_prompt)
            for name, ids in features.ids():
                self._in_vocabulary(ids, f"{who}: {name}")
        if num_prompt >= max_model_len:
            raise ValueError(
                f"{who}: the prompt has {num_prompt} tokens, max_model_len is {max_model_len} and at least one "
                "output must fit; shorten the prompt or raise max_model_len"
            )
        if num_prompt > self.max_kv_tokens:
            raise ValueError(
                f"{who}: the prompt has {num_prompt} tokens, the whole KV pool holds {self.max_kv_tokens}; "
                "shorten the prompt or raise --kv-cache-memory"
            )
        max_tokens = submit.params.max_tokens
        if max_tokens is None:
            end_len = min(max_model_len, self.max_kv_tokens + 1)
        else:
            end_len = min(max_model_len, num_prompt + max_tokens)
        if end_len - 1 > self.max_kv_tokens:
            raise ValueError(
                f"{who}: prompt {num_prompt} and max_tokens {max_tokens} need KV for {end_len - 1} tokens, "
                f"the whole pool holds {self.max_kv_tokens}; lower max_tokens or raise --kv-cache-memory"
            )
        tokens = np.concatenate((submit.prompt_token_ids, submit.output_token_ids)).astype(np.int32)
        if len(tokens) > end_len:
            raise ValueError(
                f"{who}: prompt {num_prompt} and {len(submit.output_token_ids)} earlier outputs exceed the "
                f"{end_len} tokens that it may reach"
            )
        return Request(
            front=front,
            number=submit.number,
            key=(submit.submit_key, submit.n_index),
            request_id=submit.request_id,
            seed=submit.seed,
            params=submit.params,
            num_prompt_tokens=num_prompt,
            end_len=end_len,
            tokens=tokens,
            features=features,
            priority=options.priority,
            user=options.user,
            cache_salt=options.cache_salt or "",
        )

    def _in_vocabulary(self, ids: np.ndarray, what: str) -> None:
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < self._config.vocab_size):
            outside = ids[(ids < 0) | (ids >= self._config.vocab_size)][0]
            raise ValueError(
                f"{what}: token id {outside} lies outside the vocabulary [0, {self._config.vocab_size})"
            )


def _most_tokens(config: SchedulerConfig, groups: Sequence[KVGroupSpec], usable: int) -> int:
    """Find the longest request, in tokens of KV, at most max_model_len, that can run to its end in `usable` blocks.

    Alone, and at the worst moment: a window group returns blocks only when the steps that read them have settled.
    """
    low, high = 0, config.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if sum(most_blocks(spec, middle, config.max_tokens_in_flight) for spec in groups) <= usable:
            low = middle
        else:
            high = middle - 1
    return low
