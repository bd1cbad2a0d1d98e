"""Environments of the real package verifiers: `make test-verifiers`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("verifiers", reason="verifiers is not installed: make test-verifiers")

import verifiers.v1 as vf
from tiny import tiny_tree, train

from tlt.config import Config, parse_config
from tlt.data.continuation import reply_text
from tlt.data.prompts import DataError, load_prompts
from tlt.data.verifiers import load
from tlt.metrics import read_metrics
from tlt.rewards.environments import Environments, Turn
from tlt.rewards.tools import with_tools
from tlt.rewards.verdicts import Verdict
from tlt.rewards.verifiers import Episode
from tlt.store.completions import read_completions
from tlt.types import Prompt


def config(name: str = "tiny_verifiers", **data: Any) -> Config:
    return parse_config({"model": {"path": "-"}, "data": {"environment": name} | data})


def prompts(**data: Any) -> list[Prompt]:
    return load_prompts(config(**data).data, lambda question: (len(str(question)),))


def played(number: int, *texts: str) -> list[Verdict]:
    environments, prompt = Environments(Episode, 20.0), prompts()[number]
    asked = [texts[:count] for count in range(len(texts) + 1)]
    return [environments.answer_all([(prompt, Turn(1, 5, said))])[0] for said in asked][1:]


def test_prompts_are_the_tasks_with_their_system_prompt() -> None:
    assert [prompt.text for prompt in prompts(environment_arguments={"most": 2})] == [
        "Be brief.\n\nSay 0.",
        "Be brief.\n\nSay 1.",
    ]
    assert len(prompts(size=3)) == 3
    seen: list[Any] = []
    load_prompts(config(chat=True, size=1).data, lambda question: (seen.append(question), (1,))[1])
    assert seen == [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say 0."}]]


def test_the_users_messages_are_replies_and_the_rubric_gives_the_reward() -> None:
    """The reward is 2.0 * right (1.0) + 0.5 that the environment records."""
    first, second, last = played(2, "one", "three", "it is 2")
    assert first == second == Verdict(0.0, reply=user("No, say 2."))
    scores = {"right": 1.0, "polite": 0.5, "turns": 3.0, "calls": 0.0, "malformed_calls": 0.0}
    assert last == Verdict(2.5, scores=scores)


def user(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_tools_are_called_and_malformed_calls_counted() -> None:
    texts = [call("calculator_add", first=1, second=2), call("add"), call("calculator_add", first="x"), "3"]
    right, unknown, wrong, last = played(3, *texts)
    own, message = right.reply
    assert own["tool_calls"][0]["function"] == {"name": "calculator_add", "arguments": {"first": 1, "second": 2}}
    assert message == {"role": "tool", "name": "calculator_add", "tool_call_id": "000000001", "content": "3"}
    assert unknown.reply[1]["content"] == "Error: there is no tool 'add': the tools are calculator_add"
    assert wrong.reply[1]["content"].startswith("Error: Error executing tool add")
    assert wrong.reply[1]["tool_call_id"] == "000000003"
    assert (last.reward, last.scores["malformed_calls"], last.scores["calls"]) == (2.5, 2.0, 2.0)
    (schema,) = with_tools(config(chat=True)).data.chat_arguments["tools"]  # type: ignore[misc]
    assert schema["function"]["name"] == "calculator_add"  # type: ignore[index]
    assert sorted(schema["function"]["parameters"]["properties"]) == ["first", "second"]  # type: ignore[index]


def test_an_environment_that_raises_is_an_outcome() -> None:
    (verdict,) = played(2, "raise")
    assert verdict.outcome == "error"
    assert verdict.detail.endswith("KeyError: 'bonus'")


def test_concurrent_episodes_and_one_that_is_created_again() -> None:
    environments, known = Environments(Episode, 20.0), prompts()
    both = [(known[1], Turn(1, 1, ("5",))), (known[2], Turn(1, 2, ("5",)))]
    assert [verdict.reply for verdict in environments.answer_all(both)] == [user("No, say 1."), user("No, say 2.")]
    (found,) = environments.answer_all([(known[4], Turn(1, 3, ("1", "2", "4")))])
    assert (found.reply, found.reward) == (None, 2.5)


def module_of(env: Any = None, tools: Any = None, **changes: Any) -> Any:
    """Patch the module `tiny_needs`: a taskset of one task with these changes, with its environment and its tools."""
    import tiny_verifiers

    module: Any = ModuleType("tiny_needs")
    kind = type("Kind", (tiny_verifiers.CountTask,), changes)
    data = tiny_verifiers.CountData(prompt=changes.get("prompt", "?"), number=1)
    body = {"load": lambda self: [kind(data)], "task_type": classmethod(lambda cls: kind)}
    if tools:
        body["toolsets"] = classmethod(lambda cls, config: [tools])
    module.Given, module.__all__ = type("Given", (tiny_verifiers.CountTaskset,), body), ["Given"]
    if env:
        module.Own, module.__all__ = env, ["Own", "Given"]
    return patch.dict(sys.modules, {"tiny_needs": module})


async def with_runtime(self: Any, trace: Any, runtime: Any) -> float:
    return 0.0


class Counted(vf.State):
    count: int = 0


class Shared(vf.Toolset[vf.ToolsetConfig, Counted]):
    pass


class TwoSeats(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    other: vf.AgentConfig = vf.AgentConfig()


class Duel(vf.Env[TwoSeats]):
    async def run(self, task: Any, agents: Any) -> None: ...


@pytest.fixture(autouse=True)
def loaded_again() -> Iterator[None]:
    load.cache_clear()
    yield
    load.cache_clear()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"NEEDS_CONTAINER": True}, "a container or sandbox"),
        ({"setup": with_runtime}, "a container or sandbox"),
        ({"prompt": None}, "a user who opens the conversation"),
        ({"ends": vf.stop(lambda self, trace: True)}, "hooks of the agent"),
        ({"files": vf.reward(with_runtime)}, "a sandbox for its rewards"),
        ({"env": type("Service", (Duel,), {"start": with_runtime})}, "a service of its own"),
        ({"env": Duel}, "several models"),
        ({"tools": Shared(vf.ToolsetConfig())}, "a state that its tools share"),
    ],
)
def test_features_that_an_episode_lacks_are_refused_by_name(changes: dict[str, Any], why: str) -> None:
    refused = pytest.raises(DataError, match=f"data.environment = 'tiny_needs' needs {why}")
    with module_of(**changes), refused:
        load_prompts(config("tiny_needs").data, lambda text: (1,))


def test_tasks_are_loaded_once_and_no_more_than_needed() -> None:
    """A taskset may be endless."""
    found = load("tiny_verifiers", "{}")
    assert found.tasks(2) == found.tasks(3)[:2] == found.tasks(2)
    assert len(found._tasks) == 3


async def no_turn(self: Any, task: Any, agents: Any) -> None: ...


async def two_conversations(self: Any, task: Any, agents: Any) -> None:
    for _ in range(2):
        await agents.player.run(task)


@pytest.mark.parametrize(
    ("run", "error"),
    [
        (no_turn, "ended without a turn of the model"),
        (two_conversations, "starts a second conversation with the model in one episode"),
    ],
)
def test_an_episode_is_one_conversation(run: Any, error: str) -> None:
    import tiny_verifiers

    with module_of(type("Own", (tiny_verifiers.CountEnv,), {"run": run})):
        (prompt,) = load_prompts(config("tiny_needs").data, lambda text: (1,))
        (found,) = Environments(Episode, 20.0).answer_all([(prompt, Turn(1, 1, ("1",)))])
    assert found.outcome == "error"
    assert error in str(found)


def test_an_environment_sees_the_whole_conversation() -> None:
    """Two calls in a turn, then the answer."""
    import tiny_verifiers

    seen: dict[str, Any] = {}

    class Shelf(vf.Toolset[tiny_verifiers.AddConfig, vf.State]):
        async def setup(self) -> None:
            self.word = "book"

        async def setup_task(self, task: Any) -> None:
            self.number = task.number

        @vf.tool
        async def take(self) -> str:
            """Take all messages that have arrived."""
            return f"{self.word} {self.number}"

    class Own(tiny_verifiers.CountEnv):
        async def setup(self, agents: Any) -> None:
            seen["set up"] = True

        async def run(self, task: Any, agents: Any) -> None:
            async with agents.player.interaction(task) as interaction:
                seen["segment"] = [message.content for message in (await interaction.turn()).messages]

        async def finalize(self, task: Any, episode: Any) -> None:
            seen["final reward"] = episode.traces[0].reward

    async def judged(self: Any, trace: Any) -> float:
        seen["ended well"] = trace.is_completed and trace.ok
        seen["nodes"] = [(node.parent, node.message.content, node.sampled) for node in trace.nodes]
        seen["ids"] = [call.id for message in trace.assistant_messages for call in message.tool_calls or []]
        return 1.0

    calls, answer = 2 * call("shelf_take"), "a book"
    with module_of(Own, Shelf(tiny_verifiers.AddConfig()), judged=vf.reward(judged)):
        (prompt,) = load_prompts(config("tiny_needs").data, lambda text: (1,))
        environments = Environments(Episode, 20.0)
        for said in [(), (calls,), (calls, answer)]:
            (found,) = environments.answer_all([(prompt, Turn(1, 1, said))])
            seen.setdefault("replies", []).append(found.reply and reply_text(found.reply))
    assert seen == {
        "set up": True,
        "replies": ["", "book 1\nbook 1", None],
        "segment": [calls, "book 1", "book 1", answer],
        "ended well": True,
        "nodes": [
            *[(None, "?", False), (0, calls, True), (1, "book 1", False), (2, "book 1", False)],
            (3, answer, True),
        ],
        "ids": ["000000001", "000000002"],
        "final reward": found.reward,
    }


def test_another_task_of_the_same_number_is_an_error() -> None:
    """An episode that is created again would have another reward."""
    (prompt,) = prompts(size=1)
    other = replace(prompt, data=dict(prompt.data) | {"key": "of another task"})
    (found,) = Environments(Episode, 20.0).answer_all([(other, Turn(1, 1, ("0",)))])
    assert "task 0 of tiny_verifiers differs each time it is loaded" in str(found)


def test_a_missing_environment_is_named() -> None:
    with pytest.raises(DataError, match=r"data\.environment = 'nowhere' cannot be loaded"):
        load_prompts(config("nowhere").data, lambda text: (1,))


def test_a_run_trains_on_it(tmp_path: Path) -> None:
    tree = tiny_tree(tmp_path, rollout={"stop_strings": list("abcdefgh "), "max_new_tokens": 96})
    tree["data"] = {"environment": "tiny_verifiers", "environment_arguments": {"most": 4}}
    tree["reward"] = {"turns": 3}
    train(parse_config(tree))
    lines = list(read_completions(tmp_path / "run"))
    assert any(reply.startswith("No, say ") for line in lines for reply in line["replies"])
    assert len(list(read_metrics(tmp_path / "run"))) == 2
