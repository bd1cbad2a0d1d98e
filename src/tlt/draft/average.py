"""Several workers' training of one drafter made into one: the mean of their replicas, by the tokens each trained on.

Local SGD (arXiv 1805.09767): all start from one state, each trains by itself, and parameters, both moments of Adam and
its step count are averaged, so that the next start is one state again. The mean of n replicas has the noise of n times
as many entries, so the weights go sqrt(n) times as far from the start, as the rate of Adam would be scaled with the
batch (arXiv 2205.10287), but 1.5 times at most: from 2 on they would swing about what they have found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_FARTHEST = 1.5  # times as far from the start as the mean, at most
_WEIGHTS = ("weight.", "mean.")  # of a replica


class Replica(NamedTuple):
    """A drafter in training, in host memory: nobody changes these tensors any more."""

    tensors: dict[str, Tensor]
    """`<what>.<parameter>`: the weights to be published, those in training, and Adam's moments; and Adam's `steps`"""
    tokens: int
    """trained on since the replica before, or the common start"""

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights to be published, by the names that `EagleLayer` has for them."""
        return {name.removeprefix("mean."): t for name, t in self.tensors.items() if name.startswith("mean.")}


def average(replicas: Sequence[Replica], start: Replica | None = None) -> Replica:
    """The mean by tokens of one replica or more; where none trained, the first. `start`: what all were trained from, if
    that is known."""
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
