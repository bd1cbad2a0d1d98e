"""The last lines of a run."""

from __future__ import annotations

from typing import Any

import pytest

from tlt.gain import gain_of
from tlt.run.closing import closing

SUMMARY: dict[str, Any] = {
    "steps": 4,
    "reward_steps": 1,
    "reward_first": 0.1,
    "reward_last": 0.9,
    "seconds": {"total": 10.0, "rollout": 9.0},
    "tokens_per_second": 100.0,
    "accept_length": 2.0,
    "useful_share": 0.85,
    "gain": None,
    "compared": {},
    "responses": 3840,
    "without_reward": {},
    "workers": [{"idle_seconds_trained": 0.0}] * 2,
    "peak_memory": {},
    "exact": False,
    "exactness": "not exact: attention",
}


def gain(*times: float, passes: int = 10, accepted: int = 20) -> dict[str, Any]:
    """Return the gain of a run in which plain decoding took these times as long."""
    rollout = {"draft_passes": passes, "accepted": accepted}
    lines = [{"step": 2, "seconds": {"compare": each, "rollout": 1.0}, "rollout": rollout} for each in times]
    found = gain_of(lines)
    assert found
    return found._asdict()


def test_the_last_lines_show_failures_in_red_and_the_speed() -> None:
    lines = closing(SUMMARY, "runs/x")
    assert lines[0].plain.endswith(", 85% of the workers' time useful")
    assert len(lines) == 2
    assert "runs/x" in lines[-1].plain
    assert "4 steps: mean reward 0.100 in the first step, 0.900 in the last;" in lines[0].plain
    longer = closing(SUMMARY | {"steps": 30, "reward_steps": 3}, "")[0].plain
    assert "30 steps: mean reward 0.100 in the first 3 steps, 0.900 in the last 3;" in longer
    compared = {"steps": 1, "tokens": 90, "responses": 8, "differ": 0, "plain_seconds": 6.0, "rollout_seconds": 2.0}
    faster = gain(1.9, 2.0, 2.2)
    both = closing(SUMMARY | {"compared": compared, "gain": faster}, "runs/x")
    measured = "rollouts were 2.00 times as fast as plain decoding (median; 1.90 to 2.20 times in 3 steps); "
    assert both[1].plain == measured + "same tokens"
    differ = closing(SUMMARY | {"compared": compared | {"differ": 3}, "gain": faster}, "runs/x")
    assert differ[1].plain == measured + "3 of 8 responses differ"
    assert differ[2].plain == "not exact: attention. The two times are of different responses"
    bug = closing(SUMMARY | {"exact": True, "compared": compared | {"differ": 3}, "gain": faster}, "runs/x")
    assert "so this is a bug in tlt" in bug[2].plain
    one = closing(SUMMARY | {"steps": 1, "responses": 1, "without_reward": {"error": 1}}, "runs/x")
    assert one[0].plain.startswith("1 step: mean reward")
    assert one[1].plain.startswith("100.0% of 1 response had no reward")
    alone = {"driver": {"resident": 2048.4, "cuda": 100.0}}
    three = {"driver": {"resident": 9.0}, "worker 0": {"resident": 7.0}, "worker 1": {"resident": 8.0}}
    peaks = [closing(SUMMARY | {"peak_memory": peak}, "")[1].plain for peak in (alone, three)]
    assert peaks[0] == "peak memory: 2,048 MiB and 100 MiB on CUDA"
    assert peaks[1] == "peak memory: main process 9 MiB, largest worker process 8 MiB"
    failures = {"without_reward": {"timeout": 10, "error": 2}}
    failed = closing(SUMMARY | failures, "runs/x")
    assert failed[1].plain == "0.3% of 3,840 responses had no reward (10 timeout, 2 error): see the errors above"
    assert "red" in str(failed[1].style)


@pytest.mark.parametrize(
    ("times", "passes", "accepted", "advised"),
    [
        ((0.9, 0.95, 0.99), 10, 20, True),
        ((1.01, 1.04, 1.05), 10, 20, True),
        ((1.06, 1.07, 1.08), 10, 20, False),
        ((0.9, 1.0, 1.1), 10, 20, True),
        ((0.9, 0.95, 0.99), 10, 0, True),  # all draft tokens were rejected
        ((0.9, 1.0, 1.1), 0, 0, False),
        ((0.9,), 10, 20, False),
    ],
)
def test_a_run_whose_drafts_gained_little_gets_advice(
    times: tuple[float, ...], passes: int, accepted: int, advised: bool
) -> None:
    """Without drafts or with a single pair the advice would have no ground."""
    found = gain(*times, passes=passes, accepted=accepted)
    lines = closing(SUMMARY | {"gain": found, "compared": {"differ": 0}}, "runs/x")
    assert any("tlt draft train" in line.plain for line in lines) == advised


def test_the_last_lines_show_the_result_of_drafter_training() -> None:
    workers = [{"idle_seconds_trained": 1.25}, {"idle_seconds_trained": 2.5}]
    for version, said in ((3, "version 3 is in use"), (0, "the first drafter is still in use")):
        lines = closing(SUMMARY | {"workers": workers, "by_step": {"drafter_version": [0, version]}}, "runs/x")
        assert lines[1].plain == f"the drafter was trained for 3.8 worker seconds; {said}"
    hardly = [{"idle_seconds_trained": 0.02}] * 2
    assert "the drafter was trained" not in str(closing(SUMMARY | {"workers": hardly}, "runs/x"))
