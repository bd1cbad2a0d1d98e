"""Losses of the learned drafter: distances of its distribution q from the target's distribution p.

Shapes: M draft tokens, T entries, D hidden, V vocabulary. p and log q are [M, V]; a loss is [M].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

LOGITS = 1 << 22  # largest number of logits in a chunk


def cross_entropy(p: Tensor, log_q: Tensor) -> Tensor:
    return -(p * log_q).sum(-1)


def total_variation(p: Tensor, log_q: Tensor) -> Tensor:
    """Return the total variation. With shared noise, a draft token is accepted with a probability of at least (1 - TV)
    / (1 + TV) (arXiv 2408.07978)."""
    return 0.5 * (p - log_q.exp()).abs().sum(-1)


def hybrid(p: Tensor, log_q: Tensor) -> Tensor:
    """Return a mean of KL, with more weight if the distributions differ much, and total variation, with more weight if
    they are close (the LK loss of speculators)."""
    distance = total_variation(p, log_q)
    weight = torch.exp(-3.0 * (1 - distance.detach()))
    divergence = torch.xlogy(p, p).sum(-1) + cross_entropy(p, log_q)
    return weight * divergence + (1 - weight) * distance


def rejection_rate(p: Tensor, log_q: Tensor, likeliest: int = 8) -> Tensor:
    """Return the probability that a draft token is rejected: that argmax(log p + g) differs from argmax(log q + g).

    The probability that both are token v is 1 / sum_u max(p_u / p_v, q_u / q_v). It is summed over the target's
    `likeliest` tokens v."""
    log_p = p.clamp_min(torch.finfo(p.dtype).tiny).log()  # p may be 0 among the likeliest
    top_p, ids = log_p.topk(min(likeliest, p.shape[-1]), dim=-1)
    ratio_p = log_p[:, None] - top_p[..., None]
    ratio_q = log_q[:, None] - log_q.gather(-1, ids)[..., None]
    return 1 - torch.maximum(ratio_p, ratio_q).logsumexp(-1).neg().exp().sum(-1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": cross_entropy,
    "total_variation": total_variation,
    "hybrid": hybrid,
    "acceptance_rate": rejection_rate,
}


def logits(x: Tensor, head: Tensor) -> Tensor:
    """Return [M, V] logits in the dtype of x [M, D], computed in the dtype of the head [V, D]."""
    return F.linear(x.to(head.dtype), head).to(x.dtype)


def draft_overlap(outs: Tensor, teacher: Tensor, at: Tensor, head: Tensor, known: Tensor) -> Iterator[Tensor]:
    """Yield 1 - TV of each draft token, a chunk at a time. The arguments are those of `draft_loss`."""
    rows = max(1, LOGITS // len(head))
    for out, entries in zip(outs.split(rows), at.split(rows), strict=True):
        p, q = (torch.softmax(logits(x, w), dim=-1) for x, w in ((teacher[entries], known), (out, head)))
        yield torch.minimum(p, q).sum(-1)


def draft_loss(
    name: str,
    outs: Tensor,
    weights: Tensor,
    teacher: Tensor,
    at: Tensor,
    head: Tensor,
    known: Tensor,
    check_stop: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the losses of M draft tokens, and 1 - TV of each [M].

    outs: [M, D] the drafter's inputs of the target's current `head` [V, D]. weights: [M]. teacher: [T, D] the target's
    inputs of its head `known` [V, D]. at: [M] the entry whose distribution each draft token should have.
    `check_stop` is called for each chunk, and may raise.

    Draft tokens of the same entry share its distribution, and the gradient with respect to `outs` is computed with the
    loss. So few logits are computed twice, and no logit is kept after its chunk.
    """
    total, gradient, overlap = outs.new_zeros(()), torch.empty_like(outs), torch.empty_like(weights)
    for part in at.argsort().split(max(1, LOGITS // len(head))):
        check_stop()
        entries, which = at[part].unique_consecutive(return_inverse=True)
        p = torch.softmax(logits(teacher[entries], known), dim=-1)[which]
        with torch.enable_grad():
            out = outs[part].detach().requires_grad_()
            log_q = torch.log_softmax(logits(out, head), dim=-1)
            loss = weights[part] @ LOSSES[name](p, log_q)
        (gradient[part],) = torch.autograd.grad(loss, out)
        overlap[part] = torch.minimum(p, log_q.detach().exp()).sum(-1)  # 1 - TV
        total += loss.detach()
    return total + ((outs - outs.detach()) * gradient).sum(), overlap
