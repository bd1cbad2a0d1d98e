"""Mathematics in the notations of data sets and models, with the verdict of a person."""

from __future__ import annotations

from typing import Any

import pytest

from tlt.config import parse_config
from tlt.rewards import RewardError, refuse_unanswered
from tlt.rewards.answers import Answer, equal, is_mathematics
from tlt.rewards.scores import make_terms
from tlt.types import Prompt

# right answer -> answers of a model that are right, and those that are wrong
PAIRS: dict[str, tuple[list[str], list[str]]] = {
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = 72.\n#### 72": (["72"], ["24"]),
    "He pays $5 and $7.\n#### 1,234": (["1234"], []),
    "033": (["33"], ["3"]),
    "7": (["so the answer is $x = 7$."], ["so the answer is $x = 8$.", "pages 4–7"]),
    r"\frac{\sqrt{3}}{3}": ([r"\frac{1}{\sqrt{3}}", r"$\dfrac{\sqrt3}{3}$"], ["3"]),
    r"3\sqrt{13}": ([r"\boxed{3\sqrt{13}}"], ["13", "3"]),
    "p - q": (["$p-q$"], ["$q-p$"]),
    r"\text{Evelyn}": ([r"\text{Evelyn}", "Evelyn", r"\boxed{\text{Evelyn}}"], [r"\text{Carla}", "5"]),
    r"(3,\infty)": ([r"$(3, \infty)$", "(3, ∞)"], [r"$[3, \infty)$"]),
    "[-2,7]": ([r"\left[-2,7\right]"], ["-2"]),
    r"(-\infty, -2] \cup [5, \infty)": ([r"$(-\infty,-2]\cup[5,\infty)$"], [r"$(-\infty,-2)\cup(5,\infty)$"]),
    r"\{-3, 5\}": ([r"$\{5, -3\}$"], []),
    "-3, 5": (["5, -3"], ["5"]),
    "(4,-1)": (["$(4,-1)$"], ["$(-1,4)$", "-1"]),
    r"\begin{pmatrix} 1 & 0 \\ -2 & 5 \end{pmatrix}": (
        [r"$\begin{pmatrix}1&0\\-2&5\end{pmatrix}$"],
        [r"$\begin{pmatrix}1&0\\-2&6\end{pmatrix}$", "5"],
    ),
    r"25\%": (["25%", r"$25\%$", "0.25", "25"], [r"52\%"]),
    "x = 5": (["5", "x=5"], ["6"]),
    "y = 2x + 3": (["$y=3+2x$"], ["$y=2x-3$", "2"]),
    ".5": (["0.5"], ["5"]),
    "A": (["A is the answer", "A square"], ["A, B, C, D", "A or B", "a square"]),
    "B": (
        ["B", "(B)", r"\boxed{B}", "The answer is (B).", "A triangle has three sides, so it is B.", "It is a B."],
        ["C", "The answer is (C).", "42", "a or b", "A square"],
    ),
    "(D)": ([r"$\textbf{(D)}$"], []),
    r"\textbf{(E)}": (["E"], []),
    r"\$18.90": (["18.9", "$18.90"], []),
    r"90^\circ": (["90", r"$90^{\circ}$"], [r"45^\circ"]),
    r"12 \text{ cm}": (["12 cm"], []),
    r"2\sqrt{3} \text{ inches}": ([r"2\sqrt{3}"], []),
    r"2\sqrt{3} inches": ([r"$2\sqrt{3}$"], ["2"]),
    "18 dollars": (["$18"], []),
    "1 1/2": (["3/2"], ["1"]),
    r"1\frac{1}{2}": (["1.5"], []),
    r"10,\!080": (["10{,}080"], ["10"]),
    "1 234": (["1234"], []),
    r"32\,348": (["32,348"], []),
    "6 + 9i": (["$9i+6$"], ["6"]),
    r"2\pi": (["2*pi", "2pi", "2π"], []),
    "2": ([], [r"2\pi", r"the length is 2\sqrt{3}", "√2", "The area is 10 cm^2."]),
    "5": (["5 km/h"], [r"5\sqrt{2}", ".5"]),
    r"\sqrt{2}/2": (["sqrt(2)/2"], []),
    "6xy": (["$6yx$"], []),
    "1.5e-3": (["0.0015"], []),
    r"2.5 \times 10^3": (["2500"], []),
    r"\frac12": (["0.5"], []),
    r"-\frac{3}{4}": (["-0.75"], ["0.75"]),
    r"The answer is $\frac{3}{8}$.": (["3/8"], []),
    r"$\boxed{7}$": (["7"], []),
    "x > 3": (["$x>3$"], ["$x<3$"]),
    "-2 < x < 5": (["$-2<x<5$"], []),
    "42": (
        [
            *("42.", "**42**", "It is 42.", r"the length is 42 \text{ cm}", "４２"),
            *("<b>42</b>", "<answer>42</answer>", "`42`", "```\n42\n```", "__42__"),
        ],
        ["<b>43</b>"],
    ),
    r"2\sqrt{3}": ([r"the length is 2\sqrt{3} inches"], []),
    "3:4": (["$3:4$"], []),
    r"\log 2": (["log(2)"], []),
    "10101_2": (["10101_2"], []),
    "5!": (["120"], []),
    r"\dfrac{\pi}{4}": (["pi/4"], []),
    r"x=1 \text{ or } x=-1": (["$x=-1$ or $x=1$"], []),
    r"\text{even}": (["even"], []),
    "4": ([], ["no idea", ""]),
    r"\sqrt[3]{5}": (["5^{1/3}"], []),
    r"\binom{5}{2}": (["10"], []),
    "k": (["$k$"], []),
    r"\pm 3": (["$3, -3$"], []),
    "3": ([], ["<b>2</b>3", "The answer is –3.", "3²"]),
    "8": (["2<sup>3</sup>"], []),
    "-3": (["–3", "−3", "The answer is –3."], []),
    "-2": ([], ["1–3"]),
    r"\sqrt{2}": (["√2", "√(2)"], []),
    r"2\sqrt{2}": (["2√2"], []),
    "½": (["0.5"], []),
    "5/2": (["2½"], []),
    "1": ([], ["2½"]),
    r"\frac{1}{2}": (["1⁄2"], []),
    "9": (["3²"], []),
    "x^2": (["x²"], []),
    "x^{-1}": (["x⁻¹"], []),
    "6": (["2·3"], []),
    "1234": (["1\u202f234"], []),
    "10": (["10 cm^2", "10 cm²", "The area is 10 cm^2.", "10 m^{2}", "10 m/s^2"], ["10x^2"]),
    r"10 \text{ cm}^2": (["10 cm^2"], []),
    "10 cm^2": (["10"], []),
    "12": ([], ["10^2 cm"]),
    "10m^2": (["$10 m^2$"], ["10"]),
}


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [(gold, answer, i == 0) for gold, both in PAIRS.items() for i in (0, 1) for answer in both[i]],
)
def test_the_verdict_is_that_of_a_person(gold: str, answer: str, right: bool) -> None:
    assert is_mathematics(gold)
    assert equal(gold, answer) == right


