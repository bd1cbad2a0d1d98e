"""The walk against a slow recursive twin."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import given, settings
from tiny import add_node

from tlt.draft.tree import DraftTree
from tlt.engine.committing import walk

VOCAB = 3  # small, so that walks go deep and the same token stands under many nodes


def tree_of(parents: Sequence[int], tokens: Sequence[int]) -> DraftTree:
    """Return a tree. Siblings stay distinct: a repeated one is left out."""
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
@settings(max_examples=400)
def test_the_walk_equals_its_recursive_twin(tree: DraftTree, data: st.DataObject) -> None:
    count = len(tree.tokens)
    sampled = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=count, max_size=count))
    assert walk(tree, sampled) == slow_walk(tree, sampled)
