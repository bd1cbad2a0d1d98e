"""Protocol of drafters. A drafter proposes children for the nodes of draft trees, one level at a time, with their
log-probs (log q). `tree.py` builds the trees. A new drafter needs one file and one line in `tlt.config.registry`.

Shapes: B active rows, in the engine's order; W nodes per row in a level; K candidates per node; V vocabulary size.
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
    """Nodes of one level of all rows' draft trees. The drafter proposes their children. The arrays are in NumPy,
    because trees grow on the host. They are copies, so a drafter that writes to them changes no tree."""

    depth: int
    """depth of the nodes; level 0 has one node per row (W = 1), the root, which is the last committed token"""
    tokens: np.ndarray
    """[B, W] int64 token ids of the nodes"""
    parents: np.ndarray
    """[B, W] int64, index of each node's parent among the nodes of the previous level"""
    alive: np.ndarray
    """[B, W] bool: nodes that may get children. Proposals for other nodes are ignored."""
    sampling: SamplingTensors
    """sampling parameters of the B requests"""


class Candidates(NamedTuple):
    """Draft log-probs (log q) of the next token at each node. `log_q` [B, W, K] belongs to the token ids `ids`
    [B, W, K]. If `ids` is None, `log_q` covers the whole vocabulary in order (K = V). Padding has log q -inf."""

    ids: Tensor | None
    log_q: Tensor
    classes: np.ndarray | None = None
    """[B, W] class of the draft tokens proposed at each node, from 0 to calibration.CLASSES - 1, for example by match
    length. Acceptance is counted separately for each class. None: all are of class 0."""


class Drafter(Protocol):
    """A drafter. Rows are in the engine's order. The engine calls `begin` once per rollout. It calls `open`, `commit`
    and `close` when a row is added, advances or leaves, and `predict` once per level in each round, from the roots
    down. A drafter gets only copies and views, so it can change no token. But a drafter that writes to a view's hidden
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
        """Return candidates for the token after each node, with log q under each request's sampling parameters. A node
        may have no candidates."""
        ...


class Sources(NamedTuple):
    """Input of the function `make` of a drafter's module (see `DRAFTERS` in `tlt.config.registry`)."""

    target: Decoder
    layer: EagleLayer | None
    """weights of the learned drafter; None if there is none"""
    history_tokens: int
    """Maximum number of tokens (of prompts and responses) that the suffix drafter keeps. It drops the oldest tokens
    first, but no tokens of active requests."""


@dataclass
class Node:
    """Node of a draft tree whose children a drafter proposes. `path` has the draft tokens from the root's child down to
    this node. The root is the last committed token."""

    request: Request
    committed: Sequence[int]
    """response tokens so far; the last one is the root"""
    path: tuple[int, ...]
    state: Any = None
    """the drafter's own state at this node, from `Offer.states`; None at a root"""


class Offer(NamedTuple):
    """Candidates for a list of M nodes: `ids` and `log_q` are [M, K]. Padding has log q -inf. `states[m][k]` becomes
    the state of the child of node m that takes candidate k. `classes[m]` is the class of the candidates of node m, as
    in `Candidates`."""

    ids: Tensor | None
    log_q: Tensor
    states: Sequence[Sequence[Any]] | None = None
    classes: Sequence[int] | None = None


@runtime_checkable
class ChainDrafter(Protocol):
    """Drafter that can draft a whole chain for each row on the device, without the host."""

    whole_chains: bool
    """whether drafting whole chains is faster on this machine than drafting one level at a time"""

    def draft_chain(self, alive: np.ndarray, sampling: SamplingTensors, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Draft a chain for each row, as repeated calls of `predict` would. Return the tokens [B, depth], and at each
        level the two highest noisy scores [B, depth, 2] (log q plus noise). `alive` [B]: rows to draft for. `noise`
        [B, depth, V]: noise of each level for the whole vocabulary."""
        ...


class DraftCache(Protocol):
    """Access to the target's keys and values, for drafters that attend to them."""

    def draft_pass(self, depth: int) -> tuple[Tensor, Attend]:
        """Return the positions [B, 1] of one node per row, and the attention function of these nodes. A node's position
        is `depth` after that of the row's last committed token. The function also stores the nodes' keys and values,
        until the target's next pass overwrites them. Call this method once for each depth of a draft, from 0 on."""
        ...


@runtime_checkable
class CacheDrafter(Protocol):
    """A drafter that attends to the target's keys and values."""

    def attach(self, cache: DraftCache) -> None:
        """Keep the engine's cache for the drafter's passes. The engine calls this before `begin`."""
        ...


class NodeDrafter(ABC):
    """Base class of drafters that work on `Node` objects instead of arrays. A subclass implements `propose`, which
    returns candidates for a list of nodes."""

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
        """Return `Candidates` [B, W, K] for all nodes from an offer [M, K]. `places`: (row, index) of its M nodes."""
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
