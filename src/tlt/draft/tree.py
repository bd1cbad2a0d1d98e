"""Draft trees with shared noise: grow them by levels, keep likely nodes, and stack a batch of trees for one target
pass.

The children of a node are the drafter's best tokens by log q plus the noise of their position. The target adds the same
noise. A chain is a tree with one branch. Node 0 is the root, and a parent has a smaller number than its child.

Shapes: B rows, W nodes per row in a level, k children per node, N nodes per row (smaller trees are padded to the
largest).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlt.attention.backend import TreeBatch
from tlt.draft.calibration import Calibration
from tlt.draft.drafter import Candidates, ChainDrafter, Drafter, Level
from tlt.draft.strategy import Strategy
from tlt.host import to_host
from tlt.sampling import SamplingTensors, gumbel_topk


@dataclass
class DraftTree:
    """Draft tree of one row. Its lists are indexed by node. `chance` is the estimated probability that a node is
    accepted, and `cells` is the node's calibration cell (see `Calibration`; -1 for the root)."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [0])
    depths: list[int] = field(default_factory=lambda: [0])
    chance: list[float] = field(default_factory=lambda: [1.0])
    cells: list[int] = field(default_factory=lambda: [-1])
    ahead: bool = False
    """whether the tree is a look-ahead draft"""

    @classmethod
    def chain(cls, root: int, tokens: Sequence[int]) -> DraftTree:
        """Return a look-ahead draft as a tree. The tree is a chain: `root`, then `tokens`, each with probability 1."""
        count = len(tokens) + 1
        order = list(range(count))
        return cls([root, *tokens], [0, *order[:-1]], order, [1.0] * count, [-1] * count, ahead=True)


class Roots(NamedTuple):
    """Roots of the draft trees of B rows, and the limits that each row sets to its tree."""

    tokens: np.ndarray
    """[B] last committed token of each row"""
    room: np.ndarray
    """[B] maximum number of tokens that each response may still get"""
    stops: np.ndarray
    """[B, S] stop tokens, padded with -1"""
    sampling: SamplingTensors
    """sampling parameters of the B requests, for the drafter"""
    device: torch.device
    """device of the noise, on which candidates are ranked"""


NoiseOf = Callable[[int, Tensor | None], Tensor]
"""Function (depth, token ids [B, W, K] or None) -> noise at each row's next position + depth: [B, W, K] for these ids,
or [B, 1, V] for all tokens."""


class _Inputs(NamedTuple):
    """Arguments of `grow`, for all trees of a round."""

    drafter: Drafter
    roots: Roots
    strategy: Strategy
    noise_of: NoiseOf
    vocab_size: int
    calibration: Calibration


class _Grown(NamedTuple):
    """Candidate nodes of one level, for the trees of all rows. The arrays are [B, M], with M candidates per row. A
    candidate with `chance` 0 is padding. `parents` are indices into all candidates of the row, from the root on."""

    tokens: np.ndarray
    parents: np.ndarray
    chance: np.ndarray
    cells: np.ndarray
    depth: int


def grow(
    drafter: Drafter, roots: Roots, strategy: Strategy, noise_of: NoiseOf, vocab_size: int, calibration: Calibration
) -> list[DraftTree]:
    """Draft a tree for each row. Candidates are ranked on the device. The rest runs in NumPy, because it is small."""
    with np.errstate(invalid="ignore"):  # tokens that may not be drafted have score -inf
        inputs = _Inputs(drafter, roots, strategy, noise_of, vocab_size, calibration)
        return _grow_chains(inputs) if strategy.branching == 1 else _grow_trees(inputs)


