"""`rowcast serve`, `status`, `stop` and clients in other processes, on real Ray clusters of this test's own.

One that rowcast starts itself, and one that was there before and must be there afterwards.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import pytest
from rowcast.cluster.state_file import HeadRecord
from rowcast.launch.leftovers import Footprint

SMALL = ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "32"]
TINY = ["--max-num-seqs", "4", "--kv-cache-memory", "1MiB"]
STAGES = ["find", "reserve", "start 2 workers", "load", "ready"]

GREEDY = """
import json, sys
from rowcast import Client, SamplingParams
address, name, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
with Client(address, name=name) as client:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    outputs = client.generate(prompts, params)
assert "torch" not in sys.modules, "a client loads no torch"
print(json.dumps([[o.outputs[0].token_ids for o in outputs], [o.outputs[0].text for o in outputs]]))
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tiny_model) -> Path:
    """For the tests of life and death, where tokens do not matter."""
    return tiny_model(tmp_path_factory.mktemp("model"))


def actors_in(footprint: Footprint) -> list[str]:
    """Titles of rowcast's actors among a cluster's processes."""
    titles = [" ".join(p.cmdline()) for p in footprint.processes if p.is_running()]
    return [title for title in titles if re.search("SchedulerActor|WorkerActor|FrontActor", title)]


