"""Mathematics in the notations of data sets and models, with the verdict of a person."""

from __future__ import annotations

from typing import Any

import pytest

from tlt.config import parse_config
from tlt.rewards import RewardError, refuse_unanswered
from tlt.rewards.answers import Answer
from tlt.rewards.mathematics import equal, is_mathematics
from tlt.rewards.scores import make_terms
from tlt.types import Prompt

# right answer, answer of the model, whether it is right
PAIRS = [
    ("72", "72", 1),
    ("Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = 72.\n#### 72", "72", 1),
    ("Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = 72.\n#### 72", "24", 0),
    ("He pays $5 and $7.\n#### 1,234", "1234", 1),
    ("204", r"\boxed{204}", 1),
    ("033", "33", 1),
    ("033", "3", 0),
    ("7", "so the answer is $x = 7$.", 1),
    ("7", "so the answer is $x = 8$.", 0),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}", 1),
    (r"\frac{\sqrt{3}}{3}", r"$\dfrac{\sqrt3}{3}$", 1),
    (r"\frac{\sqrt{3}}{3}", "3", 0),
    (r"3\sqrt{13}", r"\boxed{3\sqrt{13}}", 1),
    (r"3\sqrt{13}", "13", 0),
    (r"3\sqrt{13}", "3", 0),
    ("p - q", "$p-q$", 1),
    ("p - q", "$q-p$", 0),
    (r"\text{Evelyn}", r"\text{Evelyn}", 1),
    (r"\text{Evelyn}", "Evelyn", 1),
    (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", 1),
    (r"\text{Evelyn}", r"\text{Carla}", 0),
    (r"\text{Evelyn}", "5", 0),
    (r"(3,\infty)", r"$(3, \infty)$", 1),
    (r"(3,\infty)", r"$[3, \infty)$", 0),
    ("[-2,7]", r"\left[-2,7\right]", 1),
    ("[-2,7]", "-2", 0),
    (r"(-\infty, -2] \cup [5, \infty)", r"$(-\infty,-2]\cup[5,\infty)$", 1),
    (r"(-\infty, -2] \cup [5, \infty)", r"$(-\infty,-2)\cup(5,\infty)$", 0),
    (r"\{-3, 5\}", r"$\{5, -3\}$", 1),
    ("-3, 5", "5, -3", 1),
    ("-3, 5", "5", 0),
    ("(4,-1)", "$(4,-1)$", 1),
    ("(4,-1)", "$(-1,4)$", 0),
    ("(4,-1)", "-1", 0),
    (r"\begin{pmatrix} 1 & 0 \\ -2 & 5 \end{pmatrix}", r"$\begin{pmatrix}1&0\\-2&5\end{pmatrix}$", 1),
    (r"\begin{pmatrix} 1 & 0 \\ -2 & 5 \end{pmatrix}", r"$\begin{pmatrix}1&0\\-2&6\end{pmatrix}$", 0),
    (r"\begin{pmatrix} 1 & 0 \\ -2 & 5 \end{pmatrix}", "5", 0),
    (r"25\%", "25%", 1),
    (r"25\%", r"$25\%$", 1),
    (r"25\%", "0.25", 1),
    (r"25\%", "25", 1),
    (r"25\%", r"52\%", 0),
    ("x = 5", "5", 1),
    ("x = 5", "x=5", 1),
    ("x = 5", "6", 0),
    ("y = 2x + 3", "$y=3+2x$", 1),
    ("y = 2x + 3", "$y=2x-3$", 0),
    ("y = 2x + 3", "2", 0),
    ("B", "B", 1),
    ("B", "(B)", 1),
    ("B", r"\boxed{B}", 1),
    ("B", "The answer is (B).", 1),
    ("(D)", r"$\textbf{(D)}$", 1),
    (r"\textbf{(E)}", "E", 1),
    (r"\text{(C)}", r"\boxed{\text{C}}", 1),
    ("B", "C", 0),
    ("B", "The answer is (C).", 0),
    ("B", "42", 0),
    ("18.90", r"\$18.90", 1),
    (r"\$18.90", "18.9", 1),
    (r"\$18.90", "$18.90", 1),
    (r"90^\circ", "90", 1),
    (r"90^\circ", r"$90^{\circ}$", 1),
    (r"90^\circ", r"45^\circ", 0),
    (r"12 \text{ cm}", "12 cm", 1),
    (r"12\text{ square inches}", "12", 1),
    (r"2\sqrt{3} \text{ inches}", r"2\sqrt{3}", 1),
    (r"2\sqrt{3} inches", r"$2\sqrt{3}$", 1),
    (r"2\sqrt{3} inches", "2", 0),
    ("5 miles per hour", "5", 1),
    ("18 dollars", "$18", 1),
    ("1 1/2", "3/2", 1),
    (r"1\frac{1}{2}", "1.5", 1),
    ("1 1/2", "1", 0),
    ("10,080", "10080", 1),
    (r"10,\!080", "10{,}080", 1),
    (r"10,\!080", "10", 0),
    ("1 234", "1234", 1),
    (r"32\,348", "32,348", 1),
    ("6 + 9i", "$9i+6$", 1),
    ("6 + 9i", "6", 0),
    (r"2\pi", "2*pi", 1),
    (r"2\pi", "2pi", 1),
    ("2", r"2\pi", 0),
    ("5", r"5\sqrt{2}", 0),
    (r"\sqrt{2}/2", "sqrt(2)/2", 1),
    ("x^3 + 3x - 6", "$3x + x^3 - 6$", 1),
    ("x^3 + 3x - 6", "$x^3 + 3x + 6$", 0),
    ("6xy", "$6yx$", 1),
    ("1.5e-3", "0.0015", 1),
    ("1e-05", "0.00001", 1),
    (r"2.5 \times 10^3", "2500", 1),
    (r"\frac12", "0.5", 1),
    (r"-\frac{3}{4}", "-0.75", 1),
    (r"-\frac{3}{4}", "0.75", 0),
    (r"The answer is $\frac{3}{8}$.", "3/8", 1),
    (r"\boxed{\frac{3}{8}}", "3/8", 1),
    (r"$\boxed{7}$", "7", 1),
    ("x > 3", "$x>3$", 1),
    ("x > 3", "$x<3$", 0),
    ("-2 < x < 5", "$-2<x<5$", 1),
    ("42", "42.", 1),
    ("42", "**42**", 1),
    ("42", "It is 42.", 1),
    ("42", r"the length is 42 \text{ cm}", 1),
    ("2", r"the length is 2\sqrt{3}", 0),
    (r"2\sqrt{3}", r"the length is 2\sqrt{3} inches", 1),
    ("3:4", "$3:4$", 1),
    (r"\log 2", "log(2)", 1),
    ("10101_2", "10101_2", 1),
    ("2^{10}", "1024", 1),
    ("5!", "120", 1),
    (r"\dfrac{\pi}{4}", "pi/4", 1),
    (r"x=1 \text{ or } x=-1", "$x=-1$ or $x=1$", 1),
    (r"\text{even}", "even", 1),
    ("4", "no idea", 0),
    ("4", "", 0),
    (r"\sqrt[3]{5}", "5^{1/3}", 1),
    (r"\binom{5}{2}", "10", 1),
    ("k", "$k$", 1),
    ("2n+1", "1+2n", 1),
    (r"\pm 3", "$3, -3$", 1),
    # other notations
    ("42", "<b>42</b>", 1),
    ("42", "<b>43</b>", 0),
    ("42", "<answer>42</answer>", 1),
    ("3", "<b>2</b>3", 0),
    ("8", "2<sup>3</sup>", 1),
    ("23", "2<sup>3</sup>", 0),
    ("42", "`42`", 1),
    ("42", "```\n42\n```", 1),
    ("42", "__42__", 1),
    ("-3", "–3", 1),
    ("-3", "−3", 1),
    ("-3", "The answer is –3.", 1),
    ("3", "The answer is –3.", 0),
    ("-2", "1–3", 0),
    ("7", "pages 4–7", 0),
    (r"\sqrt{2}", "√2", 1),
    (r"\sqrt{2}", "√(2)", 1),
    (r"2\sqrt{2}", "2√2", 1),
    ("√2", r"\sqrt{2}", 1),
    ("2", "√2", 0),
    ("½", "0.5", 1),
    ("5/2", "2½", 1),
    ("1", "2½", 0),
    (r"\frac{1}{2}", "1⁄2", 1),
    ("9", "3²", 1),
    ("3", "3²", 0),
    ("x^2", "x²", 1),
    ("x^{-1}", "x⁻¹", 1),
    ("6", "2·3", 1),
    (r"2\pi", "2π", 1),
    (r"(3,\infty)", "(3, ∞)", 1),
    ("42", "４２", 1),
    ("1234", "1\u202f234", 1),
    # units
    ("10", "10 cm^2", 1),
    ("10", "10 cm²", 1),
    ("10", "The area is 10 cm^2.", 1),
    (r"10 \text{ cm}^2", "10 cm^2", 1),
    ("10 cm^2", "10", 1),
    ("10", "10 m^{2}", 1),
    ("10", "10 m/s^2", 1),
    ("5", "5 km/h", 1),
    ("100", "10 cm^2", 0),
    ("2", "The area is 10 cm^2.", 0),
    ("12", "10^2 cm", 0),
    ("10", "10x^2", 0),
    ("10m^2", "10", 0),
    ("10m^2", "$10 m^2$", 1),
]


@pytest.mark.parametrize(("gold", "answer", "right"), PAIRS)
def test_the_verdict_is_that_of_a_person(gold: str, answer: str, right: int) -> None:
    assert is_mathematics(gold)
    assert equal(gold, answer) == bool(right)


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
    with pytest.raises(RewardError, match=r"prompt 0 has no answer .*its other columns are question, solution"):
        refuse_unanswered(config(name), [Prompt(0, "one", (1,), row)])


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        (".5", "5", False),
        (".5", "0.5", True),
        ("5", ".5", False),
        ("-.5", "-1/2", True),
        ("A", "A, B, C, D", False),
        ("A", "A or B", False),
        ("B", "A triangle has three sides, so it is B.", True),
        ("A", "A is the answer", True),
        ("A", "a square", False),
        ("B", "a or b", False),
        ("B", "It is a B.", True),
        ("A", "A square", True),
        ("B", "A square", False),
    ],
)
def test_a_decimal_point_counts_and_several_choices_are_wrong(gold: str, answer: str, right: bool) -> None:
    assert equal(gold, answer) == right
