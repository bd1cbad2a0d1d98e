"""Loss of the learned drafter: the cross entropy of its distribution q and the target's distribution p.

From random weights, the total variation and the rejection rate hardly learned, and a mean of KL divergence and total
variation learned as fast as the cross entropy.
Shapes: M draft tokens, T entries, D hidden size, V vocabulary size. p and log q are [M, V].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

LOGITS = 1 << 22  # largest number of logits in a chunk


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
    outs: Tensor,
    weights: Tensor,
    teacher: Tensor,
    at: Tensor,
    head: Tensor,
    known: Tensor,
    check_stop: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the losses of M draft tokens, and for each [M] 1 - TV, where TV is the total variation
    of p and q.

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
            loss = weights[part] @ -(p * log_q).sum(-1)
        (gradient[part],) = torch.autograd.grad(loss, out)
        overlap[part] = torch.minimum(p, log_q.detach().exp()).sum(-1)  # 1 - TV
        total += loss.detach()
    return total + ((outs - outs.detach()) * gradient).sum(), overlap
