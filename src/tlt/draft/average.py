"""Averages the replicas of one drafter that several workers trained, weighted by the tokens that each trained on.

Local SGD (arXiv 1805.09767): all replicas start from one state and are trained apart. Then parameters, both moments of
Adam and its step count are averaged, and training goes on from the average. The mean of n replicas has the noise of a
batch n times as large, so the weights move sqrt(n) times as far from the start as the mean does (as Adam's learning
rate scales with the batch, arXiv 2205.10287), but 1.5 times at most: from 2 on they oscillate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_FARTHEST = 1.5  # the weights move at most so many times as far from the start as the mean
_WEIGHTS = ("weight.", "mean.")  # prefixes of weights in a replica


class Replica(NamedTuple):
    """A copy of a drafter in training, in host memory. Its tensors must not be changed."""

    tensors: dict[str, Tensor]
    """by parameter: `mean.*` the weights to publish, `weight.*` those in training, `exp_avg.*` and `exp_avg_sq.*`
    Adam's moments; and `steps`, `reach` and `whitening` of `DrafterTrainer`"""
    tokens: int
    """entries trained on since the previous replica or the common start"""

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights to publish, by their names in `EagleLayer`."""
        return {name.removeprefix("mean."): t for name, t in self.tensors.items() if name.startswith("mean.")}


def average(replicas: Sequence[Replica], start: Replica | None = None) -> Replica:
    """The mean of at least one replica, weighted by tokens; the first replica if none was trained. `start` is the state
    that all were trained from; without it the weights move no farther than the mean."""
    total = sum(replica.tokens for replica in replicas)
    trained = [replica for replica in replicas if replica.tokens]
    if len(trained) < 2:
        return (trained or replicas)[0]
    parts = [(replica.tokens / total, replica.tensors) for replica in trained]
    farther = min(_FARTHEST, math.sqrt(len(trained)))
    mean: dict[str, Tensor] = {}
    for name in parts[0][1]:
        mean[name] = torch.stack([share * tensors[name] for share, tensors in parts]).sum(0)
        if start and name.startswith(_WEIGHTS):
            mean[name] = start.tensors[name].to(mean[name].dtype).lerp(mean[name], farther)
    return Replica(mean, total)
