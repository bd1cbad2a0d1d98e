"""Parity check of the engine's target and the policy, which are two implementations of one model.

Their next-token distributions are compared whenever the target loads weights. Without this check, a run could train one
model and decode with another unnoticed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from tlt.engine.memory import free_bytes, return_freed_memory
from tlt.engine.protocol import Target
from tlt.models.decoder import Decoder
from tlt.models.model_folder import ModelError
from tlt.rl.policy import Policy

log = logging.getLogger(__name__)


class Weighed(Protocol):
    """Policy of tlt or of another trainer, whose weights a target can load."""

    def state_dict(self) -> Mapping[str, Tensor]: ...

    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits [N, V] at each token of one sequence [N]."""
        ...


ALLOWED = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.4}
"""Largest total variation between two next-token distributions that rounding explains. The value for float64 is
large, because transformers computes norms and rotary angles in float32."""
_TOKENS = 16  # length of the text in tokens, unless the target's context is shorter


def take_weights(target: Target, policy: Weighed, version: int) -> None:
    """Load the policy's weights into the target. `version` is the number of policy updates so far. Raises ModelError if
    the distributions of policy and target then differ (`check_parity`)."""
    return_freed_memory()  # memory that the update freed
    is_new = target.version < 0
    target.load(policy.state_dict(), version)
    check_parity(target, policy, with_drafts=is_new)  # new weights do not change how drafts are verified


def check_wide_parity(target: Target, policy: Policy) -> None:
    """Compare a bfloat16 target with the policy in float32, because rounding in bfloat16 hides, for example, slightly
    wrong rotary angles. A float32 copy of the target exists during the call. Raises ModelError if the distributions
    differ. Only our own decoders are compared."""
    if not isinstance(target, Decoder) or target.dtype != torch.bfloat16:
        return
    state = policy.state_dict()
    needed = 2 * sum(tensor.numel() for tensor in state.values()) * torch.float32.itemsize  # a layer exists twice
    places = [place for place in (target.device, torch.device("cpu")) if free_bytes(place) > needed]
    if not places:
        log.warning("engine and policy are compared in bfloat16 only: too little memory for a copy in float32")
        return
    wide = target.empty(torch.float32, places[0])
    wide.load(state, target.version)
    _compare(wide, partial(policy.logits, autocast=False), with_drafts=False)


def check_parity(target: Target, policy: Weighed, with_drafts: bool = True) -> None:
    """Compare the next-token distributions of target and policy on a short text.

    They are compared at each token whose logits the target returns. If `with_drafts`, part of the text is verified as
    draft tokens, if the target can do so. Raises ModelError if the distributions differ by more than rounding explains.
    If the policy is sharded, all its members make this call."""
    _compare(target, policy.logits, with_drafts)


def _compare(target: Target, logits: Callable[[Tensor], Tensor], with_drafts: bool) -> None:
    count = min(_TOKENS, target.longest - 1)
    tokens = torch.linspace(0, target.options.vocab_size - 1, count).long()
    decoded = target.text_logits(tokens, with_drafts)
    before = count - len(decoded)
    trained = logits(tokens)[before:]
    apart = _distributions(trained, "policy", target.version) - _distributions(decoded, "engine", target.version)
    apart = 0.5 * apart.abs().sum(-1)
    worst, allowed = apart.max().item(), ALLOWED[target.dtype]
    if worst > allowed:
        remedy = "check that config.json fits the model's weights, or save the model again with transformers"
        if target.version > 0:
            remedy += "; or, if updates made the weights too large, lower train.learning_rate and train.weight_decay"
        dtype = str(target.dtype).removeprefix("torch.")
        raise ModelError(
            f"the engine and the policy are not one model at version {target.version}: after "
            f"{before + int(apart.argmax()) + 1} tokens their next-token distributions differ by {worst:.2g} in total "
            f"variation, and rounding in {dtype} explains at most {allowed:g}: {remedy}"
        )


def _distributions(logits: Tensor, whose: str, version: int) -> Tensor:
    """Return softmax(logits) in float64 in host memory. Raises ModelError for logits that are not finite."""
    wide = logits.to("cpu", torch.float64)
    if not wide.isfinite().all():
        raise ModelError(
            f"the {whose}'s logits are not finite at version {version}: check that the model's weights are finite, or "
            "resume from an earlier checkpoint with a lower train.learning_rate"
        )
    return wide.softmax(-1)
