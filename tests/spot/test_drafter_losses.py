"""The drafter's losses against hand-worked numbers, and the rejection rate against a count of draws with shared
noise."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tlt.spot import losses
from tlt.spot.losses import LOSSES

P, Q = (0.5, 0.3, 0.2), (0.2, 0.2, 0.6)


def distribution(*of: float) -> Tensor:
    return torch.tensor([of], dtype=torch.float64)


def test_losses_by_hand() -> None:
    p, log_q = distribution(*P), distribution(*Q).log()
    cross = -(0.5 * math.log(0.2) + 0.3 * math.log(0.2) + 0.2 * math.log(0.6))
    entropy = -(0.5 * math.log(0.5) + 0.3 * math.log(0.3) + 0.2 * math.log(0.2))
    weight = math.exp(-3 * (1 - 0.4))
    assert losses.cross_entropy(p, log_q).item() == pytest.approx(cross)
    assert losses.total_variation(p, log_q).item() == pytest.approx(0.4)
    assert losses.hybrid(p, log_q).item() == pytest.approx(weight * (cross - entropy) + (1 - weight) * 0.4)
    # the same winner v: 1 / sum over u of max(p_u / p_v, q_u / q_v)
    agree = 1 / (1 + 1 + 3) + 1 / (5 / 3 + 1 + 3) + 1 / (5 / 2 + 3 / 2 + 1)
    assert losses.rejection_rate(p, log_q, 3).item() == pytest.approx(1 - agree)


def test_the_gradient_of_the_hybrid_loss_is_that_of_its_parts() -> None:
    """The gradient with respect to each log q is -p for the KL divergence, and q / 2 with the sign of q - p for the
    total variation. The weight has none."""
    p, log_q = distribution(*P), distribution(*Q).log().requires_grad_()
    (gradient,) = torch.autograd.grad(losses.hybrid(p, log_q).sum(), log_q)
    weight = math.exp(-3 * (1 - 0.4))
    expected = [weight * -p + (1 - weight) * math.copysign(q / 2, q - p) for p, q in zip(P, Q, strict=True)]
    assert gradient[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_smallest_for_equal_distributions(name: str) -> None:
    torch.manual_seed(0)
    log_p = torch.log_softmax(torch.randn(5, 9, dtype=torch.float64), -1)
    at_p = LOSSES[name](log_p.exp(), log_p)
    for _ in range(20):
        other = torch.log_softmax(log_p + 0.3 * torch.randn(5, 9, dtype=torch.float64), -1)
        assert (LOSSES[name](log_p.exp(), other) > at_p).all()


@pytest.mark.parametrize("sharpness", [0.5, 2.0])
def test_the_acceptance_rate_is_how_often_shared_noise_picks_the_same_token(sharpness: float) -> None:
    torch.manual_seed(1)
    log_p, log_q = torch.log_softmax(sharpness * torch.randn(2, 4, 9, dtype=torch.float64), -1)
    draws = 400_000
    for one, other in zip(log_p, log_q, strict=True):
        g = -torch.empty(draws, 9, dtype=torch.float64).exponential_().log()
        seen = ((one + g).argmax(-1) == (other + g).argmax(-1)).double().mean().item()
        chance = 1 - losses.rejection_rate(one.exp()[None], other[None], likeliest=9).item()
        assert chance == pytest.approx(seen, abs=5 * math.sqrt(0.25 / draws))
        overlap = 1 - losses.total_variation(one.exp(), other).item()
        assert overlap / (2 - overlap) - 1e-9 <= chance <= overlap + 1e-9, "between (1 - TV) / (1 + TV) and 1 - TV"


def test_the_acceptance_rate_with_tokens_of_probability_zero() -> None:
    """Among the eight likeliest tokens of a float32 distribution, some have a probability of exactly 0."""
    p = torch.softmax(torch.tensor([[200.0, 0.0, -200.0]]), -1)
    log_q = torch.log_softmax(torch.tensor([[1.0, 0.0, 0.0]]), -1).requires_grad_()
    loss = losses.rejection_rate(p, log_q)
    loss.sum().backward()
    assert log_q.grad is not None
    assert loss.isfinite().all()
    assert log_q.grad.isfinite().all()


# -- many guesses at once ----------------------------------------------------------------------------------------------


def guesses() -> dict[str, Tensor]:
    """Return draft tokens of several columns. Some entries have two, some none, and their weights differ."""
    torch.manual_seed(3)
    outs, teacher, head, known = (torch.randn(n, 4, dtype=torch.float64) for n in (9, 6, 11, 11))
    at = torch.tensor([0, 1, 2, 4, 5, 1, 2, 5, 5])
    return {"outs": outs, "weights": torch.rand(9).double(), "teacher": teacher, "at": at, "head": head, "known": known}


@pytest.mark.parametrize("rows", [1, 2, 4, 100])
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_equal_those_of_the_plain_sum(monkeypatch: pytest.MonkeyPatch, name: str, rows: int) -> None:
    """The twin computes each draft token alone, and leaves the gradient to autograd."""
    monkeypatch.setattr(losses, "LOGITS", rows * 11)
    given, of = guesses(), guesses()["outs"].requires_grad_()
    distributions = torch.softmax(given["teacher"] @ given["known"].T, -1)[given["at"]]
    log_q = torch.log_softmax(of @ given["head"].T, -1)
    each = [LOSSES[name](p[None], q[None])[0] for p, q in zip(distributions, log_q, strict=True)]
    plain = torch.stack(each) @ given["weights"]
    (wanted,) = torch.autograd.grad(3.0 * plain, of)
    outs = given.pop("outs").requires_grad_()
    value, overlap = losses.draft_loss(name, outs, **given)
    (found,) = torch.autograd.grad(3.0 * value, outs)
    assert value.item() == pytest.approx(plain.item())
    assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-12)
    assert torch.allclose(overlap, torch.minimum(distributions, log_q.exp()).sum(-1))


def test_it_can_be_interrupted_between_two_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LOGITS", 3 * 11)
    looks = list[int]()
    losses.draft_loss("cross_entropy", **guesses(), check_stop=lambda: looks.append(1))
    assert len(looks) == 3
