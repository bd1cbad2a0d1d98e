"""Environments that raise, return invalid values or end their process: named outcomes, and the next turn continues."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import tiny_environments

from tlt.config import Config, ConfigError, parse_config
from tlt.environments.call_reader import FORMS, CallReader
from tlt.environments.instances import Environments, Turn, TurnText, open_environments
from tlt.rewards import RewardError
from tlt.rewards.isolated import IsolatedScore
from tlt.rewards.verdicts import Verdict
from tlt.types import Prompt

PROMPT = Prompt(5, "the question", (1,), {"answer": "7"})


def config(name: str = "tiny_environments:Trouble", **reward: Any) -> Config:
    section = {"environment": name, "timeout_seconds": 20.0} | reward
    return parse_config({"model": {"path": "-"}, "data": {"path": "-"}, "reward": section})


def asked(isolated: IsolatedScore, *said: str, prompt: Prompt = PROMPT, seed: int = 1) -> Verdict:
    return isolated.score_all([(prompt, Turn(1, seed, said))])[0]


@pytest.fixture(scope="module")
def isolated() -> Iterator[IsolatedScore]:
    isolated = IsolatedScore(config(memory_mb=2048), opens=open_environments)
    yield isolated
    isolated.close()


def test_a_turn_has_its_special_tokens_and_a_reply_may_be_messages(isolated: IsolatedScore) -> None:
    assert asked(isolated, TurnText("written", "written<eos>")).reply == "written<eos>"
    assert asked(isolated, "messages").reply == [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    found = asked(isolated, prompt=replace(PROMPT, text="messages at once"))
    assert (found.outcome, "reset returned the reply [{" in found.detail) == ("error", True)


def test_calls_are_read_in_the_form_of_the_model_or_the_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments that read no calls themselves do not need that form."""
    monkeypatch.setattr(tiny_environments.Desk, "call_reader", CallReader())
    desk, example = config("tiny_environments:Desk", folder="tests"), "<call>add(2, 3)</call>"
    answer, _ = open_environments(desk, (), CallReader(FORMS[2], (), example))
    (found,) = answer([(PROMPT, Turn(1, 1, ('{"name": "add", "arguments": {"first": 2, "second": 3}}',)))])
    assert example in found.reply[1]["content"]  # type: ignore[index]
    wrong = CallReader(fault="its calls cannot be read: use another model")
    with pytest.raises(RewardError, match=r"Desk' has tools, but its calls cannot be read: use another model"):
        open_environments(desk, (), wrong)
    open_environments(config(folder="tests"), (), wrong)


@pytest.mark.parametrize(
    ("text", "outcome", "detail"),
    [
        ("raise", "error", "KeyError: 'bonus'"),
        ("die", "crash", "its process ended"),
        ("nothing", "error", "step returned None: it must return (reply, done, reward)"),
        ("two", "error", "it must return (reply, done, reward)"),
        ("number", "error", "a reply must be text"),
        ("half", "error", "lone surrogate"),
        ("no messages", "error", "a reply must be text, or messages from step"),
        ("half messages", "error", "lone surrogate"),
        ("nan", "not a number", "nan"),
        ("odd scores", "error", "scores['calls'] is not a number: 'many'"),
        ("allocate", "error", "MemoryError"),
    ],
)
def test_a_fault_is_named_and_the_next_continues(isolated: IsolatedScore, text: str, outcome: str, detail: str) -> None:
    found = asked(isolated, text)
    assert (found.reward, found.outcome, found.reply) == (None, outcome, None)
    assert detail in found.detail
    assert asked(isolated, "hello", seed=2) == Verdict(0.5, reply="turn 1")


def test_a_fault_at_the_start_is_named(isolated: IsolatedScore) -> None:
    prompt = Prompt(6, "raises at once", (1,))
    for said in [(), ("hello",)]:
        found = asked(isolated, *said, prompt=prompt)
        assert found.outcome == "error"
        assert re.fullmatch(r"\S+tiny_environments\.py:\d+: KeyError: 'bonus'", found.detail)


def test_an_episode_has_its_own_instance_which_can_be_created_again(isolated: IsolatedScore) -> None:
    assert asked(isolated, seed=1) == asked(isolated, seed=2) == Verdict(0.0, reply="")
    assert asked(isolated, "a", seed=1).reply == "turn 1"
    assert asked(isolated, "a", "b", seed=1).reply == "turn 2"
    assert asked(isolated, "a", seed=2).reply == "turn 1"
    assert asked(isolated, "die", seed=3).outcome == "crash"
    assert asked(isolated, "a", "b", "c", seed=1).reply == "turn 3", "told again what was said before"
    assert asked(isolated, "a", "another", seed=2).reply == "turn 2"


def test_an_instance_lasts_as_long_as_its_rollout() -> None:
    """A rollout that repeats a step has the same seeds."""
    made: list[tiny_environments.Echo] = []
    environments = Environments(lambda: made.append(tiny_environments.Echo()) or made[-1], 20.0)
    for rollout, said, count in [(1, ("a",), 1), (1, ("a", "b"), 1), (2, ("a", "b", "c"), 2)]:
        environments.answer_all([(PROMPT, Turn(rollout, 1, said))])
        assert len(made) == count


