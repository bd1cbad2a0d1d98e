"""Several workers in this process, under a random schedule of all that may happen to a request.

Siblings come at different times and places, rows leave one worker and go on at another or begin anew, caches are small,
so that rows are preempted, and are released when nobody is live, and drafters are swapped. One worker on its own goes
through none of this, and each is a way to decode over keys and values of somebody else.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tlt.engine.engine import Engine
from tlt.loop import Trainable
from tlt.models.decoder import Decoder
from tlt.rl.agreement import take_weights
from tlt.rl.policy import Policy
from tlt.trace import Span
from tlt.types import Request, Response, RolloutStats, Row, WorkerNow

_WORKERS = 3
_SPARE = 64  # tokens that a cache needs beyond its longest row


class SeveralWorkers:
    """A `Rollout`. `make` gives a worker's engine with a cache of so many tokens; all share `target`. `swap` puts
    another drafter into an engine."""

    def __init__(self, make: Callable[[int], Engine], target: Decoder, swap: Callable[[Engine], None]) -> None:
        self.make, self.target, self.swap = make, target, swap

    def sync(self, policy: Trainable, version: int) -> None:
        assert isinstance(policy, Policy), "the one in this process"
        take_weights(self.target, policy, version)

    def generate(
        self,
        requests: Sequence[Request],
        on_response: Callable[[Response], None],
        coming: Iterable[list[Request]] = (),
    ) -> tuple[list[Response], RolloutStats]:
        longest = max(len(r.prompt.token_ids) + r.sampling.max_new_tokens for r in requests)
        engines = [self.make(2 * longest + _SPARE) for _ in range(_WORKERS)]
        rng, line, responses = random.Random(self.target.version), list(requests), list[Response]()
        rng.shuffle(line)
        while line or any(engine.busy for engine in engines):
            engine = rng.choice(engines)
            event = rng.random()
            if line and event < 0.2:
                some = rng.randint(1, 6)
                engine.submit(line[:some])
                del line[:some]
            elif event < 0.25:
                self._hand_over(engine, rng.choice(engines), rng)
            elif event < 0.27:
                self.swap(engine)
            elif event < 0.3 and not len(engine.rows):
                engine.release()
            for _ in range(rng.randint(1, 12)):
                if engine.busy:
                    responses += engine.round()
        for response in responses:
            on_response(response)
        return responses, sum((engine.stats for engine in engines), RolloutStats())

    def _hand_over(self, giver: Engine, taker: Engine, rng: random.Random) -> None:
        seeds = [row.request.seed for row in (*giver.rows, *giver.waiting) if rng.random() < 0.5]
        anew: list[Request] = []
        resumed: list[Row] = []
        for row in giver.give_up(seeds):
            if rng.random() < 0.2:
                anew.append(row.request)
            else:
                resumed.append(row)
        taker.submit(anew, resumed)

    # -- the rest of the protocol --------------------------------------------------------------------------------------

    def plainly(self, requests: Sequence[Request], on_response: Callable[[Response], None]) -> list[Response]:
        raise NotImplementedError("another rollout of `tlt verify` does that")

    def remember(self, responses: Sequence[Response]) -> None: ...

    def release(self) -> None:
        """Engines and their caches end with each rollout."""

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None: ...

    def now(self) -> list[WorkerNow]:
        return []

    def trace(self) -> list[list[Span]]:
        return []

    def close(self) -> None: ...
