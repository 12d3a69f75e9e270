"""`rowcast run`: one prompt, answered in this process; its text appears as it is made."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from . import options as o
from . import sampling_options as so


def run(
    model: o.Model,
    prompt: Annotated[
        str, typer.Option("-p", "--prompt", metavar="TEXT", help="The prompt; - reads stdin")
    ],
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Put the prompt into the model's chat template, or send it as it is "
            "[default: chat when the model has a template]",
            show_default=False,
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The chat's system message")
    ] = None,
    max_tokens: so.MaxTokens = None,
    min_tokens: so.MinTokens = None,
    temperature: so.Temperature = None,
    top_k: so.TopK = None,
    top_p: so.TopP = None,
    min_p: so.MinP = None,
    seed: so.Seed = None,
    presence_penalty: so.PresencePenalty = None,
    frequency_penalty: so.FrequencyPenalty = None,
    repetition_penalty: so.RepetitionPenalty = None,
    stop: so.Stop = None,
    bad_word: so.BadWord = None,
    json_schema: so.JsonSchema = None,
    ignore_eos: so.IgnoreEos = False,
    tensor_parallel_size: o.TensorParallelSize = 1,
    max_num_batched_tokens: o.MaxNumBatchedTokens = o.DEFAULT_MAX_NUM_BATCHED_TOKENS,
    max_model_len: o.MaxModelLen = None,
    block_size: o.BlockSize = o.DEFAULT_BLOCK_SIZE,
    gpu_memory_utilization: o.GpuMemoryUtilization = o.DEFAULT_GPU_MEMORY_UTILIZATION,
    kv_cache_memory: o.KVCacheMemory = None,
    dtype: o.Dtype = "auto",
    quantization: o.Quantization = None,
    device: o.Device = "auto",
    kernel_backend: o.KernelBackend = "auto",
    num_threads: o.NumThreads = None,
) -> None:
    """Answer one prompt. The text goes to stdout as it comes; progress and figures go to stderr."""
    from rich.console import Console

    from ..llm import LLM

    fields = so.given(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        stop=stop,
        bad_words=bad_word,
        structured_outputs=so.json_form(json_schema),
        ignore_eos=ignore_eos,
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise ValueError(
            "the prompt is empty; give some text with -p, or -p - to read it from stdin"
        )
    if system is not None and chat is False:
        raise ValueError("--system belongs to a chat; leave out --raw or put it into the prompt")
    with LLM(
        model,
        dtype=dtype,
        quantization=quantization,
        tensor_parallel_size=tensor_parallel_size,
        max_num_seqs=1,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_memory=kv_cache_memory,
        device=device,
        kernel_backend=kernel_backend,
        num_threads=num_threads,
        console=Console(stderr=True),
    ) as llm:
        if chat is None:
            chat = llm.has_chat_template
        if system is not None and not chat:
            raise ValueError(f"--system belongs to a chat, and {model} has no chat template")
        params = so.sampling_params(fields, llm.sampling_defaults)
        messages = [{"role": "user", "content": text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        start = time.perf_counter()
        first = None
        shown = num_tokens = 0
        for output in llm.stream_chat(messages, params) if chat else llm.stream(text, params):
            first = first or time.perf_counter()
            answer = output.outputs[0]
            num_tokens = len(answer.token_ids)
            sys.stdout.write(answer.text[shown:])
            sys.stdout.flush()
            shown = len(answer.text)
        end = time.perf_counter()
        print(flush=True)
        first = first or end
        rate = f", then {(num_tokens - 1) / (end - first):.1f} tokens/s" if num_tokens > 1 else ""
        how = so.description(params, fields, llm.sampling_defaults)
        print(
            f"{num_tokens} tokens; the first after {first - start:.2f} s{rate}; {how}",
            file=sys.stderr,
        )
