"""The rollout engine. A round: admit, draft, verify, commit.

It promises design rule 1: a response is a function of (target version, prompt, seed), whatever was drafted, batched
or preempted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tlt.attention.backend import HeadShape
from tlt.attention.choose import attention_for
from tlt.config import EngineConfig
from tlt.draft.buffer import Harvest
from tlt.draft.calibration import Calibration
from tlt.draft.drafter import Drafter
from tlt.draft.features import FeatureLayout, FeatureView, FeatureWindow
from tlt.draft.strategy import PLAIN, Strategy
from tlt.draft.tree import DraftTree, NoiseOf, Roots, grow, stack
from tlt.engine.drafters import Drafters
from tlt.engine.harvest import Harvester
from tlt.engine.kv_cache import KVCache
from tlt.engine.laws import BatchLaw, LawTable
from tlt.engine.noise import DraftNoise, NoiseWindow
from tlt.engine.placing import place_new_rows
from tlt.engine.rows import RowTable
from tlt.engine.runner import Runner, Sampled
from tlt.engine.scheduler import Scheduler
from tlt.engine.tuner import Fixed, Tuner
from tlt.engine.walk import walk
from tlt.models.decoder import Decoder
from tlt.trace import Tracer
from tlt.types import Request, Response, RolloutStats, Row


@dataclass(frozen=True)
class RolloutState:
    """What lives as long as a rollout."""

    rows: RowTable
    scheduler: Scheduler
    laws: LawTable
    noise: NoiseWindow
    window: FeatureWindow | None
    view: FeatureView | None
    harvester: Harvester | None
    runner: Runner
    stats: RolloutStats
    version: int
    """of the target: all of a rollout's tokens are of one"""


@dataclass(frozen=True)
class Round:
    """What lives as long as a round: the batch as it stands before its draft."""

    strategy: Strategy
    rows: tuple[Row, ...]
    lengths: list[int]
    """[B] committed tokens in the cache"""
    positions: Tensor
    """[B] of the next token in each response"""
    batch: BatchLaw


