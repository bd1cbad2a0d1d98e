"""Loss of the learned drafter: the cross entropy between the target's distribution p and the drafter's distribution q.

Other losses were measured and are no better (docs/measurements.md).

Shapes: M draft tokens, T entries, D hidden size, V vocabulary size. p and log q are [M, V].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

LOGITS = 1 << 22  # maximum number of logits that are computed at a time (a chunk)


def logits(x: Tensor, head: Tensor) -> Tensor:
    """Return logits [M, V] of x [M, D] in the dtype of x. The product with the head [V, D] has the head's dtype."""
    return F.linear(x.to(head.dtype), head).to(x.dtype)


def draft_overlap(outs: Tensor, teacher: Tensor, at: Tensor, head: Tensor, known: Tensor) -> Iterator[Tensor]:
    """Yield 1 - TV of the draft tokens, chunk by chunk. TV is the total variation distance between p and q. See
    `draft_loss` for arguments."""
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
    """Return the weighted sum of the losses of M draft tokens, and 1 - TV of each draft token [M]. TV is the total
    variation distance between p and q.

    outs: [M, D] outputs of the drafter. head: [V, D] current output head of the target, which maps `outs` to logits.
    weights: [M] weight of each loss. teacher: [T, D] last hidden states of the target. known: [V, D] output head of the
    target version that computed `teacher`. at: [M] index in `teacher` of the entry whose distribution p each draft
    token should have. `check_stop` is called for each chunk, and may raise.

    The gradient with respect to `outs` is computed together with the loss, and draft tokens of the same entry share p.
    Therefore most logits are computed only once, and no logit is kept after its chunk.
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
