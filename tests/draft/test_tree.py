"""Draft trees: growth, selection of nodes, and the nodes that each node attends to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tiny import add_node
from torch import Tensor

from tlt.draft.calibration import Calibration
from tlt.draft.drafter import Candidates, Drafter, Level, Node, NodeDrafter, Offer
from tlt.draft.strategy import Strategy
from tlt.draft.tree import DraftTree, NoiseOf, Roots, _grow_trees, grow, stack
from tlt.engine.sampling_table import sampling_tensors
from tlt.types import Prompt, Request, SamplingParams

CPU = torch.device("cpu")
VOCAB = 7
STRATEGIES = st.builds(
    Strategy, st.just("table"), st.integers(1, 5), st.integers(1, 4), st.integers(2, 12), st.sampled_from([0.0, 0.2])
)


def request(new_tokens: int = 50) -> Request:
    return Request(Prompt(0, "", (3, 1)), 0, 0, 0, SamplingParams(max_new_tokens=new_tokens))


def noise_at(row: int, depth: int) -> list[float]:
    """Return a number for each token."""
    return [3 * math.sin((31 * row + 17 * depth) * 1.7 + token * 2.3) for token in range(VOCAB)]


def noise_of(rows: int) -> NoiseOf:
    """Return noise like the engine's, which is finite for any id."""

    def noise(depth: int, ids: Tensor | None) -> Tensor:
        table = torch.tensor([noise_at(row, depth) for row in range(rows)])[:, None]
        return table if ids is None else table.expand(-1, ids.shape[1], -1).gather(2, ids.clamp(0, VOCAB - 1))

    return noise


class TableDrafter(NodeDrafter):
    """Drafter whose log q at a node is a function of the path in its row. `states` carry the path, to check that they
    reach the child."""

    name = "table"

    def __init__(self, seed: int, listed: bool, garbage: bool = False) -> None:
        self.seed, self.listed, self.garbage = seed, listed, garbage

    def row(self, node: Node) -> tuple[list[int], list[float]]:
        """Return ids and log q of a node."""
        generator = torch.Generator().manual_seed(hash((self.seed, node.path)) % 2**31)
        ids = torch.randperm(VOCAB, generator=generator)[:5].tolist() if self.listed else list(range(VOCAB))
        scores = torch.randn(len(ids), generator=generator).tolist()
        if self.garbage:
            for k, kind in enumerate(torch.randint(8, (len(ids),), generator=generator).tolist()):
                scores[k] = {0: math.nan, 1: -math.inf, 2: math.inf}.get(kind, scores[k])
                ids[k] = {3: -1, 4: VOCAB, 5: 10**9, 6: ids[0]}.get(kind, ids[k]) if self.listed else ids[k]
        return ids, scores

    def propose(self, nodes: Sequence[Node]) -> Offer:
        assert all(node.state in (None, node.path) for node in nodes)
        offers = [self.row(node) for node in nodes]
        states = [[(*node.path, token) for token in ids] for node, (ids, _) in zip(nodes, offers, strict=True)]
        ids = torch.tensor([ids for ids, _ in offers]) if self.listed else None
        return Offer(ids, torch.tensor([scores for _, scores in offers]), states)


def trees_of(
    drafter: Drafter,
    rows: Sequence[tuple[Request, Sequence[int]]],
    strategy: Strategy,
    known: Calibration | None = None,
) -> list[DraftTree]:
    drafter.begin(None)
    for asked, committed in rows:
        drafter.open(asked, committed)
    tokens = [committed[-1] if committed else asked.prompt.token_ids[-1] for asked, committed in rows]
    room = [asked.sampling.max_new_tokens - len(committed) for asked, committed in rows]
    stops = [[*asked.sampling.stop_token_ids, -1, -1][:2] for asked, _ in rows]
    sampling = sampling_tensors([asked.sampling for asked, _ in rows], CPU)
    roots = Roots(np.array(tokens), np.array(room), np.array(stops), sampling, CPU)
    return grow(drafter, roots, strategy, noise_of(len(rows)), VOCAB, known or Calibration())


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree.tokens)):
        out.append((*out[tree.parents[node]], tree.tokens[node]))
    return out