def _grow_chains(inputs: _Inputs) -> list[DraftTree]:
    """Draft a chain for each row, as `_grow_trees` does with one child per node. The operations that choose among
    children are skipped, because on a CPU starting them takes as long as the drafter itself."""
    drafter, roots, strategy, noise_of, _, calibration = inputs
    most = min(strategy.depth, strategy.verify_tokens - 1)
    whole = None
    if isinstance(drafter, ChainDrafter) and drafter.whole_chains:
        noise = torch.cat([noise_of(depth, None) for depth in range(most)], dim=1)
        whole = to_host(*drafter.draft_chain(roots.room > 1, roots.sampling, noise))
    tokens, none = roots.tokens[:, None], np.zeros((len(roots.tokens), 1), dtype=np.int64)
    reach, alive = np.ones(none.shape), roots.room[:, None] > 1
    levels = [(tokens, reach, none - 1)]
    for depth in range(most):
        if not alive.any():
            break
        if whole is None:
            candidates = drafter.predict(Level(depth, tokens.copy(), none.copy(), alive.copy(), roots.sampling))
            tokens, cells, valid = _children(inputs, candidates, tokens.shape, depth)
        else:
            tokens, scores = whole[0][:, depth, None, None], whole[1][:, depth, None]
            cells, valid = calibration.cells(None, depth, scores, 1), np.isfinite(scores[..., :1])
        tokens, cells = tokens[..., 0], cells[..., 0]
        reach = reach * alive * valid[..., 0] * calibration.table[cells]
        reach *= reach >= strategy.min_chance
        levels.append((tokens, reach, cells))
        alive = _is_continued(tokens, reach, depth + 1, roots)
    drafted, chance, cells = (np.concatenate(columns, axis=1) for columns in zip(*levels, strict=True))
    order = list(range(len(levels)))
    return [
        DraftTree(row[:n], [max(0, i - 1) for i in order[:n]], order[:n], likely[:n], where[:n])
        for row, likely, where, n in zip(
            drafted.tolist(), chance.tolist(), cells.tolist(), (chance > 0).sum(1).tolist(), strict=True
        )
    ]


def _grow_trees(inputs: _Inputs) -> list[DraftTree]:
    drafter, roots, strategy, _, _, calibration = inputs
    B, tokens = len(roots.tokens), roots.tokens[:, None]
    rows = np.arange(B)[:, None]
    chance, numbers, count = np.ones((B, 1)), np.zeros((B, 1), dtype=np.int64), 1
    grown = [_Grown(tokens, numbers, chance, numbers - 1, 0)]
    parents, alive = numbers, roots.room[:, None] > 1
    for depth in range(strategy.depth):
        if not alive.any():
            break
        candidates = drafter.predict(Level(depth, tokens.copy(), parents.copy(), alive.copy(), roots.sampling))
        tokens, cells, valid = _children(inputs, candidates, tokens.shape, depth)
        reach = (chance * alive)[..., None] * calibration.table[cells] * valid
        reach *= reach >= strategy.min_chance
        k, tokens, chance, cells = cells.shape[-1], *(x.reshape(B, -1) for x in (tokens, reach, cells))
        grown.append(_Grown(tokens, np.repeat(numbers, k, axis=1), chance, cells, depth + 1))
        # the likeliest of each row's new nodes are continued, if they can still be among the tokens to verify
        picks = np.arange(chance.shape[1])[None].repeat(B, axis=0)
        if chance.shape[1] > strategy.branching:
            picks = np.argsort(-chance, axis=1, kind="stable")[:, : strategy.branching]
            tokens, chance = tokens[rows, picks], chance[rows, picks]
        numbers, count = picks + count, count + cells.shape[1]
        alive = _is_continued(tokens, chance, depth + 1, roots)
        if count > strategy.verify_tokens:
            alive &= chance >= _least(grown, strategy.verify_tokens)
        parents = picks // k
    return _cut(grown, strategy.verify_tokens)


