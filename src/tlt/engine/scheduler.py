"""Who is decoded now: the waiting line, the live rows, admission under the cache's bound, preemption."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from tlt.engine.kv_cache import KVCache
from tlt.types import Request

_HEADROOM = 32  # tokens that rows must be able to grow by before one more is worth admitting


@dataclass
class Row:
    """A request and its tokens so far. Its cache holds all of them but the last: that one is the root of the next
    round."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    full_logprobs: list[float] = field(default_factory=list)
    harvested: int = 0
    """entries of the feature window below this one have been given away"""

    @property
    def context(self) -> tuple[int, ...]:
        return (*self.request.prompt.token_ids, *self.tokens)

    @property
    def kv_length(self) -> int:
        return len(self.request.prompt.token_ids) + len(self.tokens) - 1

    @property
    def root(self) -> int:
        return self.tokens[-1] if self.tokens else self.request.prompt.token_ids[-1]


class Scheduler:
    """Rows [0, len(live)) of every per-row structure belong to `live`, in this order; the last row fills a hole."""

    def __init__(self, cache: KVCache, max_rows: int, verify_tokens: int) -> None:
        self.cache, self.max_rows = cache, max_rows
        self.headroom = max(_HEADROOM, verify_tokens)
        self.waiting: deque[Row] = deque()
        self.live: list[Row] = []

    def submit(self, requests: Iterable[Request], resumed: Iterable[Row] = ()) -> None:
        """Raises ValueError for a request that could never run, before any is queued. Those `resumed` were begun
        elsewhere."""
        rows = [*resumed, *(Row(request) for request in requests)]
        for row in rows:
            self._check(row.request)
        self.waiting.extend(rows)

    def _check(self, request: Request) -> None:
        longest = len(request.prompt.token_ids) + request.sampling.max_new_tokens
        if not request.prompt.token_ids:
            raise ValueError(f"prompt {request.prompt.prompt_id} is empty: give it at least one token")
        if longest > self.cache.max_tokens:
            raise ValueError(
                f"prompt {request.prompt.prompt_id} and its response may reach {longest} tokens, but the model is good "
                f"for {self.cache.max_tokens}: lower rollout.max_new_tokens"
            )
        if not self.cache.fits(1, longest + self.headroom):
            raise ValueError(
                f"one sequence of {longest} tokens does not fit the key-value cache of {self.cache.bound_tokens} "
                "tokens: raise engine.kv_memory_mb or lower rollout.max_new_tokens"
            )

    def admit(self) -> list[Row]:
        """Take from the waiting line what fits, in order; the new rows stand behind the live ones.

        An admission costs a prefill and a call for noise whatever it admits, so a full batch waits for an eighth of it
        to be free.
        """
        admitted: list[Row] = []
        if self.max_rows - len(self.live) < min(len(self.waiting), self.max_rows // 8):
            return admitted
        longest = self._longest()
        while self.waiting and len(self.live) < self.max_rows:
            longest = max(longest, self.waiting[0].kv_length)
            if not self.cache.fits(len(self.live) + 1, longest + self.headroom):
                break
            admitted.append(self.waiting.popleft())
            self.live.append(admitted[-1])
        return admitted

    def reserve(self) -> None:
        """Have the cache hold the live rows and what they may grow by until the next admission is worth a thought."""
        self.cache.reserve(len(self.live), self._longest() + self.headroom)

    def make_room(self, new: int) -> list[Row]:
        """Have the cache hold `new` more tokens of every row; where its bound forbids that, the youngest rows leave
        and wait.

        Returns those that left, in the order of leaving; each was the last row at that moment.
        """
        left: list[Row] = []
        while not self.cache.fits(len(self.live), self._longest() + new):
            left.append(self.live.pop())
            self.waiting.appendleft(left[-1])
        self.cache.reserve(len(self.live), self._longest() + new)
        return left

    def _longest(self) -> int:
        return max((s.kv_length for s in self.live), default=0)

    def withdraw(self, seeds: Collection[int]) -> list[Row]:
        """Those of the waiting line leave it."""
        left = [row for row in self.waiting if row.request.seed in seeds]
        self.waiting = deque(row for row in self.waiting if row.request.seed not in seeds)
        return left

    def remove(self, row: int) -> None:
        """A finished row leaves; the last row moves into its slot."""
        last = len(self.live) - 1
        if row != last:
            self.cache.store.copy_slot(last, row, self.live[last].kv_length)
            self.live[row] = self.live[last]
        self.live.pop()
