"""`rowcast bench throughput`: tokens a second of a whole engine, on random prompts, greedy, EOS ignored.

The prompts are random token ids, so nothing is shared and nothing stops early: the numbers of tokens are exact.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from ...scheduler.sampling_params import SamplingParams
from ..config import usable_cores

if TYPE_CHECKING:
    from ..llm import LLM

_PACKAGES = ("torch", "triton", "numba", "numpy", "ray", "tokenizers")


def random_prompts(
    *, num_prompts: int, input_len: int, vocab_size: int, seed: int
) -> list[list[int]]:
    """The same prompts for the same numbers, on every machine."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, vocab_size, (num_prompts, input_len), np.int64).tolist()


def measure(
    llm: LLM, *, num_prompts: int, input_len: int, output_len: int, seed: int
) -> dict[str, Any]:
    """Run all prompts at once and count.

    Raises: ValueError if a prompt and its answer do not fit the model.
    Returns: seconds, num_output_tokens, output_tokens_per_s (outputs alone), total_tokens_per_s (prompts too).
    """
    if input_len + output_len > llm.plan.max_model_len:
        raise ValueError(
            f"input_len {input_len} and output_len {output_len} make {input_len + output_len} tokens, max_model_len is "
            f"{llm.plan.max_model_len}; lower one of the two"
        )
    prompts = random_prompts(
        num_prompts=num_prompts,
        input_len=input_len,
        vocab_size=llm.plan.model_config.vocab_size,
        seed=seed,
    )
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    num_output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert num_output_tokens == num_prompts * output_len, (num_output_tokens, num_prompts)
    num_tokens = num_output_tokens + num_prompts * input_len
    return {
        "output_tokens_per_s": round(num_output_tokens / seconds, 2),
        "total_tokens_per_s": round(num_tokens / seconds, 2),
        "seconds": round(seconds, 4),
        "num_output_tokens": num_output_tokens,
    }


def versions() -> dict[str, str]:
    """The packages whose versions decide the result."""
    found = {"python": platform.python_version()}
    for package in ("rowcast", *_PACKAGES):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # a GPU machine may lack Numba
    return found


def machine() -> dict[str, Any]:
    """The machine in a few words: a result without it means nothing."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(
                line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor() or "unknown"
