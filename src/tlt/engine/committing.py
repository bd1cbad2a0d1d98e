"""Verification and commit of a round: one target pass over all trees, then each row takes its accepted tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tlt.draft.tree import DraftTree, stack
from tlt.engine.drafters import Drafters
from tlt.engine.runner import Sampled
from tlt.engine.state import RolloutState, Round, count_depth, count_row
from tlt.engine.stops import Stops
from tlt.types import Row


def walk(tree: DraftTree, sampled: Sequence[int]) -> list[int]:
    """Return the nodes on the accepted path, the root first. `sampled[n]` is the target's token at node n. The caller
    commits the sampled token of each node on the path.

    The token sampled at the last node was not in the draft: it is the bonus token. Siblings have distinct tokens and
    parents come before children, so one pass over the nodes suffices.
    """
    path = [0]
    for node in range(1, len(tree.tokens)):
        if tree.parents[node] == path[-1] and tree.tokens[node] == sampled[path[-1]]:
            path.append(node)
    return path


def verify_trees(now: Round, trees: Sequence[DraftTree], rollout: RolloutState) -> tuple[Sequence[DraftTree], Sampled]:
    """Verify all trees in one target pass. Return the trees and the target's tokens.

    If a draft leads to a value that is not finite, repeat the pass without drafts. Otherwise the value could change the
    tokens of other nodes, because a mask does not hide it (0 * NaN is NaN)."""
    sampled = _pass(now, trees, rollout)
    spoiled = _spoiled(now, sampled)
    if spoiled and any(len(tree.tokens) > 1 for tree in trees):
        for place in spoiled:
            rollout.runner.cache.wipe(place, now.lengths[place])
        trees = now.roots()
        sampled = _pass(now, trees, rollout)
    for place in _spoiled(now, sampled):
        now.rows[place].finite = False
    return trees, sampled


def _pass(now: Round, trees: Sequence[DraftTree], rollout: RolloutState) -> Sampled:
    runner, drafted = rollout.runner, any(len(tree.tokens) > 1 for tree in trees)
    # pad a strategy's drafts to one size, so that few CUDA graphs are captured
    stacked = stack(trees, runner.target.device, now.strategy.nodes if runner.graphs and drafted else 1)
    return runner.verify(stacked, now.lengths, rollout.noise, now.positions, now.batch.sampling)


def _spoiled(now: Round, sampled: Sampled) -> list[int]:
    """Return the places of rows whose values were all finite before this pass and no longer are."""
    return [place for place, row in enumerate(now.rows) if row.finite and not sampled.finite[place]]


def commit_tokens(
    now: Round, trees: Sequence[DraftTree], sampled: Sampled, rollout: RolloutState, drafters: Drafters, stops: Stops
) -> list[tuple[Row, str]]:
    """Append the accepted tokens to each row, up to a stop. Remove the finished rows, and return them with their finish
    reasons."""
    drafters.next_round()
    moves: list[tuple[int, int, int]] = []
    entries: list[tuple[int, int, int, int]] = []  # place, node, position, the token that follows
    finished: dict[int, str] = {}
    grown = 0
    for place, (row, tree, start) in enumerate(zip(now.rows, trees, now.lengths, strict=True)):
        path = walk(tree, sampled.tokens[place])
        if len(tree.tokens) > 1 and not tree.ahead:
            drafters.learn(now.strategy.drafter, tree, path)
            count_depth(rollout.stats, now.strategy.drafter, tree, path)
        moves += [(place, start + node, start + i) for i, node in enumerate(path) if node != i]
        reason = stops.append(row, path, sampled, place)
        taken = row.kv_length - start
        grown = max(grown, taken)
        entries += [(place, node, start + i, sampled.tokens[place][node]) for i, node in enumerate(path[:taken])]
        count_row(rollout.stats, row, tree, taken, min(taken, len(path) - 1), now.strategy.drafter)
        drafters.commit(place, row.tokens[-taken:])
        rollout.ahead.commit(place, row.tokens[-taken:])
        if reason:
            finished[place] = reason
    if moves:
        rollout.runner.cache.move(*torch.tensor(moves, device=rollout.runner.target.device).unbind(1))
    if rollout.harvester and sampled.features is not None:
        rollout.harvester.write(sampled.features, entries, grown)
        rollout.harvester.collect(now.rows, finished)
    # the last places first, so that the row which takes a free place has not finished
    return [(rollout.rows.remove(place), reason) for place, reason in reversed(finished.items())]
