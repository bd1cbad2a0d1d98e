"""Workers in this process, with random schedules and losses: the tokens and the policy are always the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cache, partial
from itertools import count, pairwise
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

from tlt.cluster.allocation import Allocation
from tlt.cluster.coordinator import Coordinator
from tlt.cluster.crew import Crew
from tlt.cluster.pool import ClusterError
from tlt.cluster.remote import join
from tlt.config import Config
from tlt.metrics import read_metrics
from tlt.rl.parallel import GroupBroken
from tlt.run import train as run_module
from tlt.run.display import Display
from tlt.spot.schedule import RULE

STEPS = 2
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
        pools.append(TestPool(size, lambda i: ThreadWorker(config, i, folder), choose, loses, room))
        return join(pools[0], config, *rest)

    enough_cores = patch("tlt.build.share_cores", lambda config: False)  # of this machine, which may have two
    try:
        with patch("tlt.run.parts._many_workers", many_workers), enough_cores:
            summary = run_module.train(config, resume, display or Display(Console(quiet=True)), **options)
    finally:
        assert all(pool.closed for pool in pools)
    kept, lines = ("step", "reward", "lengths", "tokens", "batch", "prompts"), read_metrics(Path(config.run.folder))
    learned = [{key: line[key] for key in kept} for line in lines], [line["update"]["loss"] for line in lines]
    return summary["policy_sha256"], learned, pools[0] if pools else None  # type: ignore[return-value]


@pytest.fixture(scope="module", params=[3])
def undisturbed(request: pytest.FixtureRequest, home: Path) -> tuple[int, str, Any]:
    digest, learned, _ = train(config_of(home, request.param))
    lines, losses = learned
    assert all(losses), "no gradient, no lesson"
    assert lines[0]["lengths"]["mean"] < lines[0]["lengths"]["max"]
    return request.param, digest, learned


def test_the_tokens_are_those_of_one_worker(home: Path, undisturbed: Any) -> None:
    _, (lines, losses), _ = train(config_of(home, 1))
    assert lines == undisturbed[2][0]
    # Each shard computes a prompt's gradient once for its responses, so the sums are rounded otherwise: by 1e-7, as
    # transformers' RMSNorm computes in float32. Adam makes more of it from step to step.
    assert losses == pytest.approx(undisturbed[2][1], rel=2e-6, abs=1e-12)


@given(seed=st.randoms(use_true_random=False), slots=st.integers(1, 5), drafter=st.sampled_from(["off", "suffix"]))
@settings(max_examples=3, phases=[Phase.generate])
def test_the_result_is_that_of_any_schedule(home: Path, undisturbed: Any, seed: Any, slots: int, drafter: str) -> None:
    workers, digest, learned = undisturbed
    config = config_of(home, workers, engine={"max_rows": slots}, speculation={"drafter": drafter})
    assert train(config, choose=lambda n: seed.randrange(n))[:2] == (digest, learned)


@given(data=st.data())
@settings(max_examples=5, phases=[Phase.generate])  # to shrink an example takes minutes
def test_the_result_does_not_depend_on_lost_workers(home: Path, undisturbed: Any, data: st.DataObject) -> None:
    workers, digest, learned = undisturbed
    random = data.draw(st.randoms(use_true_random=False))
    share = data.draw(st.sampled_from([0.02, 0.1]))
    lost: list[tuple[int, str, str]] = []

    def loses(worker: int, method: str) -> str:
        if method == "sha256" or random.random() > share or (lost and random.random() < 0.5):
            return ""
        lost.append((worker, method, random.choice(["before", "amid", "after"])))
        return lost[-1][2]

    found = None
    with suppress(ClusterError):  # all lost, or one too often
        found = train(config_of(home, workers), choose=lambda n: random.randrange(n), loses=loses)
    if found is None:
        assert len(lost) >= workers
    else:
        assert found[:2] == (digest, learned), lost


@pytest.mark.parametrize(
    ("method", "when"),
    [
        *(("decode", "amid"), ("update", "before"), ("update", "amid"), ("update", "after")),
        *(("sync", "amid"), ("save", "after"), ("rendezvous", "before"), ("tuner_state", "amid")),
    ],
)
def test_one_worker_lost_at_each_call(home: Path, undisturbed: Any, method: str, when: str) -> None:
    workers, *expected = undisturbed
    calls = count(1)

    def loses(worker: int, called: str) -> str:
        return when if called == method and next(calls) == 2 else ""

    *found, pool = train(config_of(home, workers), loses=loses)
    assert found == expected
    if method not in ("rendezvous", "save", "tuner_state"):  # these are called once
        assert sum(m == "take_state" for _, m in pool.log) == 1


def test_the_progress_of_an_update_is_that_of_the_slowest_worker(home: Path) -> None:
    coordinator = Coordinator(Crew(TestPool(2, lambda i: SimpleNamespace(updated=(0.75, 0.25)[i]))), config_of(home, 2))
    coordinator.group_update.read_progress()
    assert coordinator.group_update.done == 0.25


@pytest.mark.parametrize("when", ["amid", "after"])
def test_rows_decoded_by_a_lost_worker_count_once(home: Path, when: str) -> None:
    calls = count()

    def loses(worker: int, method: str) -> str:
        return when if (worker, method) == (1, "decode") and next(calls) == 12 else ""

    config = config_of(home, 2, speculation={"drafter": "off"})
    _, _, pool = train(config, loses=loses)
    assert pool.log.count((1, "decode")) > 12
    assert [line["accept_length"] for line in read_metrics(Path(config.run.folder))] == [1.0] * STEPS


def test_the_loss_of_all_workers_is_an_error_of_one_sentence(home: Path) -> None:
    with pytest.raises(ClusterError, match=r"all workers were lost"):
        train(config_of(home, 2), loses=lambda worker, method: "before" if method == "update" else "")


def never_gets_past(method: str, *, step: int) -> Loses:
    """Lose worker 1 in each call of this method from this step on, as if its node had too little memory."""
    calls = count()
    return lambda worker, called: "amid" if (worker, called) == (1, method) and next(calls) >= step else ""


@pytest.mark.parametrize("method", ["decode", "update"])
@pytest.mark.parametrize("undisturbed", [2], indirect=True)
def test_a_worker_that_is_lost_repeatedly_at_the_same_call_is_left_out(
    home: Path, undisturbed: Any, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    size, *expected = undisturbed
    turn = count()
    *found, pool = train(config_of(home, size), lambda n: next(turn), never_gets_past(method, step=1))
    assert found == expected
    assert pool.log.count((1, "take_state")) == 3
    (told,) = [record.getMessage() for record in caplog.records if "times in a row" in record.getMessage()]
    assert told.startswith("1 of 2 workers are left, and the run continues with them; worker 1 is tried again")
    assert f"worker 1 was lost 4 times in a row; worker 1 was lost during {method} (" in told


def test_a_run_that_loses_a_required_worker_during_an_update_saves(home: Path) -> None:
    config = config_of(home, 2, cluster={"min_workers": 2})
    left = r"1 of 2 workers are left, but the run needs 2 \(cluster.min_workers\): worker 1 was lost 4 times in a row"
    with pytest.raises(ClusterError, match=left) as ended:
        train(config, loses=never_gets_past("update", step=1))
    assert ended.value.__notes__ == [f"saved after step 1 in {config.run.folder}: continue with --resume"]
    assert train(config, resume=True)[0] == train(config_of(home, 2))[0]


@pytest.mark.parametrize("amid", ["decode", "update", "sync"])
def test_a_run_admits_new_workers(home: Path, undisturbed: Any, amid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node is missing in the first step, and back in the second. The policy is that of a run with all workers."""
    monkeypatch.setattr("tlt.cluster.capacity._POLL_EVERY", 0.0)
    size, *expected = undisturbed
    room, one = [size], 0 if amid == "decode" else size - 1
    losses: list[int] = []

    def loses(worker: int, method: str) -> str:
        if method == "trace":
            room[0] = size
        if (worker, method) != (one, amid) or losses:
            return ""
        room[0] = size - 1
        losses.append(worker)
        return "amid"

    config = config_of(home, size, cluster={"grace": 0.05})
    *found, pool = train(config, loses=loses, room=lambda: room[0])
    assert found == expected
    absent = [worker["ABSENT"] > 0 for worker in read_metrics(Path(config.run.folder))[0]["workers"]]
    assert absent == [index == one for index in range(size)]
    updates = [worker for worker, method in pool.log if method == "update"]
    if amid != "sync":
        assert updates.count(one) < updates.count(1 - min(one, 1)), "the first update was made without it"
    assert sorted(updates[-size:]) == list(range(size)), "it is there for the last one"


