"""Rewards that hang, raise, return no number or end their process: named outcomes, and the next is scored."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from judging import PROMPT, answer, config, is_gone, judged, responses

from tlt.rewards import AtOnce, make_reward
from tlt.rewards.isolated import IsolatedScore
from tlt.rewards.scores import Term, make_terms, one_by_one, score, score_all
from tlt.types import Prompt


@pytest.fixture(scope="module")
def isolated() -> Iterator[IsolatedScore]:
    isolated = IsolatedScore(config())
    yield isolated
    isolated.close()


@pytest.mark.parametrize(
    ("text", "outcome", "detail"),
    [
        ("raise", "error", "KeyError: 'bonus'"),
        ("nan", "not a number", "nan"),
        ("infinite", "not a number", "-inf"),
        ("word", "not a number", "'good'"),
        ("nothing", "does not apply", "None"),
        ("exit", "error", "SystemExit: 3"),
        ("die", "crash", "its process ended"),
    ],
)
def test_a_fault_is_named_and_the_next_is_scored(isolated: IsolatedScore, text: str, outcome: str, detail: str) -> None:
    verdict = judged(isolated, text)
    assert (verdict.reward, verdict.outcome, detail in verdict.detail) == (None, outcome, True)
    assert judged(isolated, "four")[:3] == (4.0, "", "")


class Rude:
    """Object that raises in every operation."""

    def __float__(self) -> float:
        raise RuntimeError("no float")

    def __repr__(self) -> str:
        raise RuntimeError("no text")


class RudeError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raises_rudely(prompt: Any, answer: Any) -> float:
    raise RudeError


@pytest.mark.parametrize(
    ("terms", "outcome", "detail"),
    [
        ([(1.0, lambda p, a: Rude())], "not a number", "it returned a Rude that cannot be printed"),
        ([(1.0, raises_rudely)], "error", "RudeError: a RudeError that cannot be printed"),
        ([(1.0, lambda p, a: 1e300)], "not a number", "it returned 1e+300, which float32 cannot hold"),
        ([(-1e38, lambda p, a: 10)], "not a number", "the sum of its terms is -1e+39"),
        ([(1e38, lambda p, a: 10)], "not a number", "the sum of its terms is 1e+39"),
        ([(1.0, lambda p, a: 3e38)] * 2, "not a number", "the sum of its terms is 6e+38"),
        ([(1.0, lambda p, a: 10**400)], "not a number", "it returned 1000"),
    ],
)
def test_any_invalid_value_is_a_named_outcome(terms: list[Any], outcome: str, detail: str) -> None:
    verdict = score([Term("own", weight, one_by_one(score)) for weight, score in terms], PROMPT, answer("a"))
    assert (verdict.reward, verdict.outcome) == (None, outcome)
    assert detail in verdict.detail


def test_a_reward_process_imports_neither_torch_nor_transformers() -> None:
    """Each process would take 230 MB and four seconds more."""
    code = "import sys, tlt.rewards.isolated; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


MASK = """
import signal, sys
from multiprocessing import util
from tlt.config import parse_config
from tlt.rewards.isolated import IsolatedScore
spawn = util.spawnv_passfds

def watched(path, arguments, handles):
    if "spawn_main" in str(arguments):
        print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()), flush=True)
    return spawn(path, arguments, handles)

if __name__ == "__main__":
    util.spawnv_passfds = watched
    tree = {"model": {"path": "-"}, "data": {"path": "-"}, "reward": {"name": "exact"}}
    IsolatedScore(parse_config(tree)).close()
"""


def test_a_signal_cannot_interrupt_the_start_of_the_first_process(tmp_path: Path) -> None:
    """The first process also starts Python's resource tracker, which unblocks signals."""
    (tmp_path / "mask.py").write_text(MASK, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, tmp_path / "mask.py"], capture_output=True, text=True, timeout=120, check=True
    )
    assert ran.stdout.split() == ["True"]


@pytest.mark.parametrize(("fault", "detail"), [("exit", "SystemExit: 3"), ("raise", "KeyError: 'bonus'")])
def test_a_fault_in_a_batch_is_that_of_one_response(fault: str, detail: str) -> None:
    terms = make_terms(config("tiny_rewards:of_lists", batched=True))
    asked = [(Prompt(5, "", (1,), {"task": ""}), answer(text)) for text in ("a", fault, "b")]
    found = score_all(terms, asked)
    assert [verdict.outcome for verdict in found] == ["", "error", ""]
    assert detail in found[1].detail


def test_signals_to_the_whole_group_do_not_reach_it(isolated: IsolatedScore) -> None:
    process = int(judged(isolated, "child").reward or 0)
    for number in (signal.SIGINT, signal.SIGTERM) * 50:
        os.kill(process, number)
        assert judged(isolated, "child").reward == process != os.getpid()


def test_a_reward_that_hangs_is_killed_and_its_process_replaced() -> None:
    isolated = IsolatedScore(config(timeout_seconds=1.0))
    process = int(judged(isolated, "child").reward or 0)
    assert judged(isolated, "hang")[:2] == (None, "timeout")
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    isolated.config = config()  # a busy machine may take longer than a second to answer
    assert judged(isolated, "four").reward == 4.0
    isolated.close()


def test_a_process_with_many_zombies_is_replaced() -> None:
    """They would fill the process table of the machine in a long run."""
    isolated = IsolatedScore(config("tiny_programs:leaves_orphans"))
    process = judged(isolated, "100").reward
    isolated._check_at = 0.0  # as after a second
    judged(isolated, "0")
    assert judged(isolated, "0").reward != process
    isolated.close()


def test_an_async_call_that_hangs_does_not_end_its_process() -> None:
    """The process may have environments of other episodes."""
    isolated = IsolatedScore(config("tiny_rewards:asks_a_server", timeout_seconds=0.5))
    assert judged(isolated, "99")[:2] == (None, "timeout")
    assert isolated.runs
    isolated.close()


def test_a_pattern_that_takes_forever_is_a_timeout() -> None:
    reward = make_reward(config("format", pattern="^(a+)+$", timeout_seconds=1.0), [])
    given = responses("a" * 60 + "b")
    reward(given)
    reward.close()
    assert given[0].outcome == "timeout"


def test_rewards_that_cannot_hang_need_no_process() -> None:
    assert isinstance(make_reward(config("exact"), [PROMPT]).scorer, AtOnce)


RUN = """
import os, sys
sys.path[:0] = {path}
from judging import IsolatedScore, config, judged
if __name__ == "__main__":
    isolated = IsolatedScore(config(timeout_seconds=1000.0))
    print(int(judged(isolated, "child").reward), flush=True)
    {then}
"""


@pytest.mark.parametrize("then", ["pass", "os.kill(os.getpid(), 9)", "judged(isolated, 'hang')"])
def test_it_ends_with_the_run_in_any_case(tmp_path: Any, then: str) -> None:
    script = tmp_path / "run.py"
    script.write_text(RUN.format(path=[p for p in sys.path if p], then=then), encoding="utf-8")
    run = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    child = int(run.stdout.readline())
    if "hang" in then:
        run.kill()
    run.wait(timeout=30)
    try:
        assert is_gone(child), "the reward's process outlives the run"
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
