"""Arguments of reward functions that the user wrote. The name of each parameter determines its argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

from tlt.rewards.answers import Answer, RewardError
from tlt.types import Prompt

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
