"""Plain English in docstrings, messages and names of tests: subjects come first, and no word must be decoded."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "tlt"
FIRST = {"Of", "What", "Those", "That", "By", "Where", "Whoever", "Who", "Which", "As", "With", "From"}
WORDS = (
    *("amid", "anew", "beside", "held against", "so many", "what it took", "what it gave", "goes live"),
    *("said to", "those who", "for so long", "as many as", "plainly", "last words", "decoded ahead", "told"),
)
FORBIDDEN = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)


def docstrings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def sentences(tree: ast.AST) -> Iterator[str]:
    """Yield string constants with a space, and the constant parts of f-strings: docstrings and messages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value


def names_of_tests(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name.replace("_", " ")


def faults(code: str, in_tests: bool = False) -> list[str]:
    """Return the texts that are not plain English: docstrings, and messages or names of tests. Other strings in tests
    may be data."""
    tree = ast.parse(code)
    texts = [*docstrings(tree), *names_of_tests(tree)] if in_tests else sentences(tree)
    without_subject = [text for text in docstrings(tree) if text.partition(" ")[0] in FIRST]
    return without_subject + [text for text in texts if FORBIDDEN.search(text)]


@pytest.mark.parametrize("folder", [SOURCE, TESTS], ids=["source", "tests"])
def test_docstrings_messages_and_names_of_tests_are_plain_english(folder: Path) -> None:
    found = {path: faults(path.read_text(encoding="utf-8"), folder == TESTS) for path in folder.rglob("*.py")}
    assert {path: texts for path, texts in found.items() if texts} == {}


@pytest.mark.parametrize(
    ("code", "in_tests", "is_fine"),
    [
        ('def f():\n    """Of a member\'s own shards."""', False, False),
        ('raise ValueError(f"worker {n} was lost amid {method}")', False, False),
        ("def test_a_worker_lost_amid_an_update(): ...", True, False),
        ('def test_a():\n    """One is lost."""\n    assert error == "amid decode"', True, True),
    ],
)
def test_the_checks_find_first_words_and_phrases(code: str, in_tests: bool, is_fine: bool) -> None:
    assert (faults(code, in_tests) == []) == is_fine
