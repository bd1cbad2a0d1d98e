"""Driver's part of drafter training in idle time, for one worker and for many.

The schedule (spot/schedule.py) decides when the drafter is trained. One worker trains at a time: the first idle one
with enough training data of earlier rollouts (spot/spot.py). The only worker of a run trains after a rollout, if
`speculation.training.extra` is above 0.
`spot/schedule.py` records which workers have the newest trainer state. If the worker that trained last is decoding
and another one is idle, the driver fetches the state first.

The candidate is the drafter in training. If it is better than the drafter in use, it is published: all workers draft
with it from their next round on. In either case training continues from the candidate. If a worker is lost, the
others continue from the state that was fetched last. A resumed run continues from the last published drafter and its
optimizer state, without training data. The driver calls these methods of the workers (spot/spot_worker.py):

    train_drafter, evaluate_drafter   idle calls, of one worker at a time
    drafter_state                     copy of the trainer state, for the next worker or for publication
    take_drafter                      all workers draft with a published drafter
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tlt.build import starting_drafter
from tlt.cluster.pool import ClusterError, Handle
from tlt.cluster.supervisor import Done, Supervisor
from tlt.config import Config
from tlt.draft.eagle import EagleLayer
from tlt.models.families import DecoderOptions, decoder_options, read_config
from tlt.spot.saving import DrafterSaver, TrainerState, load_latest, newest_number
from tlt.spot.schedule import Due, Evaluation, NewestState, Schedule, SpotReport
from tlt.spot.spot_worker import FaultBarrier, contained

log = logging.getLogger(__name__)
METHODS = ("train_drafter", "evaluate_drafter", "drafter_state")
"""methods of drafter training whose results the driver needs; one such call runs at a time"""


class DrafterTraining(FaultBarrier):
    """Driver of drafter training: it trains and evaluates on workers, publishes drafters, and saves published ones.

    `layer` is the drafter that the run starts with; None if none is trained.
    """

    passes_on = (ClusterError,)

    def __init__(
        self, supervisor: Supervisor, config: Config, target: DecoderOptions, layer: EagleLayer | None
    ) -> None:
        training = config.speculation.training
        self.supervisor, self.target, self.extra, self.is_on = supervisor, target, training.extra, layer is not None
        at_rest = layer is not None and layer.trained
        self.schedule = Schedule(training.micro_batch_tokens, begins_at_rest=at_rest)
        self.newest = NewestState[Handle]()
        self.version = 0
        """number of the published drafter in use; 0 is the drafter that the run started with"""
        self.in_use: tuple[Handle, float | None] | None = None
        """published drafter and the acceptance rate of its first draft token; None before a publication"""
        self.under_way: int | None = None
        """worker that runs a call of one of `METHODS`; None if there is no such call"""
        self.folder = Path(config.run.folder).resolve() / "drafter"
        self.saver = DrafterSaver(self.folder, layer.options) if layer else None
        self._to_publish: float | None = None  # acceptance rate of the candidate whose state was requested
        self._unable = set[int]()  # workers with too little training data in this rollout
        self._evaluation: Evaluation | None = None  # last evaluation since the last report
        self._tokens = 0  # tokens trained on since the last report

    # -- calls ---------------------------------------------------------------------------------------------------------

    @contained(False)
    def next_call(self, worker: int, idle: Collection[int], seconds: float) -> bool:
        """Start training (for about `seconds`) or evaluation on `worker`, if the schedule has one of them due. Return
        whether a call was started. `idle`: all idle workers."""
        due, able = self.schedule.due(), set(idle) - self._unable
        if due is None or self.under_way is not None or worker not in able:
            return False
        if not self.newest.is_free(worker):
            if self.newest.holder not in able:
                self._ask_for_state(self.newest.holder)
            return False
        self.under_way, start = worker, self.newest.pass_to(worker)
        if due is Due.EVALUATE:
            self.supervisor.call(worker, "evaluate_drafter", start)
        else:
            self.supervisor.call(worker, "train_drafter", start, seconds)
        return True

    def _ask_for_state(self, worker: int | None) -> None:
        if worker in self.supervisor.present:
            self.under_way = worker
            self.supervisor.call(worker, "drafter_state")
        else:
            self._to_publish = None  # the candidate is lost with its worker

    @contained(None)
    def update_begins(self) -> None:
        """Fetch the trainer state before an update, so that any worker can continue from it in the next rollout."""
        if self.supervisor.size > 1 and self.under_way is None and self.newest.holder is not None:
            self._ask_for_state(self.newest.holder)

    @contained(None)
    def handle_result(self, done: Done) -> None:
        """Handle a call that returned, or the loss of a worker, as far as it concerns drafter training."""
        if done.worker == self.under_way and (done.lost or done.method in METHODS):
            self.under_way = None
            if done.lost:
                self._to_publish = None  # the worker's replacement has weights that were not evaluated
        elif done.method in METHODS and not done.lost:
            return  # the result is that of a lost worker's replacement, whose trainer state is not the one asked for
        match done:
            case Done(lost=True):
                self._lost(done.worker)
            case Done(method="take_state") if self.in_use:
                self.supervisor.call(done.worker, "take_drafter", *self.in_use)
            case Done(method="train_drafter" | "evaluate_drafter", result=None):
                self._unable.add(done.worker)
            case Done(method="train_drafter"):
                self._trained(done.worker, done.result)
            case Done(method="evaluate_drafter"):
                self._evaluated(done.worker, done.result)
            case Done(method="drafter_state"):
                self._took_state(done.worker, done.result)
            case _:
                pass

    def _lost(self, worker: int) -> None:
        if self.newest.holder == worker:
            self.schedule.begin_stretch()
        self.newest.lost(worker)

    def _trained(self, worker: int, report: SpotReport) -> None:
        self._tokens += report.tokens
        self.schedule.trained(report)
        if report.micro_batches:
            self.newest.trained(worker)

    def _evaluated(self, worker: int, part: Evaluation) -> None:
        whole = self.schedule.evaluated(part)
        if whole is None:
            return
        self._evaluation = whole
        if self.schedule.publishes(whole):
            self._to_publish = whole.acceptance
            self._ask_for_state(worker)

    def _took_state(self, worker: int, state: TrainerState | None) -> None:
        acceptance, self._to_publish = self._to_publish, None
        if state is None:  # its values were not finite
            self.newest.taken(worker, None)
            self.schedule.begin_stretch()
            return
        handle = self.supervisor.pool.put(state)
        self.newest.taken(worker, handle)
        if acceptance is not None and self.saver:
            self.version += 1
            self._draft_with(handle, acceptance)
            self.saver.save(self.version, state, acceptance)

    def _draft_with(self, drafter: Handle, acceptance: float | None) -> None:
        self.in_use = drafter, acceptance
        self._call_all("take_drafter", drafter, acceptance)

    def _call_all(self, method: str, *arguments: Any) -> None:
        for worker in self.supervisor.present:
            self.supervisor.call(worker, method, *arguments)

    # -- rollouts ------------------------------------------------------------------------------------------------------

    @contained(None)
    def rollout_ended(self, seconds: float, acceptance: float | None) -> None:
        """Record a rollout's duration in seconds and the learned drafter's acceptance rate (None: not used)."""
        self._unable.clear()
        if self.schedule.rollout_ended(seconds, acceptance):
            self._call_all("forget_older_data")
        if self.extra:
            self._call_all("rollout_ended")

    @contained({})
    def report(self) -> dict[str, float]:
        """Return metrics of drafter training since the last report, except the number of tokens."""
        found = {"version": float(self.version if self.in_use else 0), "rests": float(self.schedule.rests)}
        evaluation, self._evaluation = self._evaluation, None
        if evaluation and evaluation.in_use:
            found["accept_length"] = evaluation.entries / evaluation.in_use
            if evaluation.candidate > 0.0:
                found["candidate"] = evaluation.entries / evaluation.candidate
        return found

    def take_tokens(self) -> int:
        """Return the number of tokens that were trained on since the last call of this method."""
        tokens, self._tokens = self._tokens, 0
        return tokens

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @contained({})
    def state(self) -> dict[str, Any]:
        """Return the schedule's state as plain data for a checkpoint. Drafters are saved in the run's folder."""
        return self.schedule.state()

    @contained(None)
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue a resumed run with the last published drafter and this state of the schedule."""
        self.number_on()
        saved = load_latest(self.folder, self.target)
        if saved and self.saver and saved.layer.options != self.saver.options:
            log.warning(
                "the drafter in %s is not used, because its shape differs from that of the recipe's drafter",
                self.folder,
            )
            return
        if saved:
            self.version, handle = saved.number, self.supervisor.pool.put(saved.state)
            self.newest.restart(handle)
            self._draft_with(handle, saved.layer.acceptance_rate)
        self.schedule.load_state(state)

    @contained(None)
    def number_on(self) -> None:
        """Continue the numbering of the drafters in the folder. The saver deletes all but the two with the highest
        numbers, so a new drafter with a lower number would be lost."""
        self.version = newest_number(self.folder)

    @contained(None)
    def close(self) -> None:
        if self.saver:
            self.saver.wait()


def training_of(supervisor: Supervisor, config: Config) -> DrafterTraining:
    """Return the driver of a recipe's drafter training."""
    options = decoder_options(read_config(config.model.path))
    return DrafterTraining(supervisor, config, options, starting_drafter(config, options))
