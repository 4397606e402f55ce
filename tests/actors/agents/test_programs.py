"""Agents as commands and functions: their input, their output, and how they are ended."""

import asyncio
import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.agents.programs import AgentError, play
from tests.actors.agents import scene
from tests.actors.agents.scene import SECONDS, said, user

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
        path.write_text(CLIENT + textwrap.dedent(source))
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

    theirs = scene.play(talk)
    ours = scene.play(program(TALK))
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)
    assert ours.loss_mask.tolist() == theirs.loss_mask.tolist() and not ours.loss_mask.all()
    assert ours.reward == theirs.reward, "the task's"
    rewarded = scene.play(program(TALK + "print(json.dumps({'reward': [0.25, 0.5]}))"))
    assert rewarded.reward == 0.75 and len(rewarded.turn_rewards) == 2


@pytest.mark.parametrize(
    "source, reward",
    [
        ("", None),
        ("print(json.dumps(row))", None),
        ("print(0.5)", None),
        ("print('{\"reward\": 0.5}'); print('done')", None),
        ("print('x' * 100000); print('{\"reward\": 0.5}')", 0.5),
        ("print('{\"reward\": [1, 2]}')", [1.0, 2.0]),
        ("print('{\"reward\": null}')", None),
        ("print(json.dumps({'reward': len(row['messages']) + row['answer']}))", 44.0),
        ("print(json.dumps({'reward': float(os.environ['OPENAI_API_KEY'] == 'sk-1')}))", 1.0),
        ("print(json.dumps({'reward': float('127.0.0.1' in os.environ['no_proxy'])}))", 1.0),
    ],
)
def test_the_last_line_may_be_a_reward(program, source, reward):
    assert run(program(source), {"messages": [1, 2], "answer": 42}) == reward


def test_an_agent_that_can_not_be_run_is_no_crash():
    for agent in ("no_such_module:play", "json:no_such_function", ["/no/such/program"]):
        with pytest.raises(ValueError, match="can't be"):
            run(agent)
    with pytest.raises(ValueError, match="no async function"):
        run("json:dumps")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


FAMILY = """
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
open(row["answer"] + ".new", "w").write(json.dumps([os.getpid(), child.pid]))
os.rename(row["answer"] + ".new", row["answer"])
"""


async def family(path: Path) -> list[int]:
    """The process ids of the program and its child, as soon as both run."""
    async with asyncio.timeout(SECONDS):
        while not path.exists():
            await asyncio.sleep(0.01)
    pids = json.loads(path.read_text())
    assert all(map(is_alive, pids))
    return pids


async def until_gone(pids: list[int]) -> None:
    async with asyncio.timeout(SECONDS):
        while any(map(is_alive, pids)):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "ending", ["time.sleep(600)", "chat(row['messages'])", "os.setpgid(0, 0); time.sleep(600)", "pass"]
)
def test_a_cancelled_command_is_killed_with_what_it_has_started(program, tmp_path, ending):
    """In each state: it sleeps, waits for an answer, has left its process group, or has ended already."""

    async def scenario():
        task = asyncio.create_task(
            play(program(FAMILY + ending), await silent_server(), "sk", {"messages": [], "answer": str(tmp_path / "p")})
        )
        pids = await family(tmp_path / "p") if ending != "pass" else []
        if ending == "pass":
            assert await task is None
            pids = json.loads((tmp_path / "p").read_text())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until_gone(pids)

    async def silent_server() -> str:
        server = await asyncio.start_server(lambda reader, writer: asyncio.sleep(SECONDS), "127.0.0.1", 0)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["command", "function"])
def test_an_agent_that_hangs_is_ended(program, kind):
    async def hangs(base_url, key, row):
        await said(base_url, key, row["messages"], max_tokens=2)
        await asyncio.Event().wait()

    source = "chat(row['messages'], max_tokens=2); time.sleep(600)"
    with pytest.raises(AgentError, match=r"has not ended after 1.5 s"):
        scene.play(program(source) if kind == "command" else hangs, timeout=1.5)


ACTOR = """
import asyncio, json, sys
from actors.agents.programs import play
asyncio.run(play(json.loads(sys.argv[1]), "http://127.0.0.1:1", "sk", {"messages": [], "answer": sys.argv[2]}))
"""


def test_a_command_dies_with_an_actor_that_is_killed(program, tmp_path):
    async def scenario():
        command = json.dumps(program(FAMILY + "time.sleep(600)"))
        actor = await asyncio.create_subprocess_exec(
            sys.executable, "-c", ACTOR, command, str(tmp_path / "p"), env={**os.environ, "PYTHONPATH": os.getcwd()}
        )
        try:
            pids = await family(tmp_path / "p")
        finally:
            actor.kill()
            await actor.wait()
        await until_gone(pids)

    asyncio.run(scenario())
