"""Several workers in one process, under a random schedule of all events that a request may meet.

Responses to one prompt start at different times on different workers. Rows move to another worker and continue or start
again there. Caches are small, so that rows are preempted, and are released when a worker is idle. Drafters are swapped.
Workers decode look-ahead tokens for requests of other workers. A single worker meets few of these events. A bug in the
handling of any of them could let a row attend to the keys and values of another row.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from tlt.attention.key_counts import rounded_up
from tlt.cluster.local import LocalRollout
from tlt.draft.ahead import AheadStore
from tlt.engine.engine import Engine
from tlt.environments.episodes import Turns
from tlt.rl.early import EarlyGroups
from tlt.types import Request, Response, RolloutStats, Row
from tlt.verify.look_ahead import MOST_TOKENS

_WORKERS = 3
_SPARE = 64  # tokens that a row needs beyond its longest length
_AHEAD = 4  # maximum number of requests for which a worker decodes look-ahead tokens


class SeveralWorkers(LocalRollout):
    """Rollout by several engines that share a target. `make` returns a worker's engine, given its look-ahead store and
    the size of its KV cache in tokens. `swap` replaces an engine's drafter."""

    def __init__(self, make: Callable[[AheadStore, int], Engine], swap: Callable[[Engine], None], turns: Turns) -> None:
        self.engine: Engine = make(AheadStore(0), _SPARE)
        super().__init__(self.engine, turns=turns)
        self.make, self.swap = make, swap

    def generate(
        self,
        requests: Sequence[Request],
        on_response: Callable[[Response], None],
        coming: Iterable[list[Request]] = (),
        early: EarlyGroups | None = None,
    ) -> tuple[list[Response], RolloutStats]:
        longest = max(len(r.prompt.token_ids) + r.sampling.max_new_tokens for r in requests)
        shared = AheadStore(MOST_TOKENS)
        stores = [shared] * (_WORKERS - 1) + [AheadStore(MOST_TOKENS)]
        slot = rounded_up(longest + _SPARE, self.engine.cache.store.key_counts)
        engines = [self.make(store, 2 * slot) for store in stores]
        rng, line, responses = random.Random(self.engine.target.version), self.turns.begin(requests), list[Response]()
        rng.shuffle(line)
        while line or self.turns.awaits or any(engine.busy for engine in engines):
            engine = rng.choice(engines)
            event = rng.random()
            if line and event < 0.2:
                some = rng.randint(1, 6)
                _submit(engine, (), line[:some])
                del line[:some]
            elif event < 0.25:
                self._hand_over(engine, rng.choice(engines), rng)
            elif event < 0.27:
                self.swap(engine)
            elif event < 0.3 and not len(engine.rows):
                engine.release()
            elif event < 0.45:
                others = [row.request for other in engines if other is not engine for row in _own(other)]
                elsewhere = [*(row.request for row in line), *others]
                engine.look_ahead(rng.sample(elsewhere, rng.randint(0, min(_AHEAD, len(elsewhere)))))
            elif event < 0.5:
                engine.look_ahead(())
            for _ in range(rng.randint(1, 12)):
                ended = engine.round() if engine.busy or engine.looks_ahead else ()
                finished, rows = self.turns.take(ended)
                responses += finished
                line += rows
        for response in responses:
            on_response(response)
        return responses, sum((engine.stats for engine in engines), RolloutStats())

    def _hand_over(self, giver: Engine, taker: Engine, rng: random.Random) -> None:
        seeds = [row.request.seed for row in _own(giver) if rng.random() < 0.5]
        restarted: list[Request] = []
        resumed: list[Row] = []
        for row in giver.release_requests(seeds):
            if rng.random() < 0.2:
                restarted.append(row.request)
            else:
                resumed.append(row)
        _submit(taker, restarted, resumed)


def _own(engine: Engine) -> list[Row]:
    """Return active and waiting rows, without look-ahead rows."""
    return [row for row in (*engine.rows, *engine.waiting) if not row.ahead]


def _submit(engine: Engine, requests: Sequence[Request], resumed: Sequence[Row] = ()) -> None:
    """Submit requests and resumed rows, and end the engine's look-ahead for them."""
    seeds = {request.seed for request in (*requests, *(row.request for row in resumed))}
    ahead = [row.request for row in (*engine.rows, *engine.rollout.scheduler.ahead) if row.ahead]
    if not seeds.isdisjoint(request.seed for request in ahead):
        engine.look_ahead(request for request in ahead if request.seed not in seeds)
    engine.submit(requests, resumed)
