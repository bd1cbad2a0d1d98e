"""Simulated runs against hand-worked numbers."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_up_run
import pytest

from tlt.config import Config, parse_config
from tlt.metrics import write_json

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from profile_run import SKIPPED
from simulate import CASES, Simulation
from simulated import Known, Profile, Rounds, Training
from simulated_profiles import KnownGroup, _share_of_cores, gpu_profile, paper_profile, recorded_lengths

ONE = Rounds([1, 8], [1.0, 1.0], [1.0, 1.0])
PROFILE = Profile(
    plain=ONE, drafted=ONE, ahead=Rounds([1, 8], [1.0, 1.0], [5.0, 5.0]), seen=0.8, prefill=0.0, update=0.0
)


def config_of(workers: int, prompts: int = 2, **train: Any) -> Config:
    return parse_config(
        {
            **{"model": {"path": "-"}, "data": {"path": "-"}, "reward": {"name": "exact"}},
            "rollout": {"prompts_per_step": prompts, "group_size": 2},
            "cluster": {"workers": workers, "slice_seconds": 2.0},
            "train": train,
        }
    )


def groups(*lengths: tuple[int, int]) -> list[KnownGroup]:
    """Return groups of two responses, of which the first one is rewarded."""
    return [KnownGroup(4, [Known(a, 1.0), Known(b, 0.0)]) for a, b in lengths]


def simulated(workers: int, profile: Profile, steps: int = 4, case: str = "adaptive", **train: Any) -> dict[str, Any]:
    """Return the means over steps with responses of 10, 10, 10 and 90 tokens."""
    step = groups((10, 10), (10, 90))
    return Simulation(config_of(workers, **train), profile, [step] * (steps + 2), CASES[case]).run(steps)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_rollout_takes_the_rounds_of_its_longest_response(workers: int) -> None:
    found = simulated(workers, PROFILE)
    assert found["rollout"] == pytest.approx(90)
    assert found["states"]["IDLE"] == pytest.approx(80 / 180 if workers == 2 else 0.0)
    assert simulated(workers, PROFILE, case="plain")["rollout"] == pytest.approx(90)
    faster = replace(PROFILE, drafted=Rounds([1, 8], [1.5, 1.5], [3.0, 3.0]))
    assert simulated(workers, faster)["rollout"] == pytest.approx(45)


def test_a_response_has_the_pace_that_was_recorded() -> None:
    """The first three responses gain 2 tokens a round and the longest one 9. Plain decoding gains 1."""
    known = [Known(10, 1.0, 2.0), Known(10, 0.0, 2.0), Known(10, 1.0, 2.0), Known(90, 0.0, 9.0)]
    steps = [[KnownGroup(4, known[:2]), KnownGroup(4, known[2:])]] * 6
    for case, rounds in (("adaptive", 10), ("plain", 90)):
        assert Simulation(config_of(1), PROFILE, steps, CASES[case]).run(4)["rollout"] == pytest.approx(rounds)


def test_workers_that_share_a_core_take_longer() -> None:
    """Both decode for 10 s of work, at half the speed. Then one decodes 80 tokens alone."""
    assert simulated(2, replace(PROFILE, speeds=(1.0, 0.5)))["rollout"] == pytest.approx(20 + 80)
    assert simulated(2, replace(PROFILE, speeds=(1.0, 0.8)))["rollout"] == pytest.approx(10 / 0.8 + 80)
    assert simulated(2, replace(PROFILE, speeds=(1.0, 0.5), update=0.1))["update"] == pytest.approx(0.1 * 94 / 0.5)


def test_look_ahead_of_an_idle_worker_makes_the_next_rollout_shorter() -> None:
    """A worker is idle for 80 s, in which it decodes both steps that come. A round then gains 5 tokens."""
    found = simulated(2, PROFILE, case="look-ahead")
    assert found["seen_ahead"] > 0.5
    assert 18 <= found["rollout"] < 60
    assert found["useful_share"] > simulated(2, PROFILE)["useful_share"]


def test_an_update_takes_the_tokens_of_the_fullest_shard() -> None:
    """A group's prompt of 4 tokens counts once in a shard. Of two workers, one computes the response of 90 tokens."""
    slow = replace(PROFILE, update=0.1, optimizer=2.0, group=3.0)
    assert simulated(1, slow)["update"] == pytest.approx(0.1 * (4 + 20 + 4 + 100) + 2)
    assert simulated(2, slow)["update"] == pytest.approx(0.1 * (4 + 90) + 2 + 3)


