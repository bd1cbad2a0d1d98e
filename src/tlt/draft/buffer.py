"""The harvest: what the rollout computed anyway, kept in host memory for the drafter's training under a bound.

Drafters are judged on the last whole rollout, and trained on those before it (the one-step offset of TLT, arXiv
2511.16665 section 4.2, and one more). So they are judged on responses that they were not trained on, and every response
is trained on in the end. The rollout under way is for neither: what it has given by the time that a worker is idle are
its short responses, which are the easy ones. Where steps are small, several are kept: the answers to a few prompts are
too much alike to learn from.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

_WHOLE = 0.5  # of the bound, at most, is left to whole rollouts, and half of that to the last one
_OLDER = 0.6  # times as likely is an item drawn, for each step that it is older


class Harvest(NamedTuple):
    """Consecutive entries of one response; n at most the window."""

    target_version: int
    start: int
    """position of the first entry"""
    prompt_length: int
    tokens: Tensor
    """[n] the token that follows each entry"""
    features: Tensor
    """[n, F] as laid out by `FeatureLayout`; the last hidden state is after the final norm"""
    prompt_id: int = 0

    @property
    def drafted(self) -> int:
        """Entries that predict a token of the response: the others teach nothing that is drafted."""
        return max(0, self.start + len(self.tokens) - max(self.start, self.prompt_length - 2) - 1)

    @property
    def end(self) -> int:
        """How far into its sequence it goes: the position behind its last entry."""
        return self.start + len(self.tokens)

    def cut(self, low: int, length: int) -> Harvest:
        """Entries [low, low + length) of it."""
        part = slice(low, low + length)
        return self._replace(start=self.start + low, tokens=self.tokens[part], features=self.features[part])


class Transcript(NamedTuple):
    """A response whose features the engine did not keep: see `recompute`."""

    prompt_length: int
    tokens: tuple[int, ...]
    """of the prompt and of the response"""


class HarvestBuffer:
    """Up to `max_tokens` entries: the newest of the rollout under way; and of the last one, and up to `steps` before
    it, later ones first, the longest."""

    def __init__(self, max_tokens: int, steps: int = 1) -> None:
        self.max_tokens, self.tokens = max_tokens, 0
        self.whole: deque[list[Harvest]] = deque(maxlen=steps + 1)
        """by rollout"""
        self.now: deque[Harvest] = deque()

    @property
    def latest(self) -> list[Harvest]:
        """Of the last whole rollout: what drafters are judged on."""
        return self.whole[-1] if self.whole else []

    @property
    def past(self) -> list[Harvest]:
        """Of those before it: what is trained on."""
        return [item for step in list(self.whole)[:-1] for item in step]

    @property
    def past_tokens(self) -> int:
        return sum(len(item.tokens) for item in self.past)

    @property
    def items(self) -> list[Harvest]:
        return [*self.past, *self.latest, *self.now]

    @property
    def versions(self) -> set[int]:
        return {item.target_version for item in self.items}

    def add(self, harvest: Harvest) -> None:
        if harvest.drafted == 0:
            return
        self.now.append(harvest)
        self.tokens += len(harvest.tokens)
        while self.tokens > self.max_tokens and len(self.now) > 1:
            self.tokens -= len(self.now.popleft().tokens)

    def add_late(self, harvest: Harvest, past: bool) -> None:
        """Of the last whole rollout, or of the one before it (`past`), if it comes only now; where there is no room,
        the oldest go."""
        place = -2 if past else -1
        if harvest.drafted == 0 or len(self.whole) < -place:
            return
        self.whole[place].append(harvest)
        self.tokens += len(harvest.tokens)
        while len(kept := [*self.past, *self.latest]) > 1:
            if sum(len(item.tokens) for item in kept) <= _WHOLE * self.max_tokens:
                break
            self.tokens -= len(next(step for step in self.whole if step).pop(0).tokens)

    def rollout_ended(self) -> None:
        """What it gave is whole now."""
        self.whole.append(list(self.now))
        self.now.clear()
        self.tokens = 0
        for step in reversed(self.whole):
            room = _WHOLE if step is not self.latest else _WHOLE / 2
            step[:] = self._longest(step, room * self.max_tokens)

    def _longest(self, items: Iterable[Harvest], most: float) -> Iterator[Harvest]:
        for item in sorted(items, key=lambda item: item.end, reverse=True):
            if not self.tokens or self.tokens + len(item.tokens) <= most:
                self.tokens += len(item.tokens)
                yield item

    def sample(self, tokens: int, rng: random.Random) -> list[Harvest]:
        """Items of the past, of one target version, of up to `tokens` entries in sum. The newer one is and the further
        it reaches, the likelier it is drawn: drafters fail at late positions first. One that is too long is cut."""
        drawn: list[Harvest] = []
        for item in _weighted(self.past, rng):
            room = tokens - sum(len(other.tokens) for other in drawn)
            if not drawn and len(item.tokens) > tokens:
                return [item.cut(rng.randrange(len(item.tokens) - tokens + 1), tokens)]
            if len(item.tokens) <= room and (not drawn or item.target_version == drawn[0].target_version):
                drawn.append(item)
            elif room < tokens // 8:
                break
        return drawn


def pieces(items: Collection[Harvest], tokens: int, longest: int, rng: random.Random) -> list[Harvest]:
    """Up to `tokens` entries of as many items, so at most `longest` of one; by target version."""
    drawn: list[Harvest] = []
    for item in _weighted(items, rng):
        if len(item.tokens) > longest:
            item = item.cut(rng.randrange(len(item.tokens) - longest + 1), longest)
        if item.drafted and len(item.tokens) + sum(len(other.tokens) for other in drawn) <= tokens:
            drawn.append(item)
    return sorted(drawn, key=lambda item: item.target_version)


def _weighted(items: Collection[Harvest], rng: random.Random) -> Iterator[Harvest]:
    """In random order, each next one drawn by its end and by how new it is (Efraimidis and Spirakis 2006)."""
    newest = max((item.target_version for item in items), default=0)
    weights = {id(item): item.end * _OLDER ** (newest - item.target_version) for item in items}
    keys = {name: rng.random() ** (1 / weight) for name, weight in weights.items()}
    yield from sorted(items, key=lambda item: keys[id(item)], reverse=True)
