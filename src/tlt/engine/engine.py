"""The rollout engine. A round has four phases: admit, draft, verify, commit.

A response is a function of (target version, prompt, seed). It does not depend on drafts, batches or preemptions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from tlt.attention.slot_memory import HeadShape
from tlt.attention.slots import attention_for
from tlt.config import EngineConfig
from tlt.cuda_graph import Replayed
from tlt.draft.ahead import Ahead, AheadStore, LookAhead
from tlt.draft.chains import Draft
from tlt.draft.drafter import Drafter
from tlt.draft.eagle import EagleLayer
from tlt.draft.features import FeatureLayout, FeatureView, FeatureWindow, Harvest, Harvester
from tlt.draft.learned import EagleDrafter
from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.committing import Stops, commit_tokens, response_of, verify_drafts
from tlt.engine.drafters import Drafters, draft_rows, look_ahead_offers
from tlt.engine.kv_cache import KVCache, TurnStore
from tlt.engine.memory import RolloutMemory
from tlt.engine.protocol import Generates
from tlt.engine.rows import RowTable
from tlt.engine.runner import Runner, Sampled
from tlt.engine.sampling_table import SamplingTable
from tlt.engine.scheduler import Scheduler, place_and_prefill
from tlt.engine.state import Clock, RolloutState, Round, draft_counts
from tlt.engine.tuner import Fixed, RoundResult, Tuner
from tlt.models.decoder import Decoder
from tlt.models.device import to_device
from tlt.spelling import Detokenizer
from tlt.trace import Tracer
from tlt.types import Request, Response, RolloutStats, Row


class Engine(Generates):
    """Rollout engine of a worker. `tuner` picks the strategy of each round (default: plain decoding).

    `detokenize` is needed for stop strings. `layout` says which hidden states of the target are kept for each active
    row. `on_harvest` is called with them when a row has `layout.window` new ones, and when a response ends. `store` has
    look-ahead drafts, which a row uses instead of the drafter. `kv_tokens`: limit of the key-value cache in tokens
    (default: by `config.kv_memory_mb`). `longest`: longest sequence in tokens, for `max_rows = "auto"` (0: not known).
    """

    def __init__(
        self,
        target: Decoder,
        config: EngineConfig,
        drafters: Sequence[Drafter] = (),
        tuner: Tuner | None = None,
        *,
        detokenize: Detokenizer | None = None,
        layout: FeatureLayout | None = None,
        on_harvest: Callable[[Harvest], None] | None = None,
        tracer: Tracer | None = None,
        store: AheadStore | None = None,
        kv_tokens: int | None = None,
        longest: int = 0,
    ) -> None:
        self.target, self.config, self.detokenize, self.tracer = target, config, detokenize, tracer
        self.layout, self.on_harvest = layout, on_harvest
        self.store = AheadStore(0) if store is None else store
        self.tuner, self.stops = tuner or Fixed(PLAIN), Stops(detokenize)
        o, dtype, device = target.options, target.dtype, target.device
        shape = HeadShape.of(o, dtype, device)
        self.cache = KVCache(attention_for(shape), bound_tokens=0)
        self.drafters = Drafters(drafters, self.cache)
        window = FeatureWindow(layout, o.hidden_size, dtype, device) if layout else None
        self.runner = Runner(target, self.cache, window, config.prefill_tokens)
        self.memory = RolloutMemory(config, self.cache, window, o.vocab_size, longest, kv_tokens)
        self.rollout, self._in_round = self._new_rollout(), False

    def _new_rollout(self) -> RolloutState:
        target, strategies = self.target, self.tuner.strategies
        self.cache.clear()
        if not self.runner.graphs:  # graphs have the cache's addresses
            self.cache.release()
        sampling = SamplingTable(target.device)
        depth, new = max(s.depth for s in strategies), max(s.new for s in strategies)
        window, view, harvester = self.runner.window, None, None
        most, self.cache.bound_tokens, noise = self.memory.sizes(depth, new)
        if window:
            window.clear()
            view, harvester = FeatureView(window), Harvester(window, target.version, self.on_harvest)
        ahead = LookAhead(self.store, target.options.vocab_size)
        turns = TurnStore(self.cache, window)
        rows = RowTable([turns, self.cache, sampling, noise, *([window] if window else []), ahead, self.drafters])
        self.drafters.begin(view)
        return RolloutState(
            rows=rows,
            scheduler=Scheduler(rows, self.cache, most, self.config.prefill_tokens, new, target.options.max_positions),
            sampling=sampling,
            noise=noise,
            view=view,
            harvester=harvester,
            ahead=ahead,
            turns=turns,
            runner=self.runner,
            stats=RolloutStats(seconds={"prefill": 0.0, "draft": 0.0, "verify": 0.0, "commit": 0.0, "ahead": 0.0}),
            version=target.version,
        )

    # -- requests ------------------------------------------------------------------------------------------------------

    def start(self, requests: Iterable[Request]) -> None:
        """Start a new rollout and drop all earlier rows. Raises ValueError for a request that cannot be decoded."""
        begun = self.busy or self.looks_ahead or self.stats.rounds or self._in_round
        if begun or self.target.version != self.rollout.version:
            self.keep_ahead()
            self.rollout.noise.release()  # before the cache's limit is set
            self.rollout, self._in_round = self._new_rollout(), False
        self.submit(requests)

    def submit(self, requests: Iterable[Request], resumed: Iterable[Row] = ()) -> None:
        """Add requests to the current rollout. `resumed` are unfinished rows of another engine, which continue here.
        Raises ValueError for a request that cannot be decoded."""
        self.rollout.scheduler.submit(requests, resumed)

    def release_requests(self, seeds: Collection[int]) -> list[Row]:
        """Remove the requests with these seeds, active or waiting. Call this between two rounds. Return their rows.
        Another engine that resumes these rows decodes the same tokens."""
        return self.rollout.scheduler.withdraw(seeds)

    def look_ahead(self, requests: Iterable[Request]) -> None:
        """Replace the look-ahead requests. They are decoded in free slots while no other request waits, in the given
        order. Their tokens are saved in `store`. Raises ValueError for a request that cannot be decoded."""
        self.keep_ahead()
        vocab_size, most = self.target.options.vocab_size, self.config.prefill_tokens
        rows = {request.seed: self.store.row(request, vocab_size, most) for request in requests}
        self.rollout.scheduler.look_ahead(rows, self._most_with_ahead() if rows else 0)

    def keep_ahead(self) -> None:
        """Store the tokens so far of all look-ahead rows as drafts."""
        preempted = (r for r in self.rollout.scheduler.coming if len(r.tokens) > self.store.length(r.request.seed))
        for row in (*self.rows.coming, *preempted):
            self.store.put_row(row, self.rollout.version)

    def swap(self, drafter: Drafter) -> None:
        """Replace the drafter of the same name by `drafter`. Call this between two rounds, or before a round's
        draft."""
        self.drafters.swap(drafter, self.rollout.view, self.rollout.rows)
        self.tuner.renew(drafter.name, drafter.acceptance_rate)

    def draft_with(self, layer: EagleLayer) -> None:
        """Replace the learned drafter in use by one with the weights of `layer`."""
        self.swap(EagleDrafter(layer, self.target))

    def _preempt_ahead(self) -> None:
        """Preempt all look-ahead rows, because rows of this rollout come first. Store their tokens so far as drafts."""
        self.keep_ahead()
        self.rollout.scheduler.coming.extendleft(self.rows.remove_all(self.rows.coming))

    def plain_engine(self) -> Engine:
        """Return an engine for plain decoding with the same target. It shares nothing else with this one."""
        return Engine(self.target, self.config, detokenize=self.detokenize, longest=self.memory.longest)

    def release(self) -> None:
        """Free the memory of cache and noise until the next rollout. Call this between two rollouts."""
        self.look_ahead(())
        self.rollout.noise.release()
        self.cache.release()

    @property
    def busy(self) -> bool:
        """Whether the current rollout has unfinished requests."""
        return bool(self.waiting or self.rows.own)

    @property
    def looks_ahead(self) -> bool:
        """Whether look-ahead requests are unfinished."""
        return bool(self.rollout.scheduler.coming or self.rows.coming)

    @property
    def rows(self) -> RowTable:
        """Requests that are being decoded, with their tokens so far."""
        return self.rollout.rows

    @property
    def waiting(self) -> Collection[Row]:
        return self.rollout.scheduler.waiting

    @property
    def stats(self) -> RolloutStats:
        """Counters of the rollout so far."""
        return self.rollout.stats

    # -- a round -------------------------------------------------------------------------------------------------------

    def round(self) -> list[Response]:
        """Run one round: admit, draft, verify and commit. Return the finished responses."""
        assert 0 <= self.target.version == self.rollout.version, "the target has new weights or none: call start"
        assert not self._in_round, "the last round failed, so the key-value cache is incomplete: call start"
        own, clock = self.busy, Clock()
        assert own or self.looks_ahead, "nothing to decode: call start, submit or look_ahead"
        self._in_round = True
        with clock.phase("prefill"):
            prefilled = self._admit()
        if prefilled:
            self._trace("prefill", clock.began)
        context = sum(row.kv_length for row in self.rows) / len(self.rows)
        offers = look_ahead_offers(self.rollout)
        strategy = self.tuner.choose(len(self.rows), context, self.drafters.usable.keys(), offers)
        with clock.phase("prefill"):
            preempted = self.make_room(strategy)
        began, start, slow_calls = time.time(), time.perf_counter(), Replayed.slow_calls
        with clock.phase("verify"):
            now = self.open_round(strategy)
        with clock.phase("draft"):
            drafts = self.draft(now)
        with clock.phase("verify"):
            drafts, sampled = verify_drafts(now, drafts, self.rollout)
        with clock.phase("commit"):
            tokens, responses = self._commit(now, drafts, sampled)
            self.cache.check(self.rollout.version)
        scored = not prefilled and not preempted and Replayed.slow_calls == slow_calls
        took, drafting = time.perf_counter() - start, clock.seconds["draft"]
        committed, proposed = zip(*map(draft_counts, now.rows, drafts, tokens), strict=True)
        self.tuner.record(RoundResult(strategy, took, drafting, sampled.computed, committed, scored, proposed))
        self._trace("plain" if strategy == PLAIN else "speculative", began, rounds=1, tokens=sum(tokens))
        self._count(strategy, clock, own)
        self._in_round = False
        return responses

    def _admit(self) -> bool:
        """Admit waiting rows and prefill them. Return whether any were admitted."""
        if own := bool(self.waiting):
            self._preempt_ahead()
        if admitted := self.rollout.scheduler.admit(self._most_with_ahead()):
            self.stats.prefill_tokens += own * place_and_prefill(admitted, self.rollout, self.cache)
        return bool(admitted)

    def _most_with_ahead(self) -> int:
        """Return the largest number of active rows, look-ahead rows included, at which look-ahead does not delay the
        rows of this rollout. If this rollout has no active row, return the limit for a short round."""
        own = len(self.rows.own)
        return self.tuner.free_rows(own) if own else self.tuner.brief_rows()

    def make_room(self, strategy: Strategy) -> bool:
        """Make room in the cache for the new tokens of a round. If needed, preempt the youngest rows. Return whether
        any were preempted."""
        if self.rollout.scheduler.reserve(strategy.new):
            return False
        if self.busy:
            self._preempt_ahead()
        self.stats.preemptions += self.rollout.scheduler.make_room(strategy.new)
        return True

    def open_round(self, strategy: Strategy) -> Round:
        rows = tuple(self.rows)
        positions = [len(row.tokens) for row in rows]
        noise, batch = self.rollout.noise, self.rollout.sampling.batch
        noise.prepare(positions, self.runner.noise_depth(strategy, noise, batch.sampling))
        (at,) = to_device(self.target.device, np.array(positions))
        return Round(strategy, rows, [row.kv_length for row in rows], at, batch)

    def draft(self, now: Round) -> list[Draft]:
        return draft_rows(now, self.rollout, self.drafters)

    def _commit(self, now: Round, drafts: Sequence[Draft], sampled: Sampled) -> tuple[list[int], list[Response]]:
        """Commit the accepted tokens. Return the number of new tokens of each row, and the finished responses."""
        responses: list[Response] = []
        news, ended = commit_tokens(now, drafts, sampled, self.rollout, self.drafters, self.stops)
        for row, reason in ended:
            if row.ahead:
                self.store.put([Ahead.of(row, self.rollout.version, ended=True)])
            else:
                responses.append(response_of(row, reason, self.detokenize))
        return [*map(len, news)], responses

    # -- records -------------------------------------------------------------------------------------------------------

    def _count(self, strategy: Strategy, clock: Clock, own: bool) -> None:
        stats = self.stats
        if not own:
            stats.seconds["ahead"] += sum(clock.seconds.values())
        else:
            stats.rounds += 1
            stats.strategies[strategy.name] = stats.strategies.get(strategy.name, 0) + 1
            for phase, seconds in clock.seconds.items():
                stats.seconds[phase] += seconds
        self.drafters.report(stats)

    def _trace(self, name: str, began: float, **facts: float) -> None:
        if self.tracer:
            self.tracer.add(name, began, time.time(), **facts)
