"""Workers in this process, with random schedules and losses: the tokens and the policy are always the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pools import Choose, Loses, TestPool, ThreadWorker
from rich.console import Console
from tiny import tiny_config

from tlt.cluster.coordinator import Coordinator
from tlt.cluster.pool import ClusterError
from tlt.cluster.remote import ClusterPolicy, join
from tlt.cluster.supervisor import Supervisor
from tlt.cluster.worker import DecodeWork, Slice
from tlt.config import Config
from tlt.metrics import read_metrics
from tlt.run import train as run_module
from tlt.run.display import Display
from tlt.spot.schedule import RULE
from tlt.types import RolloutStats

STEPS, WORKERS = 2, 3
AT_ONCE = 1e-9  # seconds of a slice: one round


def config_of(home: Path, workers: int, **sections: dict[str, Any]) -> Config:
    """Return a configuration with rollouts of one round at a time and lengths of all kinds. `sections` change it."""
    defaults: dict[str, dict[str, Any]] = {
        "reward": {"name": "tiny_rewards:share_of_low_bytes", "folder": str(Path(__file__).parent.parent)},
        "cluster": {"workers": workers, "slice_seconds": AT_ONCE},
        "train": {"steps": STEPS, "updates_per_step": 2, "learning_rate": 1e-3, "micro_batch_tokens": 64},
        "run": {"folder": str(home / "run"), "overwrite": True, "seed": 1},
        "rollout": {"stop_strings": list("abcdefghij ")},
    }
    return tiny_config(home, **sections | {name: some | sections.get(name, {}) for name, some in defaults.items()})


def train(
    config: Config,
    choose: Choose = lambda n: 0,
    loses: Loses = lambda i, m: "",
    room: Callable[[], int] = lambda: 99,
    resume: bool = False,
    display: Display | None = None,
    **options: Any,
) -> tuple[str, Any, TestPool]:
    """Return the policy's sha256, the prompts that each step learned from, and the pool, None for one worker."""
    pools: list[TestPool] = []

    def many_workers(config: Config, folder: str | Path, *rest: Any) -> Any:
        size = config.cluster.workers
        pools.append(TestPool(size, lambda i: ThreadWorker.started(config, i, folder), choose, loses, room))
        return join(pools[0], config, *rest)

    enough_cores = patch("tlt.build.share_cores", lambda config: False)  # of this machine, which may have two
    try:
        with patch("tlt.run.opening._many_workers", many_workers), enough_cores:
            summary = run_module.train(config, resume, display or Display(Console(quiet=True)), **options)
            assert summary["exact"] is not False, "every worker is; with vLLM it is None"
    finally:
        assert all(pool.closed for pool in pools)
    kept, lines = ("step", "reward", "lengths", "tokens", "batch", "prompts"), read_metrics(Path(config.run.folder))
    learned = [{key: line[key] for key in kept} for line in lines], [line["update"]["loss"] for line in lines]
    return summary["policy_sha256"], learned, pools[0] if pools else None  # type: ignore[return-value]


@pytest.fixture(scope="module")
def undisturbed(home: Path) -> tuple[str, Any]:
    digest, learned, _ = train(config_of(home, WORKERS))
    lines, losses = learned
    assert all(losses), "no gradient, no lesson"
    assert lines[0]["lengths"]["mean"] < lines[0]["lengths"]["max"]
    return digest, learned


def test_the_tokens_are_those_of_one_worker(home: Path, undisturbed: Any) -> None:
    _, (lines, losses), _ = train(config_of(home, 1))
    assert lines == undisturbed[1][0]
    # Each shard computes a prompt's gradient once for its responses, so the sums are rounded otherwise: by 1e-7, as
    # transformers' RMSNorm computes in float32. Adam makes more of it from step to step.
    assert losses == pytest.approx(undisturbed[1][1], rel=2e-6, abs=1e-12)


def test_the_result_depends_on_no_schedule_and_no_lost_worker(home: Path, undisturbed: Any) -> None:
    survived = list[int]()

    @given(data=st.data())
    @settings(max_examples=6, phases=[Phase.generate])  # to shrink an example takes minutes
    def check(data: st.DataObject) -> None:
        survived.append(lost_by_a_run_that_ends(home, undisturbed, data))

    check()
    assert any(survived), "no run lost a worker and ended nevertheless"


