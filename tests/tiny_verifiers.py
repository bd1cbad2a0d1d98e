"""An environment as in the documentation of verifiers: tasks with a reward and a metric, and a user."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class CountConfig(vf.TasksetConfig):
    most: int = 5


class CountData(vf.TaskData):
    number: int


class CountTask(vf.Task[CountData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace: Any) -> float:
        return float(str(self.data.number) in trace.last_reply)

    @vf.metric
    async def turns(self, trace: Any) -> float:
        return float(trace.num_turns)


class CountTaskset(vf.Taskset[CountTask, CountConfig]):
    def load(self) -> Iterator[CountTask]:
        for i in range(self.config.most):
            yield CountTask(CountData(prompt=f"Say {i}.", system_prompt="Be brief.", number=i), self.config.task)


class CountEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class CountEnv(vf.Env[CountEnvConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            if segment.last_reply == "raise":
                raise KeyError("bonus")
            while str(task.data.number) not in segment.last_reply:
                segment = await interaction.turn(f"No, say {task.data.number}.")
        interaction.trace.record_reward("polite", 0.5)


__all__ = ["CountEnv", "CountTaskset"]
