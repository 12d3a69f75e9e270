"""`rowcast run` and `rowcast bench throughput` as a person types them, on a tiny model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rowcast import LLM, SamplingParams


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tiny_model) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def answers(tiny) -> dict[str, str]:
    """What the prompt "hello" gives, as a chat and raw."""
    # Greedy, so small a model says the same to everything.
    params = SamplingParams(temperature=1, seed=3, max_tokens=12, ignore_eos=True)
    with LLM(tiny, max_num_seqs=1, kv_cache_memory="1MiB", num_threads=1) as llm:
        (chat,) = llm.chat([{"role": "user", "content": "hello"}], params)
        (system,) = llm.chat(
            [{"role": "system", "content": "12"}, {"role": "user", "content": "hello"}], params
        )
        (raw,) = llm.generate("hello", params)
    texts = {"chat": chat, "system": system, "raw": raw}
    texts = {name: output.outputs[0].text for name, output in texts.items()}
    assert len(set(texts.values())) == 3, "the tests below could not tell them apart"
    return texts


OPTIONS = ["--max-tokens", "12", "--ignore-eos", "--temperature", "1", "--seed", "3"]


@pytest.mark.parametrize(
    ("how", "extra"),
    [("chat", []), ("chat", ["--chat"]), ("raw", ["--raw"]), ("system", ["--system", "12"])],
)
def test_run_prints_the_answer_on_stdout_and_nothing_else(command_line, tiny, answers, how, extra):
    """A pipe gets the text alone: progress and figures go to stderr."""
    done = command_line.run("run", str(tiny), "-p", "hello", *OPTIONS, *extra)
    assert done.returncode == 0, done.stderr
    assert done.stdout == answers[how] + "\n"
    assert "12 tokens; the first after " in done.stderr


def test_run_reads_the_prompt_from_stdin(command_line, tiny, answers):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "rowcast.launch.cli",
            "run",
            str(tiny),
            "-p",
            "-",
            "--raw",
            *OPTIONS,
        ],
        env=command_line.environment,
        input="hello",
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout == answers["raw"] + "\n"


def test_run_takes_a_gguf_file(command_line, tiny, answers):
    done = command_line.run("run", str(tiny.parent / "tiny.gguf"), "-p", "hello", *OPTIONS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == answers["chat"] + "\n"


def test_ctrl_c_in_run_ends_with_one_line(start, smollm2_dir):
    running = start(
        "run", str(smollm2_dir), "-p", "Count to a thousand.", "--max-tokens", "4000", "--ignore-eos"
    )  # fmt: skip
    # The first output line is a whole one: wait for text that has been streamed.
    running.wait_for(" ", 60)
    assert running.end(signal.SIGINT) == 130, running.lines
    assert running.lines[-1] == "rowcast: interrupted"
    assert not any("Traceback" in line for line in running.lines)


def test_a_reader_that_leaves_early_is_no_error_to_print(command_line, smollm2_dir):
    """`rowcast run ... | head -1`"""
    program = (
        f"{sys.executable} -m rowcast.launch.cli run {smollm2_dir} -p 'Count to a thousand.' "
        "--max-tokens 300 --ignore-eos | head -c 20"
    )
    done = subprocess.run(
        ["bash", "-c", program],
        env=command_line.environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert len(done.stdout) == 20
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_bench_throughput_ends_with_one_line_of_json(command_line, tiny):
    sizes = ["--num-prompts", "5", "--input-len", "9", "--output-len", "7"]
    done = command_line.run(
        "bench", "throughput", str(tiny), *sizes, "--json", "--dtype", "float32"
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["num_output_tokens"] == 5 * 7
    # The same tokens in the same time: 35 outputs, 35 + 45 in all.
    ratio = figures["total_tokens_per_s"] / figures["output_tokens_per_s"]
    assert ratio == pytest.approx((5 * 7 + 5 * 9) / (5 * 7), rel=0.01)
    assert figures["output_tokens_per_s"] == pytest.approx(5 * 7 / figures["seconds"], rel=0.01)
    assert figures["versions"]["torch"].startswith("2.")
    assert figures["machine"]["cores"] >= 1
    assert figures["sizes"]["output_len"] == 7


def test_bench_throughput_refuses_what_does_not_fit_the_model(command_line, tiny):
    """Answers were cut at the model's length, and the count of them was an internal error."""
    done = command_line.run(
        "bench", "throughput", str(tiny), "--input-len", "100", "--output-len", "29"
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "rowcast: input_len 100 and output_len 29 make 129 tokens, max_model_len is 128;"
    )


def test_pull_prints_the_folder_last(command_line, smollm2_dir):
    done = command_line.run("pull", "smollm2-135m")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(smollm2_dir)