def lost_by_a_run_that_ends(home: Path, undisturbed: Any, data: st.DataObject) -> int:
    """Train with workers that are lost at random. Return how many a run lost that ended; 0 if it did not end."""
    random = data.draw(st.randoms(use_true_random=False))
    share = data.draw(st.sampled_from([0.0, 0.02, 0.1]))
    engine = {"max_rows": data.draw(st.integers(1, 5))}
    config = config_of(home, WORKERS, engine=engine, speculation={"drafter": random.choice(["off", "suffix"])})
    lost: list[tuple[int, str, str]] = []

    def loses(worker: int, method: str) -> str:
        if method == "sha256" or random.random() > share or (lost and random.random() < 0.5):
            return ""
        lost.append((worker, method, random.choice(["before", "amid", "after"])))
        return lost[-1][2]

    found = None
    with suppress(ClusterError):  # all lost, or one too often
        found = train(config, choose=lambda n: random.randrange(n), loses=loses)
    if found is None:
        assert len(lost) >= WORKERS
        return 0
    assert found[:2] == undisturbed, lost
    return len(lost)


@pytest.mark.parametrize(
    ("method", "when"),
    [
        *(("update", "before"), ("update", "after"), ("sync", "after")),
        *(("save", "after"), ("rendezvous", "before"), ("tuner_state", "after")),
    ],
)
def test_one_worker_lost_at_each_call(home: Path, undisturbed: Any, method: str, when: str) -> None:
    calls = count(1)

    def loses(worker: int, called: str) -> str:
        return when if called == method and next(calls) == 2 else ""

    *found, pool = train(config_of(home, WORKERS), loses=loses)
    assert tuple(found) == undisturbed
    if method not in ("rendezvous", "save", "tuner_state"):  # these are called once
        assert sum(m == "take_state" for _, m in pool.log) == 1


def coordinator_of(home: Path) -> Coordinator:
    """Return a coordinator of two workers."""
    return Coordinator(Supervisor(TestPool(2, lambda index: None)), config_of(home, 2))


def test_the_progress_of_an_update_is_that_of_the_slowest_worker(home: Path) -> None:
    policy = ClusterPolicy(Supervisor(TestPool(2, lambda index: SimpleNamespace(updated=(0.75, 0.25)[index]))))
    policy.read_progress()
    assert policy.updated == 0.25


def test_rows_decoded_by_a_lost_worker_count_once(home: Path) -> None:
    calls = count()

    def loses(worker: int, method: str) -> str:
        return "after" if (worker, method) == (1, "decode") and next(calls) == 12 else ""

    config = config_of(home, 2, speculation={"drafter": "off"})
    _, _, pool = train(config, loses=loses)
    assert pool.log.count((1, "decode")) > 12
    assert [line["accept_length"] for line in read_metrics(Path(config.run.folder))] == [1.0] * STEPS


def test_the_loss_of_all_workers_is_an_error_of_one_sentence(home: Path) -> None:
    with pytest.raises(ClusterError, match=r"all workers were lost"):
        train(config_of(home, 2), loses=lambda worker, method: "before" if method == "update" else "")


def lost_in_updates() -> Loses:
    """Lose worker 1 in each update from the second one on, as if its node had too little memory. After eight losses it
    lives, so that a run that does not leave it out ends."""
    updates = count()
    return lambda worker, method: "amid" if (worker, method) == (1, "update") and 0 < next(updates) <= 8 else ""