def check_sound(tree: DraftTree, strategy: Strategy) -> None:
    count = len(tree.tokens)
    assert len(tree.parents) == len(tree.depths) == len(tree.chance) == len(tree.cells) == count
    assert count <= strategy.verify_tokens
    assert (tree.parents[0], tree.depths[0]) == (0, 0)
    for node in range(1, count):
        parent = tree.parents[node]
        assert parent < node, "parents stand before their children"
        assert tree.depths[node] == tree.depths[parent] + 1 <= strategy.depth
        assert strategy.min_chance <= tree.chance[node] <= tree.chance[parent]
        assert 0 <= tree.tokens[node] < VOCAB
        assert isinstance(tree.tokens[node], int)
    assert len(set(paths(tree))) == count, "siblings are distinct"
    for node in range(count):
        assert tree.parents[1:].count(node) <= strategy.branching


@given(strategy=STRATEGIES, seed=st.integers(0, 10**6), listed=st.booleans(), garbage=st.booleans())
@settings(max_examples=150)
def test_a_tree_is_valid_whatever_the_drafter_proposes(
    strategy: Strategy, seed: int, listed: bool, garbage: bool
) -> None:
    rows = [(request(), [4]), (request(), []), (request(), [2, 6])]
    grown = trees_of(TableDrafter(seed, listed, garbage), rows, strategy)
    assert [tree.tokens[0] for tree in grown] == [4, 1, 6], "the root is the last token committed, or the prompt's last"
    for tree in grown:
        check_sound(tree, strategy)


def test_a_token_that_is_proposed_twice_is_drafted_once() -> None:
    class Twice(TableDrafter):
        def row(self, node: Node) -> tuple[list[int], list[float]]:
            return [2, 2, 5], [1.0, 1.0, -9.0]

    (tree,) = trees_of(Twice(0, listed=True), [(request(), [4])], Strategy("table", 1, 2, 12))
    assert tree.tokens == [4, 2]


@given(seed=st.integers(0, 10**6), listed=st.booleans(), branching=st.integers(1, 4))
@settings(max_examples=100)
def test_children_are_the_top_k_under_the_noise(seed: int, listed: bool, branching: int) -> None:
    drafter, everything = TableDrafter(seed, listed), Strategy("table", 3, branching, 1000)
    committed = [5]
    (tree,) = trees_of(drafter, [(request(), committed)], everything)
    where = paths(tree)
    expanded = {tree.parents[node] for node in range(1, len(tree.tokens))}
    assert 0 in expanded
    for node in expanded:
        ids, scores = drafter.row(Node(request(), committed, where[node]))
        noise = noise_at(0, tree.depths[node])
        ranked = sorted(ids, key=lambda token: -(scores[ids.index(token)] + noise[token]))
        assert [t for t, p in zip(tree.tokens[1:], tree.parents[1:], strict=True) if p == node] == ranked[:branching]


@given(seed=st.integers(0, 10**6), strategy=STRATEGIES)
@settings(max_examples=60)
def test_a_tree_does_not_depend_on_its_neighbours(seed: int, strategy: Strategy) -> None:
    drafter = TableDrafter(seed, listed=True)
    row = (request(), [5, 2])
    (alone,) = trees_of(drafter, [row], strategy)
    others = trees_of(drafter, [row, (request(), [1]), (request(3), [])], strategy)
    assert others[0] == alone


@given(strategy=STRATEGIES, seed=st.integers(0, 10**6), listed=st.booleans(), garbage=st.booleans())
@settings(max_examples=150)
def test_a_chain_equals_a_tree_with_one_branch(strategy: Strategy, seed: int, listed: bool, garbage: bool) -> None:

    class Eager(TableDrafter):
        def predict(self, level: Level) -> Candidates:
            return super().predict(level._replace(alive=np.ones_like(level.alive)))

    strategy = strategy._replace(branching=1)
    stop = replace(request().sampling, stop_token_ids=(3, 5))
    rows = [(request(), [4]), (request(3), []), (replace(request(), sampling=stop), [2])]
    chains = trees_of(Eager(seed, listed, garbage), rows, strategy)
    with patch("tlt.draft.tree._grow_chains", _grow_trees):
        assert trees_of(Eager(seed, listed, garbage), rows, strategy) == chains


