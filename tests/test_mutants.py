"""The lists of planted faults (`make mutants`) still fit the source."""

from __future__ import annotations

from mutants.run import AREAS, faults_of_the_lists


def test_every_planted_fault_still_has_its_place() -> None:
    assert faults_of_the_lists([mutant for area in AREAS.values() for mutant in area]) == []
