"""Plants each fault of the lists, one at a time, in a copy of the package, and runs the tests that should notice it.

make mutants                              all of them; exit status 1 if one goes unnoticed
make mutants ARGS="-k suffix -j 1"        those with `suffix` in area, file or name; one at a time
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from mutants import cluster, draft, engine, integrations, look_ahead, models, record, rl, sampling, vllm
from mutants.mutant import Mutant

_LISTS = cluster, sampling, models, engine, rl, draft, look_ahead, record, vllm, integrations
AREAS = {area.__name__.rpartition(".")[2]: area.MUTANTS for area in _LISTS}
TESTS = Path(__file__).parent.parent
SOURCE = TESTS.parent / "src" / "tlt"
PATIENCE = 300  # seconds for the tests of one mutant


class Outcome(NamedTuple):
    verdict: str
    """survived; killed, by a test that failed, or hung; broken, where tests could not be run"""
    detail: str
    seconds: float


def faults_of_the_lists(mutants: Iterable[Mutant]) -> list[str]:
    """What no longer fits the source or the tests, in a sentence each."""
    found, names = [], set()
    for mutant in mutants:
        path = SOURCE / mutant.file
        count = path.read_text(encoding="utf-8").count(mutant.old) if path.is_file() else 0
        if count != 1:
            found.append(f"{mutant.name!r} is stale: src/tlt/{mutant.file} holds its old text {count} times")
        if mutant.old == mutant.new or mutant.name in names:
            found.append(f"{mutant.name!r} changes nothing, or is there twice")
        found += [f"{mutant.name!r}: no tests/{test}" for test in mutant.tests.split() if not (TESTS / test).is_file()]
        names.add(mutant.name)
    return found


def run_tests(tests: str, mutant: Mutant | None = None) -> Outcome:
    """The tests of the checkout on a copy of the package, with the fault planted if there is one."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder) / "tlt"
        shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant:
            text = (copy / mutant.file).read_text(encoding="utf-8")
            (copy / mutant.file).write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        code, said = _pytest(Path(folder), [str(TESTS / test) for test in tests.split()])
    failed = re.search(r"^(?:FAILED|ERROR) \S*tests/(\S+::.*)", said, re.MULTILINE)
    if code is None:
        verdict, detail = "killed", f"hung for {PATIENCE} s"
    elif code == 1 and failed:  # with -x pytest gives 1 for an error in collection too
        verdict, detail = "killed", failed[1]
    else:
        verdict, detail = ("survived", "") if code == 0 else ("broken", f"pytest gave {code}\n{said[-2000:]}")
    return Outcome(verdict, detail, time.monotonic() - began)


def _pytest(home: Path, tests: Sequence[str]) -> tuple[int | None, str]:
    """Its exit status (None: it hung) and what it said, where `tlt` is the package in `home`."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", "not gpu"]
    environment = os.environ | {"PYTHONPATH": str(home), "OMP_NUM_THREADS": "1", "TLT_MUTANT": "1"}
    with (home / "said").open("w+", encoding="utf-8") as said:  # a pipe would stay open with a child left behind
        streams = {"stdout": said, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(
            [*command, *tests], cwd=TESTS.parent, env=environment, start_new_session=True, **streams
        )
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said.seek(0)
        return code, said.read()


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description="Plants faults that tests must notice.")
    parser.add_argument("-k", default="", help="only mutants with this in their area, file or name")
    parser.add_argument("-j", type=int, default=2, help="how many at a time")
    asked = parser.parse_args()
    if faults := faults_of_the_lists(mutant for area in AREAS.values() for mutant in area):
        print(*faults, sep="\n")
        return 1
    chosen = [m for area, listed in AREAS.items() for m in listed if asked.k in f"{area} {m.file} {m.name}"]
    with ThreadPoolExecutor(asked.j) as pool:
        suites = sorted({mutant.tests for mutant in chosen})
        for suite, outcome in zip(suites, pool.map(run_tests, suites), strict=True):
            print(f"{outcome.seconds:5.0f} s  without a fault: {suite}", flush=True)
            if outcome.verdict != "survived":
                print(f"fails without a fault: {outcome.detail}")
                return 1
        outcomes: list[Outcome] = []
        for mutant, outcome in zip(chosen, pool.map(run_tests, [m.tests for m in chosen], chosen), strict=True):
            outcomes.append(outcome)
            print(f"{outcome.seconds:5.0f} s  {outcome.verdict}: {mutant.file}: {mutant.name}", flush=True)
            print(f"         {outcome.detail}" * bool(outcome.detail))
    return report(list(zip(chosen, outcomes, strict=True)))


def report(results: Sequence[tuple[Mutant, Outcome]]) -> int:
    """The table by file, then those that were not killed, with their edits; the exit status."""
    print()
    for file in dict.fromkeys(mutant.file for mutant, _ in results):
        verdicts = [outcome.verdict for mutant, outcome in results if mutant.file == file]
        print(f"{verdicts.count('killed'):3} of {len(verdicts):2} killed  {file}")
    alive = [(mutant, outcome) for mutant, outcome in results if outcome.verdict != "killed"]
    print(f"{len(results) - len(alive):3} of {len(results):2} killed")
    for mutant, outcome in alive:
        edit = [
            f"  {sign} {line}" for sign, text in (("-", mutant.old), ("+", mutant.new)) for line in text.split("\n")
        ]
        print(f"\n{outcome.verdict}: {mutant.file}: {mutant.name} ({mutant.tests})", *edit, sep="\n")
    return int(bool(alive))


if __name__ == "__main__":
    sys.exit(main())
