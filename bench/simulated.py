"""Simulated worker for the driver in `tlt.cluster`. It decodes, computes updates and trains the drafter by counting the
seconds that a profile gives. Responses have lengths and rewards that are known in advance."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from simulated_pool import Clock, Work

from tlt.cluster.worker import AheadWork, DecodeWork, Slice
from tlt.config import Config
from tlt.draft.ahead import Ahead
from tlt.rl.batching import Packer
from tlt.rl.losses import has_gradient
from tlt.rl.parallel import numbers_of
from tlt.spot.schedule import RULE, Evaluation, SpotReport
from tlt.types import PassCounts, Request, Response, RolloutStats, TrainBatch

_BRIEF = 1.8  # a round that only looks ahead may take so many times the round of one row (engine/choice.py)


class Rounds(NamedTuple):
    """Decoding rounds by number of rows, ascending: seconds of a round, and tokens that each row gains in it."""

    rows: Sequence[float]
    seconds: Sequence[float]
    tokens: Sequence[float]

    def at(self, rows: float) -> tuple[float, float]:
        """Return the seconds and the tokens per row of a round. Between two numbers of rows they are interpolated."""
        return float(np.interp(rows, self.rows, self.seconds)), float(np.interp(rows, self.rows, self.tokens))


class Training(NamedTuple):
    """Drafter training. A candidate of m micro-batches gains `gain` x (1 - exp(-m / `slowness`)) draft tokens per token
    that the first drafter gains."""

    seconds: float
    """seconds of a micro-batch"""
    gain: float = 0.0
    slowness: float = 200.0


@dataclass(frozen=True)
class Profile:
    """Seconds of each piece of work of one worker that computes alone."""

    plain: Rounds
    drafted: Rounds
    ahead: Rounds
    """rounds of rows that have a look-ahead draft"""
    seen: float
    """share of the tokens of these rounds that are accepted look-ahead tokens"""
    prefill: float
    """seconds of a pass that computes up to `engine.prefill_tokens` tokens of prompts"""
    update: float
    """seconds per token of an update"""
    optimizer: float = 0.0
    """seconds of an update without tokens"""
    group: float = 0.0
    """further seconds of an update of several workers, which copy their state and sum gradients"""
    sync: float = 0.0
    other: float = 0.0
    """seconds of a step in which no worker works, such as waiting for rewards"""
    call: float = 0.0
    """seconds between a worker's call and the next, with several workers"""
    training: Training | None = None
    speeds: Sequence[float] = (1.0,)
    """speed of each worker while 1, 2, ... work at the same time, relative to one alone; more have the last speed"""

    def speed(self, working: int) -> float:
        """Return the speed of each of `working` workers that compute at the same time."""
        return self.speeds[min(working, len(self.speeds)) - 1]


class Known(NamedTuple):
    """What a response will be."""

    length: int
    reward: float
    pace: float = 0.0
    """tokens that it gains in a round with drafts; 0: as many as the profile says"""


@dataclass(eq=False)
class Live:
    """Row that is decoded: its tokens so far, and those that its look-ahead draft knows."""

    request: Request
    response: Known
    tokens: float = 0.0
    known: int = 0
    passes: float = 0.0
    ahead_passes: float = 0.0
    ahead_tokens: float = 0.0

    @property
    def length(self) -> int:
        return self.response.length

    def decoded(self, seen: float) -> PassCounts:
        ahead = {"ahead_passes": math.ceil(self.ahead_passes), "ahead_committed": round(self.ahead_tokens)}
        return PassCounts(math.ceil(self.passes), **ahead, seen_ahead=round(seen * self.ahead_tokens))


class Learner:
    """Learned drafter of a run: its micro-batches of training, and the quality of the drafter in use."""

    def __init__(self, training: Training | None) -> None:
        self.training, self.micro_batches, self.in_use, self.judged = training, 0, 1.0, 1.0

    @property
    def candidate(self) -> float:
        assert self.training
        return 1 + self.training.gain * (1 - math.exp(-self.micro_batches / self.training.slowness))