@pytest.mark.parametrize(("method", "who"), [("sync", "another worker"), ("save", "worker 1")])
def test_a_worker_lost_with_its_shard_is_an_error_of_one_sentence(home: Path, method: str, who: str) -> None:
    def broken(self: ThreadWorker, version: int) -> None:
        raise GroupBroken("Connection closed by peer")

    def loses(worker: int, called: str) -> str:
        return "before" if worker == 1 and called == method != "sync" else ""

    no_shards = patch.object(ThreadWorker, "shard_policy", lambda *arguments: True)
    sync = patch.object(ThreadWorker, "sync", broken) if method == "sync" else nullcontext()
    sentence = rf"{who} was lost during {method} together with its shard of the policy"
    with no_shards, sync, pytest.raises(ClusterError, match=sentence):
        train(config_of(home, 2, train={"shard": True}), loses=loses)


def test_training_workers_are_interrupted(home: Path) -> None:
    """They are interrupted when the next rollout or the update begins, and when rows of a lost worker wait. A running
    call ends early, and later calls go on."""
    training = {"micro_batch_tokens": 8, "buffer_tokens": 256}
    drafter = {"drafter": "adaptive", "look_ahead": 0, "training": training}
    config = config_of(home, 2, rollout=LONGER, speculation=drafter, train={"steps": 3 * STEPS})
    turn, decodes, real = count(), count(), ThreadWorker.train_drafter
    expected = train(config, lambda n: next(turn))[:2]
    trained: list[tuple[bool, int]] = []  # whether it was wanted, and micro-batches

    def train_drafter(self: ThreadWorker, start: Any, seconds: float, number: float) -> Any:
        report = real(self, start, seconds, number)
        trained.append((self._wanted >= number, report.micro_batches if report else 0))
        return report

    def dies(worker: int, method: str) -> str:
        return "after" if method == "decode" and next(decodes) == 40 else ""

    always = patch("tlt.spot.schedule.RULE", replace(RULE, burst=10**9))
    with always, patch.object(ThreadWorker, "train_drafter", train_drafter):
        assert train(config, lambda n: next(turn), dies)[:2] == expected
    assert {micro_batches for wanted, micro_batches in trained if wanted} == {0}
    assert sum(micro_batches for wanted, micro_batches in trained if not wanted) > STEPS
    assert [wanted for wanted, _ in trained].index(True) < len(trained) - 1


