"""Losses against numbers worked by hand, and their gradients."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from tiny import random_batch
from torch import Tensor

from tlt.config import TrainConfig
from tlt.rl.losses import (
    LOSSES,
    Clip,
    LossInputs,
    LossOutputs,
    clipped_policy_loss,
    k1,
    k3,
    needs_logprobs,
    sequence_policy_loss,
    truncated_weights,
)


def inputs(
    ratios: list[float], advantages: list[float], weights: list[float] | None = None
) -> tuple[LossInputs, Tensor]:
    """Return inputs whose ratio policy / old is `ratios` at each token, and the leaf that receives the gradient."""
    old = torch.linspace(-2.0, -0.1, len(ratios), dtype=torch.float64)
    policy = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    advantages_, share = (old.new_tensor(x) for x in (advantages, weights or [1 / len(ratios)] * len(ratios)))
    return LossInputs(policy, old, advantages_, share, [len(ratios)]), policy


def one_token(ratio: float, advantage: float, clip: Clip) -> tuple[LossOutputs, float]:
    given, policy = inputs([ratio], [advantage])
    out = clipped_policy_loss(given, clip)
    (gradient,) = torch.autograd.grad(out.loss, policy)
    return out, gradient.item()


# d(ratio)/d(log-prob) = ratio, so an unclipped token has gradient -ratio * advantage
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clip"),
    [
        (1.0, 1.0, -1.0, -1.0, Clip(0.2, 0.2)),
        (1.5, 1.0, -1.2, 0.0, Clip(0.2, 0.2)),  # good and already likelier: no further
        (0.5, 1.0, -0.5, -0.5, Clip(0.2, 0.2)),  # good but less likely: pulled back, however far
        (1.5, -1.0, 1.5, 1.5, Clip(0.2, 0.2)),  # bad but likelier: pulled back, however far
        (0.5, -1.0, 0.8, 0.0, Clip(0.2, 0.2)),  # bad and already less likely: no further
        (1.5, 0.0, 0.0, 0.0, Clip(0.2, 0.2)),
        (1.3, 1.0, -1.3, -1.3, Clip(0.1, 0.4)),
        (1.6, 1.0, -1.4, 0.0, Clip(0.1, 0.4)),
        (0.7, -1.0, 0.9, 0.0, Clip(0.1, 0.4)),
    ],
)
def test_one_token_by_hand(ratio: float, advantage: float, loss: float, gradient: float, clip: Clip) -> None:
    out, found = one_token(ratio, advantage, clip)
    assert (out.loss.item(), found) == (pytest.approx(loss, abs=1e-12), pytest.approx(gradient, abs=1e-12))
    assert out.clipped.item() == float(gradient == 0.0 != advantage)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [(5.0, -2.0, 6.0, 0.0), (2.9, -2.0, 5.8, 5.8), (5.0, 2.0, -2.4, 0.0), (0.5, -2.0, 1.6, 0.0)],
)
def test_dual_clip_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    """It applies only if the advantage is negative. It then bounds loss and gradient."""
    out, found = one_token(ratio, advantage, Clip(0.2, 0.2, 3.0))
    assert (out.loss.item(), found) == (pytest.approx(loss), pytest.approx(gradient))


@pytest.mark.parametrize("surrogate", [clipped_policy_loss, sequence_policy_loss])
def test_a_far_ratio_stays_finite(surrogate: Any) -> None:
    given, policy = inputs([1.0], [-1.0])
    loss = surrogate(given._replace(old_logprobs=given.old_logprobs - 1000.0), Clip(0.2, 0.2)).loss
    (gradient,) = torch.autograd.grad(loss, policy)
    assert (loss.item(), gradient.item()) == (pytest.approx(math.exp(20.0)), 0.0)
    single = LossInputs(*(torch.tensor([x]) for x in (0.0, -80.0, 1.0, 1.0)), [1])
    assert math.isfinite(surrogate(single, Clip(0.2, 0.2)).loss.item()), "in float32"


def test_the_configuration_knows_every_loss() -> None:
    assert set(get_args(TrainConfig.model_fields["loss"].annotation)) == set(LOSSES)


def test_k3_by_hand() -> None:
    policy = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -1.0 + math.log(2), -1.0 - math.log(2)], dtype=torch.float64)
    # d = 0, ln 2, -ln 2: 0, 2 - 0.693147 - 1, 0.5 + 0.693147 - 1; slope by policy: 1 - exp(d)
    found = k3(policy, reference)
    assert found.tolist() == pytest.approx([0.0, 0.306853, 0.193147], abs=1e-6)
    (gradient,) = torch.autograd.grad(found.sum(), policy)
    assert gradient.tolist() == pytest.approx([0.0, -1.0, 0.5], abs=1e-12)
    assert k3(torch.tensor([-1000.0]), torch.tensor([0.0])).isfinite().all()


def test_k1_by_hand() -> None:
    policy, reference = torch.tensor([-1.0, -3.0]), torch.tensor([-1.5, -1.0])
    assert k1(policy, reference).tolist() == [0.5, -2.0]


def test_truncated_weights_by_hand() -> None:
    old, rollout = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -1.0 - math.log(4), -1.0 + math.log(4)])
    assert truncated_weights(old, rollout, 2.0).tolist() == pytest.approx([1.0, 2.0, 0.25])


@pytest.mark.parametrize("loss", LOSSES)
def test_importance_weights_scale_only_the_loss_of_each_token(loss: str) -> None:
    given, _ = inputs([2.0, 0.5, 2.0, 4.0, 1.0], [1.0, 1.0, 1.0, -1.0, -1.0], [1 / 6] * 3 + [1 / 4] * 2)
    given = given._replace(lengths=[3, 2])
    surrogate = LOSSES[loss].surrogate
    factors = torch.tensor([0.5, 0.0, 2.0, 1.0, 3.0], dtype=torch.float64)
    scaled = surrogate(given._replace(importance=factors), Clip(0.2, 0.3))
    parts = [given.weights * (torch.arange(5) == t) for t in range(5)]
    alone = [surrogate(given._replace(weights=part), Clip(0.2, 0.3)) for part in parts]
    assert scaled.loss.item() == pytest.approx(sum(f * o.loss.item() for f, o in zip(factors, alone, strict=True)))
    assert scaled.clipped == surrogate(given, Clip(0.2, 0.3)).clipped


def test_logprobs_are_computed_only_for_responses_that_need_them() -> None:
    """Responses 0 and 1 have no advantage. 2 and 3 were decoded in the previous step. 5 is masked."""
    batch = random_batch(31, responses=6)
    batch.advantages = [0.0, 0.0, 1.0, -1.0, 1.0, -1.0]
    batch.old_logprobs = {i: batch.rollout_logprobs[i] for i in (2, 3)}
    batch.masked = {5}

    def found(**train: Any) -> list[int]:
        return [i for i in range(6) if needs_logprobs(batch, i, TrainConfig(epochs=2, **train))]

    assert found() == [4]
    assert found(kl_weight=0.1) == [0, 1, 2, 3, 4]
    assert found(kl_weight=0.1, kl_in="reward") == [0, 1, 2, 3, 4, 5]


def test_weighted_sum_by_hand() -> None:
    # ratios 1.5, 0.5, 1.0; A 1, -1, 2; terms -1.2, 0.8, -2; weights 0.5, 0.3, 0.2: -0.6 + 0.24 - 0.4 = -0.76
    given, _ = inputs([1.5, 0.5, 1.0], [1.0, -1.0, 2.0], [0.5, 0.3, 0.2])
    out = clipped_policy_loss(given, Clip(0.2, 0.2))
    assert out.loss.item() == pytest.approx(-0.76, abs=1e-12)
    assert out.clipped.item() == pytest.approx(0.8, abs=1e-12)  # the first two tokens
