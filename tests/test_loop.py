"""The order of a step, with stand-ins for the engine and the policy."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tlt.config import Config, parse_config
from tlt.data import Cursor
from tlt.loop import Parts, StepResult, make_batch, one_step, steps
from tlt.rl.advantages import grpo
from tlt.sampling import request_seed
from tlt.types import Group, Prompt, Request, Response, RolloutStats, SamplingParams, TrainBatch

G = 3
PROMPTS = [Prompt(i, f"prompt {i}", (i, i + 1)) for i in range(4)]


@dataclass
class Fake:
    """Engine, policy, reward and watcher in one: it writes down what is asked of it, and in what order."""

    shuffle: int | None = None
    events: list[Any] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    batches: list[TrainBatch] = field(default_factory=list)
    loaded: list[tuple[float, int]] = field(default_factory=list)
    weight: float = 0.0

    def load(self, state: Mapping[str, Tensor], version: int) -> None:
        self.events.append("load")
        self.loaded.append((state["weight"].item(), version))

    def generate(
        self, requests: Sequence[Request], on_response: Callable[[Response], None]
    ) -> tuple[list[Response], RolloutStats]:
        self.events.append("generate")
        self.requests += requests
        responses = [answer(request) for request in requests]
        if self.shuffle is not None:
            random.Random(self.shuffle).shuffle(responses)
        for response in responses:
            on_response(response)
        tokens = sum(len(r.token_ids) for r in responses)
        return responses, RolloutStats(tokens=tokens, row_passes=tokens // 2, seconds={"verify": 0.5})

    def update(self, batch: TrainBatch, step: int) -> dict[str, float]:
        self.events.append("update")
        self.batches.append(batch)
        self.weight += 1.0
        return {"loss": -1.0, "step_seen": float(step)}

    def state_dict(self) -> Mapping[str, Tensor]:
        return {"weight": torch.tensor(self.weight)}

    def reward(self, responses: Sequence[Response]) -> None:
        for response in responses:
            self.events.append(("reward", response.text))
            response.reward = float(response.text.split("/")[-1]) * (response.request.prompt.prompt_id + 1)

    def phase(self, step: int, name: str, total: int) -> None:
        self.events.append((name, step, total))

    def response(self, response: Response) -> None:
        self.events.append("response")


def answer(request: Request) -> Response:
    length = 1 + request.index + request.prompt.prompt_id
    token_ids = [10 * request.prompt.prompt_id + request.index] * length
    logprobs, full = [-0.5] * length, [-0.1 * (t + 1) for t in range(length)]
    reason = "length" if length > 4 else "stop"
    text = f"{request.prompt.prompt_id}/{request.epoch}/{request.index}"
    return Response(request, token_ids, logprobs, full, reason, text)


def make_config(prompts_per_step: int = 2, steps: int = 2) -> Config:
    return parse_config(
        {
            "model": {"path": "-"},
            "data": {"path": "-"},
            "reward": {"name": "exact"},
            "rollout": {"prompts_per_step": prompts_per_step, "group_size": G},
            "train": {"steps": steps},
            "run": {"seed": 9},
        }
    )


def run(fake: Fake, config: Config, first: int = 0, shuffle: bool = False) -> list[StepResult]:
    parts = Parts(PROMPTS, Cursor(len(PROMPTS), 0, shuffle), fake, fake.reward, fake, SamplingParams(temperature=0.7))
    return list(steps(parts, config, fake, first))


# -- the order ---------------------------------------------------------------------------------------------------------


def test_rollout_reward_update_sync_in_this_order() -> None:
    fake = Fake()
    run(fake, make_config(prompts_per_step=1, steps=1))
    rewards = [("reward", f"0/0/{index}") for index in range(G)]
    watched = [("rollout", 0, G), "generate", *["response"] * G, ("reward", 0, G), *rewards]
    assert fake.events == [*watched, ("update", 0, G), "update", "load"]


def test_the_engine_gets_the_weights_of_each_update_with_their_version() -> None:
    fake = Fake()
    run(fake, make_config(steps=3))
    assert fake.loaded == [(1.0, 1), (2.0, 2), (3.0, 3)]


def test_a_resumed_run_counts_on_from_its_first_step() -> None:
    fake = Fake()
    results = run(fake, make_config(steps=4), first=2)
    assert [r.metrics.step for r in results] == [2, 3]
    assert [version for _, version in fake.loaded] == [3, 4]
    assert [r.metrics.update["step_seen"] for r in results] == [2.0, 3.0]


# -- requests ----------------------------------------------------------------------------------------------------------


def test_each_prompt_is_asked_for_a_group_under_the_runs_law() -> None:
    fake = Fake()
    run(fake, make_config(steps=1))
    assert [(r.prompt.prompt_id, r.index) for r in fake.requests] == [(p, i) for p in (0, 1) for i in range(G)]
    assert {r.sampling for r in fake.requests} == {SamplingParams(temperature=0.7)}


def test_every_request_of_a_run_has_a_seed_of_its_own() -> None:
    fake = Fake()
    run(fake, make_config(steps=6), shuffle=True)  # three epochs
    assert len({r.seed for r in fake.requests}) == len(fake.requests) == 6 * 2 * G
    for r in fake.requests:
        assert r.seed == request_seed(9, "train", r.prompt.prompt_id, r.epoch, r.index)


def test_a_batch_that_spans_epochs_keeps_the_groups_of_one_prompt_apart() -> None:
    fake = Fake()
    (result,) = run(fake, make_config(prompts_per_step=6, steps=1))
    asked = [(group.prompt.prompt_id, group.responses[0].request.epoch) for group in result.groups]
    assert asked == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1)]
    assert all(len({r.request.epoch for r in group.responses}) == 1 for group in result.groups)


# -- the batch ---------------------------------------------------------------------------------------------------------


def test_a_batch_by_hand() -> None:
    fake = Fake()
    run(fake, make_config(prompts_per_step=2, steps=1))
    (batch,) = fake.batches
    assert batch.prompt_ids == [(0, 1)] * 3 + [(1, 2)] * 3
    assert batch.response_ids == [[0], [1, 1], [2, 2, 2], [10, 10], [11, 11, 11], [12, 12, 12, 12]]
    # rewards 0, 1, 2 and 0, 2, 4: means 1 and 2, deviations 1 and 2
    assert batch.advantages == pytest.approx([-1, 0, 1, -1, 0, 1], abs=1e-5)
    assert batch.rollout_logprobs[2] == pytest.approx([-0.1, -0.2, -0.3])  # over the whole vocabulary


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_arrival_leaves_no_trace(seed: int) -> None:
    still, shuffled = Fake(), Fake(shuffle=seed)
    ours, theirs = run(still, make_config(4)), run(shuffled, make_config(4))
    assert still.batches == shuffled.batches
    for one, other in zip(ours, theirs, strict=True):
        assert one.groups == other.groups
        assert [[r.request.index for r in group.responses] for group in other.groups] == [list(range(G))] * 4
        assert one.metrics.reward == other.metrics.reward
        assert one.metrics.lengths == other.metrics.lengths


def test_rewards_are_asked_for_in_prompt_order() -> None:
    """A reward that draws random numbers, or remembers, must not see the order of arrival."""
    fake = Fake(shuffle=1)
    run(fake, make_config(steps=1))
    asked = [event[1] for event in fake.events if isinstance(event, tuple) and event[0] == "reward" and len(event) == 2]
    assert asked == [f"{p}/0/{i}" for p in (0, 1) for i in range(G)]


def test_advantages_are_taken_within_each_group() -> None:
    groups = []
    for prompt, rewards in zip(PROMPTS, ([1.0, 0.0, 0.0], [5.0, 5.0, 5.0]), strict=False):
        responses = [answer(Request(prompt, i, 0, i, SamplingParams())) for i in range(G)]
        for response, reward in zip(responses, rewards, strict=True):
            response.reward = reward
        groups.append(Group(prompt, responses))
    assert make_batch(groups).advantages == [*grpo([1.0, 0.0, 0.0]), 0.0, 0.0, 0.0]


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_metrics_by_hand() -> None:
    fake = Fake()
    parts = Parts(PROMPTS, Cursor(4, 0, False), fake, fake.reward, fake, SamplingParams())
    metrics = one_step(parts, make_config(prompts_per_step=4), fake, 0).metrics
    # lengths 1 + index + prompt: 1 2 3, 2 3 4, 3 4 5, 4 5 6; sorted 1 2 2 3 3 3 4 4 4 5 5 6
    assert metrics.lengths == pytest.approx({"mean": 42 / 12, "median": 4, "p99": 6, "max": 6, "truncated": 3 / 12})
    # rewards index * (prompt + 1): sum of (0 + 1 + 2) * (1 + 2 + 3 + 4) = 30
    assert metrics.reward == pytest.approx(30 / 12)
    assert metrics.tokens == 42
    assert metrics.accept_length == pytest.approx(2.0)
    assert metrics.rollout["row_passes"] == 21
    assert metrics.rollout["verify_seconds"] == 0.5
    assert metrics.update["loss"] == -1.0
    assert metrics.prompts == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert metrics.outcomes == {}
    assert metrics.tokens_per_second == pytest.approx(42 / metrics.seconds["rollout"])


def test_seconds_are_disjoint_and_sum_to_the_total() -> None:
    for result in run(Fake(), make_config()):
        seconds = dict(result.metrics.seconds)
        total = seconds.pop("total")
        assert set(seconds) == {"rollout", "reward", "update", "sync", "other"}
        assert min(seconds.values()) >= 0
        assert sum(seconds.values()) == pytest.approx(total, rel=1e-9)
