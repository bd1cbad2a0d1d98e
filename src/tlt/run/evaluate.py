"""Evaluation on held-out prompts: mean@k, pass@k and length of the responses of the current policy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev

from tlt.config import Config
from tlt.loop import Rollout, Watcher, call_each
from tlt.rewards import Reward
from tlt.sampling import make_requests
from tlt.types import Prompt, Request, Response, SamplingParams


def evaluate(
    config: Config,
    prompts: Sequence[Prompt],
    rollout: Rollout,
    reward: Reward,
    sampling: SamplingParams,
    watcher: Watcher,
    step: int,
    coming: Iterable[list[Request]] = (),
) -> dict[str, float]:
    """Run an evaluation on held-out prompts and return its metrics by name.

    All evaluations of a run use the same seeds, so that differences come from the weights only. `step` is the index of
    the training step that follows, or of the last step. `coming` has the requests of the next training steps, one list
    per step. Idle workers decode them in advance as look-ahead drafts."""
    samples = config.eval.samples
    requests = make_requests(prompts, samples, sampling, config.run.seed, "eval")
    watcher.phase(step, "eval", len(requests))
    responses, _ = rollout.generate(requests, call_each(reward.submit, watcher.response), coming)
    by_seed = {response.request.seed: response for response in responses}
    in_order = [by_seed[request.seed] for request in requests]
    reward(in_order)
    groups = [in_order[i : i + samples] for i in range(0, len(in_order), samples)]
    return summary_of(groups, samples, config.eval.solved)


def summary_of(groups: Sequence[Sequence[Response]], samples: int, solved: float) -> dict[str, float]:
    """Return the metrics of an evaluation by name. Each group has `samples` responses to one prompt. A response counts
    as right if its reward is at least `solved`. Responses without a reward do not count in mean@k and pass@k. Their
    number is the metric `without_reward`. `half_width` is half of the 95 % confidence interval of mean@k. A metric
    without data is missing."""
    rewards = [[r.reward for r in group if r.reward is not None] for group in groups]
    everything = [r for group in rewards for r in group]
    lengths = [r.num_sampled for group in groups for r in group]
    counts = [(len(group), sum(is_solved(reward, solved) for reward in group)) for group in rewards]
    values = {f"mean@{samples}": everything}
    for k in _powers_of_two(samples):
        values[f"pass@{k}"] = [pass_at(n, right, k) for n, right in counts if n >= k]
    found = {name: fmean(mine) for name, mine in values.items() if mine}
    by_prompt = [fmean(group) for group in rewards if group]
    if len(by_prompt) > 1:  # responses to one prompt are alike, so prompts are the sample
        found["half_width"] = 1.96 * stdev(by_prompt) / math.sqrt(len(by_prompt))
    truncated = [r.is_truncated for group in groups for r in group]
    lengths_found = {"length_mean": fmean(lengths), "length_max": max(lengths), "truncated": fmean(truncated)}
    return {**found, **lengths_found, "without_reward": len(lengths) - len(everything)}


def is_solved(reward: float, solved: float) -> bool:
    """Return whether a reward is at least `solved`, with a relative tolerance of 1e-9: 0.6 + 0.3 + 0.1 counts as 1."""
    return reward >= solved - 1e-9 * max(1.0, abs(solved))


def pass_at(n: int, right: int, k: int) -> float:
    """Return pass@k, the probability that k responses drawn without replacement from n contain at least one of the
    `right` correct ones. This is the unbiased estimator 1 - C(n - right, k) / C(n, k) of arXiv 2107.03374. Example: n =
    4, right = 1, k = 2 gives 1 - 3 / 6 = 0.5."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def _powers_of_two(most: int) -> list[int]:
    """Return the powers of two up to `most`, and `most` itself: the values of k in pass@k."""
    return sorted({2**i for i in range(most.bit_length())} | {most})
