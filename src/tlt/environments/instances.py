"""Environments in a separate process. An environment is an instance of the user's class for one episode."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Collection, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from tlt.config import Config
from tlt.data.chat import Messages
from tlt.data.continuation import ReplyContent
from tlt.environments.call_reader import CallReader
from tlt.files import is_text
from tlt.rewards.answers import RewardError
from tlt.rewards.scores import imported
from tlt.rewards.user_calls import AT_ONCE, AsyncCalls, outside
from tlt.rewards.verdicts import Verdict, failed, number
from tlt.types import Prompt


class TurnText(str):
    """Text of a turn of the model without special tokens. `written` has the special tokens too."""

    written: str

    def __new__(cls, text: str, written: str = "") -> TurnText:
        made = super().__new__(cls, text)
        made.written = written
        return made


class ReplyText(str):
    """Text of a reply that consists of several messages. `messages` may begin with the model's turn and its calls."""

    messages: Messages

    def __new__(cls, text: str, messages: Messages) -> ReplyText:
        made = super().__new__(cls, text)
        made.messages = messages
        return made


def written(text: str) -> str:
    """Return the text of a turn with special tokens, if they are known."""
    return getattr(text, "written", text)


class Turn(NamedTuple):
    """Request to an environment for its reply to the model's turns so far in an episode."""

    rollout: int
    """number of the rollout; environments of earlier rollouts are dropped"""
    seed: int
    """seed of the request for the response; it identifies the episode"""
    texts: tuple[str, ...]
    """text that the model generated in each turn so far (`TurnText`); empty before the first turn"""


class Environments:
    """Environments in one process, one for each unfinished episode. `make` creates an environment. `timeout` is the
    time limit for one reply, in seconds. `at_once`: largest number of turns in a call.

    If `step` is async, everything runs in one event loop. Otherwise plain methods run outside any, because they may
    call `asyncio.run`.
    """

    def __init__(self, make: Callable[[], Any], timeout: float, at_once: int = 1) -> None:
        self.make, self._calls = make, AsyncCalls(at_once, timeout)
        self.is_async = inspect.iscoroutinefunction(getattr(make, "step", None))
        self._live: dict[int, tuple[Any, tuple[str, ...]]] = {}  # seed -> (environment, turns it has received)
        self._rollout = 0

    def answer_all(self, asked: Sequence[tuple[Prompt, Turn]]) -> list[Verdict]:
        if (rollout := asked[0][1].rollout) != self._rollout:
            self._live, self._rollout = {}, rollout
        calls = [self._answer(prompt, turn) for prompt, turn in asked]
        found = self._calls.run(calls) if self.is_async else map(outside, calls)
        return [failed(one) if isinstance(one, BaseException) else one for one in found]

    async def _answer(self, prompt: Prompt, turn: Turn) -> Verdict:
        known = self._live.pop(turn.seed, None)
        instance, verdict = await self._step(prompt, turn, known)
        if verdict.reply is not None:
            self._live[turn.seed] = instance, turn.texts
        return verdict

    async def _step(self, prompt: Prompt, turn: Turn, known: tuple[Any, tuple[str, ...]] | None) -> tuple[Any, Verdict]:
        """Return the environment of an episode, and its reply to the last turn as a verdict.

        `known` is the environment with the turns that it has received. If there is none, for example because its
        process ended, or if its turns differ, create the environment again and replay the earlier turns."""
        if known and turn.texts and known[1] == turn.texts[:-1]:
            instance = known[0]
        else:
            instance = self.make()
            opening = await self._result(instance.reset(deepcopy(prompt)))  # it may change prompt.data
            if not turn.texts:
                return instance, Verdict(0.0, reply="" if opening is None else _reply(opening, "reset"))
            for text in turn.texts[:-1]:
                await self._result(instance.step(text))
        verdict = _stepped(await self._result(instance.step(turn.texts[-1])))
        return instance, verdict._replace(scores=_scores(instance)) if not verdict.outcome else verdict

    async def _result(self, value: Any) -> Any:
        """Return what a method of the environment returned, and await it if it is awaitable."""
        if not isinstance(value, Awaitable):
            return value
        return await value if self.is_async else self._calls.result(value)


def open_environments(
    config: Config, columns: Collection[str], call_reader: CallReader | None = None
) -> tuple[Callable[..., list[Verdict]], bool]:
    """Load the user's environment class. Return a function that replies to a list of (prompt, `Turn`), and whether the
    list may have more than one entry (only if `step` is async). Environments with tools read calls by `call_reader`.
    Raises RewardError."""
    name = config.reward.environment
    assert name, "the recipe has an environment"
    make: Any = imported(name, config.reward.folder, "reward.environment", "module:Class")
    for method in ("reset", "step"):
        if not callable(getattr(make, method, None)):
            raise RewardError(f"reward.environment = {name!r} has no method {method}: see docs/environments.md")
    if call_reader and hasattr(make, "call_reader"):
        if call_reader.fault:
            raise RewardError(f"reward.environment = {name!r} has tools, but {call_reader.fault}")
        make.call_reader = call_reader
        call_reader("")  # loads its modules now, because a call of the environment has a time limit
    environments = Environments(make, config.reward.timeout_seconds, AT_ONCE)
    return environments.answer_all, environments.is_async


def _stepped(found: Any) -> Verdict:
    """Return the verdict for the result of `step`, a tuple (reply, done, reward). Raises TypeError or ValueError."""
    if not isinstance(found, tuple | list) or len(found) != 3:
        raise TypeError(f"step returned {found!r:.100}: it must return (reply, done, reward)")
    reply, done, reward = found
    value, fault = number(reward)
    return fault or Verdict(value, reply=None if done else _reply(reply, "step"))


def _scores(instance: Any) -> dict[str, float]:
    """Return the numbers in the attribute `scores` of an environment, by name. Raises ValueError."""
    found: dict[str, float] = {}
    for name, value in dict(getattr(instance, "scores", {})).items():
        found[str(name)], fault = number(value)
        if fault:
            raise ValueError(f"scores[{name!r:.50}] is not a number: {value!r:.50}")
    return found


def _reply(reply: Any, method: str) -> ReplyContent:
    """Return a reply as text or as messages. Raises TypeError or ValueError."""
    reply = getattr(reply, "messages", reply)
    several = isinstance(reply, list) and reply and method == "step" and all(map(_is_message, reply))
    if not isinstance(reply, str) and not several:
        raise TypeError(f"{method} returned the reply {reply!r:.100}: a reply must be text, or messages from step")
    if not is_text(reply if isinstance(reply, str) else json.dumps(reply, ensure_ascii=False)):
        raise ValueError(f"{method} returned a reply with a lone surrogate, which is not valid text: {reply!a:.100}")
    return reply


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