def no_actors_left(head: HeadRecord, timeout_s: float = 15) -> bool:
    deadline = time.monotonic() + timeout_s
    while actors_in(Footprint.of(head)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def head_of(command_line, name: str) -> HeadRecord:
    state = Path(command_line.environment["XDG_STATE_HOME"]) / "rowcast" / f"{name}.json"
    return HeadRecord(**json.loads(state.read_text())["head"])


# ---------------------------------------------------------------- a Ray that rowcast starts


@dataclass(frozen=True)
class Detached:
    address: str
    said: str
    footprint: Footprint


@pytest.fixture(scope="module")
def detached(command_line, smollm2_dir) -> Iterator[Detached]:
    """`serve --detach` with two workers; the command has returned and the engine runs."""
    done = command_line.run("serve", str(smollm2_dir), "-tp", "2", "--detach", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    (address,) = set(re.findall(r"ray://127\.0\.0\.1:\d+", done.stdout))
    footprint = Footprint.of(head_of(command_line, "default"))
    yield Detached(address, done.stdout, footprint)
    # `test_stop_...` has ended it unless it failed.
    command_line.run("stop")


def test_serve_says_a_line_a_stage_and_how_to_use_it(detached):
    lines = detached.said.splitlines()
    for stage in ("start Ray", "load", "start the scheduler", "start 2 workers"):
        (line,) = [line for line in lines if line.startswith(stage)]
        assert re.search(r"\.{3,} \d+\.\d s$", line), line
    assert any(line.startswith("ready after") for line in lines)
    assert f'rowcast.Client("{detached.address}")' in detached.said
    assert len(actors_in(detached.footprint)) == 4  # scheduler, front, two workers


def test_status_shows_what_runs(command_line, detached):
    shown = command_line.run("status")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("engine default: ready, ")
    assert re.search(r"^policy +fcfs *$", shown.stdout, re.MULTILINE)
    assert re.search(r"^prefix cache hits +0 of 0 prompt tokens *$", shown.stdout, re.MULTILINE)
    assert re.search(r"^preemptions +0 *$", shown.stdout, re.MULTILINE)
    status = json.loads(command_line.run("status", "--json").stdout)
    assert status["tensor_parallel_size"] == 2
    assert status["running"] == status["waiting"] == 0
    assert status["free_blocks"] == status["usable_blocks"] > 0


def test_two_ranks_give_the_tokens_of_transformers(command_line, detached, greedy):
    """2 + 1 KV heads; through Ray Client, from another process."""
    prompts = json.dumps(greedy.prompts)
    said = command_line.python(GREEDY, detached.address, "default", prompts)
    assert json.loads(said.splitlines()[-1]) == [greedy.token_ids, greedy.texts]


def test_a_client_in_another_process_streams_and_aborts(command_line, detached):
    program = """
import sys, threading
from rowcast import Client, SamplingParams
with Client(sys.argv[1]) as client:
    seen = []
    for output in client.stream_chat(
        [{"role": "user", "content": "Hi!"}], SamplingParams(temperature=0, max_tokens=20)
    ):
        seen.append(output.outputs[0].text)
    assert len(seen) >= 5 and seen == sorted(seen, key=len), seen
    assert all(later.startswith(earlier) for earlier, later in zip(seen, seen[1:])), seen

    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    stream = client.stream("Once upon a time", endless, request_id="mine")
    next(stream)
    threading.Timer(0.3, client.abort, ["mine"]).start()
    last = list(stream)[-1]
    assert last.finished and last.outputs[0].finish_reason == "abort", last
    assert len(last.outputs[0].token_ids) < 200, "it ran to its end"

    for output in client.stream("Once upon a time", endless):
        break  # leaving the loop aborts it

    try:
        client.generate(["fine", [1] * 300])
    except ValueError as error:
        assert "prompts[1]" in str(error) and "max_model_len is 256" in str(error), error
    else:
        raise AssertionError("a prompt that is too long was taken")
    print(len(seen), "pieces")
"""
    assert "pieces" in command_line.python(program, detached.address)
    deadline = time.monotonic() + 10
    while True:
        status = json.loads(command_line.run("status", "--json").stdout)
        if (status["running"], status["waiting"]) == (0, 0):
            break
        assert time.monotonic() < deadline, status
    assert status["free_blocks"] == status["usable_blocks"]


def test_a_second_engine_of_that_name_is_refused_and_the_first_goes_on(
    command_line, detached, smollm2_dir
):
    done = command_line.run("serve", str(smollm2_dir), *SMALL)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "an engine named 'default' is on this Ray cluster already" in done.stderr
    assert json.loads(command_line.run("status", "--json").stdout)["state"] == "ready"


def test_stop_ends_the_engine_and_the_ray_that_was_started_for_it(command_line, detached):
    done = command_line.run("stop")
    assert done.returncode == 0, done.stderr
    assert detached.footprint.left() == []
    again = command_line.run("stop")
    assert again.returncode == 2
    assert "no engine named 'default'" in again.stderr


# ---------------------------------------------------------------- a Ray that was there


@pytest.fixture(scope="module")
def running_ray(command_line) -> Iterator[HeadRecord]:
    """Somebody else's cluster: rowcast has no file about it."""
    program = """
import json
from dataclasses import asdict
from rowcast.cluster.local_ray import start_head
print(json.dumps(asdict(start_head("somebody-elses"))))
"""
    head = HeadRecord(**json.loads(command_line.python(program).splitlines()[-1]))
    footprint = Footprint.of(head)
    yield head
    stop = """
import json, sys
from rowcast.cluster.local_ray import stop_head
from rowcast.cluster.state_file import HeadRecord
stop_head(HeadRecord(**json.loads(sys.argv[1])))
"""
    command_line.python(stop, json.dumps(asdict(head)))
    assert footprint.left() == []


def test_serve_attaches_to_a_ray_that_runs_and_leaves_it_running(
    command_line, start, running_ray, smollm2_dir, greedy
):
    """Three ranks of one KV head each, found by RAY_ADDRESS; Ctrl-C ends the engine alone."""
    serve = start(
        "serve", str(smollm2_dir), "-tp", "3", "--name", "three", *SMALL,
        RAY_ADDRESS=running_ray.address,
    )  # fmt: skip
    serve.wait_for("stop it with Ctrl-C")
    assert len(actors_in(Footprint.of(running_ray))) == 5
    prompts = json.dumps(greedy.prompts)
    said = command_line.python(GREEDY, running_ray.address, "three", prompts)
    assert json.loads(said.splitlines()[-1]) == [greedy.token_ids, greedy.texts]
    assert serve.end(signal.SIGINT, group=True) == 130
    assert serve.lines[-1] == "rowcast: interrupted"
    assert no_actors_left(running_ray)
    assert psutil.pid_exists(running_ray.pid)


@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_at_any_stage_leaves_nothing(start, running_ray, tiny, stage):
    options = ["-tp", "2", "--name", "broken-off", "--address", running_ray.address, *TINY]
    serve = start("serve", str(tiny), *options)
    serve.wait_for(stage)
    assert serve.end(signal.SIGINT, group=True) == 130, serve.lines
    assert serve.lines[-1] == "rowcast: interrupted"
    assert not any("Traceback" in line for line in serve.lines), serve.lines
    assert no_actors_left(running_ray)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_service_manager_and_a_closed_terminal_are_cleaned_up_after(
    start, running_ray, tiny, number, code
):
    """Ray would answer SIGTERM, and Python SIGHUP, with an exit that leaves the engine behind."""
    options = ["--name", "managed", "--address", running_ray.address, *TINY]
    serve = start("serve", str(tiny), *options)
    serve.wait_for("stop it with Ctrl-C")
    assert serve.end(number) == code, serve.lines
    assert no_actors_left(running_ray)


def test_ctrl_c_that_also_ends_the_reader_leaves_nothing(command_line, running_ray, tiny, tmp_path):
    """`rowcast serve ... | tee log`: there was nobody to say "stopping" to, and the engine was left running."""
    log = tmp_path / "log"
    serve = [sys.executable, "-m", "rowcast.launch.cli", "serve", str(tiny), "--name", "piped"]
    serve += ["--address", running_ray.address, *TINY]
    shell = subprocess.Popen(
        f"{shlex.join(serve)} | tee {shlex.quote(str(log))}",
        shell=True,
        env=command_line.environment,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not log.exists() or "stop it with Ctrl-C" not in log.read_text():
        assert time.monotonic() < deadline
        assert shell.poll() is None
        time.sleep(0.1)
    both = psutil.Process(shell.pid).children()
    os.killpg(shell.pid, signal.SIGINT)
    shell.wait(10)
    assert psutil.wait_procs(both, timeout=30)[1] == []
    assert no_actors_left(running_ray)


def test_stop_elsewhere_ends_serve_in_the_foreground(command_line, start, running_ray, tiny):
    options = ["--name", "elsewhere", "--address", running_ray.address, *TINY]
    serve = start("serve", str(tiny), *options)
    serve.wait_for("stop it with Ctrl-C")
    stopped = command_line.run("stop", "--name", "elsewhere", "--address", running_ray.address)
    assert stopped.returncode == 0, stopped.stderr
    assert serve.wait(30) == 0, serve.lines
    assert "the engine was stopped" in serve.lines[-1]
    assert no_actors_left(running_ray)


def test_a_worker_that_dies_ends_serve_with_its_sentence(start, running_ray, tiny):
    options = ["-tp", "2", "--name", "unlucky", "--address", running_ray.address, *TINY]
    serve = start("serve", str(tiny), *options)
    serve.wait_for("stop it with Ctrl-C")
    (worker, *_) = [
        process
        for process in Footprint.of(running_ray).processes
        if "WorkerActor" in " ".join(process.cmdline())
    ]
    worker.kill()
    assert serve.wait(60) == 1, serve.lines
    assert re.search(r"^rowcast: rank \d ", serve.lines[-1]), serve.lines
    assert no_actors_left(running_ray)


def test_llm_over_a_cluster_closes_what_it_started(command_line, running_ray, tiny):
    program = """
import sys
from rowcast import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
with LLM(sys.argv[1], dtype="float32", max_model_len=64, max_num_seqs=4,
         tensor_parallel_size=2, address=sys.argv[2]) as llm:
    (output,) = llm.generate("hello", params)
    last = list(llm.stream("hello", params))[-1]
    assert last.outputs[0].token_ids == output.outputs[0].token_ids
    assert len(last.outputs[0].token_ids) == 4
    assert llm.snapshot()["state"] == "ready"
forgotten = LLM(sys.argv[1], max_model_len=64, max_num_seqs=4, address=sys.argv[2])
forgotten.generate("hello", params)
print("done")
"""
    said = command_line.python(program, str(tiny), running_ray.address)
    assert said.split() == ["done"]
    assert no_actors_left(running_ray)


# ---------------------------------------------------------------- interrupted with a Ray of its own


@pytest.mark.parametrize("when", ["before Ray is up", "while the model loads"])
def test_ctrl_c_also_ends_the_ray_that_serve_was_starting(command_line, start, tiny, when):
    serve = start("serve", str(tiny), "-tp", "2", "--name", "own", *TINY)
    if when == "before Ray is up":
        serve.wait_for("find ")
        state = Path(command_line.environment["XDG_STATE_HOME"]) / "rowcast" / "own.json"
        deadline = time.monotonic() + 30
        while not state.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(1)
    else:
        serve.wait_for("start 2 workers")
    footprint = Footprint.of(head_of(command_line, "own"))
    assert footprint.processes
    assert serve.end(signal.SIGINT, group=True) == 130, serve.lines
    assert footprint.left() == []
    assert not os.path.exists(footprint.folder)
    assert "'own'" in command_line.run("status", "--name", "own").stderr


def test_llm_with_a_ray_of_its_own_leaves_no_file(command_line, tiny):
    """Its engine has a made-up name: a log a run would fill the state folder."""
    program = """
import os, sys
from pathlib import Path
from rowcast import LLM, SamplingParams
with LLM(sys.argv[1], tensor_parallel_size=2, max_num_seqs=4, kv_cache_memory="1MiB") as llm:
    llm.generate("hello", SamplingParams(max_tokens=2))
    state = Path(os.environ["XDG_STATE_HOME"]) / "rowcast"
    during = {path.name for path in state.glob("llm-*")}
assert len(during) == 2, during  # the record and Ray's log
print(sorted(path.name for path in state.glob("llm-*")))
"""
    assert command_line.python(program, str(tiny)).strip() == "[]"
