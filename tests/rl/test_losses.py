"""The clipped loss against numbers worked by hand, and its gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tlt.rl.losses import LossInputs, LossOutputs, clipped_policy_loss


def inputs(
    ratios: list[float], advantages: list[float], weights: list[float] | None = None
) -> tuple[LossInputs, Tensor]:
    """Tokens whose policy / old probability is `ratios`, and the leaf the gradient arrives at."""
    old = torch.linspace(-2.0, -0.1, len(ratios), dtype=torch.float64)
    policy = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    share = weights or [1 / len(ratios)] * len(ratios)
    wide = {"dtype": torch.float64}
    lengths = [len(ratios)]
    return LossInputs(policy, old, torch.tensor(advantages, **wide), torch.tensor(share, **wide), lengths), policy


def one_token(ratio: float, advantage: float, low: float = 0.2, high: float = 0.2) -> tuple[LossOutputs, float]:
    """Its loss and the gradient with respect to its log-prob."""
    given, policy = inputs([ratio], [advantage])
    out = clipped_policy_loss(given, low, high)
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
    out = clipped_policy_loss(given, 0.2, 0.2)
    assert out.loss.item() == pytest.approx(-0.76, abs=1e-12)
    assert out.clipped.item() == pytest.approx(0.8, abs=1e-12)  # the first two tokens


def test_an_unchanged_policy_gives_minus_the_mean_advantage() -> None:
    given, _ = inputs([1.0] * 4, [0.3, -2.0, 1.0, 0.5])
    out = clipped_policy_loss(given, 0.2, 0.2)
    assert out.loss.item() == pytest.approx(-(0.3 - 2.0 + 1.0 + 0.5) / 4, abs=1e-12)
    assert out.clipped.item() == 0.0


def test_gradcheck() -> None:
    # no ratio at a corner (1, 0.8, 1.2), where there is no derivative to compare with
    given, policy = inputs([0.5, 0.9, 1.05, 1.15, 1.5, 2.0], [1.0, -1.0, 0.5, -0.5, 2.0, -2.0])
    assert torch.autograd.gradcheck(
        lambda p: clipped_policy_loss(given._replace(policy_logprobs=p), 0.2, 0.2).loss, policy
    )


def test_gradient_of_a_batch_is_the_policy_gradient_where_nothing_is_clipped() -> None:
    given, policy = inputs([1.0, 1.0], [2.0, -3.0], [0.25, 0.75])
    (gradient,) = torch.autograd.grad(clipped_policy_loss(given, 0.2, 0.2).loss, policy)
    assert gradient.tolist() == pytest.approx([-2.0 * 0.25, 3.0 * 0.75], abs=1e-12)


def test_no_gradient_through_the_report() -> None:
    given, _ = inputs([1.5], [1.0])
    assert not clipped_policy_loss(given, 0.2, 0.2).clipped.requires_grad


def test_a_far_ratio_stays_finite_for_a_good_token() -> None:
    given = LossInputs(*(torch.tensor([x]) for x in (0.0, -80.0, 1.0, 1.0)), [1])
    assert math.isfinite(clipped_policy_loss(given, 0.2, 0.2).loss.item())
