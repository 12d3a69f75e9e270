"""What a person gets wrong, at the command line: one sentence on stderr, exit code 2, no traceback, nothing started."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tiny_model) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def refused(command_line, *arguments: str, **variables: str) -> str:
    """Run a command that must be refused, and return its sentence."""
    done = command_line.run(*arguments, **variables)
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stdout + done.stderr
    *bars, said = done.stderr.strip().splitlines()
    assert said.startswith("rowcast: "), done.stderr
    assert all(line.startswith(("convert ", "1 KV group")) for line in bars), done.stderr
    state = Path(command_line.environment["XDG_STATE_HOME"]) / "rowcast"
    assert list(state.glob("*.json")) == [], "an engine's file was left"
    return said.removeprefix("rowcast: ")


# ---------------------------------------------------------------- run: prompt and sampling


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["-p", ""], "the prompt is empty"),
        (["-p", "hello", "--max-tokens", "0"], "max_tokens must be an integer, at least 1"),
        (["-p", "hello", "--max-tokens", "-3"], "max_tokens must be an integer, at least 1"),
        (["-p", "hello", "--temperature", "-0.1"], "temperature must be a number in [0, 2]"),
        (["-p", "hello", "--temperature", "nan"], "temperature must be a number in [0, 2]"),
        (["-p", "hello", "--top-p", "0"], "top_p must be a number in (0, 1]"),
        (["-p", "hello", "--seed", "-1"], "seed must be an integer in [0, 2**63)"),
        (["-p", "hello", "--raw", "--system", "Be kind."], "--system belongs to a chat"),
        (["-p", "hello", "--max-tokens", "many"], "Invalid value for '--max-tokens'"),
        (["-p", "hello", "--enforce-eager"], "No such option"),
        ([], "Missing option"),
        (["-p", "hello world 12", "--raw", "--max-model-len", "4"], "max_model_len is 4"),
        (
            ["-p", "hello" * 40, "--raw", "--kv-cache-memory", "12KiB", "--max-tokens", "2"],
            "the whole KV pool holds",
        ),
        (
            ["-p", "hello", "--kv-cache-memory", "100"],
            "raise --kv-cache-memory or lower --block-size",
        ),
    ],
)
def test_run_refuses(command_line, tiny, options, says):
    assert says in refused(command_line, "run", str(tiny), *options)


# ---------------------------------------------------------------- models


def test_an_unknown_model(command_line):
    assert "unknown model 'gpt-17'; known names: gemma-3-270m, smollm2-135m" in refused(
        command_line, "run", "gpt-17", "-p", "hello"
    )


def test_a_name_that_cannot_be_pulled(command_line):
    assert "known names: gemma-3-270m, smollm2-135m" in refused(command_line, "pull", "gpt-17")


def test_a_folder_without_weights(command_line, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    said = refused(command_line, "serve", str(tmp_path), "-tp", "2")
    assert f"model folder {tmp_path} has no *.safetensors" in said


def test_a_truncated_gguf(command_line, tiny, tmp_path):
    whole = (tiny.parent / "tiny.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: len(whole) // 2])
    said = refused(command_line, "run", str(cut), "-p", "hello")
    assert "cut.gguf" in said
    assert "truncated" in said


def test_an_architecture_that_rowcast_does_not_compute(command_line, tiny, tmp_path):
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"architectures": ["MambaForCausalLM"]})
    )
    (tmp_path / "model.safetensors").symlink_to(tiny / "model.safetensors")
    said = refused(command_line, "run", str(tmp_path), "-p", "hello")
    assert "architecture MambaForCausalLM is not supported" in said


# ---------------------------------------------------------------- serve, status, stop


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["-tp", "5"], "tensor_parallel_size must be in [1, 4], got 5"),
        (["--tensor-parallel-size", "0"], "tensor_parallel_size must be a whole number"),
        (["--block-size", "0"], "block_size must be a whole number, at least 1, got 0"),
        (["--max-num-batched-tokens", "0"], "max_num_batched_tokens must be a whole number"),
        (["--max-model-len", "129"], "max_model_len must be at most 128"),
        (["--kv-cache-memory", "plenty"], "kv_cache_memory must be bytes"),
        (["--gpu-memory-utilization", "1.5"], "gpu_memory_utilization must be a number in (0, 1]"),
        (["--dtype", "int3"], "dtype must be one of auto, float32, bfloat16, float16"),
        (["--quantization", "int8"], "quantization 'int8' is not supported yet"),
        (["--scheduling-policy", "sjf"], "scheduling_policy must be one of fcfs, priority, fair"),
        (["--depth", "0"], "depth must be a whole number, at least 1, got 0"),
        (["--long-prefill-token-threshold", "-1"], "long_prefill_token_threshold must be"),
        (["--name", "a/b"], "name must be 1 to 63 letters"),
        (["--client-port", "10500"], "port 10500 is one that Ray gives to its own processes"),
        (["--client-port", "20001", "--address", "10.0.0.1:6379"], "leave one of them out"),
        (["--address", "127.0.0.1:1"], "nothing answers at 127.0.0.1:1"),
        (["--address", "ray://127.0.0.1:1"], "nothing answers at ray://127.0.0.1:1"),
        (["--address", "nonsense"], "a Ray address is host:port"),
    ],
)
def test_serve_refuses(command_line, tiny, options, says):
    assert says in refused(command_line, "serve", str(tiny), *options)


def test_a_stale_ray_address(command_line, tiny):
    """It is what a cluster that ended leaves in a shell: the sentence must name the variable."""
    said = refused(command_line, "serve", str(tiny), RAY_ADDRESS="127.0.0.1:1")
    assert "nothing answers at 127.0.0.1:1 (RAY_ADDRESS); unset RAY_ADDRESS" in said


def test_an_address_where_something_else_listens(command_line, tiny):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = refused(command_line, "serve", str(tiny), "--address", f"127.0.0.1:{port}")
    assert "does not answer as Ray does" in said


def test_a_client_port_that_is_taken(command_line, tiny):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if 10_002 <= port < 20_000 or 23_000 <= port < 24_000:
            pytest.skip("the system gave a port that Ray itself uses")
        said = refused(command_line, "serve", str(tiny), "--client-port", str(port))
    assert f"port {port} is taken" in said


@pytest.mark.parametrize("command", ["status", "stop"])
def test_an_engine_that_nobody_started(command_line, command):
    assert "'nobody'" in refused(command_line, command, "--name", "nobody")


def test_llm_refuses_a_cluster_that_is_not_there(command_line, tiny):
    """The same sentence as a ValueError, in a script."""
    program = """
import sys, rowcast
try:
    rowcast.LLM(sys.argv[1], tensor_parallel_size=2, address="127.0.0.1:1")
except ValueError as error:
    print(error)
"""
    assert "nothing answers at 127.0.0.1:1" in command_line.python(program, str(tiny))


# ---------------------------------------------------------------- the command line itself


def test_no_arguments_show_the_help(command_line):
    """In lines, as --help does: it came as one sentence of four hundred characters."""
    done = command_line.run()
    assert done.stderr == command_line.run("--help").stdout
    assert done.returncode == 2


def test_version_and_help_exit_0(command_line):
    assert command_line.run("--version").stdout.startswith("rowcast 0.")
    helped = command_line.run("serve", "--help")
    assert helped.returncode == 0
    assert "--tensor-parallel-size" in helped.stdout
    assert "-tp" in helped.stdout


def test_an_unknown_command(command_line):
    assert "No such command 'sevre'" in refused(command_line, "sevre")
