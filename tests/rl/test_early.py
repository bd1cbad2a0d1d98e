"""Early shards. They depend on the responses alone, and more of them are certain as responses end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tlt.config import Config, TrainConfig, parse_config
from tlt.rl.batching import Packer
from tlt.rl.early import (
    EarlyGroups,
    counts_early,
    cut,
    has_early_gradients,
    in_shards,
    most_responses,
    needs_logprobs,
    owners_of,
)
from tlt.rl.groups import make_batch, usable
from tlt.rl.shards import GradientShards, LogprobShards, Shard, Shards
from tlt.rl.update import split
from tlt.types import Group, Prompt, Request, Response, SamplingParams, TrainBatch

LONGEST = 9


def config_of(prompts: int, workers: int, max_waves: int = 0, **train: Any) -> Config:
    rollout = {"prompts_per_step": prompts, "group_size": 2, "max_new_tokens": LONGEST, "max_waves": max_waves}
    cluster = {"workers": workers}
    tree = {"model": {"path": "-"}, "data": {"path": "-"}, "reward": {"name": "exact"}}
    return parse_config(tree | {"rollout": rollout, "cluster": cluster, "train": train})


def group_of(number: int, lengths: Sequence[int], rewards: Sequence[float | None], prompts: int = 999) -> Group:
    """Return a group. `prompts` is the number of different prompts, after which they repeat."""
    prompt = Prompt(number, "", (number % prompts, 7))
    requests = [Request(prompt, k, 0, 100 * number + k, SamplingParams()) for k in range(len(lengths))]
    tokens = [[number] * length for length in lengths]
    return Group(
        prompt,
        [
            Response(r, t, [], [-1.0] * len(t), "stop", reward=x)
            for r, t, x in zip(requests, tokens, rewards, strict=True)
        ],
    )


rewards = st.sampled_from([(0, 1), (1, 1), (1, 0), (None, 1)])
groups = st.tuples(st.lists(st.integers(1, LONGEST), min_size=2, max_size=2), rewards)


@given(
    st.lists(groups, min_size=1, max_size=12),
    st.integers(0, 8),
    st.sampled_from([2, 3, 5, 9]),
    st.sampled_from([(0, True), (2, True), (2, False)]),
    st.sampled_from([{}, {"kl_weight": 0.1}, {"epochs": 2}, {"epochs": 2, "advantage": "reinforce_pp"}]),
    st.sampled_from([1, 3, 999]),
    st.randoms(use_true_random=False),
)
def test_certain_shards_are_those_of_the_update(
    drawn: list[Any],
    before: int,
    workers: int,
    waves: tuple[int, bool],
    train: dict[str, Any],
    different: int,
    chance: random.Random,
) -> None:
    """Tokens and rewards arrive in any order. There are groups of the previous step, and prompts that repeat."""
    max_waves, is_last = waves
    everything = [group_of(number, *one, prompts=different) for number, one in enumerate(drawn)]
    prompts = max(1, len(everything) - before)
    config = config_of(prompts, workers, max_waves, **train)
    known = usable(everything[:before], config)
    asked = [response for group in everything[before:] for response in group.responses]
    batch = make_batch(usable([*known, *everything[before:]], config)[: prompts if max_waves else None], config)
    expected = [computed(batch.part(shard), config) for shard in cut_of(batch, config).early]
    scored: set[int] = set()
    early = EarlyGroups(
        config, known, [r.request for r in asked], is_last, lambda some: {id(r) for r in some} <= scored
    )
    so_far = dict.fromkeys((response.request.seed for response in asked), 0)
    found: list[Shard] = []
    left = [response for response in asked for _ in range(len(response.token_ids) + 1)]
    chance.shuffle(left)
    for response in left:  # a token more each time, and at last the reward
        seed = response.request.seed
        if seed in so_far:
            so_far[seed] += 1
            if so_far[seed] == len(response.token_ids):
                del so_far[seed]
                early.add_response(response)
        else:
            scored.add(id(response))
        shards = [computed(shard, config) for shard in early.shards(so_far)]
        assert shards[: len(found)] == found
        found = shards
    found = [computed(shard, config) for shard in early.shards({})]
    settled = [*known, *everything[before:]]
    if max_waves and not is_last and len(usable(settled, config)) < prompts:
        assert found == [], "a later wave may bring shorter groups"
    else:
        assert found == expected


def computed(shard: TrainBatch, config: Config) -> Shard:
    return shards_of(config).early_shard(0, shard)


def shards_of(config: Config) -> Shards:
    packer = Packer(99, torch.device("cpu"), shares=True)
    passes: Any = SimpleNamespace(config=config.train, packer=packer)
    kind = GradientShards if has_early_gradients(config.train) else LogprobShards
    return kind(passes, config.rollout.prompts_per_step)


def cut_of(batch: TrainBatch, config: Config) -> Any:
    counts = counts_early(config.train)
    counted = [counts(batch, i, config.train) for i in range(len(batch.response_ids))]
    return cut(batch, counted.__getitem__, config.rollout.prompts_per_step, config.cluster.workers)


def test_shards_by_hand() -> None:
    """Ten groups in four shards of two. The two longest groups are late."""
    lengths = [(3, 1), (9, 1), (2, 2), (4, 4), (1, 1), (5, 1), (8, 1), (3, 3), (6, 6), (7, 1)]
    batch = make_batch([group_of(k, two, (0, 1)) for k, two in enumerate(lengths)], config_of(10, 2))
    found = cut(batch, lambda i: True, 10, 1)
    assert found.early == [of(2) + of(4), of(0) + of(7), of(3) + of(5), of(8) + of(9)]
    assert found.late == of(1) + of(6)
    assert in_shards([0, 1], 2, prompts=2, workers=2) == [], "the other one may be the only one, and the longest"
    assert in_shards([0, 1], 2, prompts=3, workers=2) == [[0]]


def test_a_group_is_cut_if_there_are_more_workers_than_prompts() -> None:
    """The last of three groups is late. The others are cut into single responses, because there is room."""
    every = [group_of(k, [length] * 4, (0, 1, 1, 1)) for k, length in enumerate((2, 1, 3))]
    batch = make_batch(every, config_of(3, 2))
    first, second = [4, 5, 6, 7], [0, 1, 2, 3]
    assert cut(batch, lambda i: True, 3, 3).early == [first, second]
    assert cut(batch, lambda i: True, 3, 4).early == [[i] for i in first + second]
    assert cut(batch, lambda i: i not in (5, 8), 3, 4).early == [[i] for i in first + second if i != 5]


@given(st.lists(groups, min_size=1, max_size=20), st.integers(0, 8), st.integers(1, 4), st.sampled_from([1, 2]))
def test_no_shard_exceeds_most_responses(drawn: list[Any], more: int, workers: int, updates: int) -> None:
    prompts = len(drawn) + more
    config = config_of(prompts, workers, updates_per_step=min(updates, prompts))
    batch = make_batch(usable([group_of(number, *one) for number, one in enumerate(drawn)], config), config)
    everyone: Any = SimpleNamespace(rank=0, size=1, shards=workers)
    for members in split(len(batch.response_ids), config.train.updates_per_step):
        for shard in GradientShards(shards_of(config).passes, prompts).plan(batch, members, everyone, ()).own:
            assert len(shard.members) <= most_responses(config)


@pytest.mark.parametrize(
    ("prompts", "workers", "updates", "responses"), [(16, 1, 1, 32), (16, 2, 1, 6), (40, 2, 1, 18), (16, 2, 4, 8)]
)
def test_the_largest_number_of_responses_by_hand(prompts: int, workers: int, updates: int, responses: int) -> None:
    """Groups have 2 responses. Of 15 groups, 13 may be early, in shards of 2, so 12 are early and 3 are late. Of 39, 34
    may be early, in shards of 5, so 30 are early and 9 are late. Four optimizer steps have a quarter each."""
    assert most_responses(config_of(prompts, workers, updates_per_step=updates)) == responses


def of(group: int) -> list[int]:
    return [2 * group, 2 * group + 1]


def test_each_shard_has_one_owner_and_the_worker_with_the_least_work_gets_the_most() -> None:
    assert owners_of([4, 4, 6, 6], [{}, {}]) == [[0, 2], [1, 3]]
    assert owners_of([1, 1, 4], [{}, {}]) == [[2], [0, 1]], "the largest first"
    assert owners_of([4, 4, 6, 6], [{0: 1.0, 1: 0.5}, {}]) == [[0, 1, 3], [2]]
    assert owners_of([4, 4, 6, 6], [{0: 1.0, 1: 0.0}, {}]) == [[0, 1, 3], [2]]
    assert owners_of([4, 4, 4], [{2: 1.0, 9: 1.0}, {2: 0.5, 1: 1.0}]) == [[0, 2], [1]], "the first that has begun it"


def test_logprobs_are_computed_only_for_responses_that_need_them() -> None:
    """The first group has no advantages. The second one was decoded in the previous step. One response of the third one
    is masked."""
    batch = make_batch(
        [group_of(k, (1, 2), rewards) for k, rewards in enumerate([(1, 1), (0, 1), (0, 1)])], config_of(3, 2)
    )
    batch.old_logprobs = {2: [-1.0], 3: [-1.0, -1.0]}
    batch.masked = {5}

    def found(**train: Any) -> list[int]:
        return [i for i in range(6) if needs_logprobs(batch, i, TrainConfig(epochs=2, **train))]

    assert found() == [4]
    assert found(advantage="reinforce_pp") == [0, 1, 4], "their advantages depend on other groups"
    assert found(kl_weight=0.1) == [0, 1, 2, 3, 4]
    assert found(kl_weight=0.1, kl_in="reward") == [0, 1, 2, 3, 4, 5]


def test_the_work_of_a_shard_is_its_number_of_tokens() -> None:
    batch = make_batch([group_of(0, (1, 1), (0, 1)), group_of(1, (9, 8), (0, 1))], config_of(2, 2))
    packer = Packer(99, torch.device("cpu"), shares=True)
    assert packer.work(batch, of(1)) - packer.work(batch, of(0)) == 15
