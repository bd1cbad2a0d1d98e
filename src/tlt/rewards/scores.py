"""What an answer is worth: one small function a reward, each f(prompt, answer) -> float. No torch here."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

from tlt.config import Config, RewardTerm
from tlt.data import task_dataset
from tlt.types import Prompt


class RewardError(ValueError):
    """A reward that cannot be used; the message names it and the remedy."""


@dataclass(frozen=True)
class Answer:
    text: str
    """the whole response"""
    answer: str
    """what follows the marker"""
    tokens: int
    """of the response"""


Score = Callable[[Prompt, Answer], float]


class Term(NamedTuple):
    """The reward is the sum of weight * score over its terms."""

    name: str
    """as the recipe has it; a second one of the same name is `name_2`"""
    weight: float
    score: Score


def make_terms(config: Config) -> list[Term]:
    """Those that the recipe's reward section names. Raises RewardError."""
    counts: Counter[str] = Counter()
    terms = []
    for term in config.reward.all_terms:
        counts[term.name] += 1
        number = f"_{counts[term.name]}" if counts[term.name] > 1 else ""
        terms.append(Term(term.name + number, term.weight, _score_of(term, config)))
    return terms


def extract_answer(text: str, marker: str) -> str:
    """The text after the last `marker`, stripped; empty if the marker is missing. No marker: the whole text."""
    if not marker:
        return text.strip()
    _, found, answer = text.rpartition(marker)
    return answer.strip() if found else ""


def _score_of(term: RewardTerm, config: Config) -> Score:
    if ":" in term.name:
        return _users(term.name, config.reward.folder)
    if term.name == "reasoning_gym":
        return _reasoning_gym(config)
    if term.name == "math":
        return _math()
    simple = {"exact": exact, "format": partial(matches, term.pattern)}
    return simple.get(term.name) or partial(length, term.length_from, term.length_to)


# -- pure functions of the answer --------------------------------------------------------------------------------------


def exact(prompt: Prompt, answer: Answer) -> float:
    """1 if the answer is the row's `answer`, as text without outer white space; else 0."""
    return float(answer.answer == str(prompt.data["answer"]).strip())


def matches(pattern: str, prompt: Prompt, answer: Answer) -> float:
    """1 if the regular expression is found in the whole response, else 0."""
    return float(re.search(pattern, answer.text) is not None)


def length(start: int, end: int, prompt: Prompt, answer: Answer) -> float:
    """`length_penalty` of the response."""
    return length_penalty(answer.tokens, start, end)


def length_penalty(tokens: int, start: int, end: int) -> float:
    """0 up to `start` tokens, then linearly down to -1 at `end` and above: DAPO's soft overlong punishment (arXiv
    2503.14476, equation 13).

    start 6, end 10: 6, 7, 9, 10 tokens -> 0, -0.25, -0.75, -1.
    """
    return -min(1.0, max(0, tokens - start) / (end - start))


# -- those of others ---------------------------------------------------------------------------------------------------

# checkers that raise on an answer that they cannot parse, which is wrong; any other that raises is at fault itself
RAISES_ON_MALFORMED = {"boxnet", "coin_flip", "game_of_life", "prime_factorization"}
_MALFORMED = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError)


def _reasoning_gym(config: Config) -> Score:
    datasets = {stage: task_dataset(config.data, stage) for stage in {task.stage for task in config.data.tasks}}

    def score(prompt: Prompt, answer: Answer) -> float:
        entry = prompt.data["entry"]
        try:
            return datasets[prompt.data["stage"]].score_answer(answer.answer, entry)
        except _MALFORMED:
            if entry["metadata"]["source_dataset"] in RAISES_ON_MALFORMED:
                return 0.0
            raise

    return score


def _math() -> Score:
    """1 if the answer equals the row's `answer` as mathematics (math-verify), else 0."""
    try:
        from math_verify import parse, verify
    except ImportError:
        raise RewardError("reward.name = 'math' needs math-verify: pip install 'tlt[math]'") from None

    def read(text: str) -> list[Any]:
        # its own time limits would call a hang a wrong answer: ours are around the whole process
        found = parse(text, parsing_timeout=None)  # type: ignore[arg-type]
        return found or parse(f"${text}$", parsing_timeout=None)  # type: ignore[arg-type]

    def score(prompt: Prompt, answer: Answer) -> float:
        gold = read(str(prompt.data["answer"]))
        if not gold:
            raise RewardError(f"prompt {prompt.prompt_id}: {prompt.data['answer']!r} cannot be read as mathematics")
        return float(verify(gold, read(answer.answer), timeout_seconds=None))

    return score


def _users(path: str, folder: str) -> Score:
    module, _, name = path.partition(":")
    for place in map(os.path.abspath, (".", folder)):  # a console script has not even the working directory
        if place not in sys.path:
            sys.path.insert(0, place)
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:
        said = f"reward.name = {path!r} cannot be imported ({type(error).__name__}: {error})"
        raise RewardError(f"{said}: write 'module:function'") from error
    if not callable(found):
        raise RewardError(f"reward.name = {path!r} is not a function: write 'module:function'")
    function = cast(Callable[[Prompt, str], float], found)
    return lambda prompt, answer: function(prompt, answer.answer)
