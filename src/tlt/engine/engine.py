"""The rollout engine. A round: admit, draft, verify, commit.

It promises design rule 1: a response is a function of (target version, prompt, seed), whatever was drafted, batched
or preempted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from tlt.config import EngineConfig
from tlt.draft.calibration import Calibration
from tlt.draft.drafter import Drafter
from tlt.draft.tree import DraftTree, Strategy, grow, stack
from tlt.engine.kv_cache import KVCache
from tlt.engine.noise import NoiseWindow
from tlt.engine.runner import Runner, Sampled, law_of
from tlt.engine.scheduler import Scheduler
from tlt.engine.scheduler import Sequence as Row
from tlt.engine.walk import walk
from tlt.models.decoder import Decoder
from tlt.types import Request, Response, RolloutStats

log = logging.getLogger(__name__)

PLAIN = Strategy(depth=0, branching=1, verify_tokens=1)


class Engine:
    """`drafter` None, or a strategy of one token to verify, is plain decoding. `detokenize` is needed for stop
    strings."""

    def __init__(
        self,
        target: Decoder,
        config: EngineConfig,
        drafter: Drafter | None = None,
        strategy: Strategy = PLAIN,
        detokenize: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.target, self.config, self.detokenize = target, config, detokenize
        self.drafter = drafter if strategy.verify_tokens > 1 else None
        self.strategy = strategy if self.drafter else PLAIN
        self.cache = KVCache(target.options, target.dtype, target.device, config.kv_memory_mb)
        self.runner = Runner(target, self.cache, config.prefill_tokens)
        self.calibration = Calibration()
        self.stats = RolloutStats()

    def generate(self, requests: Iterable[Request]) -> Iterator[Response]:
        """Decode all requests; responses come in the order they finish. Raises ValueError for one that can never
        run."""
        self.stats = RolloutStats(seconds={"prefill": 0.0, "draft": 0.0, "verify": 0.0, "commit": 0.0})
        self.scheduler = Scheduler(self.cache, self.config.max_rows, self.strategy.verify_tokens)
        self.noise = NoiseWindow(
            self.config.max_rows, self.target.options.vocab_size, self.strategy.depth, self.target.device
        )
        self.scheduler.submit(requests)
        self._law = None
        try:
            while self.scheduler.waiting or self.scheduler.live:
                yield from self._round()
        finally:  # the caller may leave in the middle
            for row in self.scheduler.live:
                self._tell("close", row.request)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.stats.seconds[phase] += time.perf_counter() - start

    def _round(self) -> list[Response]:
        live = self.scheduler.live
        with self._timed("prefill"):
            self._admit()
            self._make_room()
        with self._timed("draft"):
            self.noise.prepare([len(row.tokens) for row in live], self.strategy.depth)
            trees = self._draft()
        with self._timed("verify"):
            if self._law is None:
                self._law = law_of([row.request.sampling for row in live], self.target.device)
            lengths, times = [row.kv_length for row in live], [len(row.tokens) for row in live]
            sampled = self.runner.verify(stack(trees, self.target.device), lengths, self.noise, times, self._law)
        with self._timed("commit"):
            return self._commit(trees, sampled)

    # -- admission ----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """New rows: prefill each context once, then copy it to the siblings that share it."""
        before = len(self.scheduler.live)
        admitted = self.scheduler.admit()
        if not admitted:
            return
        self._law = None
        self.scheduler.reserve()
        live = self.scheduler.live
        source = {row.request.prompt.token_ids: i for i, row in reversed(list(enumerate(live[:before])))}
        fresh, copies = [], []
        for row in live[before:]:
            known = row.request.prompt.token_ids in source and not row.tokens
            (copies if known else fresh).append(row)
            source.setdefault(row.request.prompt.token_ids, before + len(fresh) - 1)
        live[before:] = fresh + copies
        for row in live[before:]:
            self.noise.append(row.request.seed, len(row.tokens), row.request.sampling.max_new_tokens)
            self._tell("open", row.request, list(row.tokens))
        self.stats.prefill_tokens += sum(row.kv_length for row in fresh)
        self.runner.prefill(before, [row.context for row in fresh])
        for slot in range(before + len(fresh), len(live)):
            row = live[slot]
            self.cache.store.copy_slot(source[row.request.prompt.token_ids], slot, row.kv_length)

    def _make_room(self) -> None:
        """Room for this round's trees; the youngest rows leave where the cache's bound asks for it, and come back
        later."""
        for row in self.scheduler.make_room(self.strategy.verify_tokens):
            self.stats.preemptions += 1
            self._law = None
            self.noise.remove(len(self.noise.seeds) - 1)
            self._tell("close", row.request)

    # -- draft --------------------------------------------------------------------------------------------------------

    def _draft(self) -> list[DraftTree]:
        live = self.scheduler.live
        if self.drafter is not None:
            try:
                rows = [(row.request, row.tokens) for row in live]
                vocab_size = self.target.options.vocab_size
                return grow(self.drafter, rows, self.strategy, self._noise_of, vocab_size, self.calibration)
            except Exception:
                self._drop_drafter("propose")
        return [DraftTree([row.root]) for row in live]

    def _noise_of(self, rows: Sequence[int], depths: Sequence[int], ids: torch.Tensor | None) -> torch.Tensor:
        live, device = self.scheduler.live, self.target.device
        row = torch.tensor(rows, device=device)
        position = torch.tensor([len(live[r].tokens) + d for r, d in zip(rows, depths, strict=True)], device=device)
        return self.noise.at(row, position) if ids is None else self.noise.at_ids(row, position, ids.to(device))

    def _tell(self, event: str, *details: object) -> None:
        if self.drafter is not None:
            try:
                getattr(self.drafter, event)(*details)
            except Exception:
                self._drop_drafter(event)

    def _drop_drafter(self, event: str) -> None:
        """Rule 4: a drafter that fails costs speed, never a token. The rest of this engine's life is plain decoding."""
        log.exception("the drafter failed to %s; going on without it", event)
        self.stats.drafter_failures += 1
        self.drafter, self.strategy = None, PLAIN

    # -- commit -------------------------------------------------------------------------------------------------------

    def _commit(self, trees: Sequence[DraftTree], sampled: Sampled) -> list[Response]:
        live, stats = self.scheduler.live, self.stats
        stats.rounds += 1
        self.calibration.next_round()
        stats.row_passes += len(live)
        moves: list[tuple[int, int, int]] = []
        finished: list[tuple[int, str]] = []
        for slot, (row, tree) in enumerate(zip(live, trees, strict=True)):
            path = walk(tree, sampled.tokens[slot])
            self.calibration.observe(tree.cells, tree.parents, path)
            start = row.kv_length
            moves += [(slot, start + node, start + i) for i, node in enumerate(path) if node != i]
            reason = self._append(row, path, sampled, slot)
            taken = row.kv_length - start
            stats.drafted += len(tree.tokens) - 1
            stats.accepted += min(taken, len(path) - 1)
            stats.tokens += taken
            self._tell("commit", row.request, row.tokens[-taken:])
            if reason:
                finished.append((slot, reason))
        if moves:
            self.cache.store.move(*torch.tensor(moves, device=self.target.device).unbind(1))
        return [self._finish(slot, reason) for slot, reason in reversed(finished)]

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
        self._tell("close", row.request)
        self.scheduler.remove(slot)
        self.noise.remove(slot)
        self._law = None
        text = self.detokenize(row.tokens) if self.detokenize else ""
        return Response(row.request, row.tokens, row.logprobs, row.full_logprobs, reason, text)
