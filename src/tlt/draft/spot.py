"""Training the drafter in the gaps of a rollout: short calls, each over after the micro-batch under way.

One per worker. What is shared between workers goes by value: `replica` out, `adopt` in, sums of `judge` added up.
"""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tlt.config import DrafterTrainConfig
from tlt.draft.average import Replica, is_finite
from tlt.draft.buffer import Harvest, HarvestBuffer
from tlt.draft.eagle import EagleLayer
from tlt.draft.trainer import DrafterTrainer, pack
from tlt.models.decoder import Decoder

_JUDGED = 4  # micro-batches that a judgement takes
_READY = 4  # and of harvest before training starts
_BETTER = 1.002  # a swap costs a pass over the windows of all live rows: so much accept length is not worth it


class SpotReport(NamedTuple):
    micro_batches: int
    tokens: int
    seconds: float
    overlap: float
    """mean of 1 - TV of the first guess, before each micro-batch was trained on"""


class SpotTrainer:
    """`layer` is the drafter in use, or a fresh random one (cold start); it is not changed."""

    def __init__(self, layer: EagleLayer, target: Decoder, config: DrafterTrainConfig, seed: int = 0) -> None:
        raise NotImplementedError

    # -- the harvest ---------------------------------------------------------------------------------------------------

    def harvest(self, item: Harvest) -> None:
        """The engine's `on_harvest`. A share of the prompts is held back for `judge`, the same on all workers."""

    def target_moved(self) -> None:
        """To be called after every `target.load` of a new version."""

    @property
    def ready(self) -> bool:
        """Whether there is harvest enough to train on."""

    # -- training ------------------------------------------------------------------------------------------------------

    def train(self, seconds: float) -> SpotReport:
        """Micro-batches until the time is up; at least one, if `ready`."""

    def replica(self) -> Replica:
        """A copy of all that training changes."""

    def adopt(self, replica: Replica) -> None:
        """Train on from this one: the common start of all workers that do."""

    # -- publication ---------------------------------------------------------------------------------------------------

    def judge(self, candidate: Mapping[str, Tensor] | None) -> tuple[float, int]:
        """What a chain of `unroll` guesses would commit per pass on this worker's held-back harvest, summed over
        entries, and their number; of a candidate (`Replica.tensors`), or of the drafter in use."""

    def publish(self, candidate: Mapping[str, Tensor]) -> EagleLayer:
        """The candidate (`Replica.tensors`) is now the drafter in use: a layer of its own for
        `engine.swap(EagleDrafter(layer, target))`, its `published` agreement measured on the held-back harvest."""


def beats(candidate: tuple[float, int], in_use: tuple[float, int]) -> bool:
    """Whether a candidate goes live: by the sums over all workers of `judge`. Never one that is NaN, or was not
    judged."""
    (mine, count), (theirs, other) = candidate, in_use
    return count > 0 and other > 0 and math.isfinite(mine) and mine / count > _BETTER * theirs / other
