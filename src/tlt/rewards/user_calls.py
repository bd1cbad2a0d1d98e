"""Calls of the user's functions and methods in the process of rewards or environments: async calls, and arguments of
reward functions. The name of each parameter determines its argument."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tlt.rewards.answers import Answer, RewardError
from tlt.types import Prompt

_MORE_THREADS = 32  # threads for `asyncio.to_thread` in addition to one per call; asyncio itself has at most 32
_LATE = "late"
"""name of threads of calls that timed out"""
AT_ONCE = 16
"""largest number of responses in one call of an async or batched function"""
T = TypeVar("T")


class AsyncCalls:
    """Event loop for all calls, because clients and semaphores of the user belong to one event loop.
    `at_once`: largest number of calls that `run` is given. `limit`: timeout of a call in seconds."""

    def __init__(self, at_once: int, limit: float) -> None:
        self.at_once, self.limit = at_once, limit
        self.runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)  # not the loop of the user's plain code
        self._renew_threads()

    def run(self, calls: Iterable[Awaitable[T]]) -> list[T | BaseException]:
        """Await all calls together. Return the result of each, or the exception that it raised. A call that takes
        longer than the limit is cancelled, and its result is a TimeoutError."""
        found = self.runner.run(self._all(calls))
        if any(isinstance(one, TimeoutError) for one in found):
            self._renew_threads()
        return found

    def result(self, call: Awaitable[T]) -> T:
        """Await one call and return its result."""
        (found,) = self.run([call])
        if isinstance(found, BaseException):
            raise found
        return found

    async def _all(self, calls: Iterable[Awaitable[T]]) -> list[T | BaseException]:
        return await asyncio.gather(*map(self._one, calls), return_exceptions=True)

    async def _one(self, call: Awaitable[T]) -> T | BaseException:
        try:
            return await asyncio.wait_for(_without_exit(call), self.limit)
        except TimeoutError:
            return TimeoutError(f"no answer in {self.limit:g} s")

    def _renew_threads(self) -> None:
        """Give `asyncio.to_thread` new threads. A thread cannot be cancelled, so that of a late call would keep its
        place."""
        name = f"calls {id(self)}"
        for thread in threading.enumerate():
            if thread.name.startswith(name):
                thread.name = _LATE
        self.runner.get_loop().set_default_executor(ThreadPoolExecutor(self.at_once + _MORE_THREADS, name))


async def _without_exit(call: Awaitable[T]) -> T | BaseException:
    """Await a call. Return a SystemExit that it raises, because it would end the event loop with all other calls."""
    try:
        return await call
    except SystemExit as error:
        return error


def outside(call: Coroutine[Any, Any, T]) -> T | BaseException:
    """Run a coroutine that never waits, outside any event loop, so that plain code in it may run one. Return its result
    or the exception that it raised."""
    try:
        call.send(None)
    except StopIteration as end:
        return end.value
    except (Exception, SystemExit) as error:
        return error
    raise AssertionError("the coroutine waits")


def late_threads() -> int:
    """Return the number of threads that still run for calls that timed out."""
    return sum(thread.name == _LATE for thread in threading.enumerate())


# -- arguments ---------------------------------------------------------------------------------------------------------


Fill = Callable[[Prompt, Answer], Any]

_OURS: dict[str, Fill] = {
    "prompt": lambda prompt, answer: prompt,
    "answer": lambda prompt, answer: answer.answer,
    "response": lambda prompt, answer: answer.text,
    "token_ids": lambda prompt, answer: list(answer.token_ids),
    "length": lambda prompt, answer: answer.tokens,
    "finish_reason": lambda prompt, answer: answer.finish_reason,
    "task": lambda prompt, answer: prompt.task,
}
_OTHERS: dict[str, Fill] = {
    "completion": _OURS["response"],
    "completion_ids": _OURS["token_ids"],
    "solution_str": _OURS["response"],
}
"""parameter names that reward functions for TRL and verl use -> function that returns the argument"""


def fills(function: Callable[..., Any], label: str, columns: Collection[str], lists: bool) -> dict[str, Fill]:
    """Return, for each parameter of the user's reward function, a function of (prompt, answer) that gives its argument.

    Error messages begin with `label`, such as `reward.name = 'my_reward:close'`. `columns` are the columns of the data.
    A `**kwargs` parameter gets all other columns. If `lists`, the function takes lists and parameter names may be
    plurals. Raises RewardError for a parameter that cannot be filled.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # the function is written in C
        raise RewardError(f"{label} has no readable signature: wrap it in `def f(prompt, answer)`") from None
    others = _of_columns(columns)
    known = _known(others, lists)
    choice = f"available names are {', '.join(known)}"
    found: dict[str, Fill] = {}
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name in known and parameter.kind != parameter.POSITIONAL_ONLY:
            found[parameter.name] = known[parameter.name]
        elif parameter.default is parameter.empty:
            plural = "" if lists else "; names of lists, such as prompts, need batched = true"
            raise RewardError(f"{label} needs the argument {parameter.name!r}: {choice}{plural}")
    if not found:
        raise RewardError(f"{label} has no parameter that can be filled: {choice}")
    _refuse_another_order(label, list(found))
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
        found = {name: fill for name, fill in others.items() if name not in _OURS | _OTHERS} | found
    return found


def _of_columns(columns: Collection[str]) -> dict[str, Fill]:
    """Return, for each column of the data, the function that gives its value. `ground_truth` is the right answer
    (data.answer_column), unless the data has a column named `ground_truth`."""
    found: dict[str, Fill] = {name: lambda prompt, answer, name=name: prompt.data.get(name) for name in columns}
    if "ground_truth" in found:
        found["ground_truth"] = lambda prompt, answer: prompt.data.get("ground_truth", prompt.ground_truth)
    return found


def _known(columns: dict[str, Fill], lists: bool) -> dict[str, Fill]:
    """Return, for each parameter name that can be filled, the function that gives its argument. Values of tlt, and
    names that reward functions for TRL and verl use, precede columns of the data. If `lists`, plurals are names too."""
    first = _OURS | _OTHERS
    if lists:
        columns = {f"{name}s": fill for name, fill in columns.items()} | columns
        first |= {f"{name}s": fill for name, fill in first.items()}
    return first | {name: fill for name, fill in columns.items() if name not in first}


def _refuse_another_order(label: str, names: Collection[str]) -> None:
    """Raise RewardError if a reward function has a parameter `prompt` or `answer`, but its first two parameters are not
    (prompt, answer).

    The reason is that functions for TRL or verl use the same names for other values: `answer` is a column of their
    data, and `prompt` is text.
    """
    single = [name.removesuffix("s") for name in names]
    if {"prompt", "answer"} & set(single) and single[:2] != ["prompt", "answer"]:
        raise RewardError(
            f"{label} has the parameters ({', '.join(names)}): begin with (prompt, answer). prompt.data is the row of "
            "your data, and answer is the model's answer; the right answer is ground_truth, which may follow"
        )
