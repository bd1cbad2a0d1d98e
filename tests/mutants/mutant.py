"""One mutant: a change to one function, the promise that it breaks and the tests that must notice."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mutants.mutate import mutate

TESTS = Path(__file__).parent.parent
SOURCE = TESTS.parent / "src" / "tlt"


class Mutant(NamedTuple):
    module: str
    """module under tlt, such as `engine.committing`"""
    function: str
    """qualified name in the module, such as `Stops.append`"""
    operator: str
    site: int
    """position among the operator's sites in the function, from 0"""
    promise: str
    """the promise that the mutant breaks, in one sentence"""
    tests: str
    """test files under tests, separated by spaces"""

    def __str__(self) -> str:
        return f"{self.module}:{self.function} {self.operator} {self.site}: {self.promise} ({self.tests})"

    @property
    def file(self) -> str:
        """The path under src/tlt."""
        return self.module.replace(".", "/") + ".py"

    def source(self) -> str:
        return (SOURCE / self.file).read_text(encoding="utf-8")

    def text(self) -> str:
        """Return the mutated module. Raises MutationError if the mutant does not fit the source."""
        return mutate(self.source(), self.function, self.operator, self.site)
