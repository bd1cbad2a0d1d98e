"""Checks that weights, losses and log-probs are finite. A run ends with an error if one is not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tlt.rl.parallel import ProcessGroup
from tlt.types import Response

_REMEDY = "resume from an earlier checkpoint with a lower train.learning_rate, or check the rewards of that step"


class NotFinite(ValueError):
    """Error for a NaN or infinite weight, loss or log-prob. The message names the step and the first such tensor."""


def refuse_weights(named: Iterable[tuple[str, Tensor]], group: ProcessGroup, when: str, remedy: str = _REMEDY) -> None:
    """Raise NotFinite if any member of the group has a weight that is not finite.

    All members make this call, each with its own part of the same tensors, and raise together."""
    names, tensors = zip(*named, strict=True)
    bad = _not_finite([tensor.detach() for tensor in tensors])
    group.sum_(bad)
    if found := [name for name, count in zip(names, bad.tolist(), strict=True) if count]:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise NotFinite(f"{found[0]}{more} of the policy is not finite {when}: {remedy}")


def _not_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return [n] float64: 1 for each tensor that is not finite, else 0.

    The sum of each tensor is checked first. Finite numbers may have an infinite sum, so such a tensor is read again."""
    bad = torch.stack([tensor.sum().double() for tensor in tensors]).isfinite().logical_not().double()
    for k in bad.nonzero().flatten().tolist():
        bad[k] = not tensors[k].isfinite().all()
    return bad


def refuse_loss(loss: float, first_wrong: str, step: int) -> None:
    """Raise NotFinite if the group's loss is not finite. `first_wrong`: name of this member's first bad value."""
    if not math.isfinite(loss):
        raise NotFinite(f"{first_wrong or 'the loss'} is not finite in step {step + 1}: {_REMEDY}")


def refuse_responses(responses: Iterable[Response], step: int) -> None:
    """Raise NotFinite if a log-prob from the engine is not finite, because its logits were not finite either."""
    for response in responses:
        if not math.isfinite(sum(response.full_logprobs)):
            at = next(i for i, value in enumerate(response.full_logprobs) if not math.isfinite(value))
            raise NotFinite(
                f"the engine's logits are not finite in step {step + 1}, at token {at + 1} of response "
                f"{response.request.index} to prompt {response.request.prompt.prompt_id}: {_REMEDY}"
            )
