"""Training data of the drafter in host memory: tokens and hidden states that the engine computed in rollouts.

Drafters are evaluated on the last finished rollout and trained on earlier ones (the one-step offset of TLT,
arXiv 2511.16665 section 4.2, plus one step). So they are evaluated on responses that they were not trained on, and
every response is trained on eventually. The current rollout is used for neither, because its first responses are the
short and easy ones. If steps are small, several rollouts are kept, because the responses to a few prompts are too
similar.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Iterable, Iterator

from tlt.draft.features import Harvest

_WHOLE = 0.5  # fraction of `max_tokens` for all finished rollouts; the last rollout may use half of this
_OLDER = 0.97  # factor on an item's sampling weight for each target version by which it is older than the newest


class HarvestBuffer:
    """Buffer of up to `max_tokens` entries of training data. They are from the current rollout, the last finished one,
    and the `steps` rollouts before that one.

    If there is no room for all items, the current rollout keeps its newest items. A finished rollout keeps the items
    that end latest in their sequences. Newer finished rollouts get room first."""

    def __init__(self, max_tokens: int, steps: int = 1) -> None:
        self.max_tokens, self.tokens = max_tokens, 0
        self.whole: deque[list[Harvest]] = deque(maxlen=steps + 1)
        """items of each finished rollout, oldest rollout first"""
        self.now: deque[Harvest] = deque()

    @property
    def latest(self) -> list[Harvest]:
        """Items of the last finished rollout, on which drafters are evaluated."""
        return self.whole[-1] if self.whole else []

    @property
    def past(self) -> list[Harvest]:
        """Items of the finished rollouts before the last one, on which drafters are trained."""
        return [item for step in list(self.whole)[:-1] for item in step]

    @property
    def past_tokens(self) -> int:
        return self.tokens - sum(len(item.tokens) for item in [*self.latest, *self.now])

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

    def rollout_ended(self) -> None:
        """Make the current rollout the last finished one. If there is no room, drop items that end early in their
        sequences."""
        self.whole.append(list(self.now))
        self.now.clear()
        self.tokens = 0
        for step in reversed(self.whole):
            room = _WHOLE if step is not self.latest else _WHOLE / 2
            step[:] = self._latest_ends(step, room * self.max_tokens)

    def forget(self) -> None:
        """Drop all finished rollouts except the last one, because the task has changed."""
        while len(self.whole) > 1:
            self.tokens -= sum(len(item.tokens) for item in self.whole.popleft())

    def _latest_ends(self, items: Iterable[Harvest], most: float) -> Iterator[Harvest]:
        for item in sorted(items, key=lambda item: item.end, reverse=True):
            if not self.tokens or self.tokens + len(item.tokens) <= most:
                self.tokens += len(item.tokens)
                yield item

    def sample(self, tokens: int, rng: random.Random) -> list[Harvest]:
        """Draw random items of `past` to train on, all of one target version, with up to `tokens` entries in total.
        Newer items and items that end late in their sequence are more likely, because drafters fail at late positions
        first. If the first item drawn has more than `tokens` entries, return only a part of it."""
        drawn, room = list[Harvest](), tokens
        for item in _weighted(self.past, rng):
            if not drawn and len(item.tokens) > tokens:
                return [item.cut(rng.randrange(len(item.tokens) - tokens + 1), tokens)]
            if len(item.tokens) <= room and (not drawn or item.target_version == drawn[0].target_version):
                drawn.append(item)
                room -= len(item.tokens)
            elif room < tokens // 8:
                break
        return drawn


def pieces(items: Collection[Harvest], tokens: int, longest: int, rng: random.Random) -> list[Harvest]:
    """Draw random items and cut each to at most `longest` consecutive entries, up to `tokens` entries in total. Return
    them sorted by target version."""
    drawn: list[Harvest] = []
    for item in _weighted(items, rng):
        if len(item.tokens) > longest:
            item = item.cut(rng.randrange(len(item.tokens) - longest + 1), longest)
        if item.drafted and len(item.tokens) + sum(len(other.tokens) for other in drawn) <= tokens:
            drawn.append(item)
    return sorted(drawn, key=lambda item: item.target_version)


def _weighted(items: Collection[Harvest], rng: random.Random) -> Iterator[Harvest]:
    """Yield all items in a random order, in which newer items and items that end late in their sequence tend to come
    first (weighted sampling without replacement: Efraimidis and Spirakis 2006)."""
    newest = max((item.target_version for item in items), default=0)
    weights = {id(item): item.end * _OLDER ** (newest - item.target_version) for item in items}
    keys = {name: rng.random() ** (1 / weight) for name, weight in weights.items()}
    yield from sorted(items, key=lambda item: keys[id(item)], reverse=True)