def _children(
    inputs: _Inputs, candidates: Candidates, nodes: tuple[int, ...], depth: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the best candidates under the noise for each of the `nodes` (B, W): tokens, calibration cells, and whether
    they may be children, [B, W, k] each. This is the only place in a level where the host waits for the device."""
    _, roots, strategy, noise_of, vocab_size, calibration = inputs
    _check_shapes(candidates, nodes, vocab_size)
    ids = None if candidates.ids is None else candidates.ids.to(roots.device)
    best = gumbel_topk(candidates.log_q.to(roots.device), noise_of(depth, ids), k=strategy.branching + 1)
    tokens = best.picks if ids is None else ids.gather(-1, best.picks)
    scores, tokens = to_host(best.scores, tokens[..., : strategy.branching])
    valid = np.isfinite(scores[..., : strategy.branching])
    if ids is not None:
        valid &= (tokens >= 0) & (tokens < vocab_size)
        same = (tokens[..., :, None] == tokens[..., None, :]) & valid[..., None, :]
        valid &= ~np.tril(same, -1).any(-1)
    return tokens, calibration.cells(candidates.classes, depth, scores, strategy.branching), valid


def _check_shapes(candidates: Candidates, nodes: tuple[int, ...], vocab_size: int) -> None:
    """Raise ValueError for candidates of a wrong shape or type, because NumPy would broadcast them to wrong nodes."""
    ids, log_q, classes = candidates
    width = (vocab_size,) if ids is None else tuple(ids.shape[2:])
    if tuple(log_q.shape) != (*nodes, *width) or (ids is not None and tuple(ids.shape) != tuple(log_q.shape)):
        raise ValueError(
            f"Candidates.log_q must have shape {(*nodes, *width)}, not {tuple(log_q.shape)}, and ids the same if given"
        )
    if ids is not None and ids.dtype != torch.int64:
        raise ValueError(f"Candidates.ids must be int64, not {ids.dtype}")
    if classes is not None and classes.shape != nodes:
        raise ValueError(f"Candidates.classes must have shape {nodes}, not {classes.shape}")


def _is_continued(tokens: np.ndarray, chance: np.ndarray, depth: int, roots: Roots) -> np.ndarray:
    """Return which nodes may get children, [B, W]. A stop token gets none. The last token of a response needs no draft,
    because it is the bonus token of the pass."""
    return (chance > 0) & (roots.room[:, None] > depth + 1) & (tokens[..., None] != roots.stops[:, None, :]).all(-1)


def _least(grown: Sequence[_Grown], most: int) -> np.ndarray:
    """Return the chance [B, 1] of the `most`-th likeliest node of each row so far."""
    so_far = np.concatenate([level.chance for level in grown], axis=1)
    return -np.partition(-so_far, most - 1, axis=1)[:, most - 1, None]


def _cut(grown: Sequence[_Grown], most: int) -> list[DraftTree]:
    """Return a tree of each row's `most` likeliest nodes. The kept nodes are a tree, because a parent is likelier than
    its child."""
    tokens, parents, chance, cells = (np.concatenate(columns, axis=1) for columns in list(zip(*grown, strict=True))[:4])
    depths = [level.depth for level in grown for _ in range(level.tokens.shape[1])]
    best = np.argsort(-chance, axis=1, kind="stable")[:, :most]
    counts = (chance[np.arange(len(best))[:, None], best] > 0).sum(1).tolist()
    trees = []
    for row, count in enumerate(counts):
        kept = np.sort(best[row, :count])
        place = {node: i for i, node in enumerate(kept.tolist())}
        trees.append(
            DraftTree(
                tokens[row, kept].tolist(),
                [place[parent] for parent in parents[row, kept].tolist()],
                [depths[node] for node in place],
                chance[row, kept].tolist(),
                cells[row, kept].tolist(),
            )
        )
    return trees


def stack(trees: Sequence[DraftTree], device: torch.device, nodes: int = 1) -> TreeBatch:
    """Stack the trees of all rows, padded to the size of the largest tree and to at least `nodes` nodes. A padding node
    is a child of the node before it, and is never accepted. On a CPU, padding is not computed."""
    B, N = len(trees), max(nodes, *(len(tree.tokens) for tree in trees))
    if N == 1:
        alone = torch.tensor([tree.tokens for tree in trees], device=device)
        return TreeBatch(alone, torch.zeros_like(alone), None)
    chain = np.maximum(np.arange(N) - 1, 0)
    tokens, depths = np.zeros((2, B, N), dtype=np.int64)
    parents = np.tile(chain, (B, 1))
    for b, tree in enumerate(trees):
        count = len(tree.tokens)
        tokens[b, :count], depths[b, :count], parents[b, :count] = tree.tokens, tree.depths, tree.parents
    real = np.flatnonzero(np.arange(N) < np.array([[len(tree.tokens)] for tree in trees]))
    picked = torch.from_numpy(real) if device.type == "cpu" and len(real) < B * N else None
    batch = TreeBatch(torch.from_numpy(tokens).to(device), torch.from_numpy(depths).to(device), None, picked)
    if (parents == chain).all():
        return batch
    visible = np.tile(np.eye(N, dtype=bool), (B, 1, 1))
    for n in range(1, N):  # a parent has a smaller number, so its row of `visible` is complete
        visible[:, n] |= visible[np.arange(B), parents[:, n]]
    return batch._replace(visible=torch.from_numpy(visible).to(device))
