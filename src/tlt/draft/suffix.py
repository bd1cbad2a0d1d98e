"""Suffix drafter. It proposes the tokens that followed earlier occurrences of the row's last tokens: in this response,
in other responses of the group, and in responses to the same prompt in earlier epochs. It has no model and needs no
training, so it works from the first step.

(Suffix retrieval over a prompt's own history is from SuffixDecoding, arXiv 2411.04975, and from the model-free drafter
of TLT, arXiv 2511.16665.)
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tlt.draft.drafter import Offer, Prefix, PrefixDrafter, Sources
from tlt.draft.features import FeatureView
from tlt.types import Request

_HISTORY_TOKENS = 200_000  # tokens of prompts and responses that are kept
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


class _History:
    """All sequences (prompt + response) of one prompt in one epoch, indexed by their n-grams. New tokens are indexed
    when the index is next read, so that rounds of other strategies do not pay for it."""

    def __init__(self) -> None:
        self.sequences: dict[int, list[int]] = {}
        self.tokens = 0  # tokens of a request that was decoded again count twice
        self._index: dict[tuple[int, ...], list[_Occurrence]] = {}
        self._waiting: dict[int, tuple[list[int], int]] = {}  # sequences with new tokens, and their indexed length

    def extend(self, sequence: list[int], tokens: Sequence[int]) -> None:
        self.tokens += len(tokens)
        self._waiting.setdefault(id(sequence), (sequence, len(sequence)))
        sequence += tokens

    @property
    def index(self) -> dict[tuple[int, ...], list[_Occurrence]]:
        """Occurrences of each n-gram, the newest last."""
        for sequence, known in self._waiting.values():
            for end in range(known + 1, len(sequence) + 1):
                for order in _ORDERS:
                    if end >= order:
                        place = _Occurrence(sequence, end)
                        self._index.setdefault(tuple(sequence[end - order : end]), []).append(place)
        self._waiting.clear()
        return self._index


class SuffixDrafter(PrefixDrafter):
    name = "suffix"

    def __init__(self, history_tokens: int = _HISTORY_TOKENS) -> None:
        self.history_tokens = history_tokens
        self.kept_tokens = 0
        self.histories: OrderedDict[tuple[int, int], _History] = OrderedDict()  # (prompt id, epoch), the oldest first
        self.epochs: dict[int, list[int]] = {}  # prompt id -> epochs kept, the oldest first
        self.begin(None)

    def begin(self, window: FeatureView | None) -> None:
        super().begin(window)
        self.live: dict[tuple[int, int], int] = {}  # number of active requests by (prompt id, epoch)

    def open(self, request: Request, committed: Sequence[int]) -> None:
        super().open(request, committed)
        key = (request.prompt.prompt_id, request.epoch)
        self.live[key] = self.live.get(key, 0) + 1
        if key not in self.histories:
            self.histories[key] = _History()
            self.epochs.setdefault(key[0], []).append(key[1])
        history = self.histories[key]
        known = [*request.prompt.token_ids, *committed]
        if history.sequences.get(request.index) != known:  # else it was preempted and continues
            sequence = history.sequences[request.index] = []
            self._extend(history, sequence, known)
        self._forget()

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        super().commit(row, tokens)
        request = self.rows[row][0]
        history = self.histories[request.prompt.prompt_id, request.epoch]
        self._extend(history, history.sequences[request.index], tokens)

    def close(self, row: int, last: int) -> None:
        request = self.rows[row][0]
        self.live[request.prompt.prompt_id, request.epoch] -= 1
        super().close(row, last)

    def _extend(self, history: _History, sequence: list[int], tokens: Sequence[int]) -> None:
        history.extend(sequence, tokens)
        self.kept_tokens += len(tokens)

    def _forget(self) -> None:
        """Drop the oldest histories without active requests while more than `history_tokens` tokens are kept."""
        for key in list(self.histories):
            if self.kept_tokens <= self.history_tokens:
                return
            if self.live.get(key, 0) == 0:
                self.kept_tokens -= self.histories.pop(key).tokens
                self.epochs[key[0]].remove(key[1])
                if not self.epochs[key[0]]:
                    del self.epochs[key[0]]
                self.live.pop(key, None)

    def propose(self, prefixes: Sequence[Prefix]) -> Offer:
        found = [prefix.state if prefix.drafted else self._match(prefix) for prefix in prefixes]
        listed = [_followers(match) for match in found]
        width = 1 + max((len(followers) for followers in listed), default=0)
        ids = torch.full((len(prefixes), width), -1)
        log_q = torch.full((len(prefixes), width), -math.inf)
        states: list[list[_Match | None]] = []
        for m, (match, followers) in enumerate(zip(found, listed, strict=True)):
            states.append([])
            if match is None or not followers:
                continue
            escape = _ESCAPE[match.order]
            total = escape + sum(len(places) for places in followers.values())
            # id -1 stands for all unseen tokens: it is not proposed, but it competes with the others
            weights = [len(places) for places in followers.values()] + [escape]
            ids[m, : len(weights)] = torch.tensor([*followers, -1])
            log_q[m, : len(weights)] = torch.tensor([math.log(w / total) for w in weights])
            states[m] = [_Match(places, match.order) for places in followers.values()] + [None]
        classes = [_CLASSES[match.order] if match else 0 for match in found]
        return Offer(ids, log_q, states, classes)

    def _match(self, prefix: Prefix) -> _Match | None:
        request = prefix.request
        prompt_id = request.prompt.prompt_id
        sequence = self.histories[prompt_id, request.epoch].sequences[request.index]
        for order in _ORDERS:
            if len(sequence) < order:
                continue
            context = tuple(sequence[-order:])
            places: list[_Occurrence] = []
            for epoch in reversed(self.epochs[prompt_id]):
                hits = self.histories[prompt_id, epoch].index.get(context, ())
                places += [place for place in hits[-_MATCHES:] if place.at < len(place.tokens)]
                if len(places) >= _MATCHES:
                    break
            if places:
                return _Match(places[:_MATCHES], order)
        return None


def _followers(match: _Match | None) -> dict[int, list[_Occurrence]]:
    """Return the tokens that followed the match, each with its occurrences. In these occurrences, `at` is the index
    after the token."""
    followers: dict[int, list[_Occurrence]] = {}
    for tokens, at in match.places if match else ():
        if at < len(tokens):
            followers.setdefault(tokens[at], []).append(_Occurrence(tokens, at + 1))
    return followers


def make(sources: Sources) -> SuffixDrafter:
    return SuffixDrafter()
