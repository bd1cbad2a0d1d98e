"""Every mutant of `make mutants` still applies, and the mutation operators do what they say."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
from mutants.mutant import TESTS, Mutant
from mutants.mutate import mutate, unmutated
from mutants.table import MUTANTS

text_of = cache(Mutant.text)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_every_mutant_applies(mutant: Mutant) -> None:
    text = text_of(mutant)
    assert text != unmutated(mutant.source())
    compile(text, mutant.file, "exec")
    assert [test for test in mutant.tests.split() if not (TESTS / test).is_file()] == []


def test_no_mutant_is_listed_twice() -> None:
    assert [it for it, count in Counter(map(text_of, MUTANTS)).items() if count > 1] == []


@pytest.mark.parametrize(
    ("operator", "site", "before", "after"),
    [
        ("compare", 0, "return a < b", "return a <= b"),
        ("compare", 1, "return a in b is not c", "return a in b is c"),
        ("operator", 0, "a += b // c", "a -= b // c"),
        ("operator", 0, "return a and b", "return a or b"),
        ("negate", 0, "return [a for a in b if a]", "return [a for a in b if not a]"),
        ("always", 0, "while a(b):\n        break", "while True:\n        break"),
        ("never", 0, "return a if b else c", "return a if False else c"),
        ("drop", 1, "a = 1\n    del b", "a = 1\n    pass"),
        ("drop", 0, '"""Text."""\n    a = 1', '"""Text."""\n    pass'),
        ("swap", 1, "f(a, b, c)", "f(a, c, b)"),
        ("swap", 0, "return a if b else c", "return c if b else a"),
        ("swap", 0, "return a - b", "return b - a"),
        ("constant", 0, "return a[3]", "return a[4]"),
        ("constant", 0, "f(a, b=True)", "f(a, b=False)"),
        ("less", 0, "return a + 1", "return a + 0"),
        ("operand", 1, "return a * b", "return a"),
        ("operand", 0, "return not a", "return a"),
        ("operand", 2, "return a or b or c", "return a or b"),
        ("argument", 2, "f(a, b, c=d)", "f(a, b)"),
        ("element", 0, "return a[1:b]", "return a[:b]"),
        ("element", 1, "return (a, b, c)", "return (a, c)"),
        ("unwrap", 0, "return sorted(a)", "return a"),
        ("unwrap", 0, "return a.clone()", "return a"),
        ("opposite", 0, "return max(a, b)", "return min(a, b)"),
    ],
)
def test_an_operator_changes_one_node(operator: str, site: int, before: str, after: str) -> None:
    assert mutate(f"def g():\n    {before}", "g", operator, site) == f"def g():\n    {after}"


def test_a_function_is_found_by_its_qualified_name() -> None:
    source = (
        "def f():\n    return 1\nclass A:\n    def f(self):\n        def f():\n            return 2\n        return 3"
    )
    assert "return 4" in mutate(source, "A.f", "constant", 1)
    assert "return 3\n" in mutate(source, "A.f.f", "constant", 0)
