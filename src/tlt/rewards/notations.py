"""Conversion of mathematics in Unicode, HTML or Markdown to LaTeX, such as √2, ½, x², –3, <b>42</b> and `42`."""

from __future__ import annotations

import re
import unicodedata

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
