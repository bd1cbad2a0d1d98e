"""Drafter training on one worker in idle time, in short calls that can be interrupted within a micro-batch.

Each worker has one trainer. It can continue from the `state` of another worker's trainer. A candidate is evaluated on
training data of the last finished rollout, and was trained on data of earlier rollouts.
"""

from __future__ import annotations

import copy
import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from tlt.config import DrafterTrainConfig
from tlt.draft.eagle import EagleLayer
from tlt.draft.features import Harvest
from tlt.models.decoder import Decoder
from tlt.spot.buffer import HarvestBuffer, pieces
from tlt.spot.saving import MEAN, TrainerState, weights_of
from tlt.spot.schedule import RULE, Evaluation, SpotReport, sum_evaluations
from tlt.spot.trainer import DrafterTrainer, Interrupted
from tlt.spot.unroll import bundles, pack

log = logging.getLogger(__name__)

_PIECE = 64  # maximum number of entries from one response, because responses to a prompt are similar
_STEPS = 64  # maximum number of finished rollouts before the last one whose data are kept
_HEADS = 1 << 30  # maximum bytes of output heads, one per target version in the training data; at least two heads
_ENOUGH = 4  # least data for training: this many micro-batches, and this many entries per input of `fc`
_AVERAGED = 8  # micro-batches in the running mean of the weights at the highest learning rate; more at lower ones
_SAMPLE = 16  # entries per input of `fc` in the sample from which the whitening of these inputs is estimated
_LEAST_RATE = 0.1  # lowest learning rate, as a fraction of the configured one


