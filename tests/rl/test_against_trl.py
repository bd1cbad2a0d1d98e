"""Losses, gradients and advantages against TRL's, in float64. peers/record_trl.py recorded them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tlt.config import RolloutConfig, TrainConfig
from tlt.rl.batching import MicroBatch
from tlt.rl.groups import advantages_of
from tlt.rl.logprobs import penalized
from tlt.rl.parallel import Alone
from tlt.rl.passes import Passes
from tlt.rl.policy import Policy, Update
from tlt.types import TrainBatch

TRL = json.loads((Path(__file__).parent.parent / "peers" / "trl.json").read_text(encoding="utf-8"))
GIVEN = TRL["given"]
COUNT, GROUP = len(GIVEN["lengths"]), GIVEN["group"]

# what a recipe says where a GRPOConfig says what trl.json has under the same name; TRL has no dual clip unless asked
LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {"loss": "ppo"},
    "dapo_higher": {"loss": "dapo"},
    "dapo_delta": {"loss": "ppo", "dual_clip": 1.5},
    "dapo_kl": {"loss": "ppo", "kl_weight": 0.1},
    "dapo_masked": {"loss": "ppo", "mask_truncated": True},
    "dapo_importance": {"loss": "ppo", "importance_cap": 2.0},
    "dapo_one_step": {"loss": "ppo"},
    "grpo": {"loss": "grpo"},
    "grpo_kl": {"loss": "grpo", "kl_weight": 0.1, "clip_low": 0.1, "clip_high": 0.3},
    "grpo_delta": {"loss": "grpo", "dual_clip": 1.5},
    "grpo_masked": {"loss": "grpo", "mask_truncated": True},
    "dr_grpo": {"loss": "dr_grpo"},
    "dr_grpo_kl": {"loss": "dr_grpo", "kl_weight": 0.1},
    "dr_grpo_masked": {"loss": "dr_grpo", "mask_truncated": True},
    "gspo": {"loss": "gspo"},
    "gspo_wide": {"loss": "gspo", "clip_low": 0.2, "clip_high": 0.2},
    "gspo_kl": {"loss": "gspo", "clip_low": 0.2, "clip_high": 0.2, "kl_weight": 0.1},
    "gspo_delta": {"loss": "gspo", "clip_low": 0.01, "clip_high": 0.01, "dual_clip": 1.05},
}
ADVANTAGES: dict[str, dict[str, Any]] = {
    "group": {"advantage": "grpo", "advantage_epsilon": 1e-4},
    "batch": {"advantage": "grpo_batch", "advantage_epsilon": 1e-4},
    "none": {"advantage": "dr_grpo"},
    "rloo": {"advantage": "rloo"},
}


def wide(rows: list[list[float]]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


class GivenLogprobs(Passes):
    """Passes whose model and reference return given log-probs, by response."""

    policy_logprobs: list[Tensor]
    reference_logprobs: list[Tensor]

    def logprobs(self, model: Any, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        given = self.policy_logprobs if model is self.model else self.reference_logprobs
        found = torch.cat([given[i] for i in micro.sequences])
        return found, torch.zeros_like(found)


class GivenPolicy(Policy):
    passes_type = GivenLogprobs
    passes: GivenLogprobs


def given_policy(folder: Path, train: dict[str, Any], policy: list[Tensor]) -> GivenPolicy:
    config = TrainConfig(**({"micro_batch_tokens": 40, "dual_clip": 0.0} | train))
    rollout = RolloutConfig(max_new_tokens=GIVEN["longest"])
    found = GivenPolicy(folder, torch.float64, torch.device("cpu"), config, rollout)
    found.passes.policy_logprobs, found.passes.reference_logprobs = policy, wide(GIVEN["reference"])
    return found


def batch(train: dict[str, Any], one_step: bool = False) -> TrainBatch:
    answers = [[7] * n for n in GIVEN["lengths"]]
    made = TrainBatch([(1, 2)] * COUNT, answers, GIVEN["advantages"], GIVEN["rollout"])
    made.rewards = [GIVEN["rewards"][:GROUP], GIVEN["rewards"][GROUP:]]
    made.masked = set(TRL["masked"]) if train.get("mask_truncated") else set()
    made.old_logprobs = {} if one_step else dict(enumerate(GIVEN["old"]))
    return made


def test_the_numbers_are_of_the_version_of_trl_in_the_docs() -> None:
    assert TRL["trl"] == "1.16.0"
    assert set(TRL["losses"]) == {*LOSSES, "grpo_kl_biased", "gspo_kl_biased"}, "our KL is always unbiased"
    assert set(TRL["advantages"]) == {*ADVANTAGES, "rloo_kl"}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient_are_those_of_trl(folder: Path, name: str) -> None:
    expected, one_step = TRL["losses"][name], name.endswith("one_step")
    leaves = [row.requires_grad_() for row in wide(GIVEN["old" if one_step else "policy"])]
    policy = given_policy(folder, LOSSES[name], leaves)
    given = batch(LOSSES[name], one_step)
    found, total = policy.update(given, 0), policy.passes.objective.total(given, range(COUNT))
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-10)
    for i, (leaf, gradient) in enumerate(zip(leaves, expected["gradient"], strict=True)):
        none = [0.0] * len(gradient)
        ours = none if leaf.grad is None else (leaf.grad / total).tolist()
        assert ours == pytest.approx(gradient, abs=1e-10), i


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_those_of_trl(name: str) -> None:
    rewards = [GIVEN["rewards"][:GROUP], GIVEN["rewards"][GROUP:]]
    found = advantages_of(rewards, TrainConfig(**ADVANTAGES[name]))
    expected = TRL["advantages"][name]["advantages"]
    assert [a for group in found for a in group] == pytest.approx(expected, abs=1e-10)


def test_a_kl_divergence_in_the_reward_is_that_of_trl(folder: Path) -> None:
    train = {"advantage": "rloo", "kl_weight": 0.1, "kl_in": "reward"}
    policy = given_policy(folder, train, wide(GIVEN["old"]))
    fixed = Update(policy, policy.passes, batch({}), 0, Alone()).compute_fixed()
    found, _ = penalized(batch({}), fixed, policy.passes.objective.kl, policy.config)
    assert found.advantages == pytest.approx(TRL["advantages"]["rloo_kl"]["advantages"], abs=1e-10)
