"""A tiny Llama model as a .gguf file (2 layers, random weights, a few merges), and `rowcast` as a person runs it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rowcast.tests.launch.tiny_gguf import MERGES, Quantize, write_gguf
from tokenizers.pre_tokenizers import ByteLevel

CONTROL, NORMAL = 3, 1
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass
class TinyLlama:
    """What goes into the file. Weights are in GGUF's order of rows; each field may be changed before `write`."""

    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    hidden_size: int = 32
    intermediate_size: int = 64
    rope_theta: float = 1e4
    rms_norm_eps: float = 1e-5
    tied: bool = True
    metadata: dict[str, Any] = field(default_factory=dict)
    """Metadata keys to set, or to leave out where the value is None."""
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def tokens(self) -> list[str]:
        merged = [merge.replace(" ", "") for merge in MERGES]
        return [*SPECIALS, *sorted(ByteLevel.alphabet()), *merged]

    def __post_init__(self) -> None:
        rng = np.random.default_rng(7)

        def put(name: str, *shape: int) -> None:
            self.tensors[name] = rng.normal(0, 0.25, shape).astype(np.float32)

        put("token_embd.weight", len(self.tokens), self.hidden_size)
        put("output_norm.weight", self.hidden_size)
        if not self.tied:
            put("output.weight", len(self.tokens), self.hidden_size)
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        for layer in range(self.num_layers):
            blk = f"blk.{layer}"
            put(f"{blk}.attn_norm.weight", self.hidden_size)
            put(f"{blk}.ffn_norm.weight", self.hidden_size)
            put(f"{blk}.attn_q.weight", q_rows, self.hidden_size)
            put(f"{blk}.attn_k.weight", kv_rows, self.hidden_size)
            put(f"{blk}.attn_v.weight", kv_rows, self.hidden_size)
            put(f"{blk}.attn_output.weight", self.hidden_size, q_rows)
            put(f"{blk}.ffn_gate.weight", self.intermediate_size, self.hidden_size)
            put(f"{blk}.ffn_up.weight", self.intermediate_size, self.hidden_size)
            put(f"{blk}.ffn_down.weight", self.hidden_size, self.intermediate_size)

    def write(self, path: Path, quantize: Quantize | None = None) -> Path:
        tokens = self.tokens
        values: dict[str, Any] = {
            "general.architecture": "llama",
            "llama.block_count": self.num_layers,
            "llama.context_length": 128,
            "llama.embedding_length": self.hidden_size,
            "llama.feed_forward_length": self.intermediate_size,
            "llama.attention.head_count": self.num_heads,
            "llama.attention.head_count_kv": self.num_kv_heads,
            "llama.attention.key_length": self.head_dim,
            "llama.attention.value_length": self.head_dim,
            "llama.attention.layer_norm_rms_epsilon": self.rms_norm_eps,
            "llama.rope.freq_base": self.rope_theta,
            "llama.rope.dimension_count": self.head_dim,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3),
            "tokenizer.ggml.merges": MERGES,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.padding_token_id": 2,
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": TEMPLATE,
            **self.metadata,
        }
        return write_gguf(path, values, self.tensors, quantize)


@pytest.fixture
def tiny_llama() -> type[TinyLlama]:
    return TinyLlama


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[Path], Path]:
    """Converts the tiny model into a Hugging Face folder inside the given one; a context of 128 tokens."""
    from rowcast.launch.convert_gguf import convert_gguf

    def make(folder: Path) -> Path:
        model = folder / "tiny-llama"
        model.mkdir()
        convert_gguf(TinyLlama().write(folder / "tiny.gguf"), model, lambda done, total: None)
        return model

    return make


@dataclass(frozen=True)
class CommandLine:
    """Runs `rowcast` as a person does: a process of its own, with a home of its own."""

    environment: dict[str, str]

    def run(self, *arguments: str, timeout_s: float = 120, **variables: str) -> Any:
        """Run one command to its end: returncode, stdout, stderr."""
        return subprocess.run(
            [sys.executable, "-m", "rowcast.launch.cli", *arguments],
            env=self.environment | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )

    def python(self, program: str, *arguments: str, timeout_s: float = 180) -> str:
        """Run a script in another process and return what it printed."""
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


class Running:
    """A command in a session of its own, whose output is read line by line as it comes."""

    def __init__(self, command: list[str], environment: dict[str, str]):
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._came = threading.Condition()
        self._over = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._came:
                self.lines.append(line.rstrip("\n"))
                self._came.notify_all()
        with self._came:
            self._over = True
            self._came.notify_all()

    def wait_for(self, text: str, timeout_s: float = 120) -> None:
        with self._came:
            came = self._came.wait_for(
                lambda: self._over or any(text in line for line in self.lines), timeout_s
            )
            assert came, f"no line with {text!r} within {timeout_s} s: {self.lines}"
            assert any(text in line for line in self.lines), f"ended without {text!r}: {self.lines}"

    def end(self, signal_number: int, *, group: bool = False, timeout_s: float = 60) -> int:
        """Send a signal, to all of its session as a terminal does with Ctrl-C if `group`; its exit code."""
        if group:
            os.killpg(self.process.pid, signal_number)
        else:
            self.process.send_signal(signal_number)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 120) -> int:
        code = self.process.wait(timeout_s)
        with self._came:
            self._came.wait_for(lambda: self._over, 10)
        return code


@pytest.fixture(scope="module")
def command_line(tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    """A home and a state folder that nobody else has; the user's own cache, where models and compiled kernels lie."""
    home = tmp_path_factory.mktemp("home")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "TRITON_", "XDG_"))}
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    own = {"HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "XDG_CACHE_HOME": cache}
    return CommandLine(kept | own)


@pytest.fixture(scope="module")
def start(command_line: CommandLine) -> Iterator[Callable[..., Running]]:
    """Starts `rowcast ...`, or with `module` another of our programs; whatever still runs at the end is ended."""
    running: list[Running] = []

    def start(*arguments: str, module: str = "rowcast.launch.cli", **variables: str) -> Running:
        command = [sys.executable, "-m", module, *arguments]
        running.append(Running(command, command_line.environment | variables))
        return running[-1]

    yield start
    for one in running:
        if one.process.poll() is None:
            one.process.terminate()
            one.process.wait(60)
