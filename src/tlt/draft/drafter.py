"""Protocol of drafters. A drafter proposes the next token of each row's draft, with log-probs (log q). `chains.py`
makes the drafts. A new drafter needs one file and one line in `tlt.config.registry`.

Shapes: B active rows, in the engine's order; K candidates per row; V vocabulary size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from tlt.draft.ahead import AheadStore
from tlt.draft.features import FeatureView
from tlt.sampling import SamplingTensors
from tlt.types import Request

if TYPE_CHECKING:
    from tlt.draft.eagle import EagleLayer
    from tlt.models.decoder import Attend, Decoder


class Level(NamedTuple):
    """Last tokens of all rows' drafts so far. The drafter proposes the next ones. The arrays are in NumPy, because
    drafts grow on the host. They are copies, so a drafter that writes to them changes no draft."""

    depth: int
    """number of draft tokens of each row so far"""
    tokens: np.ndarray
    """[B] int64 last token of each row's draft; at depth 0 the root, which is the last committed token"""
    alive: np.ndarray
    """[B] bool: rows whose draft may get another token. Proposals for other rows are ignored."""
    sampling: SamplingTensors
    """sampling parameters of the B requests"""


class Candidates(NamedTuple):
    """Draft log-probs (log q) of each row's next token. `log_q` [B, K] belongs to the token ids `ids` [B, K]. If `ids`
    is None, `log_q` covers the whole vocabulary in order (K = V). Padding has log q -inf."""

    ids: Tensor | None
    log_q: Tensor
    classes: np.ndarray | None = None
    """[B] class of each row's candidates, from 0 to chains.CLASSES - 1, for example by match length. Acceptance is
    counted separately for each class. None: all are of class 0."""


class Drafter(Protocol):
    """A drafter. Rows are in the engine's order. The engine calls `begin` once per rollout. It calls `open`, `commit`
    and `close` when a row is added, advances or leaves, and `predict` once per level in each round, from level 0 on. A
    drafter gets only copies and views, so it can change no token. But a drafter that writes to a view's hidden
    states may spoil the training data of drafters."""

    name: str
    acceptance_rate: float | None
    """last measured acceptance rate of the drafter's first draft token; None if it was never measured"""

    def begin(self, window: FeatureView | None) -> None:
        """Start a rollout, which has no active rows yet. `window` gives the target's hidden states for the last tokens
        of each row; None if the engine keeps none."""
        ...

    def open(self, request: Request, committed: Sequence[int]) -> None:
        """Add a row after the last one. `committed`: its response tokens so far, for example after a preemption."""
        ...

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        """Append the tokens that the engine committed to `row`."""
        ...

    def close(self, row: int, last: int) -> None:
        """Remove `row`. The last row, `last`, takes its place; `last` may be `row` itself."""
        ...

    def predict(self, level: Level) -> Candidates:
        """Return candidates for the next token of each row, with log q under each request's sampling parameters. A row
        may have no candidates."""
        ...


class Sources(NamedTuple):
    """Input of the function `make` of a drafter's module (see `DRAFTERS` in `tlt.config.registry`)."""

    target: Decoder
    layer: EagleLayer | None
    """weights of the learned drafter; None if there is none"""
    store: AheadStore | None = None
    """the engine's store, which has earlier responses to the prompts of its requests"""


@dataclass
class Prefix:
    """Tokens of a row so far, for which a drafter proposes the next one."""

    request: Request
    committed: Sequence[int]
    """committed tokens of the response"""
    drafted: tuple[int, ...]
    """draft tokens after them"""
    state: Any = None
    """the drafter's own state, from `Offer.states`; None if there is no draft token yet"""


class Offer(NamedTuple):
    """Candidates for a list of M prefixes: `ids` and `log_q` are [M, K]. Padding has log q -inf. `states[m][k]` becomes
    the state of prefix m with candidate k appended. `classes[m]` is the class of the candidates of prefix m, as in
    `Candidates`."""

    ids: Tensor | None
    log_q: Tensor
    states: Sequence[Sequence[Any]] | None = None
    classes: Sequence[int] | None = None


