"""Built-in reward functions f(prompt, answer) -> float, and functions that load those of the user.
`tlt.config.registry` lists the names of the built-in ones. The values of a response become its `Verdict`. This module
does not import torch."""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from copy import deepcopy
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from tlt.config import Config, RewardConfig, RewardTerm
from tlt.config.registry import REWARDS, maker
from tlt.data.prompts import task_dataset
from tlt.rewards.answers import Answer, RewardError, equal, right_answers, same
from tlt.rewards.user_calls import AT_ONCE, AsyncCalls, Fill, fills
from tlt.rewards.verdicts import LARGEST, Verdict, number
from tlt.types import Prompt
from tlt.wording import counted
from tlt_rl import install_hint

Score = Callable[[Prompt, Answer], Any]
"""reward function of (prompt, answer) that returns a number, or None if it does not apply to this prompt"""
Asked = Sequence[tuple[Prompt, Answer]]
_MAKES_NAMES = ("*", "__getattr__", "__dict__", "globals", "locals", "vars", "setattr", "exec")
"""names in a module's source that may define further names, which the source does not contain"""


class Term(NamedTuple):
    """Term of a reward, such as `math` or a user's function. The reward is the sum of weight * score over its terms."""

    name: str
    """name of the term in the recipe; a second term with the same name is called `name_2`"""
    weight: float
    scores: Callable[[Asked], list[Any]]
    """function of a list of (prompt, answer). For each it returns a number, None if the term does not apply, or the
    exception that was raised."""
    if_fails: str = "response"
    many: bool = False
    """whether `scores` may be called with several responses at once"""


def make_terms(config: Config, columns: Collection[str] = ()) -> list[Term]:
    """Return the reward terms of the recipe. `columns` are the data's columns. Raises RewardError."""
    terms = []
    for name, term in named_terms(config.reward):
        if ":" in term.name:
            scores, many = _users(term, config.reward, columns)
        else:
            entry = REWARDS[term.name]
            scores, many = one_by_one(maker(entry)(term, config)), entry.quick
        terms.append(Term(name, term.weight, scores, term.if_fails, many))
    return terms


def named_terms(config: RewardConfig) -> Iterator[tuple[str, RewardTerm]]:
    """Yield (name, term) for each reward term. The name is the key of the term's scores. A second term `math` is named
    `math_2`."""
    counts: Counter[str] = Counter()
    for term in config.all_terms:
        counts[term.name] += 1
        yield term.name + (f"_{counts[term.name]}" if counts[term.name] > 1 else ""), term


def one_by_one(score: Score) -> Callable[[Asked], list[Any]]:
    def scores(asked: Asked) -> list[Any]:
        found = []
        for prompt, answer in asked:
            try:
                found.append(score(prompt, answer))
            except (Exception, SystemExit) as error:
                found.append(error)
        return found

    return scores


# -- pure functions of the answer --------------------------------------------------------------------------------------


def exactly(term: RewardTerm, config: Config) -> Score:
    """Return the reward `exact`: 1 if the answer equals a right answer of the prompt, else 0."""
    return lambda prompt, answer: float(any(same(gold, answer.answer) for gold in right_answers(prompt)))


def formatted(term: RewardTerm, config: Config) -> Score:
    """Return the reward `format`: 1 if `pattern` matches anywhere in the response, else 0."""
    return lambda prompt, answer: float(re.search(term.pattern, answer.text) is not None)


def brief(term: RewardTerm, config: Config) -> Score:
    """Return the reward `length`: 0 up to `length_from` tokens, -1 from `length_to` tokens on."""
    return lambda prompt, answer: length_penalty(answer.tokens, term.length_from, term.length_to)


