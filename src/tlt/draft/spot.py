"""Training the drafter in the gaps of a rollout: short calls, which can be broken off amid a micro-batch.

One per worker. What workers share goes by value: `replica` out, `adopt` in, and the sums of `judge` added up.
"""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tlt.config import DrafterTrainConfig
from tlt.draft.average import Replica
from tlt.draft.buffer import Harvest, HarvestBuffer
from tlt.draft.eagle import EagleLayer
from tlt.draft.trainer import DrafterTrainer, Interrupted, bundles, pack
from tlt.models.decoder import Decoder

_HELD = 32  # micro-batches of harvest held back ...
_JUDGED = 4  # ... so many of which are judged by: a judgement takes about as long as one and a half of training
_PIECE = 64  # entries of one response: those to a prompt are much alike, so that few of them say little
_STEPS = 8  # before the present one whose harvest is kept, where the buffer has room for it
_HEADS = 1 << 30  # bytes, at most, of their targets' heads, where they are more than one
_READY, _ENOUGH = 2, 32  # micro-batches of harvest before training starts; of a drafter that was trained before, which
# a few responses make worse on all others
_MEMORY = 50  # micro-batches that the published weights are a mean of
_COOLING = 1000  # micro-batches after which a drafter that began at random trains at half the rate
_LEAST_RATE = 0.1  # of the configured one: what it falls to, and what a drafter that was trained before begins with
_BETTER = 1.02  # a judgement errs by about that, and a swap costs a pass over the windows of all live rows


Sums = tuple[float, int]
"""of a judgement: accept lengths, and of how many entries"""


class SpotReport(NamedTuple):
    micro_batches: int = 0
    tokens: int = 0
    seconds: float = 0.0
    overlap: float = 0.0
    """mean of 1 - TV of the first guess, before each micro-batch was trained on"""


