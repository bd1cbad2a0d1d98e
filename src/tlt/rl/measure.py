"""Metrics of a step's responses and of their tokens, and checks that weights, losses and log-probs are finite.
docs/metrics.md explains every metric."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from tlt.rl.groups import has_spread, is_comparable
from tlt.rl.parallel import ProcessGroup
from tlt.types import Group, Response, RolloutStats, StepMetrics

_TAIL = 0.999  # quantile of `mismatch_p999`


def measure(
    step: int,
    groups: Sequence[Group],
    stats: RolloutStats,
    update: dict[str, float],
    fate: dict[str, float],
    seconds: dict[str, float],
) -> StepMetrics:
    """Return the metrics of a step. `step`: its index, from 0. `groups`: all decoded groups, in prompt order. `fate`:
    numbers of waves of prompts (`rollout.max_waves`), of groups in the update, and of groups carried over to the next
    step. `seconds`: seconds of each phase and in total."""
    responses = [response for group in groups for response in group.responses]
    rewards = [response.reward for response in responses if response.reward is not None]
    lengths = sorted(response.num_sampled for response in responses)
    apart = ("tokens", "seconds", "verified_to", "accepted_to")
    counters = {key: value for key, value in asdict(stats).items() if key not in apart}
    seconds["other"] = seconds["total"] - sum(value for key, value in seconds.items() if key != "total")
    return StepMetrics(
        step=step + 1,
        reward=_mean(rewards),
        reward_std=_deviation(rewards),
        rewards=_by_term(groups),
        tasks=_by_task(groups),
        lengths={
            "mean": sum(lengths) / len(lengths),
            "median": lengths[len(lengths) // 2],
            "p99": lengths[min(len(lengths) - 1, int(0.99 * len(lengths)))],
            "max": lengths[-1],
            "truncated": sum(response.is_truncated for response in responses) / len(responses),
        },
        accept_length=stats.accept_length,
        responses=len(responses),
        tokens=stats.tokens,
        tokens_per_second=stats.tokens / seconds["rollout"],
        seconds=seconds,
        update=update,
        rollout={
            **counters,
            "by_depth": acceptance_by_depth(stats.verified_to, stats.accepted_to),
            **{f"{phase}_seconds": spent for phase, spent in stats.seconds.items()},
        },
        batch=fate | faults_of(groups),
        outcomes=dict(Counter(response.outcome for response in responses if response.outcome)),
        prompts=[(group.prompt.prompt_id, group.responses[0].request.epoch) for group in groups],
    )


def faults_of(groups: Sequence[Group]) -> dict[str, float]:
    """Return the number of responses without a reward, of groups with fewer than two rewards, and of groups whose
    rewards are all equal. The last number is also given as a share of the groups with at least two rewards."""
    unrewarded = sum(response.reward is None for group in groups for response in group.responses)
    comparable = [group for group in groups if is_comparable(group)]
    without_spread = sum(not has_spread(group) for group in comparable)
    return {
        "unrewarded": unrewarded,
        "too_few": len(groups) - len(comparable),
        "without_spread": without_spread,
        "without_spread_share": without_spread / max(1, len(comparable)),
    }


def acceptance_by_depth(verified_to: dict[str, int], accepted_to: dict[str, int]) -> dict[str, dict[str, float]]:
    """Return acceptance rates as {drafter: {depth: rate}}. The rate at a depth counts only drafts whose earlier tokens
    were all accepted. The arguments are fields of `RolloutStats`."""
    found: dict[str, dict[str, float]] = {}
    for drafter in sorted({key.rpartition(" ")[0] for key in verified_to}):
        deepest = max(int(key.rpartition(" ")[2]) for key in verified_to if key.rpartition(" ")[0] == drafter)
        verified = accepted = 0
        rates: dict[str, float] = {}
        for depth in range(deepest, 0, -1):
            verified += verified_to.get(f"{drafter} {depth}", 0)
            accepted += accepted_to.get(f"{drafter} {depth}", 0)
            rates[str(depth)] = accepted / verified
        found[drafter] = dict(reversed(rates.items()))
    return found


def episodes_of(responses: Sequence[Response]) -> dict[str, Any]:
    """Return the mean numbers of turns and reply tokens of an episode, and the number of rewarded episodes by finish
    reason."""
    return {
        "turns": fmean(1 + sum(reply.start > 0 for reply in response.replies) for response in responses),
        "reply_tokens": fmean(len(response.token_ids) - response.num_sampled for response in responses),
        "ended": dict(Counter(response.finish_reason for response in responses if not response.outcome)),
    }


def tokens_of(groups: Sequence[Group]) -> int:
    """Return the number of tokens of all prompts and of what the model wrote. A prompt counts once per response."""
    return sum(len(group.prompt.token_ids) + response.num_sampled for group in groups for response in group.responses)


def _by_term(groups: Sequence[Group]) -> dict[str, dict[str, float]]:
    """Return mean and standard deviation of the scores of each reward term, before they are weighted."""
    found: dict[str, list[float]] = {}
    for group in groups:
        for response in group.responses:
            for term, score in response.scores.items():
                found.setdefault(term, []).append(score)
    return {term: {"mean": fmean(scores), "std": _deviation(scores)} for term, scores in found.items()}


def _by_task(groups: Sequence[Group]) -> dict[str, dict[str, float]]:
    """Return mean, standard deviation and number of the rewards of each task, if the data names tasks."""
    found: dict[str, list[float]] = {}
    for group in groups:
        if group.prompt.task and group.prompt.counts_by_task:
            rewards = [response.reward for response in group.responses if response.reward is not None]
            found.setdefault(group.prompt.task, []).extend(rewards)
    return {
        task: {"mean": _mean(rewards), "std": _deviation(rewards), "responses": len(rewards)}
        for task, rewards in sorted(found.items())
    }


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _deviation(values: Sequence[float]) -> float:
    """Return the standard deviation, which divides by n - 1 like torch.std, or 0 for fewer than two values."""
    return stdev(values) if len(values) > 1 else 0.0


class TokenMetrics:
    """Accumulator of metrics over tokens. Tokens have a weight, so that a sample of responses can represent all
    responses."""

    def __init__(self, device: torch.device) -> None:
        self._entropy = torch.zeros(2, dtype=torch.float64, device=device)  # weighted sum, sum of weights
        self._gaps = [torch.zeros(0, device=device)]
        self._weights = [torch.zeros(0, device=device)]

    def add(self, old_logprobs: Tensor, rollout_logprobs: Tensor, entropy: Tensor, weight: float = 1.0) -> None:
        """Add T response tokens. `old_logprobs` are computed by the trainer, `rollout_logprobs` by the engine."""
        self._entropy += weight * torch.stack([entropy.sum(), entropy.new_tensor(float(len(entropy)))]).double()
        self._gaps.append((old_logprobs - rollout_logprobs).abs().float())
        self._weights.append(torch.full_like(self._gaps[-1], weight))

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