def test_training_publishes_a_drafter_that_gains_more() -> None:
    drafts = replace(PROFILE, drafted=Rounds([1, 8], [1.0, 1.0], [2.0, 2.0]), training=Training(0.2, 1.0, 20.0))
    before, after = (simulated(2, drafts, steps=8, case=case)["rollout"] for case in ("adaptive", "training"))
    assert before == pytest.approx(45)
    assert 30 <= after < 0.9 * before


def test_a_gpu_has_the_rounds_of_its_file(tmp_path: Path) -> None:
    rounds = [{"shape": "s", "batch": n, "chain": c, "ms": 10.0 + n + c} for n in (1, 8) for c in (0, 4)]
    update = {"shape": "s", "batch": 8, "chain": 0, "context": 100, "update_seconds": 2.0}
    write_json(
        tmp_path / "rounds.json", {"cases": [*rounds, update, {"shape": "other", "batch": 1, "chain": 0, "ms": 9.0}]}
    )
    found = gpu_profile(tmp_path / "rounds.json", "s")
    assert found.plain == ([1, 8], [0.011, 0.018], [1.0, 1.0])
    assert found.drafted.at(4.5) == pytest.approx((0.0185, 1 + 0.7 + 0.49 + 0.343 + 0.2401))
    assert found.update == pytest.approx(2 / 800)


def write_lines(path: Path, *lines: Any) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_a_recorded_response_has_its_length_reward_and_tokens_per_pass(tmp_path: Path) -> None:
    step = made_up_run.line(0, tokens=30, tokens_seen=38, responses=2, prompts=[[5, 0]])
    of_one = {"step": 1, "prompt_id": 5, "epoch": 0}
    first, second = (of_one | {"index": i, "length": n, "reward": r} for i, n, r in ((0, 10, 1.0), (1, 20, None)))
    write_lines(tmp_path / "metrics.jsonl", step)
    decoded = {"decoded": {"row_passes": 5}}
    write_lines(tmp_path / "completions.jsonl", second | decoded, first | decoded)
    assert recorded_lengths(tmp_path) == [[KnownGroup(4, [Known(10, 1.0, 2.0), Known(20, 0.0, 4.0)])]]


def test_workers_have_the_share_of_cores_that_updates_had(tmp_path: Path) -> None:
    """Updates computed for 3 s and waited for 1 s. The first steps do not count."""
    waits = [5.0] * SKIPPED + [0.0, 1.0]
    used = [{"update": {"cpu_seconds": 1.5, "cpu_wait_seconds": wait}} for wait in waits]
    write_lines(
        tmp_path / "metrics.jsonl", *(made_up_run.line(i, energy={"phases": one}) for i, one in enumerate(used))
    )
    assert _share_of_cores(tmp_path) == pytest.approx(0.75)


def test_rounds_of_the_paper_by_hand() -> None:
    """A plain round of one row takes 0.0101 s. With drafts, one that accepts 8.21 tokens is 3.62 times as fast. With
    drafts that are known, one that accepts 6.80 tokens is 3.22 times as fast and has no time of drafting."""
    found = paper_profile(0.0)
    assert found.drafted.at(1) == pytest.approx((0.0101 * 8.21 / 3.62, 4.59))
    assert found.ahead.at(1)[0] == pytest.approx(0.0101 * (6.80 / 3.22 - 1))
    assert found.drafted.at(64) == (found.plain.at(64)[0], 1.0)
