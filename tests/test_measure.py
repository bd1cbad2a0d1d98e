"""Acceptance rate by depth, worked by hand."""

from __future__ import annotations

from tlt.draft.tree import DraftTree
from tlt.engine.committing import walk
from tlt.engine.state import count_depth
from tlt.rl.measure import acceptance_by_depth
from tlt.types import RolloutStats


def chain(length: int) -> DraftTree:
    tree = DraftTree([0])
    tree.tokens, tree.parents = list(range(length + 1)), [0, *range(length)]
    return tree


def test_acceptance_by_depth_of_four_drafts() -> None:
    """The first draft is accepted to its end. The second and third fail at depth 2 and 1. The fourth has one token."""
    stats = RolloutStats()
    for length, sampled in ((3, [1, 2, 3, 9]), (3, [1, 9, 9, 9]), (3, [9, 9, 9, 9]), (1, [1, 9])):
        count_depth(stats, "eagle", chain(length), walk(chain(length), sampled))
    assert stats.accepted_to == {"eagle 3": 1, "eagle 1": 2, "eagle 0": 1}
    assert acceptance_by_depth(stats.verified_to, stats.accepted_to) == {"eagle": {"1": 3 / 4, "2": 1 / 2, "3": 1.0}}


def test_a_tree_counts_its_accepted_path() -> None:
    """The root has two children. The second one is accepted and has no children, so nothing is verified at depth 2."""
    stats, tree = RolloutStats(), DraftTree([0])
    tree.tokens, tree.parents = [0, 5, 6, 7], [0, 0, 0, 1]
    count_depth(stats, "mixed", tree, walk(tree, [6, 7, 9, 9]))
    assert acceptance_by_depth(stats.verified_to, stats.accepted_to) == {"mixed": {"1": 1.0}}


def test_two_workers_are_one_sum() -> None:
    one = RolloutStats(verified_to={"eagle 1": 3, "suffix 1": 1}, accepted_to={"eagle 1": 3, "suffix 0": 1})
    both = one + RolloutStats(verified_to={"eagle 1": 1}, accepted_to={"eagle 0": 1})
    assert acceptance_by_depth(both.verified_to, both.accepted_to) == {"eagle": {"1": 0.75}, "suffix": {"1": 0.0}}