LONGER = {"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 24}
LOOK_AHEAD = {"drafter": "adaptive", "look_ahead": 2, "training": {"idle": False}}


@pytest.mark.parametrize(
    ("possible", "tried"),
    [
        ({"ask_for_rows"}, ["ask_for_rows", "_decode_ahead"]),  # it looks ahead while it waits
        ({"_update_early"}, ["ask_for_rows", "_update_early"]),
        ({"_train"}, ["ask_for_rows", "_update_early", "_train"]),
        (set[str](), ["ask_for_rows", "_update_early", "_train", "_decode_ahead"]),
    ],
)
def test_an_idle_worker_does_one_kind_of_work(home: Path, possible: set[str], tried: list[str]) -> None:
    coordinator = Coordinator(Crew(TestPool(2, lambda index: SimpleNamespace())), config_of(home, 2))
    asked, idle = [], []

    def do(name: str, *arguments: Any) -> bool:
        asked.append(name)
        idle.extend(arguments[1:2])
        return name in possible

    owners = {"ask_for_rows": coordinator.allocation}
    for name in ("ask_for_rows", "_update_early", "_train", "_decode_ahead"):
        setattr(owners.get(name, coordinator), name, partial(do, name))
    coordinator._idle(1)
    assert asked == tried
    assert idle == [coordinator.allocation.idle()] * ("_train" in tried)


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


@given(seed=st.integers(0, 2**31))
@settings(max_examples=3, phases=[Phase.generate])
def test_the_result_does_not_depend_on_look_ahead(home: Path, seed: int) -> None:
    random = Random(seed)
    workers, lost = random.choice([2, 3]), random.random() < 0.5
    few = {"look_ahead": random.randint(1, 3), "look_ahead_tokens": random.choice([40, 10**6])}
    config = config_of(home, workers, rollout=LONGER, speculation=LOOK_AHEAD | few)

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


@cache
def plain_of(home: Path, workers: int) -> tuple[str, Any]:
    plain = {"drafter": "off", "training": {"idle": False}}
    return train(config_of(home, workers, rollout=LONGER, speculation=plain))[:2]


def test_an_idle_worker_takes_over_half_of_the_rows(home: Path) -> None:
    """It receives them after one more round of the other worker, and does not train while it waits."""
    drafter = {"drafter": "adaptive", "training": {"micro_batch_tokens": 8, "buffer_tokens": 64}}
    turn, taken = count(), list[int]()
    decode, asks = ThreadWorker.decode, Allocation.ask_for_rows

    def decoding(self: ThreadWorker, work: Any, seconds: float) -> Any:
        taken.extend(len(row.tokens) for row in work.resumed)
        live = [row for row in self.engine.rows if not row.ahead]
        rows = [*live, *self.engine.waiting, *work.requests, *work.resumed]
        assert seconds == (0.0 if work.release else AT_ONCE if len(rows) > 1 else 5 * AT_ONCE)
        return decode(self, work, seconds)

    def asking(self: Any, index: int) -> bool:
        helps = asks(self, index)
        self.crew.pool.log.extend([(index, "asks")] * helps)
        return helps

    always = patch("tlt.cluster.balance.Forecast.is_worth_helping", lambda *arguments: True)
    with always, patch.object(ThreadWorker, "decode", decoding), patch.object(Allocation, "ask_for_rows", asking):
        *found, pool = train(config_of(home, 2, rollout=LONGER, speculation=drafter), choose=lambda n: next(turn))
    assert found == [*train(config_of(home, 2, rollout=LONGER))[:2]]
    assert max(taken) > 0
    assert "train_drafter" in {method for _, method in pool.log}
    for worker in range(2):
        calls = [method for index, method in pool.log if index == worker]
        assert ("asks", "train_drafter") not in pairwise(calls)


def test_acceptance_rates_and_alarms_cover_all_workers(home: Path) -> None:
    config, turn, decode = config_of(home, 2), count(), ThreadWorker.decode

    def decoding(self: ThreadWorker, work: Any, seconds: float) -> Any:
        done = decode(self, work, seconds)
        done.stats.acceptance_rate = {"suffix": [0.2, 0.8][self.index]}
        done.stats.alarms = {"suffix": 0.2} if self.index == 0 else {}
        return done

    with patch.object(ThreadWorker, "decode", decoding):
        train(config, choose=lambda n: next(turn))
    for line in read_metrics(Path(config.run.folder)):
        found = line["rollout"]
        assert (found["acceptance_rate"], found["alarms"]) == ({"suffix": 0.5}, {"suffix": 0.2})


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