@pytest.mark.parametrize(("new_tokens", "deepest"), [(1, 0), (2, 0), (3, 1), (4, 2), (9, 5)])
def test_tokens_that_cannot_be_committed_are_not_drafted(new_tokens: int, deepest: int) -> None:
    (tree,) = trees_of(TableDrafter(1, False), [(request(new_tokens), [5])], Strategy("table", 5, 2, 50))
    assert max(tree.depths) == deepest


@pytest.mark.parametrize("branching", [1, 3])
def test_nothing_follows_a_stop_token(branching: int) -> None:
    stopped = replace(request(), sampling=replace(request().sampling, stop_token_ids=(3,)))
    strategy, leaves, inner = Strategy("table", 5, branching, 1000), 0, 0
    for seed in range(20):
        one, other = trees_of(TableDrafter(seed, False), [(stopped, [4]), (request(), [4])], strategy)
        assert all(one.tokens[parent] != 3 for parent in one.parents[1:])
        leaves += one.tokens.count(3)
        inner += sum(other.tokens[parent] == 3 for parent in other.parents[1:])
    assert leaves > 0
    assert inner > 0


def cells(scores: Sequence[float], depth: int = 0, kind: int = 0) -> list[int]:
    """Return the calibration cells of children with these noisy scores, best first, if one sibling follows them."""
    classes = np.array([[kind]]) if kind else None
    return Calibration().cells(classes, depth, np.array([[[*scores]]]), len(scores) - 1)[0, 0].tolist()


@given(scores=st.lists(st.floats(-50, 50), min_size=2, max_size=6))
def test_without_counts_the_probability_falls_with_the_rank(scores: list[float]) -> None:
    scores = sorted(scores, reverse=True)
    chances = Calibration().table[cells([*scores, -math.inf])].tolist()
    assert all(0 < chance < 1 for chance in chances)
    assert chances == sorted(chances, reverse=True)


def test_a_probability_is_estimated_from_nodes_whose_parent_was_reached() -> None:
    """A root with two children, and a child of the second one, which is reached half of the time and never accepted."""
    known = Calibration()
    first, second = cells([1.0, 0.0, -1.0])
    (below,) = cells([1.0, 0.0], depth=1)
    for turn in range(2000):
        path = [0] if turn % 4 == 0 else [0, 1] if turn % 4 == 1 else [0, 2]
        known.observe([-1, first, second, below], [0, 0, 0, 2], path)
    known.next_round()
    assert known.table[first] == pytest.approx(0.25, abs=0.02)
    assert known.table[second] == pytest.approx(0.5, abs=0.02)
    assert known.table[below] < 0.02
    assert known.seen[below] == 1000
    assert known.acceptance_rates(2, 2) == pytest.approx([0.75, 0.0])


@pytest.mark.parametrize(
    ("turns", "low", "high"),
    [([0] * 3000 + [1] * 3000, 0.9, 1.0), ([1, 0, 0, 0] * 1000, 0.23, 0.27)],
    ids=["old counts decay", "a constant rate over many half-lives"],
)
def test_a_rate_is_estimated_from_the_last_rounds(turns: list[int], low: float, high: float) -> None:
    known, where = Calibration(), cells([1.0, 0.0], kind=3)[0]
    for accepted in turns:
        known.observe([-1, where], [0, 0], [0, 1] if accepted else [0])
        known.next_round()
    assert low < known.table[where] < high


