"""Environments of the package verifiers 0.4 as environments of tlt, without tools, sandboxes and several models.

    pip install 'verifiers>=0.4,<0.5'
    python examples/verifiers_environment.py textarena '{"game": "Hangman-v0"}' 500 > hangman.jsonl
    tlt train recipes/your_model.toml --data.path hangman.jsonl --data.chat true \\
        --reward.environment verifiers_environment:Episode --reward.folder examples
"""

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from functools import cache
from itertools import islice

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.state import state_cls
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


@cache
def load(name, arguments, size):
    """Return an environment of verifiers and its first tasks. `arguments` has the settings of its taskset as JSON."""
    settings = {"taskset": {"id": name, **json.loads(arguments)}}
    no_program = {agent: {"harness": {"id": "null"}} for agent in agent_config_fields(resolve_env_config(settings))}
    env = load_environment(resolve_env_config(settings | no_program))
    return env, list(islice(env.taskset, size))


def opening(task):
    """Return the first messages of a task: its system prompt, if any, and its prompt."""
    prompt, system = task.data.prompt, task.data.system_prompt
    messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt)
    return [*([vf.SystemMessage(content=system)] if system else []), *messages]


class Episode:
    async def reset(self, prompt):
        row = prompt.data
        env, tasks = load(row["environment"], row["arguments"], row["size"])
        self.agent = Agent()
        self.playing = asyncio.ensure_future(self.agent.play(env, tasks[row["index"]]))

    async def step(self, text):
        reply = asyncio.ensure_future(self.agent.replies.get())
        self.agent.turns.put_nowait(text)
        await asyncio.wait({reply, self.playing}, return_when=asyncio.FIRST_COMPLETED)
        if reply.done():
            return reply.result(), False, 0.0
        reply.cancel()
        trace = self.playing.result()
        self.scores = {name: reward.score for name, reward in trace.rewards.items()} | trace.metrics
        return "", True, trace.reward

    def __del__(self):
        if hasattr(self, "playing"):
            self.playing.cancel()


class Agent:
    """Agent of verifiers whose model is the one that tlt trains."""

    def __init__(self):
        self.turns, self.replies, self.trainable = asyncio.Queue(), asyncio.Queue(), True

    async def play(self, env, task):
        agents = vf.Agents(env.config, self.named)
        await env.setup(agents)
        await env.run(task, agents)
        ended = {"task": self.trace.task, "traces": [self.trace], "ok": True}
        await env.finalize(task, vf.Episode(env=vf.EnvInfo(id=env.config.env_id), **ended))
        return self.trace

    def named(self, name, config):
        self.name, self.config = name, config
        return self

    async def run(self, task):
        async with self.interaction(task):
            await self.turn()
        return self.trace

    @asynccontextmanager
    async def interaction(self, task):
        recorded = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = vf.AgentInfo(config=self.config, name=self.name, trainable=True)
        self.trace = vf.Trace(task=recorded, state=state_cls(type(task))(), agent=agent)
        self.add(opening(task))
        yield self
        self.trace.is_completed = self.trace.ok = True
        await task.score(self.trace)

    async def turn(self, message=None):
        """Pass a message of the user to the model, and return the model's turn."""
        if message is not None:
            self.add([vf.UserMessage(content=message)])
            self.replies.put_nowait(message)
        answer = vf.AssistantMessage(content=str(await self.turns.get()))
        self.add([answer], sampled=True)
        return vf.Segment(messages=[answer])

    def add(self, messages, sampled=False):
        nodes = self.trace.nodes
        for message in messages:
            nodes.append(vf.MessageNode(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled))


if __name__ == "__main__":
    if not sys.argv[3:]:
        sys.exit(__doc__)
    name, arguments, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    for index, task in enumerate(load(name, arguments, size)[1]):
        messages = [message.model_dump(exclude_none=True) for message in opening(task)]
        row = {"environment": name, "arguments": arguments, "size": size, "index": index}
        print(json.dumps({"question": messages} | row))
