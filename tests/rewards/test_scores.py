"""Each score against its library or by hand, and the errors of rewards that cannot be used."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from judging import recipe
from reasoning_gym.factory import DATASETS

from tlt.config import Config
from tlt.data.prompts import load_prompts
from tlt.rewards.answers import Answer, RewardError, extract_answer
from tlt.rewards.scores import RAISES_ON_MALFORMED, Score, make_terms, score, score_all
from tlt.types import Prompt


def config(data: dict[str, Any] | None = None, **reward: Any) -> Config:
    return recipe(reward, **data or {})


def prompt(**data: Any) -> Prompt:
    return Prompt(5, "the question", (1,), data)


def answer(text: str, marker: str = "", tokens: int = 0) -> Answer:
    return Answer(text, extract_answer(text, marker), tokens)


def make_score(given: Config) -> Score:
    """Return the function of the only term."""
    (term,) = make_terms(given)

    def score(prompt: Prompt, answer: Answer) -> Any:
        (found,) = term.scores([(prompt, answer)])
        if isinstance(found, Exception):
            raise found
        return found

    return score


def test_an_answer_may_have_an_end_marker() -> None:
    for text in ("<answer>72</answer>", "<answer> 1 </answer> no: <answer> 72 </answer> done"):
        assert extract_answer(text, "<answer>", "</answer>") == "72"
    assert extract_answer("<answer>72", "<answer>", "</answer>") == ""
    assert extract_answer("72</answer>", "<answer>", "</answer>") == ""
    assert extract_answer("72; more", "", ";") == "72"


@pytest.mark.parametrize(
    ("text", "marker", "found"),
    [
        *[(" 42 \n", "", "42"), ("so Answer: 42 ", "Answer:", "42"), ("Answer: 1, no. Answer: 2", "Answer:", "2")],
        *[("no marker", "Answer:", ""), ("Answer:", "Answer:", ""), ("answer: 42", "Answer:", "")],
        *[("Answer:\n42", "Answer: ", "42"), ("first\n\n42", "\n\n", "42"), ("it is (a+b) 1, (a+b) 43", "(a+b)", "43")],
    ],
)
def test_the_answer_follows_the_last_marker(text: str, marker: str, found: str) -> None:
    assert extract_answer(text, marker) == found


@pytest.mark.parametrize(
    ("expected", "text", "reward"),
    [
        *[("4", "4", 1.0), ("4", " 4\n", 1.0), (" 4", "4", 1.0), ("4", "4.0", 0.0), ("4", "4.", 0.0), ("4", "", 0.0)],
        *[(4, "4", 1.0), (4.0, "4", 1.0), (4, "4.", 1.0), (1234, "1,234", 1.0), ("1,234", "1234", 0.0)],
        *[(0.1, "0.1", 1.0), (2**60 + 1, str(2**60), 0.0), (4, "four", 0.0), (4, "", 0.0)],
        *[(True, "true", 1.0), (True, "1", 0.0), (False, "False", 1.0), (False, "0", 0.0)],
        *[(["Paris", "paris"], "paris", 1.0), (["Paris", "paris"], "Rome", 0.0), ([1, 2], "[1, 2]", 1.0)],
        *[([1, 2], "1", 0.0), (["4", "5"], "", 0.0)],
    ],
)
def test_exact_compares_texts_as_texts_and_numbers_as_numbers(expected: Any, text: str, reward: float) -> None:
    assert make_score(config(name="exact"))(prompt(answer=expected), answer(text)) == reward


def test_format_searches_the_whole_response() -> None:
    score = make_score(config(name="format", pattern=r"(?s)^<think>.*</think>\s*Answer: \d+$"))
    assert score(prompt(), answer("<think>\na\n</think> Answer: 12", "Answer:")) == 1.0
    assert score(prompt(), answer("12", "Answer:")) == 0.0


@pytest.mark.parametrize(
    ("tokens", "reward"), [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (95, -0.75), (100, -1.0), (500, -1.0)]
)
def test_length_falls_from_its_first_limit_to_its_second(tokens: int, reward: float) -> None:
    score = make_score(config(name="length", length_from=80, length_to=100))
    assert score(prompt(), answer("", tokens=tokens)) == pytest.approx(reward)


def test_terms_are_weighted_in_the_sum() -> None:
    terms = [
        {"name": "exact", "weight": 2.0},
        {"name": "format", "pattern": "Answer", "weight": 0.5},
        {"name": "length", "length_from": 0, "length_to": 10},
    ]
    named = make_terms(config(terms=terms))
    verdict = score(named, prompt(answer="7"), answer("Answer: 7", "Answer:", tokens=4))
    assert verdict.reward == pytest.approx(2 + 0.5 - 0.4)
    assert verdict.scores == {"exact": 1.0, "format": 1.0, "length": -0.4}, "before their weights"
    assert score(named, prompt(answer="7"), answer("7 or 8", "Answer:", tokens=0)).reward == 0.0


def test_terms_of_one_name_have_different_score_names() -> None:
    patterns = [{"name": "format", "pattern": pattern} for pattern in ("a", "b", "c")]
    scores = score(make_terms(config(terms=patterns)), prompt(), answer("a c")).scores
    assert scores == {"format": 1.0, "format_2": 0.0, "format_3": 1.0}


def test_math_without_its_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(RewardError, match=r"pip install 'tlt-rl\[math\]'"):
        make_score(config(name="math"))


def test_reasoning_gym_scores_as_the_library_does() -> None:
    tasks = [{"name": "chain_sum"}, {"name": "gcd", "stage": 1}, {"name": "letter_counting"}]
    given = config({"tasks": tasks, "size": 24}, name="reasoning_gym")
    score = make_score(given)
    checkers = {task["name"]: reasoning_gym.create_dataset(task["name"], size=1) for task in tasks}
    scores = set()
    for asked in load_prompts(given.data, lambda text: list(text.encode())):
        entry = asked.data["entry"]
        checker = checkers[entry["metadata"]["source_dataset"]]
        for text in (entry["answer"], f"it is {entry['answer']}", "no idea", ""):
            assert score(asked, answer(text)) == checker.score_answer(text.strip(), entry)
            scores.add(score(asked, answer(text)))
    assert {0.0, 1.0} <= scores


MALFORMED = ("", "no idea", "42", "1e999", "[1, 2", "{}", '{"a": 1}', "[[1,2],[3]]", "a:b,c:d", "é数", "A -> B", "nan")
EVERY_TASK = sorted(DATASETS.keys() - {"composite"})


@pytest.mark.slow
def test_the_known_checkers_raise_on_malformed_answers_and_no_others() -> None:
    """An exception of any other checker is a bug in it, and must not be scored as a wrong answer."""
    raising = set()
    for name in EVERY_TASK:
        dataset = reasoning_gym.create_dataset(name, size=1, seed=1)
        for text in MALFORMED:
            try:
                dataset.score_answer(text, dataset[0])
            except Exception:
                raising.add(name)
    assert len(EVERY_TASK) > 100
    assert raising == RAISES_ON_MALFORMED


@pytest.mark.parametrize("name", sorted(RAISES_ON_MALFORMED))
def test_an_answer_that_such_a_checker_cannot_parse_is_wrong(name: str) -> None:
    score, asked = _score_of(name)
    assert max(score(asked, answer(text)) for text in MALFORMED) < 0.1


def test_an_exception_of_any_other_checker_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    score, asked = _score_of("gcd")
    monkeypatch.setitem(asked.data["entry"], "answer", object)
    monkeypatch.setattr(DATASETS["gcd"][0], "score_answer", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        score(asked, answer("4"))


def _score_of(task: str) -> tuple[Score, Prompt]:
    given = config({"tasks": [{"name": task}], "size": 1}, name="reasoning_gym")
    (asked,) = load_prompts(given.data.model_copy(update={"max_prompt_tokens": 10**6}), lambda text: text.encode())
    return make_score(given), asked


def test_a_users_function_is_also_found_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not on the path of a console script."""
    source = "def length(prompt, answer): return len(answer) + prompt.data['bonus']\n"
    (tmp_path / "in_working_directory.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    monkeypatch.chdir(tmp_path)
    score = make_score(config(name="in_working_directory:length"))
    assert score(prompt(bonus=0.5), answer("..> four", ">")) == 4.5


def takes_options(prompt: Prompt, answer: str, options: list[str]) -> float:
    assert prompt.data["options"] is options
    return float(options.pop() == answer)


async def waits_for_options(prompt: Prompt, answer: str, options: list[str]) -> float:
    return takes_options(prompt, answer, options)


def takes_all_options(prompts: list[Prompt], answers: list[str], options: list[list[str]]) -> list[float]:
    if answers == ["a", "a"]:
        options[0].clear()
        raise ValueError("it is called again for each response")
    return list(map(takes_options, prompts, answers, options))


@pytest.mark.parametrize("name", ["takes_options", "waits_for_options", "takes_all_options"])
def test_a_function_that_changes_the_data_of_a_prompt_changes_no_other_score(name: str) -> None:
    """Responses of a group and reward terms have the same prompt."""
    term = {"name": f"test_scores:{name}", "batched": name == "takes_all_options"}
    terms = make_terms(config(terms=[term, term]), columns=["options"])
    for texts, reward in (["a", "a"], 0.0), (["b", "b"], 2.0):
        asked = [(prompt(options=["a", "b"]), answer(text)) for text in texts]
        asked[1] = asked[0]
        assert [verdict.reward for verdict in score_all(terms, asked)] == [reward, reward]
