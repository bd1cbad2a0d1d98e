"""Idle work of a worker without rows: drafter training and look-ahead, in a fixed order. If interrupted, a task ends
within a micro-batch or a round. It rests if it takes cores from workers that decode.

Look-ahead decodes requests of coming steps with the current target. The tokens become drafts. A later target version
verifies them when it decodes the request: in the request's own step, or earlier if look-ahead continues an unfinished
response. The driver sends drafts of all kinds with the requests.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from tlt.build import history_tokens, steps_ahead
from tlt.cluster.calls import BREAKABLE
from tlt.cluster.drafter_training import METHODS, DrafterTraining
from tlt.cluster.supervisor import Done, Supervisor
from tlt.cluster.worker import AheadWork
from tlt.config import Config
from tlt.draft.ahead import Ahead, AheadStore, History
from tlt.trace import ABSENT, AHEAD, IDLE, SPOT, Tracer
from tlt.types import Request, Response, RolloutStats, Row

if TYPE_CHECKING:
    from tlt.cluster.coordinator import Allocation

log = logging.getLogger(__name__)

# expected length of a response, as multiples of the length of its own draft and of the longest draft of its group
_GOES_ON, _ALIKE = 1.5, 0.5
_JUDGED = 1.0  # seconds of decoding, concurrently with idle work, between two judgements
_CROWDED = 0.15  # share of these seconds that decoding waits for a free core, from which idle work rests
_REST = 20.0  # seconds of decoding for which idle work rests; so a trial that slows decoding takes 5 % of the time
_SLICES = 2  # duration of a call of training or look-ahead, in slices (`cluster.slice_seconds`)
_LOCAL_SLICE = 0.02  # maximum slice in seconds of a worker in this process, because the driver waits meanwhile
_HANGS = 30.0  # timeout in seconds for interrupted idle work; a worker that exceeds it is replaced


class ComingRequests:
    """Requests of coming steps, their look-ahead drafts, and the workers that decode them.

    `slots`: maximum number of look-ahead requests that a worker decodes. `most_steps`: number of coming steps from
    which requests are taken. `history_tokens`: maximum number of tokens of the last responses to all prompts.
    """

    def __init__(self, slots: int, most_steps: int, history_tokens: int = 0) -> None:
        self.slots, self.most_steps = slots, most_steps
        self.store, self.history = AheadStore(), History(history_tokens)
        self.tokens = 0
        self.accept_length = self.accept_length_ahead = 1.0  # tokens per pass, without/with look-ahead drafts
        self._coming: Iterator[list[Request]] = iter(())
        self._steps: deque[list[Request]] = deque()
        self._at: dict[int, list[Request]] = {}  # worker -> look-ahead requests that it decodes
        self._home: dict[int, int] = {}  # request's seed -> worker that has its keys and values
        self._is_given = False  # whether `for_free_slots` was called in this rollout

    def begin(self, coming: Iterable[list[Request]]) -> None:
        """Begin a rollout. `coming` has the requests of the coming steps, one list per step."""
        self._coming, self._steps = iter(coming), deque()
        self._at, self._is_given = {}, False

    def since_last(self) -> int:
        """Return the number of new look-ahead tokens since the last call of this method."""
        tokens, self.tokens = self.tokens, 0
        return tokens

    def end(self, stats: RolloutStats, responses: Sequence[Response], version: int) -> None:
        """End the rollout. Compute the accept lengths with and without look-ahead drafts from `stats`. Drop the drafts
        of the rollout's requests, and keep the `responses` by the target `version`."""
        if passes := stats.row_passes - stats.ahead_passes:
            self.accept_length = (stats.tokens - stats.ahead_committed) / passes
        if stats.ahead_passes:
            self.accept_length_ahead = stats.ahead_committed / stats.ahead_passes
        self.store.forget(response.request.seed for response in responses)
        for response in responses:
            self._home.pop(response.request.seed, None)
        self.history.add(responses, version)

    # -- assignment ----------------------------------------------------------------------------------------------------

    def work(self, worker: int, rollout: int, idle: int) -> AheadWork | None:
        """Return the look-ahead requests that `worker` decodes next; None if there are none.

        The worker gets at most an equal part of the unfinished requests, which are divided among `idle` idle workers.
        It may get all requests whose keys and values it holds, and some of the others. Requests whose keys and values
        another worker holds come last, because they must be prefilled again. `rollout`: number of the current rollout.
        """
        others = {index: requests for index, requests in self._at.items() if index != worker}
        elsewhere = {request.seed for requests in others.values() for request in requests}
        coming = [request for step in self._next_steps() for request in step]
        left = [r for r in coming if r.seed not in elsewhere and not self.store.has_ended(r)]
        if not left:
            return None
        asking = max(1, idle - len(others))
        share = min(self.slots, math.ceil((len(left) + len(elsewhere)) / idle))
        line = in_order(left, self.store)
        own = {r.seed for r in line if self._home.get(r.seed) == worker}
        dealt = own.union([r.seed for r in line if r.seed not in own][::asking])
        wanted = [r for r in line if r.seed in dealt]
        wanted = sorted(wanted, key=lambda r: self._home.get(r.seed, worker) != worker)[:share]
        self._at[worker] = wanted
        self._home |= {r.seed: worker for r in wanted}
        return AheadWork(rollout, wanted, self.drafts(wanted))

    def for_free_slots(self) -> list[Request] | None:
        """Return all requests that the only worker decodes in free slots. In later calls of a rollout, return None."""
        if self._is_given:
            return None
        self._is_given = True
        return in_order([r for step in self._next_steps() for r in step if not self.store.has_ended(r)], self.store)

    def _next_steps(self) -> Iterator[list[Request]]:
        yield from list(self._steps)
        while len(self._steps) < self.most_steps and (step := next(self._coming, None)) is not None:
            self._steps.append(step)
            yield step

    def steps_of(self, worker: int) -> tuple[int, ...]:
        """Return the coming steps whose requests the worker decodes now, as numbers. 1 is the next step."""
        seeds = {request.seed for request in self._at.get(worker, ())}
        return tuple(i for i, step in enumerate(self._steps, 1) if any(r.seed in seeds for r in step))

    def rows_of(self, worker: int) -> tuple[int, ...]:
        """Return the number of draft tokens so far of each look-ahead request that the worker decodes."""
        return tuple(self.store.length(request.seed) for request in self._at.get(worker, ()))

    def add_slice(self, worker: int, found: Sequence[Ahead]) -> None:
        """Store the drafts of a look-ahead call that returned."""
        self.store_drafts(found)
        self.call_ended(worker)

    def store_drafts(self, found: Sequence[Ahead]) -> None:
        """Store drafts that a worker decoded, and count their new tokens."""
        self.tokens += sum(max(0, len(a.tokens) - self.store.length(a.seed)) for a in found)
        self.store.put(found)

    def call_ended(self, worker: int) -> None:
        """Record that the worker's look-ahead call has ended. Others may now decode its requests."""
        self._at.pop(worker, None)

    # -- drafts for the requests of this rollout -----------------------------------------------------------------------

    def drafts(self, requests: Iterable[Request]) -> list[Ahead]:
        """Return the look-ahead drafts of these requests and of their siblings (requests with the same prompt), and the
        last responses to their prompts."""
        groups = (group for r in requests for group in (self.history.group(r), self.store.group(r)))
        return list({ahead.seed: ahead for group in groups for ahead in group}.values())

    def in_even_parts(self, rows: Sequence[Row], workers: int) -> list[Row]:
        """Return the rows in the order in which workers take equal parts of them from the front.

        If no row has a draft of its own, this is the order of `rows`. Otherwise all `workers` get rows that need about
        the same number of rounds (longest processing time first: Graham, 1969). A worker gets rows of the same prompt
        one after the other.
        """
        if not any(self.store.get(row.request) or self.history.get(row.request) for row in rows):
            return list(rows)
        rounds = {row.request.seed: self._rounds(row.request) for row in rows}
        most, bins, loads = math.ceil(len(rows) / workers), [list[Row]() for _ in range(workers)], [0.0] * workers
        for row in sorted(rows, key=lambda row: -rounds[row.request.seed]):
            index = min((i for i in range(workers) if len(bins[i]) < most), key=lambda i: loads[i])
            bins[index].append(row)
            loads[index] += rounds[row.request.seed]
        return [row for one in bins for group in by_prompt(one) for row in group]

    def _rounds(self, request: Request) -> float:
        """Return the expected number of decoding rounds of the request, given the look-ahead drafts of its group (same
        prompt). If the request's own draft is unfinished, the expected number of tokens after the draft is the larger
        of two lengths: that of the draft, and the mean over the group's drafts."""
        mean = fmean(lengths) if (lengths := [len(ahead.tokens) for ahead in self.drafts([request])]) else 0.0
        known = self.store.get(request) or self.history.get(request)
        if known is None:
            return mean / self.accept_length
        rest = 0 if known.ended else max(mean, len(known.tokens))
        return len(known.tokens) / self.accept_length_ahead + rest / self.accept_length


