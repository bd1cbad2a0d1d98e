"""Answers: the answer that a response gives, the right answers in the data, and their comparison.

The ground truth of a prompt is a text, a number or a truth value. If it is a list of texts, each text is a right
answer. Answers are compared as text, or by their mathematical value with the package math-verify. math-verify reads
LaTeX only inside delimiters such as $...$. Outside of them it reads only numbers. So an answer that is LaTeX as a
whole, as in the data set MATH, is put into delimiters first.
"""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from tlt.types import Prompt


class RewardError(ValueError):
    """Error: a reward or an environment cannot be used. The message names the reward or environment, and the remedy."""


@dataclass(frozen=True)
class Answer:
    text: str
    """text of the whole response, with the prefill"""
    answer: str
    """part of the text that `extract_answer` finds between reward.answer_marker and reward.answer_end"""
    tokens: int
    """number of tokens in the response"""
    token_ids: tuple[int, ...] = ()
    finish_reason: str = "stop"
    """`stop`, or `length` if the response was truncated"""


def extract_answer(text: str, marker: str, end: str = "") -> str:
    """Return the text after the last `marker` and before the next `end`, stripped.

    The answer is empty if the marker is missing, or if no `end` follows. If `marker` is empty, the answer begins at the
    start of the text. If `end` is empty, the answer ends at the end of the text. White space at the end of the marker
    is ignored, because the answer is stripped too: `Answer: ` finds the answer in `Answer:\\n42`.
    """
    _, found, answer = text.rpartition(marker.rstrip() or marker) if marker else ("", "yes", text)
    if end:
        answer, closed, _ = answer.partition(end)
        found = found and closed
    return answer.strip() if found else ""


def right_answers(prompt: Prompt) -> list[Any]:
    """Return the right answers of a prompt: its ground truth, or the items of its ground truth if that is a list of
    texts."""
    found = prompt.ground_truth
    several = isinstance(found, list | tuple) and all(isinstance(item, str) for item in found)
    return list(found) if several else [found]


def is_blank(gold: Any) -> bool:
    """Return whether a right answer is missing: null, NaN or blank text."""
    return gold is None or (isinstance(gold, float) and math.isnan(gold)) or not str(gold).strip()


def same(gold: Any, text: str) -> bool:
    """Return whether the text of an answer equals a right answer (`gold`).

    A number is compared by value, and `text` may then contain thousands separators. A truth value is compared without
    regard to case. Everything else is compared as text without leading and trailing white space.
    """
    if isinstance(gold, bool):
        return text.strip().casefold() == str(gold).casefold()
    if isinstance(gold, int | float | Decimal):
        try:
            return Decimal(text.strip().replace(",", "")) == Decimal(str(gold))
        except InvalidOperation:  # not a number
            return False
    return text.strip() == str(gold).strip()


# -- mathematics -------------------------------------------------------------------------------------------------------


_SUPERSCRIPTS = {ord(char): str(unicodedata.normalize("NFKC", char)) for char in "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ"}
_CHARACTERS = str.maketrans(
    {"`": "", "−": "-", "∞": r"\infty ", "·": r"\cdot ", "⋅": r"\cdot ", "⁄": "/", "∕": "/"}
    | dict.fromkeys("\u00a0\u2009\u202f", " ")
)
_NOTATIONS = [
    (re.compile(r"<(b|i|u|em|strong|code|p|span|mark|answer)>(.*?)</\1>", re.DOTALL), r"\2"),
    (re.compile(r"<sup>(.*?)</sup>", re.DOTALL), r"^{\1}"),
    (re.compile(r"(?<![\w_])__(?=\S)([^_]+)__(?![\w_])"), r"\1"),
    (re.compile(r"(?<![\w)}\]])[‒–](?=[\d.\\√])"), "-"),  # a dash between two numbers is a range
    (re.compile(r"√\s*(?:(\d+)|\(([^()]*)\))"), r"\\sqrt{\1\2}"),
]
_DELIMITED = re.compile(r"(?<!\\)\$[^$]+(?<!\\)\$|\\\(.+?\\\)|\\\[.+?\\\]|\\boxed|\\fbox", re.DOTALL)
_COMMAND = re.compile(r"\\(?:text\w*|mbox|math(?:rm|bf|it)|operatorname|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")
_FUNCTIONS = "arc(?:sin|cos|tan)|sin|cos|tan|cot|sec|csc|log|ln|exp"
# a word of prose: neither a product of the usual variables nor an ASCII name of mathematics
_WORD = re.compile(
    rf"(?<![A-Za-z])(?!(?:[a-dx-z]+|pi|sqrt|and|or|inf|infinity|percent|pct|{_FUNCTIONS})(?![A-Za-z]))"
    r"(?:[A-Za-z]{3,}|(?:is|it|as|to|of|so|we|at|by|if|in|be|on|an)(?![A-Za-z]))[A-Za-z]*",
    re.IGNORECASE,
)
_WRITTEN_OTHERWISE = [
    (re.compile(r"(?<=\d)(?:\\[,!; ]| )(?=\d{3}(?!\d))"), ""),  # 1 234 is 1234
    (re.compile(r"(?<![\d./])(\d+) (\d+)/(\d+)(?![\d./])"), r"\1\\frac{\2}{\3}"),  # 1 1/2 is 3/2
    (re.compile(r"(?<=\d)[eE]([+-]?\d+)(?!\w)"), r"\\times 10^{\1}"),
    (re.compile(rf"(?<![\\A-Za-z])(pi|{_FUNCTIONS})(?![A-Za-z])"), r"\\\1"),
    (re.compile(r"\\?\$"), ""),  # a currency sign
]
_CHOICE = re.compile(r"(?:\\[a-z]+\s*\{\s*)*(?:\(([A-E])\)|([A-E]))[\s.}]*", re.DOTALL)
_TEXT = re.compile(r"(?:\\boxed\s*\{)?\s*\\(?:text\w*|mbox|mathrm)\s*\{([^{}]*[A-Za-z]{2}[^{}]*)\}[\s.}]*")
_LETTER = re.compile(r"(?<![A-Za-z'])[A-E](?![A-Za-z'])")
_ARTICLE = re.compile(r"(?<![A-Za-z'])A(?= (?!is\b|or\b|and\b|because\b)[a-z])")
_AROUND = re.compile(r"^(?:[ ,;:=*\n]|\.(?!\d))+|[ .,;:=*\n]+$")  # a decimal point in front of digits stays
_LONG_UNIT = r"(?:[kcdm]m|mi|ft|in|yd|inch(?:es)?|feet|met(?:er|re)s?|miles?|units?|kg|lb|sec|min|hr)"
_UNIT = rf"(?:{_LONG_UNIT}|[mgsh])"
_POWER = r"\^(?:[23]|\{[23]\})"
_AREA = re.compile(rf"(?<=\d)\s*{_LONG_UNIT}{_POWER}(?![\w^/])")
_MEASURED = re.compile(rf"(?<=\d)\s*{_UNIT}(?:{_POWER}|(?:{_POWER})?/{_UNIT}(?:{_POWER})?)(?![\w^/])")
_VARIABLE = re.compile(r"[A-Za-z]")