def test_a_worker_that_is_lost_repeatedly_at_the_same_call_is_left_out(
    home: Path, undisturbed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    turn = count()
    *found, pool = train(config_of(home, WORKERS), lambda n: next(turn), lost_in_updates())
    assert tuple(found) == undisturbed
    assert pool.log.count((1, "take_state")) == 3
    (told,) = [record.getMessage() for record in caplog.records if "times in a row" in record.getMessage()]
    assert told.startswith("2 of 3 workers are left, and the run continues with them; worker 1 is tried again")
    assert "worker 1 was lost 4 times in a row; worker 1 was lost during update (" in told


def test_a_run_that_loses_a_required_worker_during_an_update_saves(home: Path, undisturbed: Any) -> None:
    config = config_of(home, WORKERS, cluster={"min_workers": 3})
    left = r"2 of 3 workers are left, but the run needs 3 \(cluster.min_workers.*\): worker 1 was lost 4 times in a row"
    with pytest.raises(ClusterError, match=left) as ended:
        train(config, loses=lost_in_updates())
    assert ended.value.__notes__ == [f"saved after step 1 in {config.run.folder}: continue with --resume"]
    assert train(config, resume=True)[0] == undisturbed[0]


@pytest.mark.parametrize("amid", ["decode", "update"])
def test_a_run_admits_new_workers(home: Path, undisturbed: Any, amid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node is missing in the first step, and back in the second. The policy is that of a run with all workers."""
    monkeypatch.setattr("tlt.cluster.calls._POLL_EVERY", 0.0)
    room, one = [WORKERS], 0 if amid == "decode" else WORKERS - 1
    losses: list[int] = []

    def loses(worker: int, method: str) -> str:
        if method == "trace":
            room[0] = WORKERS
        if (worker, method) != (one, amid) or losses:
            return ""
        room[0] = WORKERS - 1
        losses.append(worker)
        return "amid"

    config = config_of(home, WORKERS, cluster={"grace": 0.05})
    *found, pool = train(config, loses=loses, room=lambda: room[0])
    assert tuple(found) == undisturbed
    absent = [worker["ABSENT"] > 0 for worker in read_metrics(Path(config.run.folder))[0]["workers"]]
    assert absent == [index == one for index in range(WORKERS)]
    updates = [worker for worker, method in pool.log if method == "update"]
    assert updates.count(one) < updates.count(1), "the first update was made without it"
    assert sorted(updates[-WORKERS:]) == list(range(WORKERS)), "it is there for the last one"


def test_training_workers_are_interrupted(home: Path) -> None:
    """They are interrupted when the next rollout or the update begins, and when rows of a lost worker wait. A running
    call ends early, and later calls go on."""
    training = {"micro_batch_tokens": 8, "buffer_tokens": 256}
    drafter = {"drafter": "adaptive", "look_ahead": 0, "training": training}
    config = config_of(home, 2, rollout=LONGER, speculation=drafter, train={"steps": 3 * STEPS})
    turn, decodes, real = count(), count(), ThreadWorker.train_drafter
    trained: list[tuple[bool, int]] = []  # whether it was wanted, and micro-batches

    def train_drafter(self: ThreadWorker, start: Any, seconds: float, number: float) -> Any:
        report = real(self, start, seconds, number)
        trained.append((self._ends >= number, report.micro_batches if report else 0))
        return report

    def dies(worker: int, method: str) -> str:
        return "after" if method == "decode" and next(decodes) == 40 else ""

    always = patch("tlt.spot.schedule.RULE", replace(RULE, burst=10**9))
    with always, patch.object(ThreadWorker, "train_drafter", train_drafter):
        train(config, lambda n: next(turn), dies)
    assert {micro_batches for wanted, micro_batches in trained if wanted} == {0}
    assert sum(micro_batches for wanted, micro_batches in trained if not wanted) > STEPS
    assert [wanted for wanted, _ in trained].index(True) < len(trained) - 1


LONGER = {"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 24}
LOOK_AHEAD = {"drafter": "adaptive", "look_ahead": 2, "training": {"idle": False}}


@pytest.mark.parametrize(
    ("idle", "has_requests", "started"),
    [
        ([1], True, ["train", "decode_ahead", "train", "decode_ahead"]),
        ([1], False, ["train"] * 4),  # nothing to look ahead to
        ([0, 1], True, ["train"] * 4),  # another idle worker looks ahead
    ],
)
def test_the_only_idle_worker_trains_and_looks_ahead_in_turns(
    home: Path, idle: list[int], has_requests: bool, started: list[str]
) -> None:
    work, calls = coordinator_of(home).idle, []

    def do(name: str, possible: bool, *arguments: Any) -> bool:
        assert name != "train" or arguments[1] == idle
        calls.extend([name] * possible)
        return possible

    work.allocation.idle = lambda: idle
    for name, possible in (("train", True), ("decode_ahead", has_requests)):
        setattr(work, name, partial(do, name, possible))
    for _ in range(4):
        work.start(1)
    assert calls == started


def ahead_of(config: Config) -> dict[str, int]:
    lines = [line["rollout"] for line in read_metrics(Path(config.run.folder))]
    names = ("ahead_tokens", "ahead_passes", "ahead_drafted", "seen_ahead")
    return {name: sum(line[name] for line in lines) for name in names}


def test_without_an_update_all_look_ahead_tokens_are_accepted(home: Path) -> None:
    """Without an update, look-ahead decodes the next step's requests with the same weights and seeds."""
    slowly = {"steps": 4, "learning_rate": 1e-30, "updates_per_step": 1}
    config, turn = config_of(home, 3, rollout=LONGER, speculation=LOOK_AHEAD, train=slowly), count()
    train(config, choose=lambda n: next(turn))
    seen = ahead_of(config)
    assert seen["ahead_drafted"] == seen["seen_ahead"] > 0
    assert read_metrics(Path(config.run.folder))[0]["rollout"]["seen_ahead"] == 0
    assert seen["ahead_tokens"] >= seen["seen_ahead"], "nothing is seen that nobody decoded"


@pytest.mark.parametrize(("seed", "lost"), [(0, False), (1, True), (2, True)])
def test_the_result_does_not_depend_on_look_ahead(home: Path, seed: int, lost: bool) -> None:
    random = Random(seed)
    workers = random.choice([2, 3])
    few = LOOK_AHEAD | {"look_ahead": random.randint(1, 3)}
    config = config_of(home, workers, rollout=LONGER, speculation=few)

    def loses(worker: int, method: str) -> str:
        dies = lost and method in ("decode", "look_ahead") and random.random() < 0.03
        return random.choice(["before", "amid", "after"]) if dies else ""

    found = None
    with suppress(ClusterError):  # all lost, or one too often
        found = train(config, choose=lambda n: random.randrange(n), loses=loses)[:2]
    assert found or lost
    assert found in (plain_of(home, workers), None)


def test_tokens_of_a_lost_worker_are_drafts_of_its_replacement(home: Path) -> None:
    """There is no other look-ahead. The drafts are the tokens that the lost worker had reported."""
    config, decodes = config_of(home, 2, rollout=LONGER, speculation=LOOK_AHEAD, train={"steps": 1}), count()

    def loses(worker: int, method: str) -> str:
        return "before" if worker == 1 and method == "decode" and next(decodes) == 6 else ""

    train(config)
    assert ahead_of(config)["ahead_drafted"] == 0
    train(config, loses=loses)
    disturbed = ahead_of(config)
    assert disturbed["ahead_drafted"] == disturbed["seen_ahead"] > 0


@pytest.mark.parametrize("lost", [False, True])
def test_the_last_responses_to_a_prompt_travel_with_its_requests(home: Path, lost: bool) -> None:
    """They go to any worker, also to one that replaces another. An epoch has one and a half steps."""
    config, decodes = config_of(home, 2, rollout=LONGER, train={"steps": 6}), count()
    answers: dict[tuple[int, ...], list[list[int]]] = {}  # of the last epoch
    sent, decode, rollout = [0] * 6, ThreadWorker.decode, Coordinator.generate

    def seen(worker: ThreadWorker, work: DecodeWork, seconds: float) -> Slice:
        own = {asked.seed for asked in (*work.requests, *(row.request for row in work.resumed))}
        prompts = {asked.prompt.token_ids for asked in (*work.requests, *(row.request for row in work.resumed))}
        drafts = [ahead for ahead in work.drafts if ahead.seed not in own and ahead.ended]
        for prompt in prompts:
            found = sorted(ahead.tokens.tolist() for ahead in drafts if ahead.prompt == prompt)
            assert found == answers.get(prompt, [])
            sent[work.rollout - 2] += len(found)
        assert {ahead.prompt for ahead in drafts} <= prompts
        return decode(worker, work, seconds)

    def rolled(coordinator: Coordinator, *arguments: Any) -> Any:
        responses, stats = rollout(coordinator, *arguments)
        for prompt in {response.request.prompt.token_ids for response in responses}:
            answers[prompt] = sorted(r.token_ids for r in responses if r.request.prompt.token_ids == prompt)
        return responses, stats

    def loses(worker: int, method: str) -> str:
        return "after" if lost and method == "decode" and any(sent[2:]) and next(decodes) == 5 else ""

    with patch.object(ThreadWorker, "decode", seen), patch.object(Coordinator, "generate", rolled):
        train(config, loses=loses)
    assert sent[0] == 0
    assert all(sent[2:])


@cache
def plain_of(home: Path, workers: int) -> tuple[str, Any]:
    plain = {"drafter": "off", "training": {"idle": False}}
    return train(config_of(home, workers, rollout=LONGER, speculation=plain))[:2]


def test_acceptance_rates_and_alarms_cover_all_workers(home: Path) -> None:
    coordinator = coordinator_of(home)
    first = RolloutStats(acceptance_rate={"suffix": 0.2}, alarms={"suffix": 0.2})
    second = RolloutStats(acceptance_rate={"suffix": 0.8, "eagle": 0.5})
    for share, stats in zip(coordinator.allocation.shares, (first, second), strict=True):
        share.last = Slice([], stats, {}, {})
    found = coordinator._stats([])
    assert (found.acceptance_rate, found.alarms) == ({"suffix": 0.5, "eagle": 0.5}, {"suffix": 0.2})


def test_the_result_does_not_depend_on_a_comparison_with_plain_decoding(home: Path) -> None:
    sections, random = {"rollout": LONGER, "speculation": LOOK_AHEAD}, Random(1)
    config, lost = config_of(home, 3, **sections, run={"compare_every": 1}), list[str]()

    def loses(worker: int, method: str) -> str:
        dies = method == "decode" and len(lost) < 2 and random.random() < 0.05
        lost.extend([method] * dies)
        return random.choice(["before", "after"]) if dies else ""

    expected = train(config_of(home, 3, **sections))[:2]
    assert train(config, lambda n: random.randrange(n), loses)[:2] == expected
    for line in read_metrics(Path(config.run.folder)):
        assert line["compared"] == {"tokens": line["tokens"], "responses": 12, "differ": 0}
        assert line["seconds"]["compare"] > 0
