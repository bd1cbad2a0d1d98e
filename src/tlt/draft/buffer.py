"""The harvest: what the rollout computed anyway, kept in host memory for the drafter's training under a bound.

Drafters are judged on what the present step gives, and trained on the steps before it. So they are judged on responses
that they were not trained on, and every response is trained on in the end. Training loses little by that: what a step
has given by the time that a worker is idle are its short responses (the one-step offset of TLT, arXiv 2511.16665
section 4.2). Where steps are small, several are kept: the answers to a few prompts are too much alike to learn from.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

_BEFORE = 0.5  # of the bound, at most, is left to the steps before
_OLDER = 0.8  # times as likely is an item drawn, for each step that it is older


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
    """Up to `max_tokens` entries: the newest of this step, and of up to `steps` before it, later ones first, the
    longest."""

    def __init__(self, max_tokens: int, steps: int = 1) -> None:
        self.max_tokens, self.tokens, self.past_tokens = max_tokens, 0, 0
        self.before: deque[list[Harvest]] = deque(maxlen=steps)
        self.now: deque[Harvest] = deque()

    @property
    def past(self) -> list[Harvest]:
        """Of the steps before this one: what is trained on."""
        return [item for step in self.before for item in step]

    @property
    def items(self) -> list[Harvest]:
        return [*self.past, *self.now]

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

    def add_past(self, harvest: Harvest) -> None:
        """Of the step before this one, if it comes only now; where there is no room, the oldest go."""
        if harvest.drafted == 0 or not self.before:
            return
        self.before[-1].append(harvest)
        self._count(len(harvest.tokens))
        while self.past_tokens > _BEFORE * self.max_tokens and len(self.past) > 1:
            self._count(-len(next(step for step in self.before if step).pop(0).tokens))

    def _count(self, past: int) -> None:
        self.tokens += past
        self.past_tokens += past

    def next_step(self) -> None:
        """The target moved: this step is now the one before."""
        self.before.append(list(self.now))
        self.now.clear()
        self.tokens = 0
        for step in reversed(self.before):
            step[:] = self._longest(step)
        self.past_tokens = self.tokens

    def _longest(self, items: Iterable[Harvest]) -> Iterator[Harvest]:
        for item in sorted(items, key=lambda item: item.end, reverse=True):
            if self.tokens + len(item.tokens) <= _BEFORE * self.max_tokens:
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
