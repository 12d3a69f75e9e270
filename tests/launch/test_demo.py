"""The demo, as `make demo` runs it: once to its end, once broken off."""

from __future__ import annotations

import json
import re
import signal
from collections import defaultdict
from pathlib import Path

from rowcast.cluster.state_file import HeadRecord
from rowcast.launch.demo_client import PROMPTS
from rowcast.launch.leftovers import Footprint

DEMO = "rowcast.launch.demo"


def footprint_of_demo(command_line) -> Footprint:
    state = Path(command_line.environment["XDG_STATE_HOME"]) / "rowcast" / "demo.json"
    return Footprint.of(HeadRecord(**json.loads(state.read_text())["head"]))


def test_the_demo_shows_texts_growing_then_a_table_and_leaves_nothing(
    command_line, start, smollm2_dir
):
    # A stale address must not matter: the demo's Ray is its own.
    demo = start(module=DEMO, RAY_ADDRESS="127.0.0.1:1")
    demo.wait_for("connected to ray://")
    footprint = footprint_of_demo(command_line)
    assert len(footprint.processes) > 5
    assert demo.wait() == 0, demo.lines
    said = "\n".join(demo.lines)
    pieces = defaultdict(list)
    order = []
    for line in demo.lines:
        if match := re.match(r"\[(\d)\] (?!> )(.+)", line):
            pieces[match[1]].append(match[2])
            order.append(match[1])
    assert len(PROMPTS) >= 4
    assert len(pieces) == len(PROMPTS)
    assert all(len(grown) >= 2 for grown in pieces.values()), pieces
    # All at once: every answer has begun before any is complete.
    first_end = min(max(i for i, who in enumerate(order) if who == number) for number in pieces)
    assert set(order[: first_end + 1]) == set(pieces), order
    for column in ("tokens", "first token", "tokens/s"):
        assert column in said
    assert re.search(r"\d+ tokens for 5 prompts at once in \d+\.\d s", said)
    assert re.search(r"replay \d+ recorded steps without the model: all \d+ digests hold", said)
    assert re.search(r"nothing is left of \d+ processes and \d+ ports; \d+\.\d s in all$", said)
    assert footprint.left() == []


def test_ctrl_c_in_the_demo_stops_everything(command_line, start, smollm2_dir):
    """A terminal sends it to the demo and to its client alike; neither shows a traceback."""
    demo = start(module=DEMO)
    demo.wait_for("[3] ")
    footprint = footprint_of_demo(command_line)
    assert demo.end(signal.SIGINT, group=True) == 130, demo.lines
    assert not any("Traceback" in line for line in demo.lines), demo.lines
    assert footprint.left() == []
    assert command_line.run("status", "--name", "demo").returncode == 2


def test_a_second_demo_beside_a_running_one_is_refused(command_line, start):
    """It would otherwise take the first one for the rest of a killed demo, and clear it up."""
    program = """
import subprocess, sys
from rowcast.launch.demo import only_demo
with only_demo():
    done = subprocess.run([sys.executable, "-m", "rowcast.launch.demo"], capture_output=True, text=True)
print(done.returncode, done.stderr)
"""
    assert command_line.python(program).strip() == (
        "2 rowcast: a demo runs already; wait for its end"
    )
