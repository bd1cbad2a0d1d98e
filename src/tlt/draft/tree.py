"""Shared-noise draft trees: grow level by level, keep what is likely to be reached, and stack a batch for one target
pass.

The children of a node are the drafter's best tokens after the noise of that position is added (the same noise the
target will add). A chain is a tree with one branch. Nodes are numbered so that a parent comes before its children;
node 0 is the root.
Shapes: B rows, N nodes a row (the largest tree; the others are padded), M nodes of a level.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlt.draft.calibration import Calibration, Cell, cell
from tlt.draft.drafter import Candidates, Drafter, Node
from tlt.sampling import rank
from tlt.types import Request


class Strategy(NamedTuple):
    """How to speculate in a round; `verify_tokens` counts the root, so 1 is plain decoding."""

    depth: int
    branching: int
    verify_tokens: int
    min_chance: float = 0.0
    """a node less likely to be reached than this is not verified"""


@dataclass
class DraftTree:
    """One row's tree; lists are indexed by node. `chance` is the estimated chance that the target's walk reaches the
    node."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [0])
    depths: list[int] = field(default_factory=lambda: [0])
    chance: list[float] = field(default_factory=lambda: [1.0])
    cells: list[Cell | None] = field(default_factory=lambda: [None])
    """where the calibration counts each node"""

    def add(self, parent: int, token: int, chance: float, where: Cell | None = None) -> int:
        self.tokens.append(token)
        self.cells.append(where)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.chance.append(self.chance[parent] * chance)
        return len(self.tokens) - 1

    def keep_best(self, count: int) -> DraftTree:
        """The `count` likeliest nodes; a parent is never less likely than its child, so what is kept is a tree."""
        if len(self.tokens) <= count:
            return self
        kept = sorted(sorted(range(len(self.tokens)), key=lambda n: (-self.chance[n], n))[:count])
        place = {node: i for i, node in enumerate(kept)}
        return DraftTree(
            [self.tokens[n] for n in kept],
            [place[self.parents[n]] for n in kept],
            [self.depths[n] for n in kept],
            [self.chance[n] for n in kept],
            [self.cells[n] for n in kept],
        )


class TreeBatch(NamedTuple):
    """Trees of B rows, padded to N nodes. `visible` [B, N, N]: node n sees node m, its ancestor or itself (None if N
    = 1)."""

    tokens: Tensor
    depths: Tensor
    visible: Tensor | None


NoiseOf = Callable[[Sequence[int], Sequence[int], Tensor | None], Tensor]
"""(rows, depths, ids or None) -> noise [M, K] at each row's next position + depth, for the listed ids or the whole
vocabulary"""


def grow(
    drafter: Drafter,
    rows: Sequence[tuple[Request, Sequence[int]]],
    strategy: Strategy,
    noise_of: NoiseOf,
    vocab_size: int,
    calibration: Calibration,
) -> list[DraftTree]:
    """Draft a tree for each row (request, committed tokens; the prompt's last token is the root of a new response)."""
    trees = [DraftTree([committed[-1] if committed else request.prompt.token_ids[-1]]) for request, committed in rows]
    frontier = [_Leaf(row, 0, Node(request, committed, ())) for row, (request, committed) in enumerate(rows)]
    for depth in range(strategy.depth):
        frontier = [leaf for leaf in frontier if _goes_on(leaf.node)]
        if not frontier:
            break
        candidates = drafter.predict([leaf.node for leaf in frontier])
        noise = noise_of([leaf.row for leaf in frontier], [depth] * len(frontier), candidates.ids)
        grown: list[_Leaf] = []
        for leaf, proposals in zip(
            frontier, _proposals(candidates, noise, strategy.branching, vocab_size), strict=True
        ):
            grown += _add_children(trees[leaf.row], leaf, proposals, strategy, calibration)
        frontier = _likeliest(trees, grown, strategy)
    return [tree.keep_best(strategy.verify_tokens) for tree in trees]


class _Leaf(NamedTuple):
    """A node that may be expanded: the row it belongs to and its number in that row's tree."""

    row: int
    number: int
    node: Node


