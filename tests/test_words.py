"""Plain English in docstrings, messages and names of tests: subjects come first, and no word must be decoded."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
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


def faults(code: str) -> list[str]:
    """Return the docstrings and messages that are not plain English."""
    tree = ast.parse(code)
    return _without_subject(tree) + [text for text in sentences(tree) if FORBIDDEN.search(text)]


def faults_in_tests(code: str) -> list[str]:
    """Return the docstrings and names of tests that are not plain English. Other strings in tests may be data."""
    tree = ast.parse(code)
    texts = [*docstrings(tree), *names_of_tests(tree)]
    return _without_subject(tree) + [text for text in texts if FORBIDDEN.search(text)]


def _without_subject(tree: ast.AST) -> list[str]:
    return [text for text in docstrings(tree) if text.split(maxsplit=1)[:1] and text.split(maxsplit=1)[0] in FIRST]


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_docstrings_and_messages_are_plain_english(path: Path) -> None:
    assert faults(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_docstrings_and_names_of_tests_are_plain_english(path: Path) -> None:
    assert faults_in_tests(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("check", "code", "is_fine"),
    [
        (faults, 'def f():\n    """Of a member\'s own shards."""', False),
        (faults, 'def f():\n    """Return the shards of a member."""', True),
        (faults, 'raise ValueError(f"worker {n} was lost amid {method}")', False),
        (faults, 'log.info("worker %d failed while decoding", n)', True),
        (faults_in_tests, 'def test_a():\n    """Of two prompts."""', False),
        (faults_in_tests, 'def test_a():\n    """One is lost amid an update."""', False),
        (faults_in_tests, "def test_a_worker_lost_amid_an_update(): ...", False),
        (faults_in_tests, 'def test_a():\n    """One is lost."""\n    assert error == "amid decode"', True),
    ],
)
def test_the_checks_find_first_words_and_phrases(check: Callable[[str], list[str]], code: str, is_fine: bool) -> None:
    assert (check(code) == []) == is_fine