def length_penalty(tokens: int, start: int, end: int) -> float:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, equation 13).

    The penalty is 0 up to `start` tokens, decreases linearly to -1 at `end` tokens, and stays at -1 above. Example for
    start 6 and end 10: 6, 7, 9, 10 tokens -> 0, -0.25, -0.75, -1.
    """
    return 0.0 - min(1.0, max(0, tokens - start) / (end - start))  # not -0.0, which is printed as -0


# -- rewards of other libraries ----------------------------------------------------------------------------------------

# Tasks of reasoning-gym whose checker raises an exception if it cannot parse an answer. The score is then 0. Checkers
# of other tasks raise only if they have a bug.
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
    """Return a reward function that gives 1 if the answer equals a right answer of the prompt as mathematics, else 0.
    Raises RewardError if math-verify is not installed."""
    try:
        importlib.import_module("math_verify")
    except ImportError:
        raise RewardError(f"reward.name = 'math' needs math-verify: {install_hint('math')}") from None

    def score(prompt: Prompt, answer: Answer) -> float:
        return float(any(equal(str(gold), answer.answer) for gold in right_answers(prompt)))

    return score


# -- the user's own ----------------------------------------------------------------------------------------------------


def _users(
    term: RewardTerm, config: RewardConfig, columns: Collection[str] = ()
) -> tuple[Callable[[Asked], list[Any]], bool]:
    """Load the user's reward function of a term. Return a function that computes its scores for a list of (prompt,
    answer), and whether the returned function may be called with several responses at once.

    If `term.batched`, the user's function takes and returns lists. `columns` are the names of the data's columns.
    """
    field = "reward.terms" if config.terms else "reward.name"
    function = imported(term.name, config.folder, field, "module:function")
    filled = fills(function, f"{field} = {term.name!r}", columns, term.batched)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    if not (is_async or term.batched):
        return one_by_one(lambda *one: function(**_arguments(filled, *one))), False
    calls = AsyncCalls(AT_ONCE, config.timeout_seconds)
    if not term.batched:

        async def late(prompt: Prompt, answer: Answer) -> Any:
            return await function(**_arguments(filled, prompt, answer))

        return lambda asked: calls.run(late(*one) for one in asked), True

    def scores(asked: Asked) -> list[Any]:
        try:
            rows = [_arguments(filled, *one) for one in asked]
            given = function(**{name: [row[name] for row in rows] for name in filled})
            given = calls.runner.run(given) if inspect.iscoroutine(given) else given
            if isinstance(given, str | bytes | Mapping | Set):  # these types are iterable too
                raise TypeError(f"it returned a {type(given).__name__}, not a list of numbers")
            found = list(given)
        except (Exception, SystemExit) as error:  # which responses are called together depends on timing
            return [error] if len(asked) == 1 else [scores([one])[0] for one in asked]
        if len(found) != len(asked):
            given, wanted = counted(len(found), "number"), counted(len(asked), "response")
            return [ValueError(f"it returned {given} for {wanted}")] * len(asked)
        return found

    return scores, True


def _arguments(filled: dict[str, Fill], prompt: Prompt, answer: Answer) -> dict[str, Any]:
    """Return the arguments of a call. They are copies, because responses and terms share the data of a prompt."""
    return deepcopy({name: fill(prompt, answer) for name, fill in filled.items()})


def sources_sha256(config: RewardConfig) -> str:
    """Return the sha256 of the files with the user's reward functions or environment. Files that they import are not
    included."""
    digest = hashlib.sha256()
    for name in [config.environment] if config.environment else [term.name for term in config.all_terms]:
        if ":" in name and (source := _source(name.partition(":")[0], config.folder)):
            digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()


def _source(module: str, folder: str) -> Path | None:
    """Return the file of a module as `imported` would find it, or None if there is none. Do not import the module."""
    found = _spec(module, folder)
    return Path(found.origin) if found and found.origin else None


def _spec(module: str, folder: str) -> ModuleSpec | None:
    places = [os.path.abspath(folder), os.path.abspath("."), *sys.path]
    found = None
    for name in accumulate(module.split("."), "{}.{}".format):
        found = PathFinder.find_spec(name, places)
        if found is None:
            return None
        places = list(found.submodule_search_locations or ())
    return found


def refuse_missing_functions(config: RewardConfig) -> None:
    """Raise RewardError if a module that the recipe names for rewards does not exist, has a syntax error, or does not
    define the function or the class. The modules are not imported, because that may take long."""
    named = [("reward.terms" if config.terms else "reward.name", term.name, "function") for term in config.all_terms]
    named += [("reward.environment", config.environment, "Class")] if config.environment else []
    for field, path, kind in named:
        module, _, name = path.partition(":")
        if not name:
            continue
        try:
            _find_definition(module, name, config.folder)
        except (ImportError, AttributeError, SyntaxError, ValueError) as error:
            raise _not_imported(path, field, f"module:{kind}", error) from None


def _find_definition(module: str, name: str, folder: str) -> None:
    """Raise the error that the import of a name would raise, as far as the module's source shows it."""
    top = module.partition(".")[0]
    spec = _spec(module, folder)
    if spec is None:
        is_found_otherwise = not _spec(top, folder) and (top in sys.modules or find_spec(top))
        if not is_found_otherwise:
            raise ModuleNotFoundError(f"No module named {module!r}")
    elif spec.origin and spec.origin.endswith(".py"):
        names = set[str]()
        for node in ast.walk(ast.parse(Path(spec.origin).read_bytes(), spec.origin)):
            fields = (getattr(node, field, None) for field in ("id", "name", "asname"))
            names.update(field for field in fields if isinstance(field, str))
        if not names & {name, *_MAKES_NAMES}:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")