async def shout(text: str) -> str:
    await asyncio.sleep(0)
    return text.upper()


class Client:
    """Environment with plain methods that runs an event loop for each call of a server."""

    def reset(self, prompt: Prompt) -> str:
        return asyncio.run(shout("go"))

    def step(self, text: str) -> Any:
        return asyncio.run(shout(text)), False, 0.0


class AsyncOpening(Client):
    async def reset(self, prompt: Prompt) -> str:  # type: ignore[override]
        return await shout("go")


class Decorated(Client):
    """Environment whose `step` is not seen to be async."""

    def step(self, text: str) -> Any:
        async def answered() -> Any:
            return await shout(text), False, 0.0

        return answered()


class OneLoop(Client):
    """Environment that uses the event loop of `step` from its beginning."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    def reset(self, prompt: Prompt) -> str:
        self.opening = self.loop.create_task(shout("go"))
        return "GO"

    async def step(self, text: str) -> Any:  # type: ignore[override]
        return await shout(text) if await self.opening == "GO" else "", False, 0.0


@pytest.mark.parametrize("made", [Client, AsyncOpening, Decorated, OneLoop])
def test_an_environment_may_use_event_loops_as_it_could_alone(made: type) -> None:
    environments = Environments(made, 20.0)
    for turns, reply in [((), "GO"), (("a",), "A"), (("a", "b"), "B")]:
        assert environments.answer_all([(PROMPT, Turn(1, 1, turns))]) == [Verdict(0.0, reply=reply)]
    assert environments.answer_all([(PROMPT, Turn(1, 2, ("a", "c")))]) == [Verdict(0.0, reply="C")], "replayed"


class Board:
    def reset(self, prompt: Prompt) -> None:
        self.board = prompt.data["board"]

    async def step(self, text: str) -> tuple[str, bool, float]:
        self.board.append(text)
        return "".join(self.board), False, 0.0


def test_an_environment_that_changes_the_data_of_its_prompt_changes_no_other_episode() -> None:
    environments, prompt = Environments(Board, 20.0), replace(PROMPT, data={"board": ["-"]})
    for texts in (("a",), ("a", "b")):
        found = environments.answer_all([(prompt, Turn(1, seed, texts)) for seed in range(3)])
        assert [verdict.reply for verdict in found] == [f"-{''.join(texts)}"] * 3
    (found,) = environments.answer_all([(prompt, Turn(1, 1, ("c", "d")))])
    assert found.reply == "-cd", "replayed"


class Exits(tiny_environments.Echo):
    def step(self, text: str) -> tuple[str, bool, float]:
        return sys.exit(3) if text == "exit" else super().step(text)


def test_a_step_that_exits_is_an_error_of_its_episode() -> None:
    environments = Environments(Exits, 20.0)
    found = environments.answer_all([(PROMPT, Turn(1, seed, (said,))) for seed, said in enumerate(("a", "exit", "b"))])
    assert [verdict.outcome for verdict in found] == ["", "error", ""]
    assert "SystemExit: 3" in found[1].detail


def test_replayed_turns_share_one_timeout() -> None:
    environments = Environments(tiny_environments.Nap, 1.0)
    told = ("0.4", "0.4", "0.4")
    for count in (1, 2, 3):
        (found,) = environments.answer_all([(PROMPT, Turn(1, 1, told[:count]))])
        assert found.reply == f"turn {count}", "each has the whole time"
    (found,) = environments.answer_all([(PROMPT, Turn(1, 2, told))])
    assert found.outcome == "timeout"


def test_async_environments_are_called_concurrently() -> None:
    isolated = IsolatedScore(config("tiny_environments:Nap"), opens=open_environments)
    assert isolated.at_once == 16
    began = time.monotonic()
    found = isolated.score_all([(PROMPT, Turn(1, seed, ("0.3",))) for seed in range(16)])
    assert found == [Verdict(0.0, reply="turn 1")] * 16
    assert time.monotonic() - began < 3, "4.8 s one after the other"
    isolated.close()


def test_a_class_that_is_not_an_environment_is_refused_at_the_start() -> None:
    for name, why in [("NoStep", "has no method step"), ("missing", "cannot be imported")]:
        with pytest.raises(RewardError, match=f"reward.environment = 'tiny_environments:{name}' {why}"):
            IsolatedScore(config(f"tiny_environments:{name}"), opens=open_environments)


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"reward": {"environment": "a:B", "name": "exact"}}, "remove reward.name"),
        ({"reward": {"turns": 3, "name": "exact"}}, "reward.turns needs reward.environment"),
        ({"reward": {"environment": "verifiers"}}, "environment"),
    ],
)
def test_contradicting_fields_are_refused(sections: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_config({"model": {"path": "-"}, "data": {"path": "-"}} | sections)
