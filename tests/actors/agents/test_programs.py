"""Agents as commands and functions: their input, their output, and how they are ended."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from actors.agents.programs import AgentError, play
from tests.actors.agents import scene
from tests.actors.agents.scene import SECONDS, said, user
from tests.actors.looped import looped
from tests.actors.test_reward_pool import ends

CLIENT = """
import json, os, sys, time, urllib.request

def chat(messages, **fields):
    body = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    key = os.environ["OPENAI_API_KEY"]
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(asked))["choices"][0]["message"]

row = json.load(sys.stdin)
"""


@pytest.fixture
def program(tmp_path: Path) -> Any:
    """Write a program; returns its command."""

    def write(source: str) -> list[str]:
        path = tmp_path / "agent.py"
        path.write_text(CLIENT + source)
        return [sys.executable, "-S", str(path)]

    return write


def run(agent: Any, row: Any = None) -> Any:
    return asyncio.run(asyncio.wait_for(play(agent, "http://127.0.0.1:1/v1", "sk-1", row or {}), SECONDS))


TALK = """
messages = row["messages"]
messages += [chat(messages, max_tokens=5), {"role": "user", "content": "12"}]
messages.append(chat(messages, max_tokens=5))
print("thinking aloud")
"""


def test_a_command_makes_the_trajectory_that_a_function_makes(program):
    async def talk(base_url, key, row):
        messages = [*row["messages"]]
        messages += [await said(base_url, key, messages, max_tokens=5), user("12")]
        await said(base_url, key, messages, max_tokens=5)

    theirs, ours = scene.play(talk), scene.play(program(TALK))
    for name in ("tokens", "logprobs", "loss_mask", "reward"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    rewarded = scene.play(program(TALK + "print(json.dumps({'reward': [0.25, 0.5]}))"))
    assert rewarded.reward == 0.75 and len(rewarded.turn_rewards) == 2


@pytest.mark.parametrize(
    "source, reward",
    [
        ("print(0.5)", None),
        ("print('{\"reward\": 0.5}'); print('done')", None),
        ("print('x' * 100000); print('{\"reward\": 0.5}')", 0.5),
        ("print('{\"reward\": [1, 2]}')", [1.0, 2.0]),
        ("print(json.dumps({'reward': len(row['messages']) + row['answer']}))", 44.0),
        ("print(json.dumps({'reward': float('127.0.0.1' in os.environ['no_proxy'])}))", 1.0),
    ],
)
def test_the_last_line_may_be_a_reward(program, source, reward):
    assert run(program(source), {"messages": [1, 2], "answer": 42}) == reward


@pytest.mark.parametrize("agent", ["no_such_module:play", "json:no_such_function", ["/no/such/program"], "json:dumps"])
def test_an_agent_that_can_not_be_run_is_no_crash(agent):
    with pytest.raises(ValueError, match=r"workflow\.agent"):
        run(agent)


FAMILY = """
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
open(row["answer"] + ".new", "w").write(json.dumps([os.getpid(), child.pid]))
os.rename(row["answer"] + ".new", row["answer"])
"""


@pytest.mark.parametrize("ending", ["time.sleep(600)", "os.setpgid(0, 0); time.sleep(600)", "pass"])
@looped
async def test_a_command_is_killed_with_what_it_has_started(program, tmp_path, ending):
    """It sleeps, has left its process group, or has ended already."""
    path = tmp_path / "p"
    asked = play(program(FAMILY + ending), "http://127.0.0.1:1", "sk", {"messages": [], "answer": str(path)})
    task = asyncio.create_task(asked)
    while not path.exists() or (ending == "pass" and not task.done()):
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert ends(*json.loads(path.read_text()))


@pytest.mark.parametrize("kind", ["command", "function"])
def test_an_agent_that_hangs_is_ended(program, kind):
    async def hangs(base_url, key, row):
        await said(base_url, key, row["messages"], max_tokens=2)
        await asyncio.Event().wait()

    source = "chat(row['messages'], max_tokens=2); time.sleep(600)"
    with pytest.raises(AgentError, match=r"has not ended after 1.5 s"):
        scene.play(program(source) if kind == "command" else hangs, timeout=1.5)


STARTS = """
import signal, time
from actors.child import Child
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
child = Child(["sh", "-c", "sleep 60 & sleep 60"])
print(child.pid, flush=True)
time.sleep(60)
"""


def in_group(group: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group:
                found.append(process)
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
def test_nothing_is_left_of_a_child_and_what_it_has_started(number: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    members = in_group(int(parent.stdout.readline()))
    assert len(members) >= 2, "the program and its guard"
    parent.send_signal(number)
    parent.wait(30)
    _, alive = psutil.wait_procs(members, timeout=30)
    assert not alive