def in_latex(text: str) -> str:
    """Return the text with Unicode characters replaced by LaTeX, and without HTML and Markdown marks."""
    text = re.sub("[⁰¹²³⁴-⁹⁺⁻ⁿ]+", lambda found: f"^{{{found[0].translate(_SUPERSCRIPTS)}}}", text)
    text = "".join(_fraction(char) for char in text.translate(_CHARACTERS))
    for pattern, meant in _NOTATIONS:
        text = pattern.sub(meant, text)
    return text


def _fraction(char: str) -> str:
    """Return the ASCII form of a fraction such as ½ (` 1/2`) or of a digit of another script. Keep other characters."""
    found = unicodedata.normalize("NFKC", char)
    if "⁄" in found and char != "⁄":
        return f" {found.replace('⁄', '/')}"
    return found if char.isdecimal() else char


def is_mathematics(gold: str) -> bool:
    """Return whether a right answer (`gold`) has anything that can be compared as mathematics: a number, a formula, a
    choice A-E, or text in \\text{...}."""
    return bool(
        _CHOICE.fullmatch(gold.strip()) or _TEXT.fullmatch(gold.strip()) or _has_value(delimited(in_latex(gold)))
    )


def _has_value(text: str) -> bool:
    return bool(_DELIMITED.search(text) or re.search(r"\d", text))


def equal(gold: str, answer: str) -> bool:
    """Return whether an answer equals the right answer (`gold`) as mathematics, as a choice A-E, or as text in
    \\text{...}. Needs the package math-verify."""
    from math_verify import parse, verify

    if choice := _CHOICE.fullmatch(gold.strip()):
        bare = re.sub(r"\\[a-zA-Z]+|[][(){}$\\]", " ", answer)
        letters = _LETTER.findall(_ARTICLE.sub("", bare)) or _LETTER.findall(bare)
        return set(letters) == {choice[1] or choice[2]}
    if text := _TEXT.fullmatch(gold.strip()):
        found = _TEXT.fullmatch(answer.strip(" \n$"))
        return _folded(text[1]) == _folded(found[1] if found else re.sub(r"\\boxed\s*\{(.*)\}", r"\1", answer))
    # no timeout of math-verify, which would count a hang as a wrong answer: reward.timeout_seconds limits the process
    texts = _without_units(in_latex(gold), in_latex(answer))
    one, other = (parse(delimited(text), parsing_timeout=None) for text in texts)  # type: ignore[arg-type]
    return verify(one, other, timeout_seconds=None)


def _folded(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .()")


def _without_units(gold: str, answer: str) -> tuple[str, str]:
    """Return both texts without units such as cm^2, and the answer also without units such as m/s.

    If the right answer contains any other letter, return both texts unchanged, because m may be a variable."""
    number = _AREA.sub("", gold)
    return (gold, answer) if _VARIABLE.search(_COMMAND.sub("", number)) else (number, _MEASURED.sub("", answer))


def delimited(text: str) -> str:
    """Return the text in a form that math-verify can read: LaTeX in delimiters, or prose with numbers.

    If prose contains LaTeX commands without delimiters, return its last formula, which is the last part between words.
    """
    text = text.rpartition("####")[2].strip()  # GSM8K: the text before it is the derivation
    if _DELIMITED.search(text):
        return text
    blanked = _COMMAND.sub(lambda found: " " * len(found[0]), text)
    words = list(_WORD.finditer(blanked))
    if words and blanked == text:
        return text
    borders = [0, *(border for word in words for border in word.span()), len(text)]
    pieces = [_AROUND.sub("", text[start:end]) for start, end in zip(borders[::2], borders[1::2], strict=True)]
    found = next(filter(None, reversed(pieces)), "")
    for pattern, meant in _WRITTEN_OTHERWISE:
        found = pattern.sub(meant, found)
    found = " ".join(found.split())
    return f"${found}$" if found else ""
