"""Look-ahead: what an older target said to a request, with the request's own seed, drafts what the present one says.

A request's noise is a function of its seed and position. So two versions of a target say the same to it but for where
an update turned an argmax, and the old response is a chain that is known in advance: no levels, no log q, no cost. A
stale, truncated or foreign one is a bad draft and nothing more.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tlt.types import MOST_GUESSES, Request, Response, Row

_FIRST, _LEAST = 16, 4  # tokens of a chain: of the first one, and after a miss
_CONTEXT = 4  # tokens by which an old response is taken up again after it diverged
_NEAR = 64  # places around the one where it would stand, had nothing been put in or left out
_TRIES = 64  # rounds until it is given up


class Ahead(NamedTuple):
    """What was decoded ahead for a request."""

    seed: int
    prompt: tuple[int, ...]
    tokens: np.ndarray
    """int32"""
    version: int
    """of the target that decoded it, or the latest part of it"""
    ended: bool


class AheadStore:
    """By request, the newest ones up to so many tokens."""

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens, self.tokens = most_tokens, 0
        self._kept: OrderedDict[int, Ahead] = OrderedDict()
        self._groups: dict[tuple[int, ...], dict[int, None]] = {}  # seeds by prompt, in order

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, found: Iterable[Ahead]) -> None:
        for ahead in found:
            self.forget([ahead.seed])
            self._kept[ahead.seed] = ahead
            self._groups.setdefault(ahead.prompt, {})[ahead.seed] = None
            self.tokens += len(ahead.tokens)
        while self.tokens > self.most_tokens:
            self.forget([next(iter(self._kept))])

    def forget(self, seeds: Iterable[int]) -> None:
        for seed in seeds:
            if ahead := self._kept.pop(seed, None):
                self.tokens -= len(ahead.tokens)
                group = self._groups[ahead.prompt]
                del group[seed]
                if not group:
                    del self._groups[ahead.prompt]

    def length(self, seed: int) -> int:
        """Tokens that are known of it."""
        return len(self._kept[seed].tokens) if seed in self._kept else 0

    def get(self, request: Request) -> Ahead | None:
        return self._kept.get(request.seed)

    def group(self, request: Request) -> list[Ahead]:
        """Of the request and its siblings, its own first."""
        seeds = self._groups.get(request.prompt.token_ids, ())
        return [self._kept[seed] for seed in sorted(seeds, key=lambda seed: seed != request.seed)]


class _Pointer:
    """Where a row stands in its old response, or after a divergence in that of a sibling."""

    def __init__(self, group: Sequence[Ahead], committed: Sequence[int]) -> None:
        self.sources = [ahead.tokens for ahead in group]
        self.old: list[int] = self.sources[0].tolist()
        self.at: int | None = 0  # of the next token in `old`
        self.width, self.proposed = _FIRST, 0
        self.length, self.last = 0, deque[int](maxlen=_CONTEXT)
        self.shift, self.tries = 0, _TRIES  # the row's own old response stands so many tokens further on
        self.is_own = True
        self.advance(committed)

    def advance(self, tokens: Sequence[int]) -> None:
        right = 0
        for token in tokens:
            self.last.append(token)
            self.length += 1
            if self.at is not None:
                if self.at < len(self.old) and self.old[self.at] == token:
                    self.at += 1
                    right += 1
                else:
                    self._part(exhausted=self.is_own and self.at == len(self.old))
        if self.proposed:
            full = right >= self.proposed
            self.width = min(2 * self.width, MOST_GUESSES) if full else max(_LEAST, self.width // 2)
            self.proposed = 0
        if self.at is None and self.tries:
            self.tries -= 1
            self._find()

    def _part(self, exhausted: bool) -> None:
        if self.is_own and self.at is not None:
            self.shift = self.at + 1 - self.length
        self.at, self.tries = None, 0 if exhausted else _TRIES

    def _find(self) -> None:
        for which, tokens in enumerate(self.sources):
            at = _nearest(tokens, list(self.last), self.length + (self.shift if which == 0 else 0))
            if at is not None:
                self.old, self.at, self.width, self.is_own = tokens.tolist(), at, _LEAST, which == 0
                return

    def left(self) -> int:
        """Tokens that it could propose."""
        return 0 if self.at is None else min(self.width, len(self.old) - self.at)

    def propose(self, count: int) -> list[int]:
        self.proposed = count
        return [] if self.at is None else self.old[self.at : self.at + count]

    def rest(self) -> list[int]:
        """Of the row's own old response, what is still to come."""
        return [] if self.at is None or not self.is_own else self.old[self.at :]


def _nearest(tokens: np.ndarray, last: Sequence[int], near: int) -> int | None:
    """The place behind these tokens that is nearest to `near`, and not the end."""
    low, high = max(0, near - _NEAR - len(last)), min(len(tokens) - 1, near + _NEAR)
    count = high - low - len(last) + 1
    if len(last) < _CONTEXT or count <= 0:
        return None
    matches = np.ones(count, dtype=bool)
    for offset, token in enumerate(last):
        matches &= tokens[low + offset : low + offset + count] == token
    places = np.flatnonzero(matches) + low + len(last)
    return int(places[np.abs(places - near).argmin()]) if len(places) else None


class LookAhead:
    """A per-row store: where each row stands in what was decoded ahead for it."""

    def __init__(self, store: AheadStore, vocab_size: int) -> None:
        self.store, self.vocab_size = store, vocab_size
        self._pointers: list[_Pointer | None] = []

    def append(self, row: Row, kept: int) -> None:
        group = self.store.group(row.request)
        known = bool(group) and group[0].seed == row.request.seed and len(group[0].tokens) > 0
        sound = known and all((a.tokens >= 0).all() and (a.tokens < self.vocab_size).all() for a in group)
        self._pointers.append(_Pointer(group, row.tokens) if sound else None)

    def remove(self, place: int, last: int) -> None:
        self._pointers[place] = self._pointers[last]
        self._pointers.pop()

    def commit(self, place: int, tokens: Sequence[int]) -> None:
        if pointer := self._pointers[place]:
            pointer.advance(tokens)

    def offers(self) -> list[int]:
        """Tokens that each row's old response could propose."""
        return [pointer.left() if pointer else 0 for pointer in self._pointers]

    def propose(self, counts: Sequence[int]) -> list[list[int]]:
        """A chain of so many tokens for each row; of none, where there is no old response to go by."""
        chains = [p.propose(n) if p else [] for p, n in zip(self._pointers, counts, strict=True)]
        return chains

    def so_far(self, place: int, row: Row, version: int) -> Ahead:
        """What a row that is decoded ahead has, and behind it what is left of what it was drafted from."""
        pointer = self._pointers[place]
        tokens = [*row.tokens, *(pointer.rest() if pointer else ())]
        prompt = row.request.prompt.token_ids
        return Ahead(row.request.seed, prompt, np.array(tokens, dtype=np.int32), version, ended=False)


def ended(request: Request, tokens: Sequence[int], version: int) -> Ahead:
    """A whole response."""
    return Ahead(request.seed, request.prompt.token_ids, np.array(tokens, dtype=np.int32), version, ended=True)


def said(responses: Iterable[Response], version: int) -> list[Ahead]:
    """What a target said to requests that will come again."""
    return [ended(response.request, response.token_ids, version) for response in responses]
