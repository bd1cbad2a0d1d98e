"""Gradients of early shards by any member, in any order, interrupted at any point: they have the bits of an update
without early shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pools import Table, Thread
from test_parallel import Steady, together
from tiny import random_batch

from tlt.config import RolloutConfig, TrainConfig
from tlt.models.weights import sha256
from tlt.rl.early import counts_early, cut
from tlt.rl.lora import AdaptedPolicy
from tlt.rl.policy import Policy
from tlt.types import TrainBatch

CPU, VOCAB, SHARDS, PROMPTS = torch.device("cpu"), 31, 3, 8
Held = list[dict[int, float]]
Before = Callable[[list[Policy], list[TrainBatch]], Held]
"""(members, early shards) -> what each member has done, before the update"""


def batch_of() -> TrainBatch:
    """Return eight groups of two. Seven groups are in early shards, and one response has no advantage."""
    batch = random_batch(VOCAB, responses=2 * PROMPTS)
    batch.rewards = [[0.0, 1.0]] * PROMPTS
    batch.prompt_ids = [batch.prompt_ids[i - i % 2] for i in range(2 * PROMPTS)]
    batch.advantages[6] = 0.0
    return batch


def make_policy(folder: Path, **train: Any) -> Policy:
    config = TrainConfig(**{"learning_rate": 1e-2, "micro_batch_tokens": 16} | train)
    kind = AdaptedPolicy if config.lora.rank else Policy
    return kind(folder, torch.float32, CPU, config, RolloutConfig(max_new_tokens=12, prompts_per_step=PROMPTS))


def early_shards(policy: Policy, batch: TrainBatch) -> list[TrainBatch]:
    counts = counts_early(policy.config)
    found = cut(batch, lambda i: counts(batch, i, policy.config), PROMPTS, SHARDS)
    return [batch.part(shard) for shard in found.early]


def updated(folder: Path, size: int, before: Before, steps: int = 1, **train: Any) -> tuple[str, list[float]]:
    """Return the policy's sha256, which is the same for all members, after some updates, and the share of each that was
    computed early."""
    members, batch, shares = [make_policy(folder, **train) for _ in range(size)], batch_of(), list[float]()
    for step in range(steps):
        held = before(members, early_shards(members[0], batch))

        def act(group: Any, step: int = step, held: Held = held) -> dict[str, float]:
            return members[group.rank].update(batch, step, group, held)

        reports = together(size, act, SHARDS)
        shares.append(reports[0]["early"])
        assert len({report["loss"] for report in reports}) == 1
    digests = {sha256(member.state_dict()) for member in members}
    assert len(digests) == 1
    return digests.pop(), shares


def nothing(members: list[Policy], shards: list[TrainBatch]) -> Held:
    return [{} for _ in members]


@pytest.fixture(scope="module")
def expected(folder: Path) -> str:
    digest, shares = updated(folder, 3, nothing, steps=2)
    assert shares == [0.0, 0.0]
    return digest


def until(count: int) -> Callable[[], bool]:
    left = iter(range(count - 1))
    return lambda: next(left, None) is None


def whole() -> bool:
    return False


@given(st.integers(1, 3), st.randoms(use_true_random=False))
@settings(max_examples=6, phases=[Phase.generate], deadline=None)
def test_any_member_may_compute_them_at_any_time(folder: Path, expected: str, size: int, chance: Any) -> None:
    """Members begin shards, are interrupted, leave them unfinished, and compute shards that others have computed
    too."""

    def before(members: list[Policy], shards: list[TrainBatch]) -> Held:
        held: Held = [{} for _ in members]
        for _ in range(chance.randint(0, 8)):
            member, shard = chance.randrange(size), chance.randrange(len(shards))
            stop = whole if chance.random() < 0.3 else until(1)
            held[member][shard] = members[member].early_update(shard, shards[shard], stop)
        return held

    assert updated(folder, size, before, steps=2)[0] == expected


def test_all_early_shards_are_computed_by_one_member(folder: Path, expected: str) -> None:
    """Nothing of them is left for the second update, which has the same batch and other weights."""
    turn = iter((True, False))

    def before(members: list[Policy], shards: list[TrainBatch]) -> Held:
        done = [members[1].early_update(k, shard, whole) for k, shard in enumerate(shards)] if next(turn) else []
        return [{}, dict(enumerate(done)), {}]

    digest, shares = updated(folder, 3, before, steps=2)
    assert digest == expected
    assert shares[0] > 0.7
    assert shares[1] == 0.0


def test_an_unfinished_shard_is_finished_in_the_update(folder: Path, expected: str) -> None:
    def before(members: list[Policy], shards: list[TrainBatch]) -> Held:
        done = members[0].early_update(len(shards) - 1, shards[-1], until(1))
        assert 0.0 < done < 1.0
        return [{len(shards) - 1: done}, {}]

    digest, shares = updated(folder, 2, before, steps=2)
    assert digest == expected
    assert 0.0 < shares[0] < 0.5


@pytest.mark.parametrize("stop", [whole, until(1)], ids=["whole", "unfinished"])
def test_gradients_of_other_responses_are_not_used(folder: Path, expected: str, stop: Callable[[], bool]) -> None:
    def before(members: list[Policy], shards: list[TrainBatch]) -> Held:
        shards[0].advantages[0] += 1.0
        return [{0: members[0].early_update(0, shards[0], stop)}, {}]

    digest, shares = updated(folder, 2, before, steps=2)
    assert (digest, shares) == (expected, [0.0, 0.0])


def test_responses_of_the_previous_step_keep_their_old_logprobs(folder: Path) -> None:
    batch, alone, member = batch_of(), make_policy(folder), make_policy(folder)
    batch.old_logprobs = {i: [-3.0] * len(batch.response_ids[i]) for i in range(0, 2 * PROMPTS, 3)}
    held = {k: member.early_update(k, shard, whole) for k, shard in enumerate(early_shards(member, batch)[:2])}
    group = Thread(Table(), 0, 1, Steady(), SHARDS)  # type: ignore[arg-type]
    found, expected = member.update(batch, 0, group, [held]), alone.update(batch, 0)
    assert 0.0 < found["early"] < 0.5
    for name in ("loss", "clipped", "grad_norm", "mismatch_mean"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)


@pytest.mark.parametrize(
    "train",
    [
        {"loss": "gspo", "kl_weight": 0.1},
        {"lora": {"rank": 2}},
        {"updates_per_step": 2, "kl_weight": 0.1},
        {"kl_weight": 0.1, "kl_in": "reward"},
    ],
    ids=str,
)
def test_other_objectives(folder: Path, train: dict[str, Any]) -> None:

    def before(members: list[Policy], shards: list[TrainBatch]) -> Held:
        members[0].early_update(0, shards[0], until(1))
        return [{k: members[0].early_update(k, shard, whole) for k, shard in enumerate(shards)}, {}]

    plain, _ = updated(folder, 3, nothing, steps=2, **train)
    digest, shares = updated(folder, 2, before, steps=2, **train)
    assert digest == plain
    assert shares[0] > 0.7
