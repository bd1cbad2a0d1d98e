"""What an answer is worth: one small function a reward, each f(prompt, answer) -> float. No torch here.

Those that a recipe names are in `tlt.config.registry`.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import inspect
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from tlt.config import Config, RewardConfig, RewardTerm
from tlt.config.registry import REWARDS, RewardEntry, maker
from tlt.data import task_dataset
from tlt.types import Prompt
from tlt_rl import install_hint


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
    token_ids: tuple[int, ...] = ()
    finish_reason: str = "stop"
    """`stop` or `length`"""


Score = Callable[[Prompt, Answer], Any]
"""a number, or None where the term does not apply"""
Asked = Sequence[tuple[Prompt, Answer]]


class Term(NamedTuple):
    """The reward is the sum of weight * score over its terms."""

    name: str
    """as the recipe has it; a second one of the same name is `name_2`"""
    weight: float
    scores: Callable[[Asked], list[Any]]
    """for each response a number, None where the term does not apply, or the exception that was raised"""
    if_fails: str = "response"
    many: bool = False
    """it is asked about several responses at once rather than about one"""


def make_terms(config: Config) -> list[Term]:
    """Those that the recipe's reward section names. Raises RewardError."""
    counts: Counter[str] = Counter()
    terms = []
    for term in config.reward.all_terms:
        counts[term.name] += 1
        number = f"_{counts[term.name]}" if counts[term.name] > 1 else ""
        if ":" in term.name:
            scores, many = _users(term, config.reward)
        else:
            entry = _entry(term.name)
            scores, many = one_by_one(maker(entry)(term, config)), entry.quick
        terms.append(Term(term.name + number, term.weight, scores, term.if_fails, many))
    return terms


def extract_answer(text: str, marker: str, end: str = "") -> str:
    """The text after the last `marker` and before the next `end`, stripped; empty if the marker is missing, or no end
    follows. No marker: the whole text; no end: up to the end."""
    _, found, answer = text.rpartition(marker) if marker else ("", "yes", text)
    if end:
        answer, closed, _ = answer.partition(end)
        found = found and closed
    return answer.strip() if found else ""


def one_by_one(score: Score) -> Callable[[Asked], list[Any]]:
    def scores(asked: Asked) -> list[Any]:
        found = []
        for prompt, answer in asked:
            try:
                found.append(score(prompt, answer))
            except Exception as error:
                found.append(error)
        return found

    return scores


def _entry(name: str) -> RewardEntry:
    if name not in REWARDS:
        known = ", ".join(REWARDS)
        raise RewardError(f"there is no reward {name!r}: give one of {known}, or your own as 'module:function'")
    return REWARDS[name]


# -- pure functions of the answer --------------------------------------------------------------------------------------


def exactly(term: RewardTerm, config: Config) -> Score:
    return exact


def formatted(term: RewardTerm, config: Config) -> Score:
    return partial(matches, term.pattern)


def brief(term: RewardTerm, config: Config) -> Score:
    return partial(length, term.length_from, term.length_to)


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


def reasoning_gym(term: RewardTerm, config: Config) -> Score:
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


def mathematics(term: RewardTerm, config: Config) -> Score:
    """1 if the answer equals the row's `answer` as mathematics (math-verify), else 0."""
    try:
        from math_verify import parse, verify
    except ImportError:
        raise RewardError(f"reward.name = 'math' needs math-verify: {install_hint('math')}") from None

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


# -- the user's own ----------------------------------------------------------------------------------------------------

_MORE: dict[str, Callable[[Prompt, Answer], Any]] = {
    "response": lambda prompt, answer: answer.text,
    "token_ids": lambda prompt, answer: list(answer.token_ids),
    "length": lambda prompt, answer: answer.tokens,
    "finish_reason": lambda prompt, answer: answer.finish_reason,
    "task": lambda prompt, answer: prompt.data.get("task", ""),
}
"""what a function of the user gets if it has a parameter of this name, behind prompt and answer"""


def _users(term: RewardTerm, config: RewardConfig) -> tuple[Callable[[Asked], list[Any]], bool]:
    """The function f(prompt, answer, ...); with `batched`, f(prompts, answers, ...), of lists. And whether it is asked
    about many at once."""
    function = _imported(term.name, config.folder)
    more = _asked_for(function, term.name)
    if inspect.iscoroutinefunction(function):
        return lambda asked: asyncio.run(_all_at_once(function, more, asked, config.timeout_seconds)), True
    if not term.batched:
        return one_by_one(lambda prompt, answer: function(prompt, answer.answer, **_more(more, prompt, answer))), False

    def scores(asked: Asked) -> list[Any]:
        columns = {name: [_MORE[name](*one) for one in asked] for name in more}
        try:
            found = list(function([prompt for prompt, _ in asked], [answer.answer for _, answer in asked], **columns))
        except Exception as error:
            return [error] * len(asked)
        if len(found) != len(asked):
            return [ValueError(f"it gave {len(found)} numbers for {len(asked)} responses")] * len(asked)
        return found

    return scores, True


async def _all_at_once(function: Callable[..., Any], more: Sequence[str], asked: Asked, limit: float) -> list[Any]:
    async def one(prompt: Prompt, answer: Answer) -> Any:
        try:
            return await asyncio.wait_for(function(prompt, answer.answer, **_more(more, prompt, answer)), limit)
        except TimeoutError:
            return TimeoutError(f"no answer in {limit:g} s")

    return await asyncio.gather(*(one(*pair) for pair in asked), return_exceptions=True)


def _more(names: Sequence[str], prompt: Prompt, answer: Answer) -> dict[str, Any]:
    return {name: _MORE[name](prompt, answer) for name in names}


def _asked_for(function: Callable[..., Any], path: str) -> list[str]:
    """The names of its parameters behind the first two. Raises RewardError for one that nobody fills."""
    ours = "write f(prompt, answer): a column of your data is prompt.data['answer']"
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # written in C, it does not say
        return []
    first = [parameter.name for parameter in parameters[:2]]
    if first and first[0] in ("prompts", "completions") and first != ["prompts", "answers"]:  # which are our lists
        raise RewardError(f"reward.name = {path!r} has parameters as TRL names them: {ours}")
    named = [p for p in parameters[2:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for parameter in named:
        if parameter.name not in _MORE and parameter.default is parameter.empty:
            raise RewardError(
                f"reward.name = {path!r} wants {parameter.name!r}: after prompt and answer there are "
                f"{', '.join(_MORE)}; {ours}"
            )
    return [parameter.name for parameter in named if parameter.name in _MORE]


def sources_sha256(config: RewardConfig) -> str:
    """Of the files that the user's own functions are in; what these import is not among them."""
    digest = hashlib.sha256()
    for term in config.all_terms:
        if ":" in term.name and (source := _source(term.name.partition(":")[0], config.folder)):
            digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()


def _source(module: str, folder: str) -> Path | None:
    """The file that `_imported` would find, without running it."""
    places = [os.path.abspath(folder), os.path.abspath("."), *sys.path]
    found = None
    for name in accumulate(module.split("."), "{}.{}".format):
        found = PathFinder.find_spec(name, places)
        if found is None:
            return None
        places = list(found.submodule_search_locations or ())
    return Path(found.origin) if found and found.origin else None


def _imported(path: str, folder: str) -> Callable[..., Any]:
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
    return found
