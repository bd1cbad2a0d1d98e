"""The rollout engine. A round: admit, draft, verify, commit.

It promises design rule 1: a response is a function of (target version, prompt, seed), whatever was drafted, batched
or preempted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from tlt.config import EngineConfig
from tlt.draft.buffer import Harvest
from tlt.draft.calibration import Calibration
from tlt.draft.drafter import Drafter
from tlt.draft.features import FeatureLayout, FeatureWindow
from tlt.draft.strategy import PLAIN, Strategy
from tlt.draft.tree import DraftTree, Roots, grow, stack
from tlt.engine.drafters import Drafters
from tlt.engine.kv_cache import KVCache
from tlt.engine.noise import NoiseWindow
from tlt.engine.runner import Runner, Sampled, law_of
from tlt.engine.scheduler import Row, Scheduler
from tlt.engine.tuner import Fixed, Tuner
from tlt.engine.walk import walk
from tlt.models.decoder import Decoder
from tlt.sampling import Law
from tlt.trace import Tracer
from tlt.types import Request, Response, RolloutStats

_GROWN = 16  # tokens of a row between two looks for windows that filled up: the ring holds more beyond a window


class Engine:
    """`tuner` picks a strategy for each round; without drafters, or where theirs failed, that is plain decoding.

    `detokenize` is needed for stop strings. `layout` says which features of the target are kept for each live row, and
    `on_harvest` is given them as windows fill up and responses end.
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
    ) -> None:
        self.target, self.config, self.detokenize = target, config, detokenize
        self.tuner = tuner or Fixed(PLAIN)
        self.drafters = Drafters(drafters)
        self.layout, self.on_harvest = layout, on_harvest
        self.tracer: Tracer | None = None
        self.cache = KVCache(target.options, target.dtype, target.device, config.kv_memory_mb)
        self.runner = Runner(target, self.cache, config.prefill_tokens)
        self.calibration = Calibration()
        self.window: FeatureWindow | None = None
        self.stats = RolloutStats()

    def generate(self, requests: Iterable[Request]) -> Iterator[Response]:
        """Decode all requests; responses come in the order they finish. Raises ValueError for one that can never
        run."""
        self.start(requests)
        while self.busy:
            yield from self.round()

    def start(self, requests: Iterable[Request]) -> None:
        """A new rollout: what was live or waiting is forgotten."""
        self.stats = RolloutStats(seconds={"prefill": 0.0, "draft": 0.0, "verify": 0.0, "commit": 0.0})
        target, strategies = self.target, self.tuner.strategies
        self.scheduler = Scheduler(self.cache, self.config.max_rows, max(s.verify_tokens for s in strategies))
        depth = max(s.depth for s in strategies)
        self.noise = NoiseWindow(self.config.max_rows, target.options.vocab_size, depth, target.device)
        if self.layout:
            self.window = FeatureWindow(self.layout, target.options.hidden_size, target.dtype, target.device)
        self.runner.window = self.window
        self._grown = 0
        self.drafters.begin(self.window)
        self.scheduler.submit(requests)
        self._law: Law | None = None
        self._left: tuple[int, ...] | None = None  # the prompt whose keys and values lie in the first free slot

    def submit(self, requests: Iterable[Request], resumed: Iterable[Row] = ()) -> None:
        """More work for the rollout under way; those `resumed` were given up by another engine. Raises ValueError for
        one that can never run."""
        self.scheduler.submit(requests, resumed)

    def give_up(self, seeds: Collection[int]) -> list[Row]:
        """Between two rounds: these requests leave, wherever they stand; whoever goes on with one ends it with the same
        tokens. What has finished is not among them."""
        left = self.scheduler.withdraw(seeds)
        for slot in reversed(range(len(self.scheduler.live))):
            row = self.scheduler.live[slot]
            if row.request.seed in seeds:
                left.append(row)
                self.scheduler.remove(slot)
                self._leave(slot)
        return left

    def swap(self, drafter: Drafter) -> None:
        """Put a drafter in the place of the one of its name, between two rounds or before one's draft."""
        live = [(row.request, row.tokens) for row in self.scheduler.live]
        for name in self.drafters.swap(drafter, self.window, live):
            self.tuner.renew(name, drafter.agreement)

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.live)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.stats.seconds[phase] += time.perf_counter() - start

    def _trace(self, name: str, began: float, **facts: float) -> None:
        if self.tracer:
            self.tracer.add(name, began, time.time(), **facts)

    def round(self) -> list[Response]:
        """One turn; returns what finished."""
        live, stats = self.scheduler.live, self.stats
        began = time.time()
        with self._timed("prefill"):
            prefilled = self._admit()
        if prefilled:
            self._trace("prefill", began)
        context = sum(row.kv_length for row in live) / len(live)
        strategy = self.tuner.choose(len(live), context, self.drafters.usable.keys())
        with self._timed("prefill"):
            preempted = self.make_room(strategy)
        before = [(row, len(row.tokens)) for row in live]
        start, began = time.perf_counter(), time.time()
        with self._timed("draft"):
            trees = self.draft(strategy)
        with self._timed("verify"):
            sampled = self.verify(trees)
        with self._timed("commit"):
            responses = self._commit(trees, sampled, strategy.drafter)
        stats.strategies[strategy.name] = stats.strategies.get(strategy.name, 0) + 1
        spent = time.perf_counter() - start
        tokens = [len(row.tokens) - had for row, had in before]
        self._trace("plain" if strategy == PLAIN else "speculative", began, rounds=1, tokens=sum(tokens))
        stats.drafter_failures = self.drafters.failures
        stats.agreement = {name: seen.now for name, seen in self.drafters.agreement.items() if seen.last}
        stats.alarms = {name: seen.now for name, seen in self.drafters.agreement.items() if seen.alarming}
        self.tuner.record(strategy, spent, tokens, scored=not prefilled and not preempted)
        return responses

    # -- admission ----------------------------------------------------------------------------------------------------

    def _admit(self) -> bool:
        """New rows: prefill each context once, then copy it to the siblings that share it. Whether there were any."""
        before = len(self.scheduler.live)
        if not self.scheduler.admit():
            return False
        self._law = None
        self.scheduler.reserve()
        live = self.scheduler.live
        origin = {row.request.prompt.token_ids: i for i, row in reversed(list(enumerate(live[:before])))}
        kept, fresh, copies = self._sort_out(live[before:], origin.keys())
        live[before:] = kept + fresh + copies
        for slot in range(before, len(live)):
            row = live[slot]
            origin.setdefault(row.request.prompt.token_ids, slot)
            self.noise.append(row.request.seed, len(row.tokens), row.request.sampling.max_new_tokens)
            self.drafters.open(row.request, list(row.tokens))
            if self.window:
                self.window.append(inherited=row.kv_length if slot < before + len(kept) else 0)
        self._left = None
        self.stats.prefill_tokens += sum(row.kv_length for row in fresh)
        self.runner.prefill(before + len(kept), [row.context for row in fresh])
        for slot in range(before + len(kept) + len(fresh), len(live)):
            row = live[slot]
            source = origin[row.request.prompt.token_ids]
            self.cache.store.copy_slot(source, slot, row.kv_length)
            if self.window:
                self.window.copy(source, slot, row.kv_length)
        return True

    def _sort_out(self, rows: Sequence[Row], held: Collection[tuple[int, ...]]) -> tuple[list[Row], ...]:
        """New rows by where their first keys and values come from: the first free slot, where the sibling that left it
        last has them still; a prefill; a sibling, live or just prefilled."""
        kept: list[Row] = []
        fresh: list[Row] = []
        copies: list[Row] = []
        known = set(held)
        for row in rows:
            prompt = row.request.prompt.token_ids
            if prompt == self._left and prompt not in known and not row.tokens:
                kept.append(row)
            else:
                (copies if prompt in known and not row.tokens else fresh).append(row)
            known.add(prompt)
        return kept, fresh, copies

    def make_room(self, strategy: Strategy) -> bool:
        """Room for this round's trees; the youngest rows leave where the cache's bound asks for it, and come back
        later. Whether any did."""
        left = self.scheduler.make_room(strategy.verify_tokens)
        for _ in left:
            self.stats.preemptions += 1
            self._leave(len(self.noise.seeds) - 1)
        return bool(left)

    def _leave(self, slot: int) -> None:
        """Every per-row structure but the scheduler's: the last row takes the place of the one that leaves."""
        self._law = self._left = None
        self.noise.remove(slot)
        self.drafters.close(slot)
        if self.window:
            self.window.remove(slot)

    # -- draft --------------------------------------------------------------------------------------------------------

    def _start_rows(self, strategy: Strategy) -> None:
        """What a round needs to know of each row: its law, its root, its noise."""
        live, device = self.scheduler.live, self.target.device
        times = [len(row.tokens) for row in live]
        self.noise.prepare(times, strategy.depth)
        if self._law is None:
            self._law = law_of([row.request.sampling for row in live], device)
            stops = [row.request.sampling.stop_token_ids for row in live]
            most = max(1, max(len(s) for s in stops))
            self._stops = np.array([[*s, *[-1] * (most - len(s))] for s in stops])
            self._greedy = self._law.temperature == 0
            self._any_greedy = bool(self._greedy.any())
        self._times = torch.tensor(times, device=device)
        self._rows = torch.arange(len(live), device=device)[:, None]
        self._depths = torch.arange(max(1, strategy.depth), device=device)
        self._ahead: Tensor | None = None

    def draft(self, strategy: Strategy) -> list[DraftTree]:
        self._start_rows(strategy)
        live = self.scheduler.live
        drafter = self.drafters.usable.get(strategy.drafter)
        trees = None
        if drafter is not None:
            tokens, room = np.array(
                [(row.root, row.request.sampling.max_new_tokens - len(row.tokens)) for row in live]
            ).T
            assert self._law is not None, "set just above"
            roots = Roots(tokens, room, self._stops, self._law)
            vocab_size = self.target.options.vocab_size
            trees = self.drafters.guard(
                strategy.drafter,
                lambda: grow(drafter, roots, strategy, self._noise_of, vocab_size, self.calibration),
                "propose",
            )
        return trees or [DraftTree([row.root]) for row in live]

    def _noise_of(self, depth: int, ids: Tensor | None) -> Tensor:
        if ids is None:
            if self._ahead is None:  # of all levels at once: a look-up costs as much for one
                self._ahead = self.noise.at(self._rows, self._times[:, None] + self._depths)
            noise = self._ahead[:, depth : depth + 1]
        else:
            noise = self.noise.at_ids(self._rows[..., None], (self._times + depth)[:, None, None], ids)
        return noise.masked_fill(self._greedy[:, None, None], 0.0) if self._any_greedy else noise

    def verify(self, trees: Sequence[DraftTree]) -> Sampled:
        """One target pass over all trees."""
        assert self._law is not None, "draft comes before verify"
        lengths = [row.kv_length for row in self.scheduler.live]
        return self.runner.verify(stack(trees, self.target.device), lengths, self.noise, self._times, self._law)

    # -- commit -------------------------------------------------------------------------------------------------------

    def _commit(self, trees: Sequence[DraftTree], sampled: Sampled, drafter: str) -> list[Response]:
        live, stats = self.scheduler.live, self.stats
        stats.rounds += 1
        self.calibration.next_round()
        stats.row_passes += len(live)
        moves: list[tuple[int, int, int]] = []
        entries: list[tuple[int, int, int, int]] = []  # slot, node, position, the token that follows
        finished: list[tuple[int, str]] = []
        grown = 0
        for slot, (row, tree) in enumerate(zip(live, trees, strict=True)):
            path = walk(tree, sampled.tokens[slot])
            self.calibration.observe(tree.cells, tree.parents, path)
            if len(tree.tokens) > 1:
                self.drafters.agreement[drafter].add(1 in path)
            start = row.kv_length
            moves += [(slot, start + node, start + i) for i, node in enumerate(path) if node != i]
            reason = self._append(row, path, sampled, slot)
            taken = row.kv_length - start
            grown = max(grown, taken)
            entries += [(slot, node, start + i, sampled.tokens[slot][node]) for i, node in enumerate(path[:taken])]
            stats.drafted += len(tree.tokens) - 1
            stats.accepted += min(taken, len(path) - 1)
            stats.tokens += taken
            self.drafters.commit(slot, row.tokens[-taken:])
            if reason:
                finished.append((slot, reason))
        if moves:
            self.cache.store.move(*torch.tensor(moves, device=self.target.device).unbind(1))
        if self.window and sampled.features is not None:
            slots, nodes, positions, following = zip(*entries, strict=True)
            plain = sampled.features.shape[1] == 1
            kept = sampled.features[:, 0] if plain else sampled.features[list(slots), list(nodes)]
            self.window.write(slots, positions, kept, following)
            self._grown += grown
            if finished or self._grown >= _GROWN:
                self._grown = 0
                self._harvest(dict(finished))
        return [self._finish(slot, reason) for slot, reason in reversed(finished)]

    def _harvest(self, finished: Collection[int]) -> None:
        """Give away whole windows as they fill up, and the last window of what is finished."""
        if self.on_harvest is None or self.window is None:
            return
        size = self.window.window
        for slot, row in enumerate(self.scheduler.live):
            low, length = max(row.harvested, self.window.first[slot]), self.window.length[slot]
            while length - low >= size:
                self._give(row, slot, low, low + size)
                low += size
            if slot in finished and low < length:
                self._give(row, slot, self.window.start(slot), length)

    def _give(self, row: Row, slot: int, low: int, high: int) -> None:
        assert self.window is not None, "harvesting needs a window"
        assert self.on_harvest is not None, "and somebody who takes it"
        features, tokens = self.window.read(slot, low, high)
        row.harvested = high
        prompt, version = row.request.prompt, self.target.version
        length = len(prompt.token_ids)
        self.on_harvest(Harvest(version, low, length, tokens.cpu(), features.cpu(), prompt.prompt_id))

    def _append(self, row: Row, path: Sequence[int], sampled: Sampled, slot: int) -> str | None:
        """Commit the sampled token of each node on the path, up to a stop; returns why the response ends, if it
        does."""
        params = row.request.sampling
        for node in path:
            token = sampled.tokens[slot][node]
            row.tokens.append(token)
            row.logprobs.append(sampled.logprobs[slot][node])
            row.full_logprobs.append(sampled.full_logprobs[slot][node])
            if token in params.stop_token_ids or (params.stop_strings and self._ends_in_stop_string(row)):
                return "stop"
            if len(row.tokens) == params.max_new_tokens:
                return "length"
        return None

    def _ends_in_stop_string(self, row: Row) -> bool:
        assert self.detokenize is not None, "stop strings need a tokenizer"
        stops = row.request.sampling.stop_strings
        # a token spells at least one byte, so this tail holds the whole of a stop string that the last token completes
        tail = row.tokens[-(max(len(s.encode()) for s in stops) + 4) :]
        text = self.detokenize(tail)
        return any(stop in text for stop in stops)

    def _finish(self, slot: int, reason: str) -> Response:
        row = self.scheduler.live[slot]
        self.scheduler.remove(slot)
        self._leave(slot)
        if slot == len(self.scheduler.live):  # nothing took its place
            self._left = row.request.prompt.token_ids
        text = self.detokenize(row.tokens) if self.detokenize else ""
        return Response(row.request, row.tokens, row.logprobs, row.full_logprobs, reason, text)