class _Proposal(NamedTuple):
    token: int
    behind: float  # distance from the best sibling's noisy score
    gap: float  # lead over the next one
    kind: int
    state: Any


def _goes_on(node: Node) -> bool:
    """Nothing follows a stop token; and the last token of a response needs no draft: the pass before gives it."""
    params = node.request.sampling
    ended = bool(node.path) and node.path[-1] in params.stop_token_ids
    return not ended and len(node.committed) + len(node.path) + 1 < params.max_new_tokens


def _proposals(candidates: Candidates, noise: Tensor, branching: int, vocab_size: int) -> Iterator[list[_Proposal]]:
    """For each node its best children, best first; what a drafter may not propose is passed over here."""
    best = rank(candidates.log_q, noise, k=branching + 1)
    ids = best.picks if candidates.ids is None else candidates.ids.gather(-1, best.picks)
    for m, (scores, tokens, picks) in enumerate(
        zip(best.scores.tolist(), ids.tolist(), best.picks.tolist(), strict=True)
    ):
        found: dict[int, _Proposal] = {}
        for k, (score, token, pick) in enumerate(zip(scores, tokens, picks, strict=True)):
            if k == branching or not math.isfinite(score):
                break  # NaN and padding rank nothing behind them
            if 0 <= token < vocab_size and token not in found:
                gap = score - scores[k + 1] if k + 1 < len(scores) else math.inf
                state = candidates.states[m][pick] if candidates.states is not None else None
                kind = candidates.kinds[m] if candidates.kinds is not None else 0
                found[token] = _Proposal(token, scores[0] - score, gap, kind, state)
        yield list(found.values())


def _add_children(
    tree: DraftTree, leaf: _Leaf, proposals: Sequence[_Proposal], strategy: Strategy, calibration: Calibration
) -> Iterator[_Leaf]:
    parent = leaf.node
    for place, p in enumerate(proposals):
        where = cell(p.kind, len(parent.path), place, p.behind, p.gap)
        chance = calibration.chance(where)
        if tree.chance[leaf.number] * chance >= strategy.min_chance:
            number = tree.add(leaf.number, p.token, chance, where)
            yield _Leaf(leaf.row, number, Node(parent.request, parent.committed, (*parent.path, p.token), p.state))


def _likeliest(trees: list[DraftTree], grown: Sequence[_Leaf], strategy: Strategy) -> list[_Leaf]:
    """Of each row's new nodes the `branching` likeliest go on, if they can still be among the tokens to verify."""
    by_row: dict[int, list[_Leaf]] = {}
    for leaf in grown:
        by_row.setdefault(leaf.row, []).append(leaf)
    kept: list[_Leaf] = []
    for row, leaves in by_row.items():
        chance, full = trees[row].chance, len(trees[row].chance) >= strategy.verify_tokens
        bar = sorted(chance, reverse=True)[strategy.verify_tokens - 1] if full else -1.0
        leaves.sort(key=lambda leaf: -chance[leaf.number])
        kept += [leaf for leaf in leaves[: strategy.branching] if chance[leaf.number] > bar]
    return kept


def stack(trees: Sequence[DraftTree], device: torch.device) -> TreeBatch:
    """Pad to the largest tree. A padding node sees only itself, and no walk reaches it."""
    B, N = len(trees), max(len(tree.tokens) for tree in trees)
    tokens = np.zeros((B, N), dtype=np.int64)
    depths = np.zeros((B, N), dtype=np.int64)
    for b, tree in enumerate(trees):
        tokens[b, : len(tree.tokens)] = tree.tokens
        depths[b, : len(tree.depths)] = tree.depths
    if N == 1:
        return TreeBatch(torch.from_numpy(tokens).to(device), torch.from_numpy(depths).to(device), None)
    visible = np.zeros((B, N, N), dtype=bool)
    for b, tree in enumerate(trees):
        for n, parent in enumerate(tree.parents):
            visible[b, n] = visible[b, parent]  # parents come first, so theirs is complete
            visible[b, n, n] = True
        visible[b, range(len(tree.parents), N), range(len(tree.parents), N)] = True
    return TreeBatch(*(torch.from_numpy(a).to(device) for a in (tokens, depths, visible)))