def in_order(left: Sequence[Request], store: AheadStore) -> list[Request]:
    """Return requests of coming steps in the order in which look-ahead decodes them. `left`: these requests, those of
    the nearest step first.

    If no request of a group (same prompt) has a draft yet, one request of the group comes first, because responses to
    one prompt have similar lengths. Then come the requests with the largest expected length, because a step waits for
    its longest response.
    """
    first = {request.prompt.token_ids: request for request in reversed(left)}
    longest = {
        prompt: max((len(ahead.tokens) for ahead in store.group(request)), default=0)
        for prompt, request in first.items()
    }
    probes = {request.seed for prompt, request in first.items() if not longest[prompt]}

    def expected_length(request: Request) -> float:
        return max(_GOES_ON * store.length(request.seed), _ALIKE * longest[request.prompt.token_ids])

    return sorted(left, key=lambda request: (request.seed not in probes, -expected_length(request)))


def by_prompt(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows as one list for each prompt and epoch, in the order of the first row of each list."""
    groups: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.request.prompt.prompt_id, row.request.epoch), []).append(row)
    return list(groups.values())


class Crowding:
    """Judgement whether idle work takes cores from workers that decode."""

    def __init__(self) -> None:
        self._seconds = self._waited = self._rest = 0.0

    @property
    def rests(self) -> bool:
        return self._rest > 0.0

    def decoded(self, seconds: float, waited: float, is_concurrent: bool) -> None:
        """Record a decoding call: its duration, how long it waited for a free core, and whether others did idle work
        meanwhile."""
        self._rest = max(0.0, self._rest - seconds)
        if self.rests or not is_concurrent:
            return
        self._seconds, self._waited = self._seconds + seconds, self._waited + waited
        if self._seconds >= _JUDGED:
            share, self._seconds, self._waited = self._waited / self._seconds, 0.0, 0.0
            if share >= _CROWDED:
                self._rest = _REST
                log.info("decoding waits %.0f %% of its time for a core: idle workers rest for a while", 100 * share)


class IdleWork:
    """Idle work of all workers: drafter training and look-ahead."""

    def __init__(
        self,
        supervisor: Supervisor,
        allocation: Allocation,
        tracers: Sequence[Tracer],
        config: Config,
        training: DrafterTraining,
    ) -> None:
        self.supervisor, self.allocation, self.tracers, self.training = supervisor, allocation, tracers, training
        longest, speculation = math.inf if supervisor.pool.is_concurrent else _LOCAL_SLICE, config.speculation
        self.slice_seconds = min(config.cluster.slice_seconds, longest)
        self.looks_ahead = steps_ahead(speculation) > 0
        self.ahead = ComingRequests(allocation.slots, speculation.look_ahead, history_tokens(speculation))
        self.crowding, self._on_one_machine = Crowding(), config.cluster.address is None
        self.is_on = True
        """whether idle workers do anything"""
        self._trained_last: int | None = None  # worker whose training was the last idle work that was started

    def start(self, index: int) -> None:
        """Start the first possible kind of idle work on a worker without rows: drafter training, look-ahead. If it is
        the only idle worker, it trains and looks ahead in turns. Idle work rests if it takes cores from workers that
        decode."""
        if self.crowding.rests:
            return
        idle = self.allocation.idle()
        looks_first = index == self._trained_last and len(idle) == 1
        self._trained_last = None
        if looks_first and self.decode_ahead(index):
            return
        if self.train(index, idle, _SLICES * self.slice_seconds):
            self._trained_last = index
        elif not looks_first:
            self.decode_ahead(index)

    def train(self, index: int, idle: Collection[int], seconds: float) -> bool:
        """Start training or evaluating the drafter on an idle worker for about `seconds`, if the schedule permits.
        `idle`: all idle workers. Return whether a call was started."""
        due = self.is_on and self.training.next_call(index, idle, seconds)
        if due:
            self.tracers[index].enter(SPOT)
        return due

    def decode_ahead(self, index: int) -> bool:
        """Start decoding look-ahead requests on an idle worker. Return whether there were any."""
        looks_ahead = self.looks_ahead and self.is_on
        work = self.ahead.work(index, self.allocation.number, len(self.allocation.idle())) if looks_ahead else None
        if work:
            self.tracers[index].enter(AHEAD)
            self.supervisor.call(index, "look_ahead", work, _SLICES * self.slice_seconds)
        return work is not None

    def for_free_slots(self) -> Sequence[Request] | None:
        """Return the requests of coming steps that a worker decodes in slots that its rows leave free. There are none
        if several workers are present, because others may be idle. Return None if they have not changed since the
        worker's last call."""
        if not (self.looks_ahead and self.is_on and len(self.supervisor.present) == 1):
            return ()
        return self.ahead.for_free_slots()

    def train_longer(self, rollout_seconds: float) -> float:
        """Train the drafter between rollout and update, for `speculation.training.extra` times the rollout's duration.
        Return the seconds that this took."""
        began = time.monotonic()
        until = began + self.training.extra * rollout_seconds
        if until == began:
            return 0.0
        self.train_for(lambda: until - time.monotonic())
        return time.monotonic() - began

    def train_for(self, left: Callable[[], float]) -> None:
        """Train and evaluate the drafter on free workers until the time is over or nothing is due. `left()` returns the
        seconds left."""
        while (seconds := left()) > 0.0:
            for worker in (idle := self.supervisor.free()):
                self.train(worker, idle, min(seconds, self.slice_seconds))
            if not self.training.is_on or (self.training.under_way is None and self.supervisor.free()):
                break
            for done in self.supervisor.done():
                self.handle(done)
                self.tracers[done.worker].enter(IDLE if done.worker in self.supervisor.present else ABSENT)

    def handle(self, done: Done) -> None:
        """Pass a call that returned to look-ahead and drafter training."""
        if done.lost:
            self.ahead.call_ended(done.worker)
        elif done.method == "look_ahead":
            self.ahead.add_slice(done.worker, done.result)
        elif done.method == "decode" and self._on_one_machine:
            others_work = bool(self.supervisor.calls.workers_in(BREAKABLE))
            self.crowding.decoded(done.result.seconds, done.result.waited, others_work)
        self.training.handle_result(done)

    def handle_kept(self) -> None:
        """Handle the calls that returned while the supervisor was waiting for other calls."""
        for done in self.supervisor.take_kept():
            self.handle(done)

    def end_look_ahead(self) -> None:
        """Interrupt all idle work, and wait until look-ahead has ended, so that all its tokens are known."""
        self.supervisor.calls.break_off()
        self.supervisor.wait_until_ended(("look_ahead",), _HANGS)

    def end_all(self) -> None:
        """Interrupt all idle work, and wait until it has ended."""
        self.supervisor.calls.break_off()
        self.supervisor.wait_until_ended((*BREAKABLE, *METHODS), _HANGS)
        self.handle_kept()
