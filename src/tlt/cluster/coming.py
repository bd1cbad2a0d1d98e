"""Look-ahead: assignment of requests of coming steps to idle workers, or to the free slots of the only worker. Drafts
of all kinds, which the driver sends with the requests.

They are decoded with the current target. The tokens become drafts. A later target
version verifies them when it decodes the request: in the request's own step, or earlier if look-ahead continues an
unfinished response.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

from tlt.cluster.worker import AheadWork
from tlt.draft.ahead import Ahead, AheadStore
from tlt.draft.history import History
from tlt.types import Request, Response, RolloutStats, Row

# expected length of a response, as multiples of the length of its own draft and of the longest draft of its group
_GOES_ON, _ALIKE = 1.5, 0.5


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