class SpotTrainer:
    """Trainer of one worker. `layer` is the drafter in use, or a new one with random weights (cold start); it is not
    changed.

    The learning rate is the configured one times the fraction of a chain's draft tokens that are rejected. So it falls
    as the drafter learns, and rises when the target changes. It never reaches zero, so the weights stay noisy.
    Therefore their running mean is published.
    """

    def __init__(self, layer: EagleLayer, target: Decoder, config: DrafterTrainConfig, seed: int = 0) -> None:
        self.target, self.config = target, config
        self.trainer = DrafterTrainer(copy.deepcopy(layer), target, config, seed)
        self.in_use, self.candidate = copy.deepcopy(self.trainer.layer), copy.deepcopy(self.trainer.layer)
        self.names = [name for name, _ in self.trainer.layer.named_parameters()]
        self.mean = [parameter.detach().clone() for parameter in self.trainer.layer.parameters()]
        self.buffer = HarvestBuffer(config.buffer_tokens, max(1, min(_STEPS, _HEADS // target.head.nbytes - 1)))
        self.rng = random.Random(seed)
        self.judged_tokens = RULE.judged * config.micro_batch_tokens
        self._is_whole = False  # whether the current target's rollout has ended
        self._is_new_task = False  # whether no training has followed the last change of the task
        self.enough = min(_ENOUGH * max(config.micro_batch_tokens, layer.fc.in_features), config.buffer_tokens // 8)

    # -- training data -------------------------------------------------------------------------------------------------

    def harvest(self, item: Harvest) -> None:
        """Add an item of training data. The engine calls this method as its `on_harvest`."""
        self.buffer.add(item)

    def rollout_ended(self) -> None:
        """Record that the current rollout's data are complete, so drafters may be evaluated on them. If nobody calls
        this, `target_moved` does."""
        if not self._is_whole:
            self._is_whole = True
            self.buffer.rollout_ended()

    def target_moved(self) -> None:
        """Record that the target has new weights. Call this after every `target.load`."""
        self.rollout_ended()
        self._is_whole = False
        self.trainer.target_moved(self.buffer.versions)

    def forget(self) -> None:
        """Adapt to a changed task: drop rollouts before the last finished one. Training then restarts at the highest
        learning rate, with only the first draft token of each chain."""
        self._is_new_task = True
        self.buffer.forget()

    @property
    def ready(self) -> bool:
        """Whether there are enough training data."""
        return self.buffer.past_tokens >= self.enough

    # -- training ------------------------------------------------------------------------------------------------------

    def train(self, seconds: float, stop: Callable[[], bool] = lambda: False) -> SpotReport:
        """Train for about `seconds`, at least one micro-batch. If `ready` is False, return at once. If `stop` returns
        True, drop the current micro-batch and return."""
        began, report = time.perf_counter(), SpotReport()
        while self.ready and (report.seconds < seconds or report.micro_batches == 0):
            try:
                trained = self._micro_batch(stop)
            except Interrupted:  # the dropped micro-batch took time too
                return report._replace(seconds=time.perf_counter() - began)
            spent = time.perf_counter() - began
            report = SpotReport(report.micro_batches + 1, report.tokens + trained, spent)
        return report

    def _micro_batch(self, stop: Callable[[], bool]) -> int:
        """Train on one micro-batch. Return its number of entries (token positions). Raises Interrupted."""
        if self.trainer.steps == 0:
            self._prepare(stop)
        if self._is_new_task:
            self.trainer.reach, self._is_new_task = 0.0, False
        self.trainer.rate_scale = max(_LEAST_RATE, 1 - self.trainer.reach / self.config.unroll)
        batch = pack(self.buffer.sample(self.config.micro_batch_tokens, self.rng), self.target.device)
        self.trainer.step(batch, stop)
        self._follow()
        if self.trainer.steps.bit_count() == 1:
            with suppress(Interrupted):  # the micro-batch is complete, so it counts
                self._prepare(stop)
        return len(batch.tokens)

    def _prepare(self, stop: Callable[[], bool]) -> None:
        """Estimate the matrix that whitens the inputs of the layer `fc`. This is done before the first step and after
        1, 2, 4, ... steps, because later data have more prompts. Raises Interrupted."""
        entries, steps = _SAMPLE * self.trainer.layer.fc.in_features, self.trainer.steps
        sample = pieces(self.buffer.past, entries, _PIECE, random.Random(steps))
        self.trainer.prepare(sample, from_scratch=steps == 0 and not self.in_use.trained, stop=stop)

    @torch.no_grad()
    def _follow(self) -> None:
        """Update the running mean of the weights. The higher the learning rate, the fewer micro-batches the mean
        covers."""
        for mean, parameter in zip(self.mean, self.trainer.layer.parameters(), strict=True):
            mean.lerp_(parameter, self.trainer.rate_scale / _AVERAGED)

    def state(self) -> TrainerState | None:
        """Return a copy in host memory of all that training changes. If a value is not finite, return None and restart
        training from the drafter in use."""
        tensors = {MEAN + name: tensor for name, tensor in self._weights().items()}
        tensors |= self.trainer.state()
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            self._restart()
            return None
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def _weights(self) -> dict[str, Tensor]:
        """Return the weights to publish, by their names in `EagleLayer`."""
        return dict(self.trainer.layer.named_buffers()) | dict(zip(self.names, self.mean, strict=True))

    def _restart(self) -> None:
        """Restart training from the drafter in use."""
        log.warning("the weights of the drafter in training are not finite; training restarts from the drafter in use")
        trainer = DrafterTrainer(copy.deepcopy(self.in_use), self.target, self.config)
        weights = {MEAN + name: tensor for name, tensor in self.in_use.state_dict().items()}
        self.load_state(weights | trainer.state())

    @torch.no_grad()
    def load_state(self, state: TrainerState) -> None:
        """Continue from another trainer's state."""
        for name, tensor in self._weights().items():
            tensor.copy_(state[MEAN + name])
        self.trainer.load_state(state)

    # -- publication ---------------------------------------------------------------------------------------------------

    def evaluate(self, stop: Callable[[], bool] = lambda: False) -> Evaluation:
        """Compare the candidate (the running mean of the weights) with the drafter in use, on this worker's held-out
        data. If `stop` returns True, end within a micro-batch and return the result for the part that was compared."""
        if not all(bool(tensor.isfinite().all()) for tensor in self.mean):
            self._restart()
            return Evaluation()
        began, done = time.perf_counter(), list[Evaluation]()
        self.candidate.load_state_dict(self._weights())
        layers = [self.in_use, self.candidate]
        try:
            parts = list(bundles(self.held_out(), self.config.micro_batch_tokens))
            self.rng.shuffle(parts)  # so that interrupted calls do not all compare the same part
            for items in parts:
                batch = pack(items, self.target.device)
                [(in_use, _), (mine, first)], entries = self.trainer.judge(layers, batch, stop)
                done.append(Evaluation(entries, in_use, mine, first))
        except Interrupted:
            done.append(Evaluation(interrupted=True))
        return sum_evaluations(done)._replace(seconds=time.perf_counter() - began)

    def held_out(self) -> list[Harvest]:
        """Return the held-out data on which drafters are compared: random segments of responses of the last finished
        rollout. The seed is the target's version, so that all evaluations between two updates use the same segments."""
        return pieces(self.buffer.latest, self.judged_tokens, _PIECE, random.Random(self.target.version))

    def publish(self, state: TrainerState, acceptance: float | None) -> EagleLayer:
        """Make the weights of this trainer state the drafter in use, and return a separate copy for
        `engine.draft_with`. `acceptance`: measured acceptance rate of its first draft token."""
        self.in_use.load_state_dict(weights_of(state))
        self.in_use.acceptance_rate = acceptance
        return copy.deepcopy(self.in_use)