class Engine:
    """`tuner` picks a strategy for each round; without drafters, or where theirs failed, that is plain decoding.

    `detokenize` is needed for stop strings. `layout` says which features of the target are kept for each live row, and
    `on_harvest` is given them as windows fill up and responses end. `kv_tokens` bounds the cache in tokens, in the
    place of the configuration's bound in bytes.
    """

    def __init__(
        self,
        target: Decoder,
        config: EngineConfig,
        drafters: Sequence[Drafter] = (),
        tuner: Tuner | None = None,
        detokenize: Callable[[Sequence[int]], str] | None = None,
        layout: FeatureLayout | None = None,
        on_harvest: Callable[[Harvest], None] | None = None,
        tracer: Tracer | None = None,
        calibration: Calibration | None = None,
        kv_tokens: int | None = None,
    ) -> None:
        self.target, self.config, self.detokenize, self.tracer = target, config, detokenize, tracer
        self.tuner = tuner or Fixed(PLAIN)
        self.drafters = Drafters(drafters)
        self.layout, self.on_harvest = layout, on_harvest
        self.calibration = calibration or Calibration()
        o = target.options
        shape = HeadShape(o.num_layers, o.num_heads, o.num_kv_heads, o.head_dim, target.dtype, target.device)
        bound = kv_tokens or config.kv_memory_mb * 2**20 // shape.bytes_per_token
        self.cache = KVCache(attention_for(shape), bound)
        self.rollout = self._new_rollout()
        self._amid_round = False

    def _new_rollout(self) -> RolloutState:
        target, config, strategies = self.target, self.config, self.tuner.strategies
        self.cache.clear()
        laws = LawTable(target.device)
        depth = max(s.depth for s in strategies)
        noise = NoiseWindow(config.max_rows, target.options.vocab_size, depth, target.device)
        window = view = harvester = None
        if self.layout:
            window = FeatureWindow(self.layout, target.options.hidden_size, target.dtype, target.device)
            view, harvester = FeatureView(window), Harvester(window, target.version, self.on_harvest)
        rows = RowTable([self.cache, laws, noise, *([window] if window else []), self.drafters])
        widest = max(s.verify_tokens for s in strategies)
        self.drafters.begin(view)
        return RolloutState(
            rows=rows,
            scheduler=Scheduler(rows, self.cache, config.max_rows, widest, target.options.max_positions),
            laws=laws,
            noise=noise,
            window=window,
            view=view,
            harvester=harvester,
            runner=Runner(target, self.cache, window, config.prefill_tokens),
            stats=RolloutStats(seconds={"prefill": 0.0, "draft": 0.0, "verify": 0.0, "commit": 0.0}),
            version=target.version,
        )

    # -- what is decoded -----------------------------------------------------------------------------------------------

    def generate(self, requests: Iterable[Request]) -> Iterator[Response]:
        """Decode all requests; responses come in the order they finish. Raises ValueError for one that can never
        run."""
        self.start(requests)
        while self.busy:
            yield from self.round()

    def start(self, requests: Iterable[Request]) -> None:
        """A new rollout: what was live or waiting is forgotten. Raises ValueError for a request that can never run."""
        begun = self.busy or self.stats.rounds or self._amid_round
        if begun or self.target.version != self.rollout.version:
            self.rollout = self._new_rollout()
            self._amid_round = False
        self.submit(requests)

    def submit(self, requests: Iterable[Request], resumed: Iterable[Row] = ()) -> None:
        """More work for the rollout under way; those `resumed` were given up by another engine. Raises ValueError for
        one that can never run."""
        self.rollout.scheduler.submit(requests, resumed)

    def give_up(self, seeds: Collection[int]) -> list[Row]:
        """Between two rounds: these requests leave, wherever they stand; whoever goes on with one ends it with the same
        tokens. What has finished is not among them."""
        return self.rollout.scheduler.withdraw(seeds)

    def swap(self, drafter: Drafter) -> None:
        """Put a drafter in the place of the one of its name, between two rounds or before one's draft."""
        for name in self.drafters.swap(drafter, self.rollout.view, self.rollout.rows):
            self.tuner.renew(name, drafter.agreement)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.rows)

    @property
    def rows(self) -> RowTable:
        """The live rows."""
        return self.rollout.rows

    @property
    def waiting(self) -> Collection[Row]:
        return self.rollout.scheduler.waiting

    @property
    def stats(self) -> RolloutStats:
        """Of the rollout so far."""
        return self.rollout.stats

    # -- a round -------------------------------------------------------------------------------------------------------

    def round(self) -> list[Response]:
        """One turn; returns what finished."""
        assert self.target.version == self.rollout.version, "another target needs a new rollout: call start"
        assert not self._amid_round, "a round that failed leaves half-filled rows behind: call start"
        assert self.busy, "nothing to decode: call start or submit"
        self._amid_round = True
        stats, began = self.stats, time.time()
        with self._timed("prefill"):
            prefilled = self._admit()
        if prefilled:
            self._trace("prefill", began)
        context = sum(row.kv_length for row in self.rows) / len(self.rows)
        strategy = self.tuner.choose(len(self.rows), context, self.drafters.usable.keys())
        with self._timed("prefill"):
            preempted = self.make_room(strategy)
        start, began = time.perf_counter(), time.time()
        with self._timed("draft"):
            now = self.open_round(strategy)
            trees = self.draft(now)
        with self._timed("verify"):
            trees, sampled = self.verify(now, trees)
        with self._timed("commit"):
            responses = self._commit(now, trees, sampled)
            self.cache.check(self.rollout.version)
        spent = time.perf_counter() - start
        stats.strategies[strategy.name] = stats.strategies.get(strategy.name, 0) + 1
        tokens = [row.kv_length - had for row, had in zip(now.rows, now.lengths, strict=True)]
        self._trace("plain" if strategy == PLAIN else "speculative", began, rounds=1, tokens=sum(tokens))
        stats.drafter_failures = self.drafters.failures
        stats.agreement = {name: seen.now for name, seen in self.drafters.agreement.items() if seen.last}
        stats.alarms = {name: seen.now for name, seen in self.drafters.agreement.items() if seen.alarming}
        self.tuner.record(strategy, spent, tokens, scored=not prefilled and not preempted)
        self._amid_round = False
        return responses

    def _admit(self) -> bool:
        """New rows: prefill each context once, then copy it to the siblings that share it. Whether there were any."""
        rows, runner, window = self.rows, self.rollout.runner, self.rollout.window
        admitted = self.rollout.scheduler.admit()
        if not admitted:
            return False
        kept, fresh, copies = place_new_rows(admitted, rows, self.cache)
        for row in kept:
            rows.append(row, kept=row.kv_length)
        first = len(rows)
        for row in (*fresh, *copies):
            rows.append(row)
        finite = runner.prefill(first, [row.context for row in fresh])
        for place, (row, good) in enumerate(zip(fresh, finite, strict=True), start=first):
            if not good:
                row.finite = False
                self.cache.wipe(place, row.kv_length)  # a prefill pads shorter rows
        origin = {row.request.prompt.token_ids: place for place, row in reversed(list(enumerate(rows)))}
        for place, row in enumerate(copies, start=first + len(fresh)):
            source = origin[row.request.prompt.token_ids]
            row.finite &= rows[source].finite
            self.cache.copy(source, place, row.kv_length)
            if window:
                window.copy(source, place, row.kv_length)
        self.stats.prefill_tokens += sum(row.kv_length for row in fresh)
        return True

    def make_room(self, strategy: Strategy) -> bool:
        """Room for this round's trees; the youngest rows leave where the cache's bound asks for it, and come back
        later. Whether any did."""
        left = self.rollout.scheduler.make_room(strategy.verify_tokens)
        self.stats.preemptions += left
        return left > 0

    def open_round(self, strategy: Strategy) -> Round:
        rows = tuple(self.rows)
        positions = [len(row.tokens) for row in rows]
        self.rollout.noise.prepare(positions, strategy.depth)
        at = torch.tensor(positions, device=self.target.device)
        return Round(strategy, rows, [row.kv_length for row in rows], at, self.rollout.laws.batch)

    def draft(self, now: Round) -> list[DraftTree]:
        strategy = now.strategy
        drafter = self.drafters.usable.get(strategy.drafter)
        trees = None
        if drafter is not None:
            tokens, room = np.array(
                [(row.root, (row.request.sampling.max_new_tokens - len(row.tokens)) * row.finite) for row in now.rows]
            ).T  # a row that is not finite gets no draft
            roots = Roots(tokens, room, now.batch.stops, now.batch.shown, self.target.device)
            noise = self.draft_noise(now)
            vocab_size = self.target.options.vocab_size
            trees = self.drafters.guard(
                strategy.drafter,
                lambda: grow(drafter, roots, strategy, noise, vocab_size, self.calibration),
                "propose",
            )
        return trees or _roots(now)

    def draft_noise(self, now: Round) -> NoiseOf:
        return DraftNoise(self.rollout.noise, now.positions, now.strategy.depth)

    def verify(self, now: Round, trees: Sequence[DraftTree]) -> tuple[Sequence[DraftTree], Sampled]:
        """One target pass over all trees. The trees come back, as they are the roots alone where a draft led to where
        the target is not finite: 0 * NaN behind a mask is NaN, so that it would reach the tokens."""
        sampled = self._pass(now, trees)
        spoiled = _spoiled(now, sampled)
        if spoiled and any(len(tree.tokens) > 1 for tree in trees):
            for place in spoiled:
                self.cache.wipe(place, now.lengths[place])
            trees = _roots(now)
            sampled = self._pass(now, trees)
        for place in _spoiled(now, sampled):
            now.rows[place].finite = False
        return trees, sampled

    def _pass(self, now: Round, trees: Sequence[DraftTree]) -> Sampled:
        stacked = stack(trees, self.target.device)
        return self.rollout.runner.verify(stacked, now.lengths, self.rollout.noise, now.positions, now.batch.law)

    # -- commit --------------------------------------------------------------------------------------------------------

    def _commit(self, now: Round, trees: Sequence[DraftTree], sampled: Sampled) -> list[Response]:
        stats, rollout = self.stats, self.rollout
        stats.rounds += 1
        self.calibration.next_round()
        stats.row_passes += len(now.rows)
        moves: list[tuple[int, int, int]] = []
        entries: list[tuple[int, int, int, int]] = []  # place, node, position, the token that follows
        finished: dict[int, str] = {}
        grown = 0
        for place, (row, tree, start) in enumerate(zip(now.rows, trees, now.lengths, strict=True)):
            path = walk(tree, sampled.tokens[place])
            self.calibration.observe(tree.cells, tree.parents, path)
            if len(tree.tokens) > 1:
                self.drafters.agreement[now.strategy.drafter].add(1 in path)
            moves += [(place, start + node, start + i) for i, node in enumerate(path) if node != i]
            reason = self._append(row, path, sampled, place)
            taken = row.kv_length - start
            grown = max(grown, taken)
            entries += [(place, node, start + i, sampled.tokens[place][node]) for i, node in enumerate(path[:taken])]
            stats.drafted += len(tree.tokens) - 1
            stats.accepted += min(taken, len(path) - 1)
            stats.tokens += taken
            self.drafters.commit(place, row.tokens[-taken:])
            if reason:
                finished[place] = reason
        if moves:
            self.cache.move(*torch.tensor(moves, device=self.target.device).unbind(1))
        if rollout.harvester and sampled.features is not None:
            rollout.harvester.write(sampled.features, entries, grown)
            rollout.harvester.collect(now.rows, finished)
        return [self._finish(place, reason) for place, reason in reversed(finished.items())]

    def _append(self, row: Row, path: Sequence[int], sampled: Sampled, place: int) -> str | None:
        """Commit the sampled token of each node on the path, up to a stop; returns why the response ends, if it
        does."""
        params = row.request.sampling
        for node in path:
            token = sampled.tokens[place][node]
            row.tokens.append(token)
            row.logprobs.append(sampled.logprobs[place][node])
            row.full_logprobs.append(sampled.full_logprobs[place][node])
            if token in params.stop_token_ids or (params.stop_strings and self._ends_in_stop_string(row)):
                return "stop"
            if len(row.tokens) >= params.max_new_tokens:
                return "length"
        return None

    def _ends_in_stop_string(self, row: Row) -> bool:
        assert self.detokenize is not None, "stop strings need a tokenizer"
        stops = row.request.sampling.stop_strings
        # a token spells at least one byte, so this tail holds the whole of a stop string that the last token completes
        tail = row.tokens[-(max(len(s.encode()) for s in stops) + 4) :]
        text = self.detokenize(tail)
        return any(stop in text for stop in stops)

    def _finish(self, place: int, reason: str) -> Response:
        row = self.rows.remove(place)
        text = self.detokenize(row.tokens) if self.detokenize else ""
        return Response(row.request, row.tokens, row.logprobs, row.full_logprobs, reason, text)

    # -- records -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.stats.seconds[phase] += time.perf_counter() - start

    def _trace(self, name: str, began: float, **facts: float) -> None:
        if self.tracer:
            self.tracer.add(name, began, time.time(), **facts)


def _spoiled(now: Round, sampled: Sampled) -> list[int]:
    """Rows that were finite until this pass."""
    finite = sampled.finite or [True] * len(now.rows)
    return [place for place, row in enumerate(now.rows) if row.finite and not finite[place]]


def _roots(now: Round) -> list[DraftTree]:
    """Trees without a draft."""
    return [DraftTree([row.root]) for row in now.rows]
