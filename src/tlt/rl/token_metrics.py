"""Metrics over the tokens of a batch: entropy of the policy, and mismatch |trainer - rollout| of log-probs."""

from __future__ import annotations

import torch
from torch import Tensor

from tlt.rl.parallel import ProcessGroup

_TAIL = 0.999  # quantile of `mismatch_p999`


class TokenMetrics:
    """Accumulator of metrics over tokens. Tokens have a weight, so that a sample of responses can represent all of
    them."""

    def __init__(self, device: torch.device) -> None:
        self._entropy = torch.zeros(2, dtype=torch.float64, device=device)  # weighted sum, sum of weights
        self._gaps = [torch.zeros(0, device=device)]
        self._weights = [torch.zeros(0, device=device)]

    def add(self, old_logprobs: Tensor, rollout_logprobs: Tensor, entropy: Tensor, weight: float = 1.0) -> None:
        """Add T response tokens. `old_logprobs` are computed by the trainer, `rollout_logprobs` by the engine."""
        self._entropy += weight * torch.stack([entropy.sum(), entropy.new_tensor(float(len(entropy)))]).double()
        self._gaps.append((old_logprobs - rollout_logprobs).abs().float())
        self._weights.append(torch.full_like(self._gaps[-1], weight))

    def add_all(self, other: TokenMetrics) -> None:
        """Add all tokens of another accumulator."""
        self._entropy += other._entropy
        self._gaps += other._gaps
        self._weights += other._weights

    def over(self, group: ProcessGroup) -> dict[str, float]:
        """Return the metrics over the tokens of all members of the group. They are 0 if there are no tokens."""
        group.sum_(self._entropy)
        total, count = self._entropy.tolist()
        gaps, weights = (group.gather(torch.cat(parts)) for parts in (self._gaps, self._weights))
        found = {"entropy": total / (count or 1.0), "mismatch_mean": 0.0, "mismatch_p999": 0.0}
        if len(gaps):
            mean = (gaps * weights).sum() / weights.sum()
            found |= {"mismatch_mean": mean.item(), "mismatch_p999": _quantile(gaps, weights, _TAIL)}
        return found


def _quantile(values: Tensor, weights: Tensor, share: float) -> float:
    """Return the weighted quantile: the smallest value such that values up to it have this share of the weight."""
    values, order = values.sort()
    below = weights[order].double().cumsum(0)
    place = int((below < share * below[-1] * (1 - 1e-12)).sum())
    return values[place].item()
