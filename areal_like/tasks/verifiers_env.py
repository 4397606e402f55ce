"""Environments of verifiers 0.4 as agents. Their rewards and hooks run in the actor's event loop: none may block."""

from __future__ import annotations

import importlib
import json
import re
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import lru_cache
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from verifiers import v1 as vf
from verifiers.v1.clients import eval as provider
from verifiers.v1.dialects.chat import message_to_wire, parse_message
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.runtimes import provision_runtime

__all__ = ["ChatLoop"]
HARNESS = "areal_like"  # the id of `ChatLoop`: the package looks for harnesses among its own modules
sys.modules[f"verifiers.v1.harnesses.{HARNESS}"] = sys.modules[__name__]
_PROGRAM: dict[str, Any] = {"__name__": "null"}
exec(CHAT_PROGRAM_SOURCE, _PROGRAM)  # modules of the package's that find each other's names in one namespace
# Each sample makes a client of the actor's endpoint: to read certificates would take 30 ms, and HTTP needs none.
provider.build_async_httpx = lambda c: DefaultAsyncHttpxClient(verify=c.base_url.startswith("https"), timeout=None)
_BARE = Namespace(tool_interception_url="", bash=False, edit=False, search=False)


class ChatLoop(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]  # mypy does not read the package
    """The package's harness `null`, whose program each sample starts, in this process."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> Any:
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        http = DefaultAsyncHttpxClient(verify=False, timeout=None)
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, http_client=http)
        async with client, AsyncExitStack() as stack:
            tools, *connected = await _PROGRAM["connect_mcp"]({"mcpServers": servers}, stack)
            turns = _PROGRAM["Compactor"](client, ctx.model, tools, False, None)
            try:
                await _PROGRAM["run_chat_loop"](_BARE, turns, messages_of(data), *connected, None)
            except SystemExit as ended:
                return vf.ProgramResult(exit_code=ended.code, stdout="", stderr=repr(ended.__cause__))
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


@lru_cache(maxsize=16)
def environment(name: str, args: str) -> tuple[Any, list[Any]]:
    """An environment's configuration, of which each sample makes an instance of its own, and its tasks. `args` are JSON
    text. Raises ValueError for one that can't be loaded, or is not taken."""
    given, found = json.loads(args), name
    try:
        if re.fullmatch(r"\w+(\.\w+)+", name):  # the package looks for no module within another
            found = name.replace(".", "_").lower()
            sys.modules[f"verifiers.v1.tasksets.{found}"] = importlib.import_module(name)
        config = vf.resolve_env_config(given | {"taskset": {"id": found} | given.get("taskset", {})})
        agents = {key: value for key, value in config if isinstance(value, vf.AgentConfig)}
        if len(agents) != 1:
            raise ValueError(f"got the agents {', '.join(agents)}, expected one, which is trained")
        config = config.model_copy(update={key: _trained(found, agent) for key, agent in agents.items()})
        taskset = vf.load_environment(config).taskset
        if not taskset.bounded:
            raise ValueError("got an infinite taskset, expected one that ends")
        return config, list(taskset)
    except Exception as error:  # the environment's code may raise anything
        raise ValueError(f"task.env: {name!r} with {args} can't be loaded: {error}") from error


def _trained(name: str, agent: Any) -> Any:
    """The agent, in this process by default, and without sampling of its own: the run samples. Raises
    ValueError where it would run the model's code on this machine."""
    default = HARNESS if (found := vf.default_harness_id(name)) == "bash" else found
    harness = agent.harness or vf.harness_config_type(default)(id=default)
    runtime = agent.runtime if "runtime" in agent.model_fields_set else vf.SubprocessConfig()
    if vf.load_harness(harness).EXECUTES_CODE and isinstance(runtime, vf.SubprocessConfig):
        raise ValueError(f"got agent.runtime subprocess, expected docker for harness {harness.id!r}, which runs code")
    return agent.model_copy(update={"harness": harness, "runtime": runtime, "sampling": None})


def messages_of(data: Any) -> list[dict[str, Any]]:
    """The first messages of a task."""
    asked = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt or []
    system = [vf.SystemMessage(content=data.system_prompt)] if data.system_prompt else []
    return [message_to_wire(each) for each in [*system, *asked]]


def _task_of(asked: Mapping[str, Any], messages: Sequence[Any]) -> Any:
    """The task of a row, with the row's messages: the run may have added a suffix or a system message."""
    task = environment(asked["env"], asked["args"])[1][asked["task"]]
    if messages_of(task.data) == list(messages):
        return task
    return task.with_data(prompt=list(map(parse_message, messages)), system_prompt=None)


async def play(base_url: str, key: str, row: dict[str, Any]) -> float:
    """One episode, and its reward. An answer without a word earns what the rewards give it. Raises what went wrong
    otherwise: the sample is drawn again."""
    asked = row["answer"]
    env = vf.load_environment(environment(asked["env"], asked["args"])[0])
    client = vf.EvalClientConfig(base_url=base_url, headers={"X-Api-Key": key})
    async with env.serving():
        episode = await env.run_episode(_task_of(asked, row["messages"]), vf.ModelContext("policy", client))
    errors = [f"{error.type}: {error.message}" for each in (episode, *episode.traces) for error in each.errors]
    if errors or len(episode.traces) != 1:
        raise RuntimeError(f"got {len(episode.traces)} runs of the agent, expected 1; errors: {'; '.join(errors)}")
    return float(episode.traces[0].reward)


async def score(asked: Mapping[str, Any], messages: Sequence[Any], text: str) -> float:
    """The reward of a conversation of one answer: all there is in an environment of a single turn."""
    task = _task_of(asked, messages)
    about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    answer = vf.MessageNode(message=vf.AssistantMessage(content=text), sampled=True)
    trace = vf.Trace(task=about, agent=vf.AgentInfo(config=vf.AgentConfig()), nodes=[answer])
    async with provision_runtime(vf.SubprocessConfig()) as runtime:
        await task.score(trace, runtime)
    return float(trace.reward)
