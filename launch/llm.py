"""`rowcast.LLM`: a model in a script. Names follow vLLM's, so that a script ports by changing its import.

With one rank it is embedded: this process, no Ray. With more, or an address, it brings up an engine on a Ray cluster as
`rowcast serve` does, and ends what it started. Owns that choice; the engines are elsewhere.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..cluster.chat_options import ChatOptions, Tools
from ..cluster.prompts import (
    Conversation,
    Many,
    Prompt,
    Prompts,
    list_conversations,
    list_params,
)
from ..scheduler.sampling_params import SamplingParams
from .config import EngineOptions, Environment, plan_engine

if TYPE_CHECKING:
    from rich.console import Console

    from ..cluster.outputs import RequestOutput

ManyParams = SamplingParams | Sequence[SamplingParams] | None


class _Engine(Protocol):
    """What LLM needs of an engine, embedded or on a cluster."""

    def generate(
        self,
        prompts: Prompts,
        sampling_params: ManyParams = None,
        *,
        priority: Many[int] = 0,
        user: Many[str] = "",
        cache_salt: Many[str | None] = None,
    ) -> list[RequestOutput]: ...
    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        user: str = "",
        cache_salt: str | None = None,
    ) -> Iterator[RequestOutput]: ...
    def abort(self, request_id: str) -> None: ...
    def snapshot(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


class LLM:
    """One model, ready to answer. A context manager; `close` gives back everything it took.

    model: a name that `rowcast pull` knows (fetched at first use) or a Hugging Face folder. dtype "auto" is float32 on
        a CPU. kv_cache_memory: bytes or text such as "512MiB". scheduling_policy: "fcfs", "priority" or "fair". record:
        a file for `rowcast replay`. The other options: `EngineOptions`. address: a Ray cluster ("host:6379", "auto");
        with tensor_parallel_size above 1 and no address, RAY_ADDRESS or a local one is used. name: the engine's on
        that cluster, made up when None. console: a rich Console for progress; None prints nothing.
    plan: the options that were settled, and the model's config.

    Example: `LLM("smollm2-135m").generate("Once upon a time", SamplingParams(max_tokens=8))[0].outputs[0].text`
    Raises: ValueError, one sentence, for a mistake in the options; RuntimeError when the engine cannot start.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        dtype: str = "auto",
        quantization: str | None = None,
        tensor_parallel_size: int = 1,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        block_size: int = 16,
        gpu_memory_utilization: float = 0.9,
        kv_cache_memory: int | str | None = None,
        kernel_backend: str = "auto",
        device: str = "auto",
        num_threads: int | None = None,
        enable_prefix_caching: bool = True,
        scheduling_policy: str = "fcfs",
        long_prefill_token_threshold: int | None = None,
        depth: int = 2,
        record: str | os.PathLike[str] | None = None,
        name: str | None = None,
        address: str | None = None,
        console: Console | None = None,
    ):
        options = EngineOptions(
            model=os.fspath(model) if isinstance(model, os.PathLike) else model,
            dtype=dtype,
            quantization=quantization,
            tensor_parallel_size=tensor_parallel_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory=kv_cache_memory,
            kernel_backend=kernel_backend,
            device=device,
            num_threads=num_threads,
            enable_prefix_caching=enable_prefix_caching,
            scheduling_policy=scheduling_policy,
            long_prefill_token_threshold=long_prefill_token_threshold,
            depth=depth,
            record=record,
            name=name if name is not None else f"llm-{os.getpid()}-{os.urandom(3).hex()}",
        )
        if address is not None and (not isinstance(address, str) or not address):
            raise ValueError(f"address must be a Ray cluster's HOST:PORT or auto, got {address!r}")
        environment = Environment.read()
        plan = plan_engine(options, environment, console=console)
        from ..cluster.text import TextProcessor

        self.plan = plan
        self._text = TextProcessor(plan.model_dir)
        if self._text.has_tokenizer:
            self._text.encode(
                ""
            )  # a damaged one is found here, not by a prompt after the weights were read
        if options.tensor_parallel_size == 1 and address is None:
            from .embedded_llm import EmbeddedLLM

            self._engine: _Engine = EmbeddedLLM(plan, self._text, console=console)
        else:
            from .served import ServedLLM

            self._engine = ServedLLM(
                plan, address=address, made_up_name=name is None, console=console
            )
        # Not self.close: that would keep the LLM, and with it the weights, alive until the process ends. Registered
        # last, so that at exit it runs before Ray's own hook takes the connection away.
        self._close = weakref.finalize(self, self._engine.close)
        atexit.register(self._close)

    @property
    def has_chat_template(self) -> bool:
        return self._text.has_chat_template

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that the model's generation_config.json names, with what it recommends."""
        return self._text.sampling_defaults

    def get_default_sampling_params(self) -> SamplingParams:
        """What a call without any gets: the recommendation of the model's generation_config.json."""
        return list_params(None, 1, self._text.sampling_defaults)[0]

    def generate(
        self,
        prompts: Prompts,
        sampling_params: ManyParams = None,
        *,
        priority: Many[int] = 0,
        user: Many[str] = "",
        cache_salt: Many[str | None] = None,
    ) -> list[RequestOutput]:
        """Answer prompts, all at once; the results are in the prompts' order.

        prompts: a string, a list of token ids, or a list of either. sampling_params: one for all, or a list; without
            any, what the model's generation_config.json recommends. One for all or a list are also priority (the
            smaller the more urgent), user (who shares fairly with others) and cache_salt (only requests of the same
            salt share cached prefixes); see `RequestOptions`.
        Raises: ValueError naming the prompt that cannot be served, before any is started; RuntimeError when the engine
            fails.
        """
        return self._engine.generate(
            prompts, sampling_params, priority=priority, user=user, cache_salt=cache_salt
        )

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        user: str = "",
        cache_salt: str | None = None,
    ) -> Iterator[RequestOutput]:
        """Answer one prompt as its tokens come: each output holds all text so far. Leaving the loop aborts it."""
        outputs = self._engine.stream(
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            user=user,
            cache_salt=cache_salt,
        )
        return self._while_read(outputs)

    def _while_read(self, outputs: Iterator[RequestOutput]) -> Iterator[RequestOutput]:
        """Hold on to this LLM for so long: `for output in LLM(model).stream(prompt)` has no other reference to it."""
        yield from outputs

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: ManyParams = None,
        *,
        priority: Many[int] = 0,
        user: Many[str] = "",
        cache_salt: Many[str | None] = None,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation (`[{"role": "user", "content": "Hi"}]`) or a list of them, in order.

        tools, add_generation_prompt and chat_template_kwargs go to the model's chat template; see `ChatOptions`.
        """
        chat = ChatOptions(
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.generate(
            [self._encode_chat(c, chat) for c in list_conversations(messages)],
            sampling_params,
            priority=priority,
            user=user,
            cache_salt=cache_salt,
        )

    def stream_chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        user: str = "",
        cache_salt: str | None = None,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[RequestOutput]:
        """`stream` for one conversation, with `chat`'s options."""
        chat = ChatOptions(
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.stream(
            self._encode_chat(messages, chat),
            sampling_params,
            request_id,
            priority=priority,
            user=user,
            cache_salt=cache_salt,
        )

    def _encode_chat(self, messages: Conversation, chat: ChatOptions) -> list[int]:
        return self._text.encode_chat(messages, chat.add_generation_prompt, **chat.variables)

    def abort(self, request_id: str) -> None:
        """End a request that another thread, or an open `stream`, is waiting for."""
        self._engine.abort(request_id)

    def snapshot(self) -> dict[str, Any]:
        """The scheduler's counts: running, waiting, free_blocks, usable_blocks, steps, preemptions and so on."""
        return self._engine.snapshot()

    def close(self) -> None:
        """Stop the engine, and the Ray cluster if this LLM started it. A second call does nothing."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