def config(name: str = "math") -> Any:
    return parse_config({"model": {"path": "-"}, "data": {"path": "-"}, "reward": {"name": name}})


@pytest.mark.parametrize(
    ("gold", "answer", "reward"),
    [
        (["3", r"\frac{6}{3}"], "2", 1.0),
        (["3", "2"], "5", 0.0),
        (3.0, "3", 1.0),
        (1e-05, "0.00001", 1.0),
        (1234, "1,234", 1.0),
    ],
)
def test_numbers_and_several_right_answers(gold: Any, answer: str, reward: float) -> None:
    (term,) = make_terms(config())
    assert term.scores([(Prompt(0, "", (1,), {"answer": gold}), Answer(answer, answer, 1))]) == [reward]


@pytest.mark.parametrize("gold", ["proof", "Yes, it converges", "see the figure", True, ["3", "unknown"]])
def test_a_right_answer_that_is_not_mathematics_is_refused(gold: Any) -> None:
    prompts = [Prompt(0, "one", (1,), {"answer": "1"}), Prompt(1, "two", (1,), {"answer": gold})]
    with pytest.raises(RewardError, match=r"prompt 1 \('two'\): its answer '.*' cannot be read as mathematics"):
        refuse_unanswered(config(), prompts)


@pytest.mark.parametrize("name", ["math", "exact"])
@pytest.mark.parametrize("gold", [None, "", " \n", float("nan"), [], ["4", ""]])
def test_a_right_answer_that_is_empty_is_refused(name: str, gold: Any) -> None:
    row = {"question": "q", "solution": "1", "answer": gold}
    with pytest.raises(RewardError, match=r"prompt 0 .*no right answer.*columns \(question, solution\)"):
        refuse_unanswered(config(name), [Prompt(0, "one", (1,), row)])
