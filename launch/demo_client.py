"""The demo's other half: a process of its own that knows the engine's `ray://` address and nothing else.

Sends all its prompts at once, shows the texts as they grow (in place on a terminal, as lines elsewhere), then a table.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..scheduler.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console, Group

    from ..cluster.client import Client

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "Give me three tips for learning a new language.",
    "Tell me a story about a robot that plants trees.",
)
MAX_TOKENS = 64
_PIECE_TOKENS = 12
_REFRESH_S = 0.08


@dataclass(slots=True)
class Answer:
    """One prompt's answer as it grows. Times are this process's own, in seconds since it was sent."""

    prompt: str
    sent_at: float
    text: str = ""
    num_tokens: int = 0
    first_token_s: float | None = None
    total_s: float | None = None
    finish_reason: str | None = None
    error: Exception | None = None

    @property
    def over(self) -> bool:
        return self.total_s is not None or self.error is not None

    @property
    def tokens_per_s(self) -> float | None:
        """After the first token, whose time is a figure of its own."""
        if self.total_s is None or self.first_token_s is None or self.num_tokens < 2:
            return None
        return (self.num_tokens - 1) / max(self.total_s - self.first_token_s, 1e-9)


def ask(client: Client, answer: Answer, seed: int) -> None:
    """Stream one answer; runs in a thread of its own."""
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=MAX_TOKENS, seed=seed)
    try:
        for output in client.stream_chat([{"role": "user", "content": answer.prompt}], params):
            now = time.monotonic() - answer.sent_at
            completion = output.outputs[0]
            if completion.token_ids and answer.first_token_s is None:
                answer.first_token_s = now
            answer.text, answer.num_tokens = completion.text, len(completion.token_ids)
            if output.finished:
                answer.finish_reason = completion.finish_reason
                answer.total_s = now
    except Exception as error:  # shown by the main thread, which decides how the process ends
        answer.error = error


def show_growing(console: Console, answers: list[Answer]) -> None:
    """Until all are over: redraw on a terminal, print the new pieces elsewhere."""
    if not console.is_terminal:
        _print_pieces(answers)
        return
    from rich.live import Live

    with Live(console=console, get_renderable=lambda: _texts(answers), refresh_per_second=12):
        while not all(answer.over for answer in answers):
            time.sleep(_REFRESH_S)


def _texts(answers: list[Answer]) -> Group:
    from rich.console import Group
    from rich.text import Text

    lines: list[Text] = []
    for answer in answers:
        lines.append(Text(f"> {answer.prompt}", style="bold cyan", no_wrap=True))
        cursor = "" if answer.over else "▌"
        lines.append(Text(" ".join(answer.text.split()) + cursor))
    return Group(*lines)


def _print_pieces(answers: list[Answer]) -> None:
    shown = [(0, 0) for _ in answers]  # characters, tokens
    for number, answer in enumerate(answers, start=1):
        print(f"[{number}] > {answer.prompt}", flush=True)
    while True:
        over = all(answer.over for answer in answers)
        for index, answer in enumerate(answers):
            text, num_tokens = answer.text, answer.num_tokens
            characters, tokens = shown[index]
            grown = num_tokens - tokens
            if grown >= _PIECE_TOKENS or (grown > 0 and answer.over):
                print(f"[{index + 1}] {' '.join(text[characters:].split())}", flush=True)
                shown[index] = (len(text), num_tokens)
        if over:
            return
        time.sleep(_REFRESH_S)


def show_table(console: Console, answers: list[Answer], seconds: float) -> None:
    from rich.table import Table

    table = Table(title="what it took")
    table.add_column("prompt", no_wrap=True, overflow="ellipsis", max_width=30)
    for column in ("tokens", "first token", "tokens/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("end", no_wrap=True)
    for answer in answers:
        rate = answer.tokens_per_s
        table.add_row(
            answer.prompt,
            str(answer.num_tokens),
            "-" if answer.first_token_s is None else f"{answer.first_token_s:.2f} s",
            "-" if rate is None else f"{rate:.1f}",
            answer.finish_reason or "error",
        )
    console.print(table)
    tokens = sum(answer.num_tokens for answer in answers)
    console.print(
        f"{tokens} tokens for {len(answers)} prompts at once in {seconds:.1f} s: {tokens / seconds:.1f} tokens/s",
        highlight=False,
    )


def main(address: str, name: str) -> int:
    from rich.console import Console

    from ..cluster.client import Client

    console = Console()
    began = time.monotonic()
    with Client(address, name=name) as client:
        console.print(
            f"another process, connected to {address} in {time.monotonic() - began:.1f} s",
            highlight=False,
        )
        began = time.monotonic()
        answers = [Answer(prompt, began) for prompt in PROMPTS]
        for seed, answer in enumerate(answers):
            # Daemons: an interrupted demo does not wait for their answers.
            threading.Thread(target=ask, args=(client, answer, seed), daemon=True).start()
        show_growing(console, answers)
        seconds = time.monotonic() - began
    show_table(console, answers, seconds)
    for answer in answers:
        if answer.error is not None:
            raise answer.error
    return 0


if __name__ == "__main__":
    from .cli import run_guarded

    sys.exit(run_guarded(lambda: main(sys.argv[1], sys.argv[2])))