class SimulatedWorker:
    """Worker that has the methods of `tlt.cluster.run_worker.RunWorker` as generators of work."""

    def __init__(self, config: Config, profile: Profile, known: Mapping[int, Known], clock: Clock, learner: Learner):
        self.config, self.profile, self.known, self.clock, self.learner = config, profile, known, clock, learner
        self.packer = Packer(config.train.micro_batch_tokens, torch.device("cpu"), True)
        self.version, self.ends, self.rollout = 0, 0.0, -1
        self.rows: dict[int, Live] = {}
        self.stats = RolloutStats()
        self.has_data = False  # whether a rollout has ended, from which the drafter can be trained

    # -- decoding ------------------------------------------------------------------------------------------------------

    def decode(self, work: DecodeWork, seconds: float) -> Work:
        if work.rollout != self.rollout:
            self.rollout, self.rows, self.stats = work.rollout, {}, RolloutStats()
        until, drafts = self.clock.now + seconds, {ahead.seed: len(ahead.tokens) for ahead in work.drafts}
        requests = [*work.requests, *(row.request for row in work.resumed)]
        self.rows |= {r.seed: Live(r, self.known[r.seed], known=drafts.get(r.seed, 0)) for r in requests}
        yield from self._prefill(requests)
        found: list[Response] = []
        while self.rows:
            yield from self._rounds(list(self.rows.values()), until - self.clock.now)
            ended = [row for row in self.rows.values() if row.tokens >= row.length]
            found += [self._response(self.rows.pop(row.request.seed)) for row in ended]
            if self.clock.now >= until:
                break
        live = {seed: int(row.tokens) for seed, row in self.rows.items()}
        return Slice(found, self.stats, live, {})

    def _prefill(self, requests: Sequence[Request]) -> Work:
        """Compute each prompt once."""
        tokens = sum(len(prompt) for prompt in {request.prompt.token_ids for request in requests})
        if tokens:
            yield self.profile.prefill * math.ceil(tokens / self.config.engine.prefill_tokens), math.inf

    def _rounds(self, rows: Sequence[Live], seconds: float) -> Work:
        """Decode rounds until a row or its look-ahead draft ends, or the seconds are over. The last round is counted in
        part, because the recorded rounds include last ones, which gain fewer tokens."""
        plain = self.config.speculation.drafter == "off"
        each, gained = (self.profile.plain if plain else self.profile.drafted).at(len(rows))
        each_known, gained_known = self.profile.ahead.at(len(rows))
        paces = [1.0 if plain else row.response.pace or gained for row in rows]
        own = [1 + (pace - 1) * self.learner.in_use for pace in paces]
        known = [row.tokens < row.known for row in rows]
        speeds = [max(speed, gained_known) if ahead else speed for speed, ahead in zip(own, known, strict=True)]
        ends = [row.known if ahead else row.length for row, ahead in zip(rows, known, strict=True)]
        left = min((end - row.tokens) / speed for row, end, speed in zip(rows, ends, speeds, strict=True))
        one = each + (each_known - each) * sum(known) / len(rows)
        count = (yield min(left, max(1, math.ceil(seconds / one))) * one, one) / one
        for row, ahead, speed in zip(rows, known, speeds, strict=True):
            gain = min(count * speed, row.length - row.tokens)
            row.tokens += gain
            row.passes += gain / speed
            row.ahead_passes += ahead * gain / speed
            row.ahead_tokens += ahead * gain

    def _response(self, row: Live) -> Response:
        known, tokens = self.known[row.request.seed], [0] * row.length
        decoded = row.decoded(self.profile.seen)
        return Response(row.request, tokens, [], [], "stop", reward=known.reward, decoded=decoded)

    def look_ahead(self, work: AheadWork, seconds: float, number: float = math.inf) -> Work:
        until, drafts = self.clock.now + seconds, {ahead.seed: ahead for ahead in work.drafts}
        waiting, live, found = deque(work.requests), list[Live](), list[Live]()
        most = self._brief_rows()
        while (waiting or live) and self.ends < number and self.clock.now < until:
            new = [waiting.popleft() for _ in range(min(most - len(live), len(waiting)))]
            for request in new:
                own = drafts.get(request.seed)
                known = len(own.tokens) if own and not own.ended else 0
                live.append(Live(request, self.known[request.seed], tokens=known))
            found += live[len(live) - len(new) :]
            yield from self._prefill(new)
            yield from self._rounds(live, until - self.clock.now if self.ends < number else 0.0)
            live = [row for row in live if row.tokens < row.length]
        return [self._draft(row) for row in found if row.tokens >= 1]

    def _brief_rows(self) -> int:
        """Return the number of rows with which a round is brief."""
        plain = self.profile.plain
        most = _BRIEF * plain.at(1)[0]
        return int(max(rows for rows, each in zip(plain.rows, plain.seconds, strict=True) if each <= most))

    def _draft(self, row: Live) -> Ahead:
        tokens, request = np.zeros(int(row.tokens), dtype=np.int32), row.request
        return Ahead(request.seed, request.prompt.token_ids, tokens, self.version, row.tokens >= row.length)

    # -- update --------------------------------------------------------------------------------------------------------

    def update(self, batch: TrainBatch, step: int, rendezvous: Any, rank: int, size: int) -> Work:
        """Take as long as the worker with the most work, because all wait for the sum of gradients. The first member
        does this for all."""
        if rank:
            return {}
        counted = [i for i in range(len(batch.response_ids)) if has_gradient(batch, i, self.config.train)]
        count = self.config.cluster.workers
        work = [_tokens(batch, shard) for shard in self.packer.all_shards(batch, counted, count)]
        most = max(sum(work[k] for k in numbers_of(member, size, count)) for member in range(size))
        seconds = most * self.profile.update + self.profile.optimizer + self.profile.group * (size > 1)
        yield seconds / self.profile.speed(size), math.inf
        return {}

    def sync(self, version: int) -> Work:
        self.version, self.has_data = version, True
        yield self.profile.sync, math.inf

    # -- drafter -------------------------------------------------------------------------------------------------------

    def train_drafter(self, start: Any, seconds: float, number: float = math.inf) -> Work:
        training, began, count = self.learner.training, self.clock.now, 0
        if training is None or not self.has_data:
            return None
        while self.ends < number and self.clock.now - began < seconds:
            yield training.seconds, math.inf
            count += 1
        self.learner.micro_batches += count
        tokens = count * self.config.speculation.training.micro_batch_tokens
        return SpotReport(count, tokens, self.clock.now - began)

    def evaluate_drafter(self, start: Any, number: float = math.inf) -> Work:
        training, began = self.learner.training, self.clock.now
        if training is None or not self.has_data:
            return None
        yield 5 * training.seconds, math.inf  # as spot/schedule.py says
        gained = self.profile.drafted.at(1)[1] - 1
        entries, self.learner.judged = RULE.judged * 10_000, self.learner.candidate
        rounds = [entries / (1 + gained * quality) for quality in (self.learner.in_use, self.learner.judged)]
        return Evaluation(entries, *rounds, first=0.8 * rounds[1], seconds=self.clock.now - began)

    def take_drafter(self, state: Any, acceptance: float | None) -> Work:
        self.learner.in_use = self.learner.judged
        yield from ()

    def __getattr__(self, name: str) -> Callable[..., Work]:
        """Return work that takes no time, for all other methods, such as `release`."""
        if name.startswith("_"):
            raise AttributeError(name)
        return nothing


def _tokens(batch: TrainBatch, shard: Sequence[int]) -> int:
    """Return the number of tokens to compute for these responses. A prompt counts once."""
    prompts = {batch.prompt_ids[i] for i in shard}
    return sum(map(len, prompts)) + sum(len(batch.response_ids[i]) for i in shard)


def nothing(*arguments: Any) -> Work:
    yield from ()
    return []
