"""Rewards: reasoning-gym's scorer, exact match, the user's own function, and what is said when one cannot be used."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import reasoning_gym

from tlt import rewards
from tlt.config import Config, parse_config
from tlt.data import load_prompts
from tlt.rewards import RewardError, extract_answer, make_reward
from tlt.types import Prompt


def config(name: str, marker: str = "", **data: Any) -> Config:
    tree = {"model": {"path": "-"}, "data": data or {"path": "-"}, "reward": {"name": name, "answer_marker": marker}}
    return parse_config(tree)


def prompt(**data: Any) -> Prompt:
    return Prompt(5, "the question", (1,), data)


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "marker", "answer"),
    [
        (" 42 \n", "", "42"),
        ("so Answer: 42 ", "Answer:", "42"),
        ("Answer: 1, no. Answer: 2", "Answer:", "2"),
        ("no marker", "Answer:", ""),
        ("Answer:", "Answer:", ""),
    ],
)
def test_the_answer_follows_the_last_marker(text: str, marker: str, answer: str) -> None:
    assert extract_answer(text, marker) == answer


def test_the_marker_is_taken_off_before_the_reward_sees_the_answer() -> None:
    reward = make_reward(config("exact", marker="Answer:"))
    assert reward(prompt(answer="7"), "3 + 4. Answer: 7\n") == 1.0
    assert reward(prompt(answer="7"), "7") == 0.0


# -- reasoning-gym -----------------------------------------------------------------------------------------------------


def test_reasoning_gym_scores_as_the_library_does() -> None:
    data = {"tasks": [{"name": "chain_sum"}, {"name": "gcd"}, {"name": "letter_counting"}], "size": 24}
    given = config("reasoning_gym", **data)
    reward = make_reward(given)
    checkers = {task["name"]: reasoning_gym.create_dataset(task["name"], size=1) for task in data["tasks"]}
    scores = set()
    for asked in load_prompts(given.data, lambda text: list(text.encode())):
        entry = asked.data["entry"]
        checker = checkers[entry["metadata"]["source_dataset"]]
        for answer in (entry["answer"], f"it is {entry['answer']}", "no idea", ""):
            assert reward(asked, answer) == checker.score_answer(answer.strip(), entry)
            scores.add(reward(asked, answer))
    assert {0.0, 1.0} <= scores


def test_an_answer_that_the_checker_cannot_parse_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def score_answer(answer: str, entry: dict[str, Any]) -> float:
        return float(answer)

    monkeypatch.setattr(rewards, "task_dataset", lambda _: SimpleNamespace(score_answer=score_answer))
    reward = make_reward(config("reasoning_gym", tasks=[{"name": "gcd"}]))
    assert reward(prompt(entry={}), "0.5") == 0.5
    assert reward(prompt(entry={}), "half") == 0.0


# -- exact -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "answer", "reward"),
    [("4", "4", 1.0), ("4", " 4\n", 1.0), (" 4", "4", 1.0), (4, "4", 1.0), ("4", "4.0", 0.0), ("4", "", 0.0)],
)
def test_exact_compares_text_without_outer_white_space(expected: Any, answer: str, reward: float) -> None:
    assert make_reward(config("exact"))(prompt(answer=expected), answer) == reward


def test_exact_without_an_answer_names_the_prompt() -> None:
    with pytest.raises(RewardError, match=r"prompt 5 has no answer.*data\.answer_column"):
        make_reward(config("exact"))(prompt(answer=None), "4")


# -- the user's own ----------------------------------------------------------------------------------------------------

USER_MODULE = """
import math

def length(prompt, answer):
    return len(answer) + prompt.data["bonus"]

def raises(prompt, answer):
    raise KeyError("bonus")

def nothing(prompt, answer):
    pass

def word(prompt, answer):
    return "good"

def nan(prompt, answer):
    return math.nan

def infinite(prompt, answer):
    return -math.inf

constant = 3
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module in the working directory, which is not on the path of a console script."""
    (tmp_path / "my_rewards.py").write_text(USER_MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    yield "my_rewards"
    sys.modules.pop("my_rewards", None)


def test_a_users_function_sees_the_prompt_and_the_answer(user_module: str) -> None:
    reward = make_reward(config(f"{user_module}:length", marker=">"))
    assert reward(prompt(bonus=0.5), "..> four") == 4.5
    assert isinstance(reward(prompt(bonus=1), "> x"), float)


@pytest.mark.parametrize("function", ["raises", "nothing", "word", "nan", "infinite"])
def test_a_reward_that_fails_is_named_with_its_prompt_and_answer(user_module: str, function: str) -> None:
    with pytest.raises(RewardError) as error:
        make_reward(config(f"{user_module}:{function}"))(prompt(), "the answer")
    message = str(error.value)
    assert f"{user_module}:{function}" in message
    assert "prompt 5" in message
    assert "the answer" in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["missing", "constant", ""])
def test_what_is_no_function_of_the_module_is_refused(user_module: str, name: str) -> None:
    with pytest.raises(RewardError, match=f"{user_module}:{name}.*write 'module:function'"):
        make_reward(config(f"{user_module}:{name}"))


@pytest.mark.parametrize("name", ["no_such_module:f", ":f"])
def test_a_module_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(RewardError, match=r"reward\.name"):
        make_reward(config(name))


@pytest.mark.parametrize("source", ["def f(:\n", "undefined_name\n", "raise OSError('no disk')\n"])
def test_a_module_that_fails_to_load_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    (tmp_path / "broken_rewards.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RewardError, match="broken_rewards"):
        make_reward(config("broken_rewards:f"))


def test_an_unknown_name_is_refused_with_what_is_known() -> None:
    with pytest.raises(RewardError, match=r"unknown reward 'exakt'.*'exact'.*'module:function'"):
        make_reward(config("exakt"))
