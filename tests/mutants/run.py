"""Run the tests that must notice each mutant, against a copy of the package with that mutant.

make mutants                        all mutants; the exit status is 1 if one survives
make mutants ARGS="-k scheduler"    mutants with `scheduler` in their function, operator, promise or tests
make mutants ARGS="-j 4"            four at a time (default 1)
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from difflib import unified_diff
from pathlib import Path
from typing import NamedTuple

from mutants.mutant import SOURCE, TESTS, Mutant
from mutants.mutate import unmutated
from mutants.table import MUTANTS

TIMEOUT = 180  # seconds for the tests of one mutant


class Outcome(NamedTuple):
    verdict: str
    """noticed: a test failed or hung; survived: all passed; broken: pytest could not run"""
    detail: str
    seconds: float


def run_tests(tests: str, mutant: Mutant | None = None) -> Outcome:
    """Run the test files `tests` against a copy of the package, with the mutant if there is one."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder) / "tlt"
        shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant:
            (copy / mutant.file).write_text(mutant.text(), encoding="utf-8")
        code, output = _pytest(Path(folder), [str(TESTS / test) for test in tests.split()])
    failed = re.search(r"^(?:FAILED|ERROR) \S*tests/(\S+::.*)", output, re.MULTILINE)
    if code is None:
        verdict, detail = "noticed", f"timeout after {TIMEOUT} s"
    elif code == 1 and failed:  # with -x pytest exits with 1 for an error in collection too
        verdict, detail = "noticed", failed[1]
    elif code == 0:
        verdict, detail = "survived", ""
    else:
        verdict, detail = "broken", f"pytest exited with {code}\n{output[-2000:]}"
    return Outcome(verdict, detail, time.monotonic() - began)


def _pytest(folder: Path, tests: Sequence[str]) -> tuple[int | None, str]:
    """Return pytest's exit status (None after a timeout) and output. `tlt` is the package in `folder`."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", "not gpu"]
    paths = f"{folder}{os.pathsep}{TESTS.parent / '.triton'}"  # `make mutants` installs Triton there
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TLT_MUTANT": "1"}
    with (folder / "output").open("w+", encoding="utf-8") as output:  # a child left behind would keep a pipe open
        streams = {"stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(
            [*command, *tests], cwd=TESTS.parent, env=environment, start_new_session=True, **streams
        )
        try:
            code = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return code, output.read()


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description="Run the tests that must notice each mutant.")
    parser.add_argument("-k", default="", help="only mutants with this text in function, operator, promise or tests")
    parser.add_argument("-j", type=int, default=1, help="number of mutants at a time (default 1)")
    asked = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if asked.k in str(mutant)]
    if not chosen:
        parser.error(f"no mutant has the text {asked.k!r}")
    with ThreadPoolExecutor(asked.j) as pool:
        suites = sorted({mutant.tests for mutant in chosen})
        for suite, outcome in zip(suites, pool.map(run_tests, suites), strict=True):
            print(f"{outcome.seconds:5.0f} s  without a mutant: {suite}", flush=True)
            if outcome.verdict != "survived":
                print(f"fails without a mutant: {outcome.detail}")
                return 1
        outcomes: list[Outcome] = []
        for mutant, outcome in zip(chosen, pool.map(run_tests, [it.tests for it in chosen], chosen), strict=True):
            outcomes.append(outcome)
            print(f"{outcome.seconds:5.0f} s  {outcome.verdict:8}  {mutant}  {outcome.detail}", flush=True)
    return report(list(zip(chosen, outcomes, strict=True)))


def report(results: Sequence[tuple[Mutant, Outcome]]) -> int:
    """Print the counts by module and the diffs of mutants that survived, and return the exit status."""
    print()
    for file in dict.fromkeys(mutant.file for mutant, _ in results):
        verdicts = [outcome.verdict for mutant, outcome in results if mutant.file == file]
        print(f"{verdicts.count('noticed'):3} of {len(verdicts):2} noticed  {file}")
    alive = [(mutant, outcome) for mutant, outcome in results if outcome.verdict != "noticed"]
    print(f"{len(results) - len(alive):3} of {len(results):2} noticed")
    for mutant, outcome in alive:
        before, after = unmutated(mutant.source()), mutant.text()
        print(f"\n{outcome.verdict}: {mutant}")
        print(*unified_diff(before.split("\n"), after.split("\n"), lineterm="", n=2), sep="\n")
        print(outcome.detail)
    return int(bool(alive))


if __name__ == "__main__":
    sys.exit(main())
