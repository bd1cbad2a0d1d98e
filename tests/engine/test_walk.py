"""The walk against a slow recursive twin."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given, settings
from tiny import add_node

from tlt.draft.tree import DraftTree
from tlt.engine.walk import walk

VOCAB = 3  # small, so that walks go deep and the same token stands under many nodes


def tree_of(parents: Sequence[int], tokens: Sequence[int]) -> DraftTree:
    """Siblings stay distinct: a repeated one is left out."""
    tree = DraftTree([0])
    for parent, token in zip(parents, tokens, strict=True):
        parent %= len(tree.tokens)
        if (parent, token) not in zip(tree.parents[1:], tree.tokens[1:], strict=True):
            add_node(tree, parent, token)
    return tree


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 14) -> DraftTree:
    edges = draw(st.lists(st.tuples(st.integers(0, 99), st.integers(0, VOCAB - 1)), max_size=max_nodes))
    return tree_of([parent for parent, _ in edges], [token for _, token in edges])


def slow_walk(tree: DraftTree, sampled: Sequence[int], node: int = 0) -> list[int]:
    for child in range(1, len(tree.tokens)):
        if tree.parents[child] == node and tree.tokens[child] == sampled[node]:
            return [node, *slow_walk(tree, sampled, child)]
    return [node]


@given(tree=trees(), data=st.data())
@settings(max_examples=400, deadline=None)
def test_the_walk_is_its_recursive_twin(tree: DraftTree, data: st.DataObject) -> None:
    count = len(tree.tokens)
    sampled = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=count, max_size=count))
    path = walk(tree, sampled)
    assert path == slow_walk(tree, sampled)
    assert not any(tree.parents[n] == path[-1] and tree.tokens[n] == sampled[path[-1]] for n in range(1, count)), (
        "the walk goes on while it can"
    )


@given(tree=trees(), data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_target_that_agrees_with_a_branch_is_led_down_all_of_it(tree: DraftTree, data: st.DataObject) -> None:
    node = data.draw(st.integers(0, len(tree.tokens) - 1))
    branch = [node]
    while branch[0] != 0:
        branch.insert(0, tree.parents[branch[0]])
    sampled = [VOCAB] * len(tree.tokens)  # a token that stands nowhere in the tree
    for above, below in pairwise(branch):
        sampled[above] = tree.tokens[below]
    assert walk(tree, sampled) == branch


def test_a_token_of_another_branch_is_not_followed() -> None:
    tree = DraftTree([0])
    left, right = add_node(tree, 0, 1), add_node(tree, 0, 2)
    add_node(tree, left, 1)
    below_right = add_node(tree, right, 2)
    assert walk(tree, [1, 2, 2, 0, 0]) == [0, left]
    assert walk(tree, [2, 1, 2, 0, 0]) == [0, right, below_right]


def test_plain_decoding_is_a_root_alone() -> None:
    assert walk(DraftTree([5]), [5]) == [0]
