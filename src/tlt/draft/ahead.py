"""Look-ahead drafts. A request's draft is the response that an older target version gave to it, with the same seed.
The store also has responses to the same prompt with other seeds, such as those of an earlier epoch (`History`).

A request's noise is a function of its seed and the position. So two target versions give the same response, except
where an update changed which token has the largest noisy score. The old response is a chain of known tokens, so it
needs no drafter. Fewer of its tokens are accepted if it is several versions old, truncated, or from another request.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

from tlt.types import MAX_DRAFT_TOKENS, Request, Response, Row

_FILE = "history.safetensors"
_LEAST = 4  # smallest limit of a chain's length in tokens; also the first limit after a divergence
_CONTEXT = 4  # number of a row's last tokens that are searched for in old responses after a divergence


class Ahead(NamedTuple):
    """Look-ahead draft of a request: its response by an older target version."""

    seed: int
    prompt: tuple[int, ...]
    tokens: np.ndarray
    """[n] int32 tokens of the old response"""
    version: int
    """newest target version that decoded a part of the response"""
    ended: bool
    """whether the response is complete"""

    @classmethod
    def of(cls, decoded: Row | Response, version: int, ended: bool = False) -> Ahead:
        """Return a draft with the tokens of a row or a response. `ended` says whether the response is complete."""
        tokens = np.array(decoded.tokens if isinstance(decoded, Row) else decoded.token_ids, dtype=np.int32)
        return cls(decoded.request.seed, decoded.request.prompt.token_ids, tokens, version, ended)

    def is_valid(self, vocab_size: int) -> bool:
        """Return whether all tokens are in the vocabulary."""
        return bool(self.tokens.min() >= 0 and self.tokens.max() < vocab_size)


class AheadStore:
    """Store of look-ahead drafts by the request's seed. If they and their prompts have more than `most_tokens` tokens
    in total (four bytes each), the drafts that were stored first are dropped."""

    def __init__(self, most_tokens: int = 16_000_000) -> None:
        self.most_tokens, self.tokens = most_tokens, 0
        self._kept: OrderedDict[int, Ahead] = OrderedDict()
        self._groups: dict[tuple[int, ...], dict[int, None]] = {}  # seeds by prompt, in order of arrival

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, found: Iterable[Ahead]) -> None:
        """Add drafts. A draft replaces the stored draft of the same request. But if both have the same target version,
        keep the one that has ended. If both or neither have ended, keep the longer one."""
        for ahead in found:
            known = self._kept.get(ahead.seed)
            if not len(ahead.tokens):
                continue
            if known and known.version == ahead.version and _extent(known) > _extent(ahead):
                continue
            self.forget([ahead.seed])
            self._kept[ahead.seed] = ahead
            self.tokens += len(ahead.tokens) + (0 if ahead.prompt in self._groups else len(ahead.prompt))
            self._groups.setdefault(ahead.prompt, {})[ahead.seed] = None
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
                    self.tokens -= len(ahead.prompt)

    def clear(self) -> None:
        self.forget([*self._kept])

    def length(self, seed: int) -> int:
        """Return the length in tokens of the draft for this seed; 0 if there is none."""
        return len(self._kept[seed].tokens) if seed in self._kept else 0

    def get(self, request: Request) -> Ahead | None:
        return self._kept.get(request.seed)

    def row(self, request: Request, vocab_size: int, most: int) -> Row:
        """Return a look-ahead row for this request. If the request has a draft of at most `most` tokens that has not
        ended, the row continues the draft. This holds for a draft of an older target version too, because decoding its
        tokens again would take more time than their later rejections cost."""
        known = self.get(request)
        most = min(most, request.sampling.max_new_tokens - 1)
        continues = known and not known.ended and len(known.tokens) <= most and known.is_valid(vocab_size)
        return Row(request, known.tokens.tolist() if known and continues else [], ahead=True)

    def put_row(self, row: Row, version: int) -> None:
        """Add the tokens of an unfinished row as a draft, followed by the rest of the stored draft of its request.
        `version`: target version that decoded the row."""
        known = self.get(row.request)
        rest = known.tokens[len(row.tokens) :].tolist() if known else ()
        self.put([Ahead.of(replace(row, tokens=[*row.tokens, *rest]), version)])

    def has_ended(self, request: Request) -> bool:
        known = self.get(request)
        return known is not None and known.ended

    def group(self, request: Request) -> list[Ahead]:
        """Return the drafts of all requests with this request's prompt. The request's own draft comes first, if there
        is one."""
        seeds = self._groups.get(request.prompt.token_ids, ())
        return [self._kept[seed] for seed in sorted(seeds, key=lambda seed: seed != request.seed)]


def _extent(ahead: Ahead) -> tuple[bool, int]:
    return ahead.ended, len(ahead.tokens)


class Pointer:
    """Position of a row in its old response. After a divergence, which is a token that differs from the old response,
    it may be a position in the old response of another row of the group.

    `sources` are old responses (int32), the row's own first. `committed` are the tokens that the row already has.
    """

    def __init__(self, sources: Sequence[np.ndarray], committed: Sequence[int]) -> None:
        self.sources = sources
        self.old: list[int] = self.sources[0].tolist()
        self.at: int | None = 0  # index of the next token in `old`; None after a divergence
        self.is_own, self.is_over = True, False  # whether `old` is the row's own; whether the row is beyond its end
        self.width, self.proposed = MAX_DRAFT_TOKENS, 0  # limit of a chain; length of the last chain
        self.length, self.last = 0, deque[int](maxlen=_CONTEXT)
        self.shift = 0  # position in the row's own old response minus position in the row
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
                    self._part(self.at)
        if self.proposed:
            full = right >= self.proposed
            self.width = min(2 * self.width, MAX_DRAFT_TOKENS) if full else max(_LEAST, self.width // 2)
            self.proposed = 0
        if self.at is None and tokens and not self.is_over:
            self._find()

    def _part(self, at: int) -> None:
        """Handle a committed token that differs from the old response at index `at`. It is treated as a substitution:
        the row is assumed to continue in its own old response at index `at` + 1."""
        if self.is_own:
            self.shift = at + 1 - self.length
            self.is_over = at == len(self.old)
        self.at = None

    def _find(self) -> None:
        """Find the row's position in an old response after a divergence. First assume that no token was inserted or
        deleted: then the row's last token must be at the expected index of its own old response. Else search for the
        last 4 tokens in this response, then in those of the group."""
        own, here = self.sources[0], self.length + self.shift
        if 0 < here < len(own) and own[here - 1] == self.last[-1]:
            self._take(own, here, is_own=True)
            return
        for which, tokens in enumerate(self.sources if len(self.last) == _CONTEXT else ()):
            at = _nearest(tokens, self.last, self.length if which else here)
            if at is not None:
                self._take(tokens, at, is_own=not which)
                return

    def _take(self, tokens: np.ndarray, at: int, is_own: bool) -> None:
        self.old, self.at, self.is_own, self.width = tokens.tolist(), at, is_own, _LEAST

    def left(self) -> int:
        """Return the number of tokens that the old response can propose in this round."""
        return 0 if self.at is None else min(self.width, len(self.old) - self.at)

    def propose(self, count: int) -> list[int]:
        self.proposed = count
        return [] if self.at is None else self.old[self.at : self.at + count]


def _nearest(tokens: np.ndarray, last: Iterable[int], near: int) -> int | None:
    """Return the index after the occurrence of `last` in `tokens` that is nearest to the index `near`; None if there is
    no occurrence. An occurrence at the end of `tokens` does not count."""
    first, *others = last
    places = np.flatnonzero(tokens[:-_CONTEXT] == first) + 1
    for token in others:
        places = places[tokens[places] == token] + 1
    return int(places[np.abs(places - near).argmin()]) if len(places) else None


class LookAhead:
    """Per-row store of the position of each active row in its look-ahead draft."""

    def __init__(self, store: AheadStore, vocab_size: int) -> None:
        self.store, self.vocab_size = store, vocab_size
        self._pointers: list[Pointer | None] = []

    def append(self, row: Row, kept: int) -> None:
        group = self.store.group(row.request)
        known = bool(group) and group[0].seed == row.request.seed
        usable = known and all(ahead.is_valid(self.vocab_size) for ahead in group)
        self._pointers.append(Pointer([ahead.tokens for ahead in group], row.tokens) if usable else None)

    def remove(self, place: int, last: int) -> None:
        self._pointers[place] = self._pointers[last]
        self._pointers.pop()

    def commit(self, news: Sequence[Sequence[int]]) -> None:
        """Advance all rows by their new tokens."""
        for pointer, tokens in zip(self._pointers, news, strict=True):
            if pointer:
                pointer.advance(tokens)

    def offers(self) -> list[int]:
        """Return for each row the number of tokens that its old response can propose in this round."""
        return [pointer.left() if pointer else 0 for pointer in self._pointers]

    def propose(self, counts: Sequence[int]) -> list[list[int]]:
        """Return for row i a chain of up to `counts[i]` tokens; [] if the row has no position in an old response."""
        return [p.propose(n) if p else [] for p, n in zip(self._pointers, counts, strict=True)]


class History(AheadStore):
    """Store of the last responses to each prompt, in the driver."""

    # The noise of an earlier epoch is not used again, although its responses would then be nearly exact drafts. The
    # weights were trained on samples of that noise, so with it a token would no longer be a sample of the policy.

    def add(self, responses: Iterable[Response], version: int) -> None:
        """Store the responses of a rollout by the target `version`. They replace earlier responses to their prompts."""
        found = [Ahead.of(response, version, ended=True) for response in responses]
        for prompt in {ahead.prompt for ahead in found}:
            self.forget([*self._groups.get(prompt, ())])
        self.put(found)

    def save(self, folder: Path) -> None:
        """Write all responses to a file in this folder, if there are any."""
        if not self._kept:
            return
        number = {prompt: index for index, prompt in enumerate(self._groups)}
        kept = self._kept.values()
        arrays = {
            "seeds": np.array([ahead.seed for ahead in kept], dtype=np.uint64),
            "versions": np.array([ahead.version for ahead in kept]),
            "prompt_numbers": np.array([number[ahead.prompt] for ahead in kept]),
            **_joined("prompts", [np.array(prompt, dtype=np.int32) for prompt in number]),
            **_joined("responses", [ahead.tokens for ahead in kept]),
        }
        save_file(arrays, folder / _FILE)

    def load(self, folder: Path) -> None:
        """Read the responses from the file in this folder, if there is one."""
        if not (folder / _FILE).is_file():
            return
        arrays = load_file(folder / _FILE)
        prompts = [tuple(prompt.tolist()) for prompt in _split("prompts", arrays)]
        lists = (arrays[name].tolist() for name in ("seeds", "prompt_numbers", "versions"))
        self.put(
            Ahead(seed, prompts[number], tokens, version, True)
            for seed, number, version, tokens in zip(*lists, _split("responses", arrays), strict=True)
        )


def _joined(name: str, lists: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.concatenate(lists), f"{name}_lengths": np.array([len(one) for one in lists])}


def _split(name: str, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    return np.split(arrays[name], np.cumsum(arrays[f"{name}_lengths"])[:-1])
