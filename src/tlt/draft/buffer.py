"""The harvest: what the rollout computed anyway, kept in host memory for the drafter's training under a bound.

Those who finish early in a rollout are short, and a worker is idle while the long ones still run. So the longest of
the step before are kept beside what this step gave so far (the one-step offset of TLT, arXiv 2511.16665 section 4.2).
Where steps are small, those before it as well: the answers to a few prompts are too much alike to learn from.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

_BEFORE = 0.5  # of the bound, at most, is left to the steps before
_HELD_BACK = 5  # one prompt in so many is not trained on: rarely do two steps have none of them


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

    @property
    def held_back(self) -> bool:
        """Of a prompt that no worker ever trains on, by a hash of its id: the gate's."""
        return is_held_back(self.prompt_id)

    def cut(self, low: int, length: int) -> Harvest:
        """Entries [low, low + length) of it."""
        part = slice(low, low + length)
        return self._replace(start=self.start + low, tokens=self.tokens[part], features=self.features[part])


class Transcript(NamedTuple):
    """A response whose features the engine did not keep: see `recompute`."""

    prompt_id: int
    prompt_length: int
    tokens: tuple[int, ...]
    """of the prompt and of the response"""


def is_held_back(prompt_id: int) -> bool:
    return zlib.crc32(prompt_id.to_bytes(8, "little", signed=True)) % _HELD_BACK == 0


class HarvestBuffer:
    """Up to `max_tokens` entries: the newest of this step, and of up to `steps` before it, later ones first, the
    longest."""

    def __init__(self, max_tokens: int, steps: int = 1) -> None:
        self.max_tokens, self.tokens = max_tokens, 0
        self.before: deque[list[Harvest]] = deque(maxlen=steps)
        self.now: deque[Harvest] = deque()

    @property
    def items(self) -> list[Harvest]:
        return [item for step in (*self.before, self.now) for item in step]

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

    def next_step(self) -> None:
        """The target moved: this step is now the one before."""
        self.before.append(list(self.now))
        self.now.clear()
        self.tokens = 0
        for step in reversed(self.before):
            step[:] = self._longest(step)

    def _longest(self, items: Iterable[Harvest]) -> Iterator[Harvest]:
        for item in sorted(items, key=lambda item: item.end, reverse=True):
            if self.tokens + len(item.tokens) <= _BEFORE * self.max_tokens:
                self.tokens += len(item.tokens)
                yield item

    def sample(self, tokens: int, rng: random.Random) -> list[Harvest]:
        """Items of one target version of up to `tokens` entries together. The further an item reaches, the likelier it
        is drawn: drafters fail at late positions first. One that is too long by itself is cut."""
        drawn: list[Harvest] = []
        for item in _weighted(self.items, rng):
            room = tokens - sum(len(other.tokens) for other in drawn)
            if not drawn and len(item.tokens) > tokens:
                return [item.cut(rng.randrange(len(item.tokens) - tokens + 1), tokens)]
            if len(item.tokens) <= room and (not drawn or item.target_version == drawn[0].target_version):
                drawn.append(item)
            elif room < tokens // 8:
                break
        return drawn

    def newest(self, tokens: int) -> list[Harvest]:
        """Of the last steps, as few as hold so many entries together."""
        found: list[Harvest] = []
        for step in (self.now, *reversed(self.before)):
            if sum(len(item.tokens) for item in found) < tokens:
                found += step
        return found


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
    """In random order, each next one drawn by its end (Efraimidis and Spirakis 2006)."""
    keys = {id(item): rng.random() ** (1 / item.end) for item in items}
    yield from sorted(items, key=lambda item: keys[id(item)], reverse=True)
