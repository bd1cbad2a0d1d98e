"""User code inherits from its process what it has alone, in Python without tlt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_programs
from judging import PROMPT, is_gone, judged, responses

from tlt.config import Config, parse_config
from tlt.rewards import make_reward
from tlt.rewards.isolated import IsolatedScore

ALONE = [function.__name__ for function in tiny_programs.ALONE]


def config(*names: str, **reward: Any) -> Config:
    terms = [{"name": f"tiny_programs:{name}"} for name in names]
    tree = {"model": {"path": "-"}, "data": {"path": "-"}, "reward": {"terms": terms, "timeout_seconds": 20.0} | reward}
    return parse_config(tree)


@pytest.fixture(scope="module")
def scores() -> dict[str, float]:
    """Return the score of each function by a single reward process."""
    isolated = IsolatedScore(config(*ALONE, timeout_seconds=60.0))
    verdict = judged(isolated)
    isolated.close()
    return {name.partition(":")[2]: score for name, score in verdict.scores.items()}


@pytest.mark.parametrize("name", ALONE)
def test_a_function_works_as_it_does_alone(name: str, scores: dict[str, float]) -> None:
    assert scores[name] == 1.0


def test_each_of_these_functions_works_alone() -> None:
    code = "import tiny_programs; print([function(None, '') for function in tiny_programs.ALONE])"
    home = Path(__file__).parents[1]
    ran = subprocess.run([sys.executable, "-c", code], cwd=home, capture_output=True, text=True, timeout=60)
    assert ran.stdout == f"{[1.0] * len(ALONE)}\n", ran.stderr


def test_plain_functions_do_not_share_the_event_loop_of_async_ones() -> None:
    plain = {"name": "tiny_programs:close_the_current_loop", "batched": True}
    isolated = IsolatedScore(config(terms=[plain, {"name": "tiny_rewards:asks_a_server"}]))
    assert [judged(isolated, "0").reward for _ in range(2)] == [2.0, 2.0]
    isolated.close()


READS = """
from test_inherited_state import IsolatedScore, config, judged
if __name__ == "__main__":
    isolated = IsolatedScore(config("reads_its_input"))
    print(judged(isolated))
    isolated.close()
"""


def test_a_program_does_not_read_the_terminal_of_the_run(tmp_path: Path) -> None:
    """The answer of a program that reads must not depend on how the run was started."""
    script = tmp_path / "run.py"
    script.write_text(READS, encoding="utf-8")
    paths = os.pathsep.join(path for path in [str(Path(__file__).parent), *sys.path] if path)
    command = [sys.executable, str(script)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths}
    ) as run:
        assert run.stdout
        assert run.stdout.readline().startswith("Verdict(reward=1.0")


@pytest.mark.parametrize("left", ["fork", "program"])
def test_a_crash_is_seen_at_once_though_a_child_lives_on(left: str) -> None:
    """Its child inherits the file descriptors of the process."""
    isolated = IsolatedScore(config("crashes_but_not_its_child", timeout_seconds=8.0))
    assert judged(isolated, left).outcome == "crash"
    isolated.close()


def test_a_call_whose_program_got_a_signal_to_all_processes_is_repeated(tmp_path: Path) -> None:
    """Otherwise a run that is stopped would learn from the reward of a program that did not end by itself."""
    reward, seen = make_reward(config("runs_a_program"), [PROMPT]), tmp_path / "seen"
    (given,) = responses(str(seen))
    reward.submit(given)
    while not seen.exists() or not seen.read_text(encoding="utf-8").endswith("\n"):
        time.sleep(0.01)
    process, program = map(int, seen.read_text(encoding="utf-8").split())
    os.kill(process, signal.SIGSTOP)
    for pid in (program, process):
        os.kill(pid, signal.SIGTERM)
    os.kill(process, signal.SIGCONT)
    reward([given])
    reward.close()
    assert (given.reward, len(seen.read_text(encoding="utf-8").splitlines())) == (1.0, 2)


def test_exit_handlers_run_and_then_nothing_is_left(tmp_path: Path) -> None:
    reward = make_reward(config("leaves_a_folder"), [PROMPT])
    (given,) = responses(str(tmp_path))
    reward([given])
    reward.close()
    assert given.reward == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["ended"], "the temporary folder is removed"
    assert is_gone(int((tmp_path / "ended").read_text(encoding="utf-8")))


def test_exit_handlers_that_hang_are_killed() -> None:
    isolated = IsolatedScore(config("hangs_at_its_end"))
    process = int(judged(isolated).reward or 0)
    isolated.config = config("hangs_at_its_end", timeout_seconds=0.5)
    began = time.monotonic()
    isolated.close()
    assert 0.5 < time.monotonic() - began < 15
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
