"""Arguments of the user's reward functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tlt.config import RewardConfig, RewardTerm
from tlt.rewards import columns_of
from tlt.rewards.answers import Answer, RewardError
from tlt.rewards.scores import _users
from tlt.rewards.user_calls import fills
from tlt.types import Prompt

ROW = {"question": "Q", "answer": "42", "solution": "so 42", "extra_info": {"level": 3}, "answers": ["a column"]}
PROMPT = Prompt(0, "Q?", (1,), ROW)
SAID = Answer("I think. Answer: 42", "42", 5, (7, 8), "length")


def called(function: Callable[..., Any], lists: bool = False, prompt: Prompt = PROMPT) -> dict[str, Any]:
    found = fills(function, "own:f", columns_of([prompt]), lists)
    return {name: fill(prompt, SAID) for name, fill in found.items()}


def test_parameters_are_filled_by_their_names() -> None:
    def ours(prompt: Prompt, answer: str, solution_str: str) -> None: ...

    def of_tlt(token_ids: Any, response: Any, *, length: Any, finish_reason: Any, task: Any) -> None: ...

    def of_columns(prompt: Prompt, answer: str, solution: str, question: str) -> None: ...

    def of_verl(solution_str: str, ground_truth: str, extra_info: Any = None, method: str = "strict") -> None: ...

    assert called(ours) == {"prompt": PROMPT, "answer": "42", "solution_str": SAID.text}
    own = {"token_ids": [7, 8], "response": SAID.text, "length": 5, "finish_reason": "length", "task": ""}
    assert called(of_tlt) == own
    assert called(of_columns) == {"prompt": PROMPT, "answer": "42", "question": "Q", "solution": "so 42"}
    assert called(of_verl) == {"solution_str": SAID.text, "ground_truth": "42", "extra_info": {"level": 3}}
    assert called(functools.partial(of_verl, method="loose")).keys() == {"solution_str", "ground_truth", "extra_info"}


def test_the_other_columns_are_passed_as_keywords() -> None:
    """Columns whose names mean a response in TRL and verl are left out."""

    def of_trl(completions: list[str], **kwargs: Any) -> None: ...

    row = ROW | {"solution_str": "old", "completion_ids": [1], "response": "old"}
    rest = {"question": "Q", "solution": "so 42", "extra_info": {"level": 3}, "answers": ["a column"]}
    found = called(of_trl, lists=True, prompt=Prompt(0, "", (1,), row))
    assert found == {"completions": SAID.text, "ground_truth": "42", **rest}


def test_names_of_lists_may_be_plurals_and_those_of_tlt_are_preferred() -> None:
    def ours(prompts: Any, answers: Any, task: Any) -> None: ...

    def of_verl(solution_strs: Any, ground_truths: Any, extra_info: Any) -> None: ...

    verls = {"solution_strs": SAID.text, "ground_truths": "42", "extra_info": {"level": 3}}
    assert called(ours, lists=True) == {"prompts": PROMPT, "answers": "42", "task": ""}
    assert called(of_verl, lists=True) == verls


def test_ground_truth_is_the_column_of_that_name_or_the_answer_column() -> None:
    def f(response: str, ground_truth: str) -> None: ...

    nested = Prompt(0, "", (1,), {"reward_model": {"ground_truth": "7"}}, "reward_model.ground_truth")
    assert called(f, prompt=nested)["ground_truth"] == "7"
    assert called(f, prompt=Prompt(0, "", (1,), {"answer": "1", "ground_truth": "2"}))["ground_truth"] == "2"
    with pytest.raises(RewardError, match=r"needs the argument 'ground_truth'"):
        called(f, prompt=Prompt(0, "", (1,), {"question": "Q"}))


REFUSED = {
    "other names": (lambda p, a: 0.0, r"needs the argument 'p': available names are prompt, answer, response"),
    "lists": (lambda prompts, answers: 0.0, r"argument 'prompts': available .* need batched = true"),
    "written in C": (max, r"has no readable signature: wrap it"),
    "nothing by name": (lambda *args, **kwargs: 0.0, r"no parameter that can be filled"),
    "TRL's answer": (lambda completion, answer: 0.0, r"\(completion, answer\): begin with \(prompt, ans"),
    "no answer": (lambda prompt, response: 0.0, r"\(prompt, response\): begin with"),
    "turned": (lambda answer, prompt: 0.0, r"\(answer, prompt\): begin with"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_parameter_that_cannot_be_filled_is_refused(case: str) -> None:
    function, said = REFUSED[case]
    with pytest.raises(RewardError, match=said):
        called(function)


@pytest.mark.parametrize("name", ["one", "late", "many", "many_late", "callable", "late_callable"])
def test_functions_of_every_kind_get_the_same_arguments(tmp_path: Path, name: str) -> None:
    (tmp_path / "of_names.py").write_text("""
def one(question, response, scale=2.0): return scale * response.endswith(question)
async def late(question, response, scale=2.0): return one(question, response, scale)
def many(questions, responses): return [one(*pair) for pair in zip(questions, responses)]
async def many_late(questions, responses): return many(questions, responses)
class Callable:
    def __call__(self, question, response): return one(question, response)
callable = Callable()
class Late:
    async def __call__(self, question, response): return one(question, response)
late_callable = Late()
""")
    term, config = RewardTerm(name=f"of_names:{name}", batched="many" in name), RewardConfig(folder=str(tmp_path))
    scores, _ = _users(term, config, columns_of([PROMPT]))
    asked = [(Prompt(i, "", (1,), {"question": text}), SAID) for i, text in enumerate(("42", "41"))]
    assert scores(asked) == [2.0, 0.0]
