"""The drafter protocol. A new drafter is one file that gives log q for the nodes of a level, and its line in
`tlt.config.registry`; the tree does the rest.

Shapes: B live rows, in the engine's order; W nodes of a level in each row; K listed candidates; V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tlt.draft.features import FeatureView
from tlt.sampling import Law
from tlt.types import Request

if TYPE_CHECKING:
    from tlt.draft.eagle import EagleLayer
    from tlt.models.decoder import Decoder


class Level(NamedTuple):
    """The nodes of one level of every row's tree: what is to be continued. Arrays, as trees grow on the host; copies,
    so that a drafter which writes to them changes no tree."""

    depth: int
    """0: the roots (the last committed tokens), W = 1"""
    tokens: np.ndarray
    """[B, W] int64"""
    parents: np.ndarray
    """[B, W] int64, place of each node's parent among the W of the level before"""
    alive: np.ndarray
    """[B, W] bool; what is proposed for the others is passed over"""
    law: Law
    """of the B requests"""


class Candidates(NamedTuple):
    """log q of the next token at each node. `ids` [B, W, K] lists the tokens that `log_q` [B, W, K] speaks of (None:
    the whole vocabulary, in order); pad with -inf."""

    ids: Tensor | None
    log_q: Tensor
    classes: np.ndarray | None = None
    """[B, W] class of guess, below calibration.CLASSES, calibrated apart (how long the match was, say)"""


class Drafter(Protocol):
    """Rows stand in the engine's order. The calls of a rollout: begin, then open, commit and close as rows come and go,
    and rounds of predict, a level at a time from the roots down. All it is given is its own copy, or a view. What
    it writes into the features of a view may spoil what drafters are trained on; no token depends on anything that a
    drafter can reach."""

    name: str
    agreement: float | None
    """how often its first guess was right when it was made, if that is known"""

    def begin(self, window: FeatureView | None) -> None:
        """No row is live. `window` holds what the target computed for their last tokens, if the engine keeps that."""
        ...

    def open(self, request: Request, committed: Sequence[int]) -> None:
        """A new last row, with the tokens it has already (after a preemption, or when drafters are swapped)."""
        ...

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        """The engine committed these tokens."""
        ...

    def close(self, row: int, last: int) -> None:
        """The request of `row` leaves; that of `last`, the last row, stands there from now on (or was it itself)."""
        ...

    def predict(self, level: Level) -> Candidates:
        """log q, under each request's sampling law, of what follows each node. May list nothing for a node."""
        ...


class Sources(NamedTuple):
    """What a drafter may be made of: see `tlt.config.registry`."""

    target: Decoder
    layer: EagleLayer | None
    """the learned one's weights; there where the drafter's entry says that it is learned"""
    history_tokens: int
    """of earlier epochs that may be kept"""


@dataclass
class Node:
    """A node about to be expanded: the tokens from the root (the last committed one, not listed) down to it."""

    request: Request
    committed: Sequence[int]
    """the response so far, the root last"""
    path: tuple[int, ...]
    state: Any = None
    """whatever the drafter keeps to continue from here"""


class Offer(NamedTuple):
    """As `Candidates`, of M nodes in a list: `ids` and `log_q` [M, K]; `states[m][k]` goes to the child that takes
    candidate k."""

    ids: Tensor | None
    log_q: Tensor
    states: Sequence[Sequence[Any]] | None = None
    classes: Sequence[int] | None = None


class NodeDrafter(ABC):
    """Base of drafters in plain Python that look at one node at a time: they give `propose`."""

    name = "nodes"
    agreement: float | None = None

    def begin(self, window: FeatureView | None) -> None:
        self.rows: list[tuple[Request, list[int]]] = []
        self._level: list[list[Node | None]] = []
        self._states: dict[tuple[int, int], dict[int, Any]] = {}

    def open(self, request: Request, committed: Sequence[int]) -> None:
        self.rows.append((request, list(committed)))

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        self.rows[row][1].extend(tokens)

    def close(self, row: int, last: int) -> None:
        self.rows[row] = self.rows[last]
        self.rows.pop()

    @abstractmethod
    def propose(self, nodes: Sequence[Node]) -> Offer: ...

    def predict(self, level: Level) -> Candidates:
        self._level = self._nodes(level)
        places = [(b, w) for b, row in enumerate(self._level) for w, node in enumerate(row) if node is not None]
        offer = self.propose([node for row in self._level for node in row if node is not None])
        self._states = {}
        if offer.states is not None:
            listed = offer.ids.tolist() if offer.ids is not None else [range(offer.log_q.shape[-1])] * len(places)
            for place, tokens, states in zip(places, listed, offer.states, strict=True):
                self._states[place] = dict(zip(tokens, states, strict=False))  # padding has no state
        return self._scatter(offer, places, level.tokens.shape)

    def _nodes(self, level: Level) -> list[list[Node | None]]:
        alive = level.alive.tolist()
        if level.depth == 0:
            return [
                [Node(request, committed, ()) if on else None]
                for (request, committed), (on,) in zip(self.rows, alive, strict=True)
            ]
        tokens, parents = level.tokens.tolist(), level.parents.tolist()
        return [
            [self._child(b, p, t) if on else None for p, t, on in zip(parents[b], tokens[b], alive[b], strict=True)]
            for b in range(len(tokens))
        ]

    def _child(self, row: int, place: int, token: int) -> Node:
        parent = self._level[row][place]
        assert parent is not None, "only living nodes have children"
        state = self._states.get((row, place), {}).get(token)
        return Node(parent.request, parent.committed, (*parent.path, token), state)

    def _scatter(self, offer: Offer, places: Sequence[tuple[int, int]], nodes: tuple[int, ...]) -> Candidates:
        """[M, K] of the living nodes -> [B, W, K] of all."""
        shape, device = (*nodes, offer.log_q.shape[-1]), offer.log_q.device
        log_q = torch.full(shape, -torch.inf, dtype=offer.log_q.dtype, device=device)
        ids = None if offer.ids is None else torch.full(shape, -1, device=device)
        classes = None if offer.classes is None else np.zeros(nodes, dtype=np.int64)
        if places:
            row, place = torch.tensor(places, device=device).unbind(1)
            log_q[row, place] = offer.log_q
            if ids is not None and offer.ids is not None:
                ids[row, place] = offer.ids.to(device)
            if classes is not None and offer.classes is not None:
                classes[tuple(np.array(places).T)] = offer.classes
        return Candidates(ids, log_q, classes)
