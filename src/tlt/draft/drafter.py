"""Protocol of drafters. A new drafter needs one file that returns log q for the nodes of a level, and one line in
`tlt.config.registry`. `tree.py` builds the trees.

Shapes: B active rows, in the engine's order; W nodes of a level in each row; K listed candidates; V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from tlt.draft.features import FeatureView
from tlt.sampling import SamplingTensors
from tlt.types import Request

if TYPE_CHECKING:
    from tlt.draft.eagle import EagleLayer
    from tlt.models.decoder import Attend, Decoder


class Level(NamedTuple):
    """The nodes of one level of every row's tree, which the drafter continues. They are NumPy arrays, because trees
    grow on the host. They are copies, so a drafter that writes to them changes no tree."""

    depth: int
    """depth of the nodes. 0: the roots (the last committed tokens), W = 1"""
    tokens: np.ndarray
    """[B, W] int64"""
    parents: np.ndarray
    """[B, W] int64, index of each node's parent among the nodes of the previous level"""
    alive: np.ndarray
    """[B, W] bool. Proposals for other nodes are ignored."""
    sampling: SamplingTensors
    """sampling parameters of the B requests"""


class Candidates(NamedTuple):
    """Values of log q for the next token at each node. `log_q` [B, W, K] belongs to the tokens listed in `ids` [B, W,
    K], or with `ids` None to the whole vocabulary in order (K = V). Padding has log q -inf."""

    ids: Tensor | None
    log_q: Tensor
    classes: np.ndarray | None = None
    """[B, W] class of the draft token, below calibration.CLASSES; each of the drafter's classes is calibrated
    separately (e.g. by match length)"""


class Drafter(Protocol):
    """A drafter. Rows are in the engine's order. In a rollout the engine calls `begin` once, `open`, `commit` and
    `close` when rows are added, advance and leave, and in each round `predict` once per level, from the roots down. A
    drafter gets only copies and views, so no token depends on anything that it can change. But if it writes to the
    hidden states of a view, it may spoil the training data of drafters."""

    name: str
    acceptance_rate: float | None
    """acceptance rate of its first draft token when last measured; None if it never was"""

    def begin(self, window: FeatureView | None) -> None:
        """Start without active rows. `window` gives the target's hidden states of the rows' last tokens; None if the
        engine keeps none."""
        ...

    def open(self, request: Request, committed: Sequence[int]) -> None:
        """Add a row at the end. `committed` are the tokens it has already, after a preemption or a swap of drafters."""
        ...

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        """Append the tokens that the engine committed to `row`."""
        ...

    def close(self, row: int, last: int) -> None:
        """Remove `row`. The last row, `last`, takes its place; `last` may be `row` itself."""
        ...

    def predict(self, level: Level) -> Candidates:
        """Return log q of the tokens that may follow each node, under each request's sampling parameters. A node may
        have no candidates."""
        ...


class Sources(NamedTuple):
    """Inputs from which a drafter may be built: see `tlt.config.registry`."""

    target: Decoder
    layer: EagleLayer | None
    """weights of the learned drafter, if the registry says that this drafter is learned"""
    history_tokens: int
    """limit of the tokens kept from earlier epochs"""


@dataclass
class Node:
    """A node to continue. `path` has the tokens from after the root (the last committed token) down to it."""

    request: Request
    committed: Sequence[int]
    """response so far; its last token is the root"""
    path: tuple[int, ...]
    state: Any = None
    """state with which the drafter continues from this node"""


class Offer(NamedTuple):
    """`Candidates` for a list of M nodes: `ids` and `log_q` are [M, K]. Without a proposal, log q is -inf.
    `states[m][k]` becomes the state of the child of node m that takes candidate k."""

    ids: Tensor | None
    log_q: Tensor
    states: Sequence[Sequence[Any]] | None = None
    classes: Sequence[int] | None = None


@runtime_checkable
class ChainDrafter(Protocol):
    """A drafter that can draft a whole chain for each row without the host."""

    whole_chains: bool
    """whether whole chains are faster on this machine than one level at a time"""

    def draft_chain(self, alive: np.ndarray, sampling: SamplingTensors, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each row what `predict` would lead to, as long as all draft tokens are continued: the tokens [B,
        depth], and the two best scores of each under the noise [B, depth, 2]. `alive` [B]: rows that are continued.
        `noise` [B, depth, V]: that of each level, over the whole vocabulary."""
        ...


class DraftCache(Protocol):
    """The target's keys and values, for drafters that attend to them."""

    def draft_pass(self, depth: int) -> tuple[Tensor, Attend]:
        """Return the positions [B, 1] of one draft token per row, `depth` after its last committed one, and the
        attention of these draft tokens. The attention also stores their keys and values, until the target's next pass
        overwrites them. Call this method once for each depth of a draft, from 0 on."""
        ...


@runtime_checkable
class CacheDrafter(Protocol):
    """A drafter that attends to the target's keys and values."""

    def attach(self, cache: DraftCache) -> None:
        """Take the cache of the engine. The engine calls it before `begin`."""
        ...


class NodeDrafter(ABC):
    """Base class of drafters in plain Python that process one node at a time. They implement `propose`."""

    name = "nodes"
    acceptance_rate: float | None = None

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
        assert parent is not None, "only alive nodes have children"
        state = self._states.get((row, place), {}).get(token)
        return Node(parent.request, parent.committed, (*parent.path, token), state)

    def _scatter(self, offer: Offer, places: Sequence[tuple[int, int]], nodes: tuple[int, ...]) -> Candidates:
        """Place the proposals for the M living nodes, [M, K], among all nodes, [B, W, K]."""
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
