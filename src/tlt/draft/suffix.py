"""Suffix drafter. It proposes the tokens that followed earlier occurrences of the row's last tokens: in this response,
in other responses of the group, and in the responses to the same prompt in the last epoch. It has no model and needs
no training, so it works from the first step.

(Suffix retrieval over a prompt's own history is from SuffixDecoding, arXiv 2411.04975, and from the model-free drafter
of TLT, arXiv 2511.16665.)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from tlt.draft.ahead import AheadStore
from tlt.draft.drafter import Offer, Prefix, PrefixDrafter, Sources
from tlt.draft.features import FeatureView
from tlt.types import Request

_ORDERS = (8, 4, 2)  # lengths of matched context in tokens, the longest first
_ESCAPE = {8: 0.3, 4: 0.6, 2: 1.5}  # smoothing: pseudo-count of unseen tokens, by length of the context
_CLASSES = {8: 3, 4: 2, 2: 1}  # classes of the calibration, by the length of the match; 0: no match
_MATCHES = 16  # number of occurrences used, the newest first


class _Occurrence(NamedTuple):
    """Occurrence of the matched context in `tokens`. The token that followed is `tokens[at]`. If `at` is the end of the
    list, no token has followed yet; the list may still grow."""

    tokens: list[int]
    at: int


class _Match(NamedTuple):
    places: list[_Occurrence]
    order: int


class _Prompt:
    """Sequences (prompt + response) of one prompt, indexed by their n-grams. New tokens are indexed when the index is
    next read, so that rounds of other strategies do not pay for it."""

    def __init__(self) -> None:
        self.live: dict[tuple[int, int], list[int]] = {}  # sequences of this rollout by (epoch, index)
        self._index = defaultdict[tuple[int, ...], list[_Occurrence]](list)
        self._waiting: dict[int, tuple[list[int], int]] = {}  # sequences with new tokens, and their indexed length

    def extend(self, sequence: list[int], tokens: Sequence[int]) -> None:
        self._waiting.setdefault(id(sequence), (sequence, len(sequence)))
        sequence += tokens

    @property
    def index(self) -> dict[tuple[int, ...], list[_Occurrence]]:
        """Occurrences of each n-gram, the newest last."""
        for sequence, known in self._waiting.values():
            for end in range(known + 1, len(sequence) + 1):
                place = _Occurrence(sequence, end)
                for order in _ORDERS:
                    if end >= order:
                        self._index[tuple(sequence[end - order : end])].append(place)
        self._waiting.clear()
        return self._index


class SuffixDrafter(PrefixDrafter):
    """Suffix drafter. `store` has earlier responses to the prompts, which the driver sends with the requests."""

    name = "suffix"

    def __init__(self, store: AheadStore | None = None) -> None:
        self.store = AheadStore() if store is None else store
        self.begin(None)

    def begin(self, window: FeatureView | None) -> None:
        super().begin(window)
        self.prompts: dict[tuple[int, ...], _Prompt] = {}  # by token ids

    def open(self, request: Request, committed: Sequence[int]) -> None:
        super().open(request, committed)
        token_ids = request.prompt.token_ids
        if token_ids not in self.prompts:
            self.prompts[token_ids] = _Prompt()
            for earlier in self.store.group(request):
                self.prompts[token_ids].extend([], [*token_ids, *earlier.tokens.tolist()])
        prompt, key, known = self.prompts[token_ids], (request.epoch, request.index), [*token_ids, *committed]
        if prompt.live.get(key) != known:  # else it was preempted and continues
            sequence = prompt.live[key] = []
            prompt.extend(sequence, known)

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        super().commit(row, tokens)
        prompt, sequence = self._of(self.rows[row][0])
        prompt.extend(sequence, tokens)

    def _of(self, request: Request) -> tuple[_Prompt, list[int]]:
        """Return the prompt of a request, and the request's tokens so far."""
        prompt = self.prompts[request.prompt.token_ids]
        return prompt, prompt.live[request.epoch, request.index]

    def propose(self, prefixes: Sequence[Prefix]) -> Offer:
        found = [prefix.state if prefix.drafted else self._match(prefix) for prefix in prefixes]
        listed = [_followers(match, len(prefix.drafted)) for match, prefix in zip(found, prefixes, strict=True)]
        width = 1 + max(map(len, listed), default=0)
        ids, log_q, states = list[list[int]](), list[list[float]](), list[list[_Match | None]]()
        for match, followers in zip(found, listed, strict=True):
            weights, further = list[float](), list[_Match | None]()
            if match and followers:
                # id -1 stands for all unseen tokens: it is not proposed, but it competes with the others
                weights = [*map(len, followers.values()), _ESCAPE[match.order]]
                further = [*(_Match(places, match.order) for places in followers.values()), None]
            total = sum(weights)
            ids.append([*followers, *[-1] * (width - len(followers))])
            log_q.append([math.log(w / total) for w in weights] + [-math.inf] * (width - len(weights)))
            states.append(further)
        classes = [_CLASSES[match.order] if match else 0 for match in found]
        # by way of arrays, because torch needs four times as long for nested lists
        tokens, shares = torch.from_numpy(np.array(ids)), torch.from_numpy(np.array(log_q, dtype=np.float32))
        return Offer(tokens, shares, states, classes)

    def _match(self, prefix: Prefix) -> _Match | None:
        prompt, sequence = self._of(prefix.request)
        index = prompt.index
        for order in _ORDERS:
            hits = index.get(tuple(sequence[-order:]), ()) if len(sequence) >= order else ()
            if places := [place for place in hits[-_MATCHES:] if place.at < len(place.tokens)]:
                return _Match(places, order)
        return None


def _followers(match: _Match | None, depth: int) -> dict[int, list[_Occurrence]]:
    """Return the tokens that followed the match and `depth` draft tokens after it, each with its occurrences."""
    followers = defaultdict[int, list[_Occurrence]](list)
    for place in match.places if match else ():
        if place.at + depth < len(place.tokens):
            followers[place.tokens[place.at + depth]].append(place)
    return followers


def make(sources: Sources) -> SuffixDrafter:
    return SuffixDrafter(sources.store)
