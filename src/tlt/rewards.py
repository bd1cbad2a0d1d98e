"""Rewards: reasoning-gym's scorer, exact match, and the user's own `module:function`, all called as f(prompt, answer)
-> float."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable
from typing import cast

from tlt.config import Config
from tlt.data import task_dataset
from tlt.types import Prompt

Reward = Callable[[Prompt, str], float]


class RewardError(ValueError):
    """A reward function that cannot be used; the message names it and the remedy."""


def make_reward(config: Config) -> Reward:
    """f(prompt, text of the response) -> reward, by the recipe's reward section. Raises RewardError."""
    name, marker = config.reward.name, config.reward.answer_marker
    if name == "reasoning_gym":
        score = _reasoning_gym(config)
    elif name == "exact":
        score = exact
    elif ":" in name:
        score = _user_function(name)
    else:
        raise RewardError(f"unknown reward {name!r}: give 'reasoning_gym', 'exact' or your own 'module:function'")
    return lambda prompt, text: _checked(name, score, prompt, extract_answer(text, marker))


def extract_answer(text: str, marker: str) -> str:
    """The text after the last `marker`, stripped; empty if the marker is missing. No marker: the whole text."""
    if not marker:
        return text.strip()
    _, found, answer = text.rpartition(marker)
    return answer.strip() if found else ""


def exact(prompt: Prompt, answer: str) -> float:
    """1 if the answer is the row's `answer`, as text without outer white space; else 0."""
    expected = prompt.data.get("answer")
    if expected is None:
        raise RewardError(f"prompt {prompt.prompt_id} has no answer to compare with: set data.answer_column")
    return float(answer == str(expected).strip())


def _reasoning_gym(config: Config) -> Reward:
    dataset = task_dataset(config.data)

    def score(prompt: Prompt, answer: str) -> float:
        entry = prompt.data["entry"]
        try:
            return dataset.score_answer(answer, entry)
        except (ValueError, TypeError, ArithmeticError, LookupError):
            return 0.0  # some checkers raise on an answer that they cannot parse: it is wrong

    return score


def _user_function(path: str) -> Reward:
    module, _, function = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # `tlt` is a console script: the user's folder is not on the path by itself
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:
        said = f"reward.name = {path!r} cannot be imported ({type(error).__name__}: {error})"
        raise RewardError(f"{said}: write 'module:function'") from error
    if not callable(found):
        raise RewardError(f"reward.name = {path!r} is not a function: write 'module:function'")
    return cast(Reward, found)


def _checked(name: str, score: Reward, prompt: Prompt, answer: str) -> float:
    try:
        reward = float(score(prompt, answer))
    except RewardError:
        raise
    except Exception as error:
        raise RewardError(
            f"reward {name} failed on prompt {prompt.prompt_id} ({type(error).__name__}: {error}); "
            f"the answer was {answer[:80]!r}"
        ) from error
    if not math.isfinite(reward):
        said = f"reward {name} gave {reward} on prompt {prompt.prompt_id}, answer {answer[:80]!r}"
        raise RewardError(f"{said}: return a finite number")
    return reward
