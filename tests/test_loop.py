"""The order of a step, with stand-ins for the engine and the policy."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tlt.config import Config, parse_config
from tlt.data.prompts import Cursor
from tlt.loop import Parts, StepResult, Trainable, one_step
from tlt.rewards import RewardError
from tlt.rl.groups import grpo
from tlt.rl.measure import NotFinite
from tlt.sampling import request_seed
from tlt.types import Prompt, Request, Response, RolloutStats, SamplingParams, TrainBatch

G = 3
PROMPTS = [Prompt(i, f"prompt {i}", (i, i + 1)) for i in range(4)]


@dataclass
class Fake:
    """Engine, policy, reward and watcher in one. It records its calls in their order."""

    shuffle: int | None = None
    events: list[Any] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    batches: list[TrainBatch] = field(default_factory=list)
    loaded: list[tuple[float, int]] = field(default_factory=list)
    weight: float = 0.0
    score: Callable[[Prompt, int], float | None] | None = None
    """reward by prompt and index"""

    def sync(self, policy: Trainable, version: int) -> None:
        self.events.append("sync")
        self.loaded.append((policy.state_dict()["weight"].item(), version))

    def generate(self, requests: Sequence[Request], on_response: Callable[[Response], None], coming: Any = ()) -> Any:
        self.events.append("generate")
        self.requests += requests
        responses = [answer(request) for request in requests]
        if self.shuffle is not None:
            random.Random(self.shuffle).shuffle(responses)
        for response in responses:
            on_response(response)
        tokens = sum(len(r.token_ids) for r in responses)
        return responses, RolloutStats(tokens=tokens, row_passes=tokens // 2, seconds={"verify": 0.5})

    def release(self) -> None:
        self.events.append("release")

    def update(self, batch: TrainBatch, step: int) -> dict[str, float]:
        self.events.append("update")
        self.batches.append(batch)
        self.weight += 1.0
        return {"loss": -1.0, "step_seen": float(step)}

    def logprobs(self, batch: TrainBatch) -> list[list[float]]:
        """Return the number of the policy as each log-prob."""
        self.events.append("logprobs")
        return [[self.weight] * len(response) for response in batch.response_ids]

    def state_dict(self) -> Mapping[str, Tensor]:
        return {"weight": torch.tensor(self.weight)}

    def reward(self, responses: Sequence[Response]) -> None:
        for response in responses:
            self.events.append(("reward", response.text))
            index, prompt = int(response.text.split("/")[-1]), response.request.prompt
            response.reward = self.score(prompt, index) if self.score else float(index) * (prompt.prompt_id + 1)

    def phase(self, step: int, name: str, total: int) -> None:
        self.events.append((name, step, total))

    def response(self, response: Response) -> None:
        self.events.append("response")


@dataclass
class Scores:
    fake: Fake

    def submit(self, response: Response) -> None:
        self.fake.events.append("submit")

    def __call__(self, responses: Sequence[Response]) -> None:
        self.fake.reward(responses)

    def close(self) -> None: ...


def answer(request: Request) -> Response:
    length = 1 + request.index + request.prompt.prompt_id
    token_ids = [10 * request.prompt.prompt_id + request.index] * length
    logprobs, full = [-0.5] * length, [-0.1 * (t + 1) for t in range(length)]
    reason = "length" if length > 4 else "stop"
    text = f"{request.prompt.prompt_id}/{request.epoch}/{request.index}"
    return Response(request, token_ids, logprobs, full, reason, text)


def make_config(prompts_per_step: int = 2, steps: int = 2, **rollout: Any) -> Config:
    rollout |= {"prompts_per_step": prompts_per_step, "group_size": G}
    tree = {"model": {"path": "-"}, "data": {"path": "-"}, "reward": {"name": "exact"}, "run": {"seed": 9}}
    return parse_config(tree | {"rollout": rollout, "train": {"steps": steps}})


def make_parts(fake: Fake, shuffle: bool = False, prompts: Sequence[Prompt] = PROMPTS) -> Parts:
    return Parts(prompts, Cursor(len(prompts), 0, shuffle), fake, Scores(fake), fake, SamplingParams(temperature=0.7))


def run(fake: Fake, config: Config, first: int = 0, shuffle: bool = False) -> list[StepResult]:
    parts = make_parts(fake, shuffle)
    return [one_step(parts, config, fake, step) for step in range(first, config.train.steps)]


def test_rollout_reward_update_sync_in_this_order() -> None:
    fake = Fake()
    run(fake, make_config(prompts_per_step=1, steps=1))
    rewards = [("reward", f"0/0/{index}") for index in range(G)]
    watched = [("rollout", 0, G), "generate", *["submit", "response"] * G, ("reward", 0, G), *rewards]
    assert fake.events == [*watched, ("update", 0, G), "release", "update", "sync"]


def test_the_engine_gets_the_weights_of_each_update_with_their_version() -> None:
    """A resumed run counts from its first step."""
    fake, resumed = Fake(), Fake()
    run(fake, make_config(steps=3))
    assert fake.loaded == [(1.0, 1), (2.0, 2), (3.0, 3)]
    results = run(resumed, make_config(steps=4), first=2)
    assert [version for _, version in resumed.loaded] == [3, 4]
    assert [(r.metrics.step, r.metrics.update["step_seen"]) for r in results] == [(3, 2.0), (4, 3.0)]


def test_a_batch_may_span_epochs_and_every_request_has_a_seed_of_its_own() -> None:
    fake = Fake()
    first, _ = run(fake, make_config(prompts_per_step=6, steps=2))  # three epochs
    asked = [(group.prompt.prompt_id, {r.request.epoch for r in group.responses}) for group in first.groups]
    assert asked == [(0, {0}), (1, {0}), (2, {0}), (3, {0}), (0, {1}), (1, {1})]
    assert len({r.seed for r in fake.requests}) == len(fake.requests) == 2 * 6 * G
    for r in fake.requests:
        assert r.seed == request_seed(9, "train", r.prompt.prompt_id, r.epoch, r.index)
        assert r.sampling == SamplingParams(temperature=0.7)


def test_a_batch_by_hand() -> None:
    fake = Fake()
    run(fake, make_config(steps=1))
    (batch,) = fake.batches
    assert batch.prompt_ids == [(0, 1)] * 3 + [(1, 2)] * 3
    assert batch.response_ids == [[0], [1, 1], [2, 2, 2], [10, 10], [11, 11, 11], [12, 12, 12, 12]]
    # rewards 0, 1, 2 and 0, 2, 4: means 1 and 2, deviations 1 and 2
    assert batch.advantages == pytest.approx([-1, 0, 1, -1, 0, 1], abs=1e-5)
    assert batch.rollout_logprobs[2] == pytest.approx([-0.1, -0.2, -0.3])  # over the whole vocabulary


@pytest.mark.parametrize("seed", range(2))
def test_the_order_of_arrival_has_no_effect(seed: int) -> None:
    """A reward that draws random numbers or has a memory is computed in prompt order."""
    still, shuffled = Fake(), Fake(shuffle=seed)
    ours, theirs = run(still, make_config(4)), run(shuffled, make_config(4))
    assert still.batches == shuffled.batches
    asked = [[event for event in fake.events if event[0] == "reward" and len(event) == 2] for fake in (still, shuffled)]
    assert asked[0] == asked[1]
    for one, other in zip(ours, theirs, strict=True):
        assert one.groups == other.groups
        assert [[r.request.index for r in group.responses] for group in other.groups] == [list(range(G))] * 4
        assert (one.metrics.reward, one.metrics.lengths) == (other.metrics.reward, other.metrics.lengths)


# -- dynamic sampling --------------------------------------------------------------------------------------------------

MANY = [Prompt(row, f"prompt {row}", (row, row + 1)) for row in range(40)]


def spread_in(rows: set[int]) -> Callable[[Prompt, int], float]:
    return lambda prompt, index: float(index) if prompt.prompt_id in rows else 0.5


def drawn(fake: Fake) -> list[int]:
    return [r.prompt.prompt_id for r in fake.requests if r.index == 0]


def trained(batch: TrainBatch) -> list[int]:
    return [prompt_ids[0] for prompt_ids in batch.prompt_ids[::G]]


def take_steps(fake: Fake, count: int = 1, **rollout: Any) -> tuple[Parts, list[StepResult]]:
    """Take steps with dynamic sampling on many prompts."""
    parts, config = make_parts(fake, prompts=MANY), make_config(**{"max_waves": 9} | rollout)
    return parts, [one_step(parts, config, fake, step) for step in range(count)]


def test_waves_are_decoded_until_enough_groups_have_spread() -> None:
    fake = Fake(score=spread_in({1, 3}))
    parts, (result,) = take_steps(fake)
    assert drawn(fake) == [0, 1, 2, 3]
    assert fake.events.count("generate") == 2
    assert trained(fake.batches[0]) == [1, 3]
    assert (parts.carried, parts.cursor.position) == ([], 4)
    metrics = result.metrics
    assert metrics.tokens == 6 + 9 + 12 + 15  # lengths 1 + index + prompt
    assert metrics.rollout["verify_seconds"] == 1.0
    assert metrics.reward == pytest.approx((6 * 0.5 + 2 * (0 + 1 + 2)) / 12)  # of all that was decoded
    assert metrics.batch == {
        "waves": 2, "groups": 2, "carried": 0, "unrewarded": 0, "too_few": 0, "without_spread": 2,
        "without_spread_share": 0.5
    }  # fmt: skip


def test_the_batch_is_the_first_groups_in_prompt_order_and_the_rest_open_the_next_step() -> None:
    fake = Fake(score=spread_in({1, 2, 3, 5, 6, 7, 8, 9}))
    _, (first, second) = take_steps(fake, 2)
    assert drawn(fake) == [0, 1, 2, 3, 4, 5]  # prompt 3 is not decoded again
    assert [trained(batch) for batch in fake.batches] == [[1, 2], [3, 5]]
    kept = first.groups[3]
    assert fake.batches[1].response_ids[:G] == [response.token_ids for response in kept.responses]
    # the policy before the first update, 0.0, decoded them
    lengths = [len(response.token_ids) for response in kept.responses]
    assert [batch.old_logprobs for batch in fake.batches] == [{}, {i: [0.0] * n for i, n in enumerate(lengths)}]
    assert [first.metrics.batch["carried"], second.metrics.batch["carried"]] == [1, 0]
    assert [[g.prompt.prompt_id for g in result.groups] for result in (first, second)] == [[0, 1, 2, 3], [4, 5]]


def test_waves_are_bounded_and_the_step_then_uses_the_groups_so_far() -> None:
    fake = Fake(score=spread_in({5}))
    parts = make_parts(fake, prompts=MANY)
    one_step(parts, make_config(max_waves=2), fake, 0)
    result = one_step(parts, make_config(max_waves=3), fake, 1)
    assert [trained(batch) for batch in fake.batches] == [[], [5]]
    assert drawn(fake) == list(range(10))
    assert result.metrics.batch["waves"] == 3
    assert fake.loaded[-1] == (2.0, 2)


@pytest.mark.parametrize("seed", range(2))
def test_dynamic_sampling_does_not_depend_on_the_order_of_arrival(seed: int) -> None:
    still, shuffled = (Fake(shuffle=s, score=spread_in({1, 2, 3, 6, 7, 9, 12, 13, 14, 15, 17})) for s in (None, seed))
    for fake in (still, shuffled):
        take_steps(fake, 3, prompts_per_step=3, max_waves=4)
    assert (still.batches, still.requests) == (shuffled.batches, shuffled.requests)


def test_every_prompt_is_drawn_once_per_epoch_and_trained_on_at_most_once() -> None:
    """A group is completed once, in the step that trains on it or drops it."""
    rows = {row for row in range(40) if row % 3}
    fake = Fake(score=spread_in(rows))
    parts = make_parts(fake, shuffle=True, prompts=MANY)
    completed: list[int] = []
    while parts.cursor.epoch == 0:
        result = one_step(parts, make_config(prompts_per_step=4, max_waves=9), fake, 0)
        now = [group.prompt.prompt_id for group in result.completed]
        assert set(trained(fake.batches[-1])) <= set(now)
        completed += now
    carried = [group.prompt.prompt_id for group in parts.carried]
    assert sorted(r.prompt.prompt_id for r in fake.requests if r.index == r.epoch == 0) == list(range(40))
    used = [row for batch in fake.batches for row in trained(batch)]
    assert used + carried == [row for row in drawn(fake) if row in rows]
    assert sorted([*completed, *carried]) == sorted(drawn(fake))


def test_without_dynamic_sampling_groups_without_spread_are_kept() -> None:
    fake = Fake(score=spread_in({1}))
    (result,) = run(fake, make_config(steps=1))
    assert trained(fake.batches[0]) == [0, 1]
    assert result.metrics.batch["without_spread"] == 1


def test_a_group_with_fewer_than_two_rewards_is_dropped_and_counted() -> None:
    missing = {(0, 1), (1, 0), (1, 2), (2, 0), (2, 1), (2, 2)}
    fake = Fake(score=lambda prompt, index: None if (prompt.prompt_id, index) in missing else float(index))
    (result,) = run(fake, make_config(prompts_per_step=4, steps=1))
    (batch,) = fake.batches
    assert batch.response_ids == [[0], [2] * 3, [30] * 4, [31] * 5, [32] * 6]
    assert batch.advantages == [*grpo([0.0, 2.0], 1e-6), *grpo([0.0, 1.0, 2.0], 1e-6)]
    assert result.metrics.reward == pytest.approx((0 + 2 + 1 + 0 + 1 + 2) / 6)
    assert result.metrics.batch == {
        "waves": 1, "groups": 2, "carried": 0, "unrewarded": 6, "too_few": 2, "without_spread": 0,
        "without_spread_share": 0.0
    }  # fmt: skip
    assert result.metrics.tokens == 42  # they were decoded all the same


def test_equal_rewards_are_explained_only_in_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    run(Fake(score=lambda prompt, index: 0.0), make_config(steps=3))
    assert [said.partition(",")[0] for said in caplog.messages] == ["all 6 rewards of the first step are 0"]


def test_a_step_without_rewards_is_logged_and_a_second_one_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    fake = Fake(score=lambda prompt, index: None)
    ends = r"none of the 6 responses of step 2 has a reward .* nor has any response of the previous"
    with pytest.raises(RewardError, match=ends):
        run(fake, make_config(steps=9))
    assert [batch.response_ids for batch in fake.batches] == [[]]
    assert "of step 1 has a reward" in caplog.text


def test_steps_without_a_reward_that_are_not_in_a_row_end_nothing() -> None:
    rewards = itertools.cycle([None] * 6 + [1.0] * 6)
    fake = Fake(score=lambda prompt, index: next(rewards))
    assert [result.metrics.reward for result in run(fake, make_config(steps=4))] == [0.0, 1.0, 0.0, 1.0]


def test_a_last_step_without_rewards_is_an_error() -> None:
    fake = Fake(score=lambda prompt, index: None)
    with pytest.raises(RewardError, match=r"none of the 6 responses of step 1 has a reward"):
        run(fake, make_config(steps=1))


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_logits_of_the_engine_that_are_not_finite_end_the_run(value: float) -> None:
    fake = Fake()
    generate = fake.generate

    def spoilt(*arguments: Any) -> Any:
        responses, stats = generate(*arguments)
        responses[4].full_logprobs[-1] = value
        return responses, stats

    fake.generate = spoilt  # type: ignore[method-assign]
    with pytest.raises(NotFinite, match=r"logits are not finite in step 1, at token 3 of response 1 to prompt 1"):
        run(fake, make_config(steps=1))
    assert not fake.batches


def test_episodes_are_counted_in_each_step() -> None:
    """Also in a step in which no environment replied, so that means over steps are right."""
    config, ended = make_config(prompts_per_step=4), {"stop": 9, "length": 3}
    assert one_step(make_parts(Fake()), config, Fake(), 0).metrics.episodes == {}
    reward = config.reward.model_copy(update={"environment": "game:Game"})
    found = one_step(make_parts(Fake()), config.model_copy(update={"reward": reward}), Fake(), 0).metrics.episodes
    assert found == {"turns": 1.0, "reply_tokens": 0.0, "ended": ended}


def test_metrics_by_hand() -> None:
    fake = Fake()
    metrics = one_step(make_parts(fake), make_config(prompts_per_step=4), fake, 0).metrics
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
