"""The drafter's loss, computed in chunks, against a plain sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tlt.spot import unroll


def guesses() -> dict[str, Tensor]:
    """Return draft tokens of several columns. Some entries have two, some none, and their weights differ."""
    torch.manual_seed(3)
    outs, teacher, head, known = (torch.randn(n, 4, dtype=torch.float64) for n in (9, 6, 11, 11))
    at = torch.tensor([0, 1, 2, 4, 5, 1, 2, 5, 5])
    return {"outs": outs, "weights": torch.rand(9).double(), "teacher": teacher, "at": at, "head": head, "known": known}


@pytest.mark.parametrize("rows", [1, 2, 4, 100])
def test_value_and_gradient_equal_those_of_the_plain_sum(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """The twin computes each draft token alone, and leaves the gradient to autograd."""
    monkeypatch.setattr(unroll, "LOGITS", rows * 11)
    given, of = guesses(), guesses()["outs"].requires_grad_()
    distributions = torch.softmax(given["teacher"] @ given["known"].T, -1)[given["at"]]
    log_q = torch.log_softmax(of @ given["head"].T, -1)
    each = [-(p * q).sum() for p, q in zip(distributions, log_q, strict=True)]
    plain = torch.stack(each) @ given["weights"]
    (wanted,) = torch.autograd.grad(3.0 * plain, of)
    outs = given.pop("outs").requires_grad_()
    value, overlap = unroll.draft_loss(outs, **given)
    (found,) = torch.autograd.grad(3.0 * value, outs)
    assert value.item() == pytest.approx(plain.item())
    assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-12)
    assert torch.allclose(overlap, torch.minimum(distributions, log_q.exp()).sum(-1))


def test_it_can_be_interrupted_between_two_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unroll, "LOGITS", 3 * 11)
    looks = list[int]()
    unroll.draft_loss(**guesses(), check_stop=lambda: looks.append(1))
    assert len(looks) == 3
