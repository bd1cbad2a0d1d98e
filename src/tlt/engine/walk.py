"""Acceptance of draft tokens: the path from the root along the tokens that the target sampled."""

from __future__ import annotations

from collections.abc import Sequence

from tlt.draft.tree import DraftTree


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
