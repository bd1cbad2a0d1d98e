"""The arguments of a reward function of the user's: each parameter is filled by its name."""

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
"""names of TRL and verl"""


def fills(function: Callable[..., Any], path: str, columns: Collection[str], lists: bool) -> dict[str, Fill]:
    """Return what each argument of the function is filled with, by its name; **kwargs takes the other columns.

    If `lists`, a name may be a plural. Raises RewardError for a parameter that nothing fills.
    """
    said = f"reward.name = {path!r}"
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # written in C
        raise RewardError(f"{said} does not say its parameters: wrap it in `def f(prompt, answer)`") from None
    known = _known(columns)
    found: dict[str, Fill] = {}
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        name = next((name for name in _spellings(parameter.name, lists) if name in known), "")
        if name and parameter.kind != parameter.POSITIONAL_ONLY:
            _refuse_two_sources(said, parameter.name, name, columns)
            found[parameter.name] = known[name]
        elif parameter.default is parameter.empty:
            raise RewardError(f"{said} wants {parameter.name!r}: {_remedy(parameter, known, lists)}")
    if not found:
        raise RewardError(f"{said} has no parameter that is filled by its name: {_choice(known)}")
    _refuse_another_order(said, list(found))
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
        found = {name: known[name] for name in columns if name not in _OURS and name not in _OTHERS} | found
    return found


def _known(columns: Collection[str]) -> dict[str, Fill]:
    """Ours, then the columns of the data; the column that answers are in is `ground_truth` too."""
    found: dict[str, Fill] = {name: lambda prompt, answer, name=name: prompt.data.get(name) for name in columns}
    if "ground_truth" in found:
        found["ground_truth"] = lambda prompt, answer: prompt.data.get("ground_truth", prompt.ground_truth)
    return _OURS | {name: fill for name, fill in found.items() if name not in _OURS} | _OTHERS


def _spellings(name: str, lists: bool) -> list[str]:
    """`answers` of a function of lists is `answer`, whether or not there is a column of that name."""
    single = name.removesuffix("s")
    if not lists or single == name:
        return [name]
    return [single, name] if single in _OURS or single in _OTHERS else [name, single]


def _remedy(parameter: inspect.Parameter, known: Collection[str], lists: bool) -> str:
    if parameter.kind == parameter.POSITIONAL_ONLY:
        return "a parameter before `/` cannot be filled by its name"
    if not lists and parameter.name.removesuffix("s") in known:
        return "a function of lists needs reward.batched = true"
    return _choice(known)


def _choice(known: Collection[str]) -> str:
    return f"the names that are filled are {', '.join(known)}"


def _refuse_two_sources(said: str, parameter: str, name: str, columns: Collection[str]) -> None:
    """`prompt` and `answer` are ours whatever the data has, and `task` is read from the data."""
    if name in columns and name in (_OURS | _OTHERS).keys() - {"prompt", "answer", "task"}:
        raise RewardError(
            f"{said} wants {parameter!r}, which tlt has of each response and your data has as a column: rename the "
            f"column, or read it as prompt.data[{name!r}]"
        )


def _refuse_another_order(said: str, names: Collection[str]) -> None:
    """To TRL and verl `answer` is the data's and `prompt` is text. So a function that takes ours begins with both, as
    those do that are written for tlt, and one that was written for another project is not called by mistake."""
    single = [name.removesuffix("s") for name in names]
    if {"prompt", "answer"} & set(single) and single[:2] != ["prompt", "answer"]:
        raise RewardError(
            f"{said} has the parameters ({', '.join(names)}): let it begin with (prompt, answer), the row and the "
            "model's answer; behind them it may have response, ground_truth and others by their names"
        )
