"""Shared-noise draft trees: grow level by level, keep what is likely to be reached, and stack a batch for one target
pass.

The children of a node are the drafter's best tokens after the noise of that position is added (the same noise the
target will add). A chain is a tree with one branch. Nodes are numbered so that a parent comes before its children;
node 0 is the root.
Shapes: B rows, N nodes a row (the largest tree; the others are padded), M nodes of a level.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlt.draft.drafter import Candidates, Drafter, Node
from tlt.sampling import rank
from tlt.types import Request


class Strategy(NamedTuple):
    """How to speculate in a round; `verify_tokens` counts the root, so 1 is plain decoding."""

    depth: int
    branching: int
    verify_tokens: int


@dataclass
class DraftTree:
    """One row's tree; lists are indexed by node. `chance` is the estimated chance that the target's walk reaches the
    node."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [0])
    depths: list[int] = field(default_factory=lambda: [0])
    chance: list[float] = field(default_factory=lambda: [1.0])

    def add(self, parent: int, token: int, chance: float) -> int:
        self.tokens.append(token)
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
) -> list[DraftTree]:
    """Draft a tree for each row (request, committed tokens; the prompt's last token is the root of a new response)."""
    trees = [DraftTree([committed[-1] if committed else request.prompt.token_ids[-1]]) for request, committed in rows]
    frontier = [(row, 0, Node(request, committed, ())) for row, (request, committed) in enumerate(rows)]
    for depth in range(strategy.depth):
        frontier = [entry for entry in frontier if _goes_on(entry[2])]
        if not frontier:
            break
        candidates = drafter.predict([node for _, _, node in frontier])
        grown = _expand(trees, frontier, candidates, strategy.branching, noise_of, depth, vocab_size)
        frontier = _likeliest(trees, grown, strategy)
    return [tree.keep_best(strategy.verify_tokens) for tree in trees]


def _goes_on(node: Node) -> bool:
    """Nothing follows a stop token; and the last token of a response needs no draft, the pass before gives it as its
    bonus."""
    params = node.request.sampling
    ended = bool(node.path) and node.path[-1] in params.stop_token_ids
    return not ended and len(node.committed) + len(node.path) + 1 < params.max_new_tokens


_Frontier = list[tuple[int, int, Node]]  # (row, node number, node)


def _expand(
    trees: list[DraftTree],
    frontier: _Frontier,
    candidates: Candidates,
    branching: int,
    noise_of: NoiseOf,
    depth: int,
    vocab_size: int,
) -> _Frontier:
    """Add the best children of each frontier node to its tree; what a drafter may not propose is passed over here."""
    noise = noise_of([row for row, _, _ in frontier], [depth] * len(frontier), candidates.ids)
    best = rank(candidates.log_q, noise, k=branching + 1)
    ids = best.picks if candidates.ids is None else candidates.ids.gather(-1, best.picks)
    grown: _Frontier = []
    for m, (scores, tokens, picks) in enumerate(
        zip(best.scores.tolist(), ids.tolist(), best.picks.tolist(), strict=True)
    ):
        row, number, node = frontier[m]
        taken: set[int] = set()
        for k, (score, token, pick) in enumerate(zip(scores, tokens, picks, strict=True)):
            if k == branching or not math.isfinite(score):
                break  # NaN and padding rank nothing behind them
            if token in taken or not 0 <= token < vocab_size:
                continue
            taken.add(token)
            gap = score - scores[k + 1] if k + 1 < len(scores) else math.inf
            child = trees[row].add(number, token, agreement(k, scores[0] - score, gap))
            state = candidates.states[m][pick] if candidates.states is not None else None
            grown.append((row, child, Node(node.request, node.committed, (*node.path, token), state)))
    return grown


def agreement(place: int, behind: float, gap: float) -> float:
    """Chance that the target takes this child: from its place among siblings and the gaps of the noisy scores.

    `behind` is its distance from the best sibling, `gap` its lead over the next. Given the noise, these say how
    likely the target's slightly different law turns the order; log q itself says almost nothing more.
    """
    lead = gap if place == 0 else -behind
    return 1.0 / (1.0 + math.exp(-1.2 * min(lead, 20.0) - 0.3)) if place == 0 else 0.5 * math.exp(lead) / (1 + place)


def _likeliest(trees: list[DraftTree], grown: _Frontier, strategy: Strategy) -> _Frontier:
    """Of each row's new nodes the `branching` likeliest go on, if they can still be among the tokens to verify."""
    by_row: dict[int, _Frontier] = {}
    for entry in grown:
        by_row.setdefault(entry[0], []).append(entry)
    kept: _Frontier = []
    for row, entries in by_row.items():
        tree = trees[row]
        entries.sort(key=lambda entry: -tree.chance[entry[1]])
        bar = (
            sorted(tree.chance, reverse=True)[: strategy.verify_tokens][-1]
            if len(tree.chance) >= strategy.verify_tokens
            else 0.0
        )
        kept += [entry for entry in entries[: strategy.branching] if tree.chance[entry[1]] > bar or bar == 0.0]
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
