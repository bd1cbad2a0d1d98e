"""Arguments of reward functions that the user wrote. The name of each parameter determines its argument."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection
from typing import Any

from tlt.rewards.answers import Answer, RewardError
from tlt.types import Prompt

Fill = Callable[[Prompt, Answer], Any]
_NEAR = 0.8  # similarity, by difflib, from which a parameter's name is taken for a misspelled one

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
    known = _known(columns)
    found: dict[str, Fill] = {}
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        name = next((name for name in _spellings(parameter.name, lists) if name in known), "")
        if name and parameter.kind != parameter.POSITIONAL_ONLY:
            _refuse_two_sources(label, parameter.name, name, columns)
            found[parameter.name] = known[name]
        elif parameter.default is parameter.empty:
            raise RewardError(f"{label} needs the argument {parameter.name!r}: {_remedy(parameter, known, lists)}")
        elif near := difflib.get_close_matches(parameter.name, known, n=1, cutoff=_NEAR):
            raise RewardError(
                f"{label} has the parameter {parameter.name!r}, which would always have its default: call it "
                f"{near[0]}, or, if the default is meant, give it another name"
            )
    if not found:
        raise RewardError(f"{label} has no parameter that can be filled: {_choice(known)}")
    _refuse_another_order(label, list(found))
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
        found = {name: known[name] for name in columns if name not in _OURS and name not in _OTHERS} | found
    return found


def _known(columns: Collection[str]) -> dict[str, Fill]:
    """Return, for each parameter name that can be filled, the function that gives its argument. The order of the names
    is: values of tlt, columns of the data, names that reward functions for TRL and verl use.

    `ground_truth` is the right answer (data.answer_column), unless the data has a column named `ground_truth`.
    """
    found: dict[str, Fill] = {name: lambda prompt, answer, name=name: prompt.data.get(name) for name in columns}
    if "ground_truth" in found:
        found["ground_truth"] = lambda prompt, answer: prompt.data.get("ground_truth", prompt.ground_truth)
    return _OURS | {name: fill for name, fill in found.items() if name not in _OURS} | _OTHERS


def _spellings(name: str, lists: bool) -> list[str]:
    """Return the names under which the argument of a parameter is looked up, in order. If the function takes lists, a
    plural such as `responses` is also looked up as its singular. The singular comes first if it is a parameter name of
    tlt, TRL or verl."""
    single = name.removesuffix("s")
    if not lists or single == name:
        return [name]
    return [single, name] if single in _OURS or single in _OTHERS else [name, single]


def _remedy(parameter: inspect.Parameter, known: Collection[str], lists: bool) -> str:
    if parameter.kind == parameter.POSITIONAL_ONLY:
        return "a parameter before `/` cannot be filled by its name"
    if not lists and parameter.name.removesuffix("s") in known:
        return "if the function takes lists, set batched = true in [reward] or in its [[reward.terms]]"
    return _choice(known)


def _choice(known: Collection[str]) -> str:
    return f"available names are {', '.join(known)}"


def _refuse_two_sources(label: str, parameter: str, name: str, columns: Collection[str]) -> None:
    """Raise RewardError if `name` is both a value of tlt and a column of the data.

    `prompt` and `answer` are allowed, because they are always the values of tlt. `task` is allowed, because tlt itself
    reads it from the data.
    """
    if name in columns and name in (_OURS | _OTHERS).keys() - {"prompt", "answer", "task"}:
        raise RewardError(
            f"{label} has the parameter {parameter!r}, which is both a value of tlt and a column of your data: rename "
            f"the column, or read it as prompt.data[{name!r}]"
        )


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