def imported(path: str, folder: str, field: str, form: str) -> Callable[..., Any]:
    """Import and return the user's function or class that a recipe names. `path` is the value of the configuration
    field `field`, and must have the form `form`, such as `module:function`. `folder` is reward.folder. Raises
    RewardError."""
    module, _, name = path.partition(":")
    for place in map(os.path.abspath, (".", folder)):  # console scripts do not have the working directory on sys.path
        if place not in sys.path:
            sys.path.insert(0, place)
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise _not_imported(path, field, form, error) from error
    if not callable(found):
        raise RewardError(f"{field} = {path!r} is not a {form.partition(':')[2].lower()}: write {form!r}")
    return found


def _not_imported(path: str, field: str, form: str, error: Exception) -> RewardError:
    problem = f"{field} = {path!r} cannot be imported ({type(error).__name__}: {error})"
    return RewardError(f"{problem}: correct the file or the name, whose form is {form!r}")


# -- verdicts ----------------------------------------------------------------------------------------------------------


def score(terms: Sequence[Term], prompt: Prompt, answer: Answer) -> Verdict:
    return score_all(terms, [(prompt, answer)])[0]


def score_all(terms: Sequence[Term], asked: Sequence[tuple[Prompt, Answer]]) -> list[Verdict]:
    """Return a verdict for each (prompt, answer). The reward is the weighted sum of the terms' scores. A term that
    returns None is left out. If a term fails, its `if_fails` decides whether the reward is missing or the term is left
    out."""
    columns = [term.scores(asked) for term in terms]
    return [_verdict(terms, values) for values in zip(*columns, strict=True)]


def _verdict(terms: Sequence[Term], values: Sequence[Any]) -> Verdict:
    """Return the verdict of one response from the values of its terms. A value is a number, None or an exception."""
    reward, scores, failed = 0.0, dict[str, float](), None
    for term, value in zip(terms, values, strict=True):
        if value is None:
            continue
        score, fault = number(value)
        if fault and term.if_fails == "response":
            return fault
        if fault:
            failed = fault
            continue
        scores[term.name] = score
        reward += term.weight * score
    if not scores:
        return failed or Verdict(None, "does not apply", "each term returned None")
    if not abs(reward) <= LARGEST:
        return Verdict(None, "not a number", f"the sum of its terms is {reward}")
    return Verdict(reward, scores=scores)