def test_classes_and_depths_do_not_share_cells() -> None:
    known, scores = Calibration(), np.array([[[4.0, 3.0, 2.0, 1.0, 0.0]]])
    seen = {cell for kind in range(4) for d in range(8) for cell in known.cells(np.array([[kind]]), d, scores, 4).flat}
    assert len(seen) == 4 * 8 * 4


def test_draft_tokens_that_are_never_accepted_are_no_longer_verified() -> None:
    drafter, strategy = TableDrafter(1, listed=False), Strategy("table", 3, 2, 8, min_chance=0.2)
    known, row = Calibration(), (request(), [5])
    assert len(trees_of(drafter, [row], strategy, known)[0].tokens) > 1
    for _ in range(100):
        (tree,) = trees_of(drafter, [row], strategy, known)
        known.observe(tree.cells, tree.parents, [0])
        known.next_round()
    assert trees_of(drafter, [row], strategy, known) == [DraftTree([5])]
    known.renew()  # its successor may be right
    assert len(trees_of(drafter, [row], strategy, known)[0].tokens) > 1


def test_counts_of_a_drafter_weigh_two_nodes_for_its_successor() -> None:
    """The drafter had 25 of 100 nodes accepted, so its successor begins with half a node of two."""
    known, (where, rare) = Calibration(), cells([1.0, 0.0, -1.0])
    for turn in range(100):
        known.observe([-1, where], [0, 0], [0, 1] if turn % 4 == 0 else [0])
    known.observe([-1, rare], [0, 0], [0, 1])
    known.renew()
    assert (known.seen[where], known.agreed[where]) == (2.0, 0.5)
    assert (known.seen[rare], known.agreed[rare]) == (1.0, 1.0)


@st.composite
def random_trees(draw: st.DrawFn) -> DraftTree:
    tree = DraftTree([0])
    for node in range(1, draw(st.integers(1, 14))):
        add_node(tree, draw(st.integers(0, node - 1)), node)
    return tree


@given(strategy=STRATEGIES, seed=st.integers(0, 10**6), listed=st.booleans())
@settings(max_examples=300)
def test_the_likeliest_nodes_are_kept(strategy: Strategy, seed: int, listed: bool) -> None:
    (whole,), (kept,) = (
        trees_of(TableDrafter(seed, listed), [(request(), [4])], strategy._replace(verify_tokens=most))
        for most in (1000, strategy.verify_tokens)
    )
    assert sorted(kept.chance, reverse=True) == sorted(whole.chance, reverse=True)[: strategy.verify_tokens]
    nodes = dict(zip(paths(whole), zip(whole.chance, whole.cells, strict=True), strict=True))
    assert [nodes[path] for path in paths(kept)] == list(zip(kept.chance, kept.cells, strict=True))


def sees(tree: DraftTree, node: int) -> set[int]:
    """Return the node and its ancestors, computed slowly."""
    return {0} if node == 0 else {node} | sees(tree, tree.parents[node])


@given(trees=st.lists(random_trees(), min_size=1, max_size=4))
@settings(max_examples=150)
def test_a_node_attends_to_its_ancestors_and_itself_and_padding_is_a_chain(trees: list[DraftTree]) -> None:
    batch = stack(trees, CPU)
    width = max(len(tree.tokens) for tree in trees)
    assert batch.tokens.shape == batch.depths.shape == (len(trees), width)
    chains = all(tree.parents == [max(0, n - 1) for n in range(len(tree.parents))] for tree in trees)
    assert (batch.visible is None) == chains
    assert (batch.nodes is None) == all(len(tree.tokens) == width for tree in trees)
    visible = torch.ones(len(trees), width, width).tril().bool() if batch.visible is None else batch.visible
    for row, tree in enumerate(trees):
        count = len(tree.tokens)
        assert batch.tokens[row].tolist() == tree.tokens + [0] * (width - count)
        assert batch.depths[row].tolist() == tree.depths + [0] * (width - count)
        for node in range(width):
            expected = sees(tree, node) if node < count else {*sees(tree, count - 1), *range(count, node + 1)}
            assert set(visible[row, node].nonzero().flatten().tolist()) == expected
