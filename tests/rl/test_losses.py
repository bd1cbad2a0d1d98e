"""Losses against numbers worked by hand, and their gradients."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tlt.config import TrainConfig
from tlt.rl.losses import (
    KL,
    LOSSES,
    Clip,
    LossInputs,
    LossOutputs,
    LossShare,
    by_longest,
    by_response,
    by_token,
    clipped_policy_loss,
    k1,
    k2,
    k3,
    sequence_policy_loss,
    truncated_weights,
)


def inputs(
    ratios: list[float], advantages: list[float], weights: list[float] | None = None
) -> tuple[LossInputs, Tensor]:
    """Return inputs whose ratio policy / old is `ratios` at each token, and the leaf that receives the gradient."""
    old = torch.linspace(-2.0, -0.1, len(ratios), dtype=torch.float64)
    policy = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    share = weights or [1 / len(ratios)] * len(ratios)
    wide = {"dtype": torch.float64}
    lengths = [len(ratios)]
    return LossInputs(policy, old, torch.tensor(advantages, **wide), torch.tensor(share, **wide), lengths), policy


def one_token(ratio: float, advantage: float, low: float = 0.2, high: float = 0.2) -> tuple[LossOutputs, float]:
    """Return the loss of one token, and its gradient with respect to the log-prob."""
    given, policy = inputs([ratio], [advantage])
    out = clipped_policy_loss(given, Clip(low, high))
    (gradient,) = torch.autograd.grad(out.loss, policy)
    return out, gradient.item()


# d(ratio)/d(log-prob) = ratio, so an unclipped token has gradient -ratio * advantage
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 1.0, -1.0, -1.0, False),
        (1.1, 1.0, -1.1, -1.1, False),
        (1.5, 1.0, -1.2, 0.0, True),  # good and already likelier: no further
        (0.5, 1.0, -0.5, -0.5, False),  # good but less likely: pulled back, however far
        (1.5, -1.0, 1.5, 1.5, False),  # bad but likelier: pulled back, however far
        (0.5, -1.0, 0.8, 0.0, True),  # bad and already less likely: no further
        (0.9, -2.0, 1.8, 1.8, False),
        (1.5, 0.0, 0.0, 0.0, False),
    ],
)
def test_one_token_by_hand(ratio: float, advantage: float, loss: float, gradient: float, clipped: bool) -> None:
    out, found = one_token(ratio, advantage)
    assert out.loss.item() == pytest.approx(loss, abs=1e-12)
    assert found == pytest.approx(gradient, abs=1e-12)
    assert out.clipped.item() == float(clipped)


def test_low_and_high_clip_are_not_mixed_up() -> None:
    low, high = 0.1, 0.4
    assert one_token(1.3, 1.0, low, high)[0].loss.item() == pytest.approx(-1.3)  # within 1.4
    assert one_token(1.6, 1.0, low, high)[0].loss.item() == pytest.approx(-1.4)
    assert one_token(0.95, -1.0, low, high)[0].loss.item() == pytest.approx(0.95)  # within 0.9
    assert one_token(0.7, -1.0, low, high)[0].loss.item() == pytest.approx(0.9)


def test_weighted_sum_by_hand() -> None:
    # ratios 1.5, 0.5, 1.0; A 1, -1, 2; terms -1.2, 0.8, -2; weights 0.5, 0.3, 0.2: -0.6 + 0.24 - 0.4 = -0.76
    given, _ = inputs([1.5, 0.5, 1.0], [1.0, -1.0, 2.0], [0.5, 0.3, 0.2])
    out = clipped_policy_loss(given, Clip(0.2, 0.2))
    assert out.loss.item() == pytest.approx(-0.76, abs=1e-12)
    assert out.clipped.item() == pytest.approx(0.8, abs=1e-12)  # the first two tokens


def test_dual_clip_by_hand() -> None:
    """It applies only if the advantage is negative. It then bounds loss and gradient."""

    def of(ratio: float, advantage: float) -> tuple[float, float]:
        given, policy = inputs([ratio], [advantage])
        out = clipped_policy_loss(given, Clip(0.2, 0.2, 3.0))
        (gradient,) = torch.autograd.grad(out.loss, policy)
        return out.loss.item(), gradient.item()

    assert of(5.0, -2.0) == (pytest.approx(6.0), 0.0)
    assert of(2.9, -2.0) == (pytest.approx(5.8), pytest.approx(5.8))
    assert of(5.0, 2.0) == (pytest.approx(-2.4), 0.0)
    assert of(0.5, -2.0) == (pytest.approx(1.6), 0.0)


@pytest.mark.parametrize("surrogate", [clipped_policy_loss, sequence_policy_loss])
def test_a_far_ratio_of_a_bad_token_stays_finite(surrogate: Any) -> None:
    given, policy = inputs([1.0], [-1.0])
    given = given._replace(old_logprobs=given.old_logprobs - 1000.0)
    loss = surrogate(given, Clip(0.2, 0.2)).loss
    (gradient,) = torch.autograd.grad(loss, policy)
    assert loss.item() == pytest.approx(math.exp(20.0))
    assert gradient.item() == 0.0


def test_a_far_ratio_stays_finite_for_a_good_token() -> None:
    given = LossInputs(*(torch.tensor([x]) for x in (0.0, -80.0, 1.0, 1.0)), [1])
    assert math.isfinite(clipped_policy_loss(given, Clip(0.2, 0.2)).loss.item())


# -- one ratio a response ----------------------------------------------------------------------------------------------


def two_responses() -> tuple[LossInputs, Tensor]:
    """Return two responses with token ratios 2, 1/2, 2 and 4, 1, sequence ratios 2^(1/3) = 1.259921 and 4^(1/2) = 2,
    and A = 1 and -1."""
    given, policy = inputs([2.0, 0.5, 2.0, 4.0, 1.0], [1.0, 1.0, 1.0, -1.0, -1.0], [1 / 6] * 3 + [1 / 4] * 2)
    return given._replace(lengths=[3, 2]), policy


def test_sequence_ratios_by_hand() -> None:
    given, policy = two_responses()
    out = sequence_policy_loss(given, Clip(0.2, 0.3))
    # half of -1.259921 and half of 2: nothing is clipped, as the bad response got likelier
    assert out.loss.item() == pytest.approx((-1.259921 + 2.0) / 2, abs=1e-6)
    assert out.clipped.item() == 0.0
    (gradient,) = torch.autograd.grad(out.loss, policy)
    # each token moves its response's ratio by a share of 1/n, and a response is half of the loss
    expected = [-1.259921 / 6] * 3 + [2.0 / 4] * 2
    assert gradient.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_sequence_is_clipped_as_a_whole() -> None:
    given, policy = two_responses()
    out = sequence_policy_loss(given, Clip(0.2, 0.25))
    assert out.loss.item() == pytest.approx((-1.25 + 2.0) / 2, abs=1e-6)
    assert out.clipped.item() == pytest.approx(1 / 2)
    (gradient,) = torch.autograd.grad(out.loss, policy)
    assert gradient.tolist() == pytest.approx([0.0] * 3 + [0.5] * 2, abs=1e-6)


# -- shares, clips and additions ---------------------------------------------------------------------------------------


def shares(share: LossShare, lengths: list[int]) -> list[float]:
    return [share.weight(length, 8) / share.total(lengths) for length in lengths]


def test_weights_of_tokens_by_hand() -> None:
    assert shares(by_response, [2, 4]) == [1 / 4, 1 / 8]
    assert shares(by_token, [2, 4]) == [1 / 6, 1 / 6]
    assert shares(by_longest, [2, 4]) == [1 / 16, 1 / 16]


def test_a_masked_response_is_counted_but_its_tokens_are_not() -> None:
    assert shares(by_response, [2, 0])[0] == 1 / 4
    assert shares(by_token, [2, 0])[0] == 1 / 2
    assert shares(by_longest, [2, 0])[0] == 1 / 16
    assert shares(by_token, [0, 0]) == [1.0, 1.0]


def test_the_configuration_knows_every_loss() -> None:
    assert set(get_args(TrainConfig.model_fields["loss"].annotation)) == set(LOSSES)


def test_clips_are_those_of_the_papers() -> None:
    clips = {name: (loss.clip_low, loss.clip_high) for name, loss in LOSSES.items()}
    assert clips == {
        "ppo": (0.2, 0.2),
        "grpo": (0.2, 0.2),
        "dapo": (0.2, 0.28),
        "dr_grpo": (0.2, 0.2),
        "gspo": (3e-4, 4e-4),
    }


def test_k3_by_hand() -> None:
    policy = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -1.0 + math.log(2), -1.0 - math.log(2)], dtype=torch.float64)
    # d = 0, ln 2, -ln 2: 0, 2 - 0.693147 - 1, 0.5 + 0.693147 - 1; slope by policy: 1 - exp(d)
    found = k3(policy, reference)
    assert found.tolist() == pytest.approx([0.0, 0.306853, 0.193147], abs=1e-6)
    (gradient,) = torch.autograd.grad(found.sum(), policy)
    assert gradient.tolist() == pytest.approx([0.0, -1.0, 0.5], abs=1e-12)


def test_k1_and_k2_by_hand() -> None:
    policy, reference = torch.tensor([-1.0, -3.0]), torch.tensor([-1.5, -1.0])
    assert k1(policy, reference).tolist() == [0.5, -2.0]
    assert k2(policy, reference).tolist() == [0.125, 2.0]


def test_a_far_reference_stays_finite() -> None:
    assert k3(torch.tensor([-1000.0]), torch.tensor([0.0])).isfinite().all()


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_with_the_ratio_the_mean_gradient_is_that_of_the_divergence(name: str) -> None:
    scores = torch.tensor([0.1, 1.0, -2.0], dtype=torch.float64, requires_grad=True)
    q = torch.softmax(torch.tensor([0.5, -1.0, 0.0], dtype=torch.float64), -1)
    log_p = torch.log_softmax(scores, -1)
    old = log_p.detach()
    drawn = (old.exp() * torch.exp(log_p - old) * KL[name](log_p, q.log())).sum()
    (found,) = torch.autograd.grad(drawn, scores, retain_graph=True)
    (expected,) = torch.autograd.grad((log_p.exp() * (log_p - q.log())).sum(), scores)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-12)


@pytest.mark.parametrize(("name", "share"), [("k1", 0.0), ("k2", 1.0), ("k3", None)])
def test_the_mean_gradients_of_the_estimators(name: str, share: float | None) -> None:
    """The mean gradient of k1 is zero, that of k2 is the gradient of the divergence, and that of k3 the gradient of the
    divergence of the policy from the reference."""
    scores = torch.tensor([0.1, 1.0, -2.0], dtype=torch.float64, requires_grad=True)
    q = torch.softmax(torch.tensor([0.5, -1.0, 0.0], dtype=torch.float64), -1)
    log_p = torch.log_softmax(scores, -1)
    p = log_p.exp()
    (found,) = torch.autograd.grad((p.detach() * KL[name](log_p, q.log())).sum(), scores, retain_graph=True)
    forward = (p * (log_p - q.log())).sum()
    backward = (q * (q.log() - log_p)).sum()
    (expected,) = torch.autograd.grad(backward if share is None else share * forward, scores)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-12)


@pytest.mark.parametrize("estimate", [k1, k3])
def test_the_mean_of_the_estimate_is_the_divergence(estimate: Any) -> None:
    p, q = (torch.softmax(torch.tensor(x, dtype=torch.float64), -1) for x in ([0.1, 1.0, -2.0], [0.5, -1.0, 0.0]))
    assert (p * estimate(p.log(), q.log())).sum().item() == pytest.approx((p * (p / q).log()).sum().item(), abs=1e-12)


def test_truncated_weights_by_hand() -> None:
    old, rollout = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -1.0 - math.log(4), -1.0 + math.log(4)])
    assert truncated_weights(old, rollout, 2.0).tolist() == pytest.approx([1.0, 2.0, 0.25])


@pytest.mark.parametrize("loss", LOSSES)
def test_importance_weights_scale_only_the_loss_of_each_token(loss: str) -> None:
    given, _ = two_responses()
    surrogate = LOSSES[loss].surrogate
    factors = torch.tensor([0.5, 0.0, 2.0, 1.0, 3.0], dtype=torch.float64)
    scaled = surrogate(given._replace(importance=factors), Clip(0.2, 0.3))
    alone = [
        surrogate(given._replace(weights=given.weights * (torch.arange(5) == t)), Clip(0.2, 0.3)) for t in range(5)
    ]
    assert scaled.loss.item() == pytest.approx(sum(f * o.loss.item() for f, o in zip(factors, alone, strict=True)))
    assert scaled.clipped == surrogate(given, Clip(0.2, 0.3)).clipped
