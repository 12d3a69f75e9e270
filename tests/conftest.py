"""Fixtures that several folders of tests share."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

# Triton decides when it is first imported whether kernels are interpreted, so this stands before any test imports it;
# what compiles (tests/kernels/test_aot.py) is a process of its own. One thread: torch spins while it waits for more.
os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# A shell's `make test &` ignores Ctrl-C, and so would every program that the tests start and then interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

RAY_TESTS = ("tests/cluster/", "tests/launch/test_demo.py", "tests/launch/test_serve.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of two processes (`pytest -n 2 --dist loadfile`), let one run all that starts Ray and the other the rest.

    A Ray is a dozen processes that wait more than they compute: one at a time leaves a core to the other tests, and
    nothing competes with it but them. Whoever is done first takes further files.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class RayTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ray" if nodeid.startswith(RAY_TESTS) else super()._split_scope(nodeid)

    config.option.loadscopereorder = False  # tests/cluster/ first: the longest
    return RayTogether(config, log)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, pulled once into the user's own cache."""
    return pulled("smollm2-135m")


@pytest.fixture(scope="session")
def gemma_dir() -> Path:
    """Gemma-3-270m, a base model, as a Hugging Face folder, pulled once into the user's own cache."""
    return pulled("gemma-3-270m")


def pulled(name: str) -> Path:
    from rowcast.launch.pull import pull

    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return pull(name, cache_home=Path(cache_home))


@dataclass(frozen=True)
class Greedy:
    """20 prompts and what transformers' own `generate` answers to them: greedy, float32, 32 tokens each, past any EOS.

    prompts: texts, conversations that the model's template wrote, and token ids from 1 to 150 long.
    """

    prompts: list[str | list[int]]
    token_ids: list[list[int]]
    texts: list[str]


@pytest.fixture(scope="session")
def greedy(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Greedy:
    """The reference, computed once for all tests: of two processes one computes it and the other reads it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    file = folder / "greedy.json"
    with (folder / "greedy.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            file.write_text(json.dumps(asdict(greedy_answers(smollm2_dir))))
    return Greedy(**json.loads(file.read_text()))


def greedy_answers(smollm2_dir: Path) -> Greedy:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    chats = [
        "What is the capital of France?",
        "Write a haiku about rain.",
        "Count from 1 to 10.",
        "Hi!",
    ]
    prompts: list[str | list[int]] = [
        "The capital of France is",
        "Once upon a time, in a village by the sea,",
        "def fibonacci(n):\n",
        "a",
        "1, 2, 3, 4, 5, 6, 7,",
        "Q: Why is the sky blue?\nA:",
        "Äpfel, naïve café, 東京 and 🙂:",
        "The quick brown fox " * 12,
        *(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": chat}], tokenize=False, add_generation_prompt=True
            )
            for chat in chats
        ),
    ]
    # Lengths on both sides of a block's end (8 and 16) and of a step's budget (7, 16, 48).
    book = tokenizer.encode(
        "It was a bright cold day in April, and the clocks were striking. " * 12
    )
    prompts += [book[:n] for n in (1, 7, 15, 16, 17, 48, 97, 150)]
    assert len(prompts) == 20
    encoded = [tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    # Together with those of about the same length, padded on the left: ten times faster than alone.
    by_length = sorted(range(20), key=lambda index: len(encoded[index]))
    with torch.inference_mode():
        for batch in (by_length[:10], by_length[10:17], by_length[17:]):
            width = max(len(encoded[index]) for index in batch)
            ids = [[2] * (width - len(encoded[index])) + encoded[index] for index in batch]
            mask = [[0] * (width - len(encoded[i])) + [1] * len(encoded[i]) for i in batch]
            output = model.generate(
                torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                do_sample=False,
                max_new_tokens=32,
                pad_token_id=2,
            )
            for index, row in zip(batch, output.tolist(), strict=True):
                answers[index] = row[width:]
    assert all(len(answer) == 32 for answer in answers)
    texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    return Greedy(prompts=prompts, token_ids=answers, texts=texts)