class SpotTrainer:
    """`layer` is the drafter in use, or a fresh random one (cold start); it is not changed.

    The rate never falls to zero, so as to follow a moving target; that leaves noise in the weights, so what is
    published is their running mean.
    """

    def __init__(self, layer: EagleLayer, target: Decoder, config: DrafterTrainConfig, seed: int = 0) -> None:
        self.target, self.config = target, config
        self.trainer = DrafterTrainer(copy.deepcopy(layer), target, config, seed)
        self.in_use, self.judged = copy.deepcopy(self.trainer.layer), copy.deepcopy(self.trainer.layer)
        self.names = [name for name, _ in self.trainer.layer.named_parameters()]
        self.mean = [parameter.detach().clone() for parameter in self.trainer.layer.parameters()]
        self.buffer = HarvestBuffer(config.buffer_tokens, max(1, min(_STEPS, _HEADS // target.head.nbytes)))
        self.held_back = HarvestBuffer(_HELD * config.micro_batch_tokens, self.buffer.before.maxlen or 1)
        self.rng = random.Random(seed)
        self.tokens = 0  # since the last replica
        self.cold = not layer.published
        wanted = (_READY if self.cold else _ENOUGH) * config.micro_batch_tokens
        self.enough = min(wanted, config.buffer_tokens // 4)

    # -- the harvest ---------------------------------------------------------------------------------------------------

    def harvest(self, item: Harvest) -> None:
        """The engine's `on_harvest`. A share of the prompts is held back for `judge`, the same on all workers."""
        (self.held_back if item.held_back else self.buffer).add(item)

    def target_moved(self) -> None:
        """To be called after every `target.load` of a new version."""
        self.buffer.next_step()
        if self.held_back.now:  # else there is something to judge by still, if of a target that is older
            self.held_back.next_step()
        self.trainer.target_moved(self.buffer.versions | self.held_back.versions)

    @property
    def ready(self) -> bool:
        """Whether there is harvest enough to train on."""
        return self.buffer.tokens >= self.enough

    # -- training ------------------------------------------------------------------------------------------------------

    def train(self, seconds: float, stop: Callable[[], bool] = lambda: False) -> SpotReport:
        """Micro-batches until the time is up: at least one, none where nothing is `ready`; or until `stop` says so,
        which leaves the one under way undone."""
        began, report, overlaps = time.perf_counter(), SpotReport(), [0.0]
        while self.ready and (report.micro_batches == 0 or report.seconds < seconds):
            self.trainer.rate_scale = max(_LEAST_RATE, 1 / (1 + self.trainer.steps / _COOLING) if self.cold else 0.0)
            batch = pack(self.buffer.sample(self.config.micro_batch_tokens, self.rng), self.target.device)
            try:
                overlaps.append(self.trainer.step(batch, stop)[0])
            except Interrupted:
                break
            self._follow()
            spent = time.perf_counter() - began
            report = SpotReport(report.micro_batches + 1, report.tokens + len(batch.tokens), spent)
        self.tokens += report.tokens
        return report._replace(overlap=sum(overlaps) / max(1, report.micro_batches))

    @torch.no_grad()
    def _follow(self) -> None:
        weight = max(1 / _MEMORY, 2 / (2 + self.trainer.steps))  # from a cold start, of the later half
        for mean, parameter in zip(self.mean, self.trainer.layer.parameters(), strict=True):
            mean.lerp_(parameter, weight)

    def replica(self) -> Replica:
        """A copy of all that training changes, with the tokens since the last one; what follows is trained on top."""
        tensors = {f"mean.{name}": tensor for name, tensor in zip(self.names, self.mean, strict=True)}
        tensors |= self.trainer.state()
        tokens, self.tokens = self.tokens, 0
        return Replica({name: t.detach().to("cpu", copy=True) for name, t in tensors.items()}, tokens)

    @torch.no_grad()
    def adopt(self, replica: Replica) -> None:
        """Train on from this one: the common start of all workers that do."""
        for name, tensor in zip(self.names, self.mean, strict=True):
            tensor.copy_(replica.tensors[f"mean.{name}"])
        self.trainer.load_state(replica.tensors)
        self.tokens = 0

    # -- publication ---------------------------------------------------------------------------------------------------

    def judge(
        self,
        candidate: Mapping[str, Tensor] | None,
        lent: Sequence[Harvest] = (),
        stop: Callable[[], bool] = lambda: False,
    ) -> Sums:
        """What a chain of `unroll` guesses would commit per pass on this worker's `evidence` and on what is lent,
        summed over entries, and their number; of a candidate (`Replica.tensors`), or of the drafter in use. What is
        lent of a target version whose head is no longer here is left out. Raises Interrupted where `stop` says so."""
        total, _, count = self._judge(self.in_use if candidate is None else _put(candidate, self.judged), lent, stop)
        return total, count

    def evidence(self) -> list[Harvest]:
        """Of what is held back; another part at every step."""
        rng = random.Random(f"{self.target.version} {self.held_back.tokens}")
        return self.held_back.pieces(_JUDGED * self.config.micro_batch_tokens, _PIECE, rng)

    def _judge(
        self, layer: EagleLayer, lent: Sequence[Harvest] = (), stop: Callable[[], bool] = lambda: False
    ) -> tuple[float, float, int]:
        known = [item for item in (*self.evidence(), *lent) if item.target_version in self.trainer.heads]
        parts = [
            self.trainer.judge(layer, pack(items, self.target.device), stop)
            for items in bundles(known, self.config.micro_batch_tokens)
        ]
        total, first, count = (sum(column) for column in zip(*parts, strict=True)) if parts else (0.0, 0.0, 0)
        return total, first, int(count)

    def publish(self, candidate: Mapping[str, Tensor], agreement: float | None = None) -> EagleLayer:
        """The candidate (`Replica.tensors`) is now the drafter in use: a layer of its own for
        `engine.swap(EagleDrafter(layer, target))`, its `published` agreement measured on the held-back harvest where
        nobody has measured it before."""
        _put(candidate, self.in_use)
        if agreement is None:
            _, first, count = self._judge(self.in_use)
            agreement = first / count if count else None
        self.in_use.published = agreement
        return copy.deepcopy(self.in_use)


@torch.no_grad()
def _put(candidate: Mapping[str, Tensor], layer: EagleLayer) -> EagleLayer:
    for name, parameter in layer.named_parameters():
        parameter.copy_(candidate[f"mean.{name}"])
    return layer


def beats(candidate: Sums, in_use: Sums) -> bool:
    """Whether a candidate goes live: by the sums of `judge` over all workers. Never one that is NaN, or was not
    judged."""
    (mine, count), (theirs, other) = candidate, in_use
    return count > 0 and other > 0 and math.isfinite(mine) and mine / count > _BETTER * theirs / other
