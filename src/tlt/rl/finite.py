"""Checks that weights, losses and log-probs are finite. If one is NaN or infinite, the run ends with an error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tlt.rl.parallel import ProcessGroup
from tlt.types import Response

_REMEDY = "resume from an earlier checkpoint with a lower train.learning_rate, or check the rewards of that step"


class NotFinite(ValueError):
    """Error for a NaN or infinite weight, loss or log-prob. The message names the first value that is not finite,
    and the step if there is one."""


def refuse_weights(named: Iterable[tuple[str, Tensor]], group: ProcessGroup, when: str, remedy: str = _REMEDY) -> None:
    """Raise NotFinite if any member of the group has a weight that is NaN or infinite.

    All members call this with their own parts of the same tensors, and raise together. `when` is the time or place in
    the message, such as `after step 3`. `remedy` is the end of the message."""
    names, tensors = zip(*named, strict=True)
    bad = _not_finite([tensor.detach() for tensor in tensors])
    group.sum_(bad)
    if found := [name for name, count in zip(names, bad.tolist(), strict=True) if count]:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise NotFinite(f"{found[0]}{more} of the policy is not finite {when}: {remedy}")


def _not_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return a float64 tensor [n]: 1 for each of n tensors with a NaN or infinite element, else 0.

    Sums are checked first. Finite numbers may have an infinite sum, so the elements of such a tensor are checked
    too."""
    bad = torch.stack([tensor.sum().double() for tensor in tensors]).isfinite().logical_not().double()
    for k in bad.nonzero().flatten().tolist():
        bad[k] = not tensors[k].isfinite().all()
    return bad


def refuse_loss(loss: float, first_wrong: str, step: int) -> None:
    """Raise NotFinite if the loss, summed over all workers, is not finite. `first_wrong`: name of the first value on
    this worker that is not finite; empty if there is none."""
    if not math.isfinite(loss):
        raise NotFinite(f"{first_wrong or 'the loss'} is not finite in step {step + 1}: {_REMEDY}")


def refuse_responses(responses: Iterable[Response], step: int) -> None:
    """Raise NotFinite if a log-prob in a response is not finite, because the engine's logits were not finite."""
    for response in responses:
        if not math.isfinite(sum(response.full_logprobs)):
            at = next(i for i, value in enumerate(response.full_logprobs) if not math.isfinite(value))
            raise NotFinite(
                f"the engine's logits are not finite in step {step + 1}, at token {at + 1} of response "
                f"{response.request.index} to prompt {response.request.prompt.prompt_id}: {_REMEDY}"
            )