@runtime_checkable
class ChainDrafter(Protocol):
    """Drafter that can draft all tokens of each row on the device, without the host."""

    whole_chains: bool
    """whether drafting whole chains is faster on this machine than drafting one token at a time"""

    def draft_chain(self, alive: np.ndarray, sampling: SamplingTensors, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Draft a chain for each row, as repeated calls of `predict` would. Return the tokens [B, depth], and at each
        level the two highest noisy scores [B, depth, 2] (log q plus noise). `alive` [B]: rows to draft for. `noise`
        [B, depth, V]: noise of each level for the whole vocabulary."""
        ...


class DraftCache(Protocol):
    """Access to the target's keys and values, for drafters that attend to them."""

    def draft_pass(self, depth: int) -> tuple[Tensor, Attend]:
        """Return the positions [B, 1] of one token per row, and the attention function of these tokens. Their position
        is `depth` after that of the row's last committed token. The function also stores their keys and values, until
        the target's next pass overwrites them. Call this method once for each depth of a draft, from 0 on."""
        ...


@runtime_checkable
class CacheDrafter(Protocol):
    """A drafter that attends to the target's keys and values."""

    def attach(self, cache: DraftCache) -> None:
        """Keep the engine's cache for the drafter's passes. The engine calls this before `begin`."""
        ...


class PrefixDrafter(ABC):
    """Base class of drafters that work on `Prefix` objects instead of arrays. A subclass implements `propose`, which
    returns candidates for a list of prefixes."""

    name = "prefix"
    acceptance_rate: float | None = None

    def begin(self, window: FeatureView | None) -> None:
        self.rows: list[tuple[Request, list[int]]] = []
        self._prefixes: dict[int, Prefix] = {}  # by row
        self._states: dict[int, dict[int, Any]] = {}

    def open(self, request: Request, committed: Sequence[int]) -> None:
        self.rows.append((request, list(committed)))

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        self.rows[row][1].extend(tokens)

    def close(self, row: int, last: int) -> None:
        self.rows[row] = self.rows[last]
        self.rows.pop()

    @abstractmethod
    def propose(self, prefixes: Sequence[Prefix]) -> Offer: ...

    def predict(self, level: Level) -> Candidates:
        rows = np.flatnonzero(level.alive).tolist()
        if level.depth == 0:
            self._prefixes = {row: Prefix(*self.rows[row], ()) for row in rows}
        else:
            self._prefixes = {row: self._longer(row, int(level.tokens[row])) for row in rows}
        offer = self.propose([*self._prefixes.values()])
        self._states = {}
        if offer.states is not None:
            listed = offer.ids.tolist() if offer.ids is not None else [range(offer.log_q.shape[-1])] * len(rows)
            for row, tokens, states in zip(rows, listed, offer.states, strict=True):
                self._states[row] = dict(zip(tokens, states, strict=False))  # padding has no state
        return _scattered(offer, rows, len(level.alive))

    def _longer(self, row: int, token: int) -> Prefix:
        before, state = self._prefixes[row], self._states.get(row, {}).get(token)
        return Prefix(before.request, before.committed, (*before.drafted, token), state)


def _scattered(offer: Offer, rows: Sequence[int], count: int) -> Candidates:
    """Return `Candidates` for `count` rows from an offer for the rows `rows`."""
    shape, device = (count, offer.log_q.shape[-1]), offer.log_q.device
    log_q = torch.full(shape, -torch.inf, dtype=offer.log_q.dtype, device=device)
    ids = None if offer.ids is None else torch.full(shape, -1, device=device)
    classes = None if offer.classes is None else np.zeros(count, dtype=np.int64)
    log_q[rows] = offer.log_q
    if ids is not None and offer.ids is not None:
        ids[rows] = offer.ids.to(device)
    if classes is not None and offer.classes is not None:
        classes[rows] = offer.classes
    return Candidates(ids, log_q, classes)
