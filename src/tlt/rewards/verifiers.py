"""Environment of tlt that runs environments of the package `verifiers`. It runs in a process for environments.

In verifiers, an environment runs agents, and an agent is a program that calls a model over HTTP. Here `TrainedAgent`
takes the place of the agent. It passes the environment's messages to the model as replies, and the model's turns to the
environment. Tasks, rewards, metrics, tools, and the methods `run` and `finalize` are those of verifiers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from verifiers.v1.state import state_cls

from tlt.config import Config
from tlt.data.continuation import Call, calling
from tlt.data.verifiers import Loaded, load, loaded, opening
from tlt.rewards.call_reader import CallReader, numbered
from tlt.rewards.environments import ReplyText, written
from tlt.rewards.tools import MalformedCall


class Episode:
    """Environment of tlt (with `reset` and `step`) that plays one episode of an environment of verifiers."""

    call_reader: ClassVar[CallReader] = CallReader()
    """reader of the calls that the model writes; a run sets it to that of its model"""

    @staticmethod
    def schemas(config: Config) -> list[dict[str, Any]]:
        """Return the JSON schemas of the environment's tools, for the chat template."""
        return [schema for _, _, schema in asyncio.run(_tools(loaded(config.data))).values()]

    async def reset(self, prompt: Any) -> None:
        found, index = load(prompt.data["environment"], prompt.data["arguments"]), prompt.data["index"]
        task = found.tasks(index + 1)[index]
        if task.key != prompt.data["key"]:
            raise ValueError(f"task {index} of {prompt.data['environment']} differs each time it is loaded")
        self._agent = agent = TrainedAgent(await _tools(found, task.data), self.call_reader)
        self._playing = asyncio.ensure_future(_play(found.env, task, agent))

    async def step(self, text: str) -> tuple[str, bool, float]:
        agent, reply = self._agent, asyncio.ensure_future(self._agent.replies.get())
        agent.turns.put_nowait(text)
        await asyncio.wait({reply, self._playing}, return_when=asyncio.FIRST_COMPLETED)
        if reply.done():
            return reply.result(), False, 0.0
        reply.cancel()
        trace = self._playing.result()
        self.scores = {name: reward.score for name, reward in trace.rewards.items()} | trace.metrics
        self.scores |= {"malformed_calls": agent.malformed} if agent.tools else {}
        return "", True, trace.reward

    def __del__(self) -> None:
        if hasattr(self, "_playing"):
            self._playing.cancel()


async def _play(env: Any, task: Any, agent: TrainedAgent) -> Any:
    """Play an episode of a verifiers environment. Return its trace: the messages, rewards and metrics."""
    agents = vf.Agents(env.config, agent.named)
    await env.setup(agents)
    await env.run(task, agents)
    if agent.trace is None:
        raise ValueError(f"{type(env).__name__} ended without a turn of the model")
    episode = vf.Episode(env=vf.EnvInfo(id=env.config.env_id), task=agent.trace.task, traces=[agent.trace], ok=True)
    await env.finalize(task, episode)
    return agent.trace


class TrainedAgent:
    """Adapter that gives the trained model the interface of a verifiers agent. `turns` has the texts that the model
    generated, `replies` the messages to the model."""

    def __init__(self, tools: dict[str, tuple[MCPServer, str, Any]], call_reader: CallReader) -> None:
        self.turns: asyncio.Queue[str] = asyncio.Queue()
        self.replies: asyncio.Queue[str] = asyncio.Queue()
        self.tools, self.call_reader, self.called, self.malformed = tools, call_reader, 0, 0
        self.trainable, self.trace = True, None

    def named(self, name: str, config: Any) -> TrainedAgent:
        """Set the name and the configuration that the environment gives to this agent, and return the agent."""
        self.name, self.config = name, config
        return self

    async def run(self, task: Any) -> Any:
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return self.trace

    @asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator[TrainedAgent]:
        """Begin the only conversation of the episode, and score it at its end. Raises ValueError for a second one."""
        if self.trace is not None:
            raise ValueError(
                "the environment starts a second conversation with the model in one episode, but tlt supports only one"
            )
        recorded = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = vf.AgentInfo(config=self.config, name=self.name, trainable=self.trainable)
        self.trace = vf.Trace(task=recorded, state=state_cls(type(task))(), agent=agent)
        self._add(opening(task))
        yield self
        self.trace.is_completed = self.trace.ok = True
        await task.score(self.trace)

    async def turn(self, message: str | Sequence[Any] | None = None) -> Any:
        """Pass messages of the user to the model, and carry out its tool calls. Return the model's turns, up to the
        first one without a call, and the results of the calls."""
        messages = [vf.UserMessage(content=message)] if isinstance(message, str) else list(message or ())
        segment: list[Any] = []
        own: list[dict[str, Any]] = []  # the model's turn, if it calls tools
        while True:
            self._add(messages)
            if messages:
                sent = [*own, *(each.model_dump(exclude_none=True) for each in messages)]
                self.replies.put_nowait(ReplyText("\n".join(each.content for each in messages), sent))
            text = await self.turns.get()
            calls = numbered(self.call_reader(written(text)) if self.tools else [], self.called)
            self.called += len(calls)
            own = [calling(*calls)] if calls else []
            messages = [vf.ToolMessage(**call.result(await self._result(call))) for call in calls]
            known = [
                vf.ToolCall(id=call.id, name=call.name, arguments=json.dumps(call.arguments))
                for call in calls
                if call.name in self.tools and not call.error
            ]
            answer = vf.AssistantMessage(content=str(text), tool_calls=known or None)
            self._add([answer], sampled=True)
            segment += [answer, *messages]
            if not messages:
                return vf.Segment(messages=segment)

    async def _result(self, call: Call) -> str:
        """Carry out a tool call. Return its result or its error as text."""
        try:
            if call.error:
                raise MalformedCall(call.error)
            if call.name not in self.tools:
                raise MalformedCall(f"there is no tool {call.name!r:.100}: the tools are {', '.join(self.tools)}")
            server, own, _ = self.tools[call.name]
            content = (await server.call_tool(own, call.arguments)).content
            return "\n".join(part.text if part.type == "text" else str(part) for part in content)
        except (MalformedCall, ToolError) as error:
            self.malformed += 1
            return f"Error: {error}"

    def _add(self, messages: Sequence[Any], sampled: bool = False) -> None:
        nodes = self.trace.nodes
        for message in messages:
            nodes.append(vf.MessageNode(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled))


async def _tools(found: Loaded, data: Any = None) -> dict[str, tuple[MCPServer, str, Any]]:
    """Return the tools of an environment: name that the model sees -> (server, name on that server, JSON schema).
    `data` is the data of the task, if there is one."""
    tools = {}
    for toolset in found.toolsets:
        await toolset.setup()
        if data is not None:
            await toolset.setup_task(data)
        server, prefix = MCPServer(type(toolset).__name__), f"{toolset.server_name}_" if toolset.server_name else ""
        toolset.register(server)
        for tool in await server.list_tools():
            schema = {"name": prefix + tool.name, "description": tool.description, "parameters": tool.input_schema}
            tools[prefix + tool.name] = server, tool.name, {"type": "function", "function": schema}
    return tools
