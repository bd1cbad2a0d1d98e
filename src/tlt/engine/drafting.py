"""Draft of a round: a tree of draft tokens for each row, from its look-ahead draft or from the strategy's drafter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tlt.draft.tree import DraftTree, Roots, grow
from tlt.engine.drafters import Drafters
from tlt.engine.noise import DraftNoise
from tlt.engine.runner import most_nodes
from tlt.engine.state import RolloutState, Round


def draft_trees(now: Round, rollout: RolloutState, drafters: Drafters) -> list[DraftTree]:
    """Draft a tree for each row, from its look-ahead draft if it has one, else with the strategy's drafter."""
    offers = look_ahead_offers(rollout) if now.strategy.ahead else [0] * len(now.rows)
    chains = rollout.ahead.propose([min(offer, now.strategy.ahead) for offer in offers])
    drafted = _grow_trees(now, rollout, drafters, chains) if not all(chains) else now.roots()
    return [
        DraftTree.chain(row.root, chain) if chain else tree
        for row, chain, tree in zip(now.rows, chains, drafted, strict=True)
    ]


def look_ahead_offers(rollout: RolloutState) -> list[int]:
    """Return for each row the number of look-ahead tokens that it can propose in this round."""
    rows, vocab_size = rollout.rows, rollout.runner.target.options.vocab_size
    widest = min(rollout.noise.width, most_nodes(len(rows), vocab_size)) - 1
    offers = zip(rows, rollout.ahead.offers(), strict=True)
    return [min(offer, widest, row.room - 1) if row.finite else 0 for row, offer in offers]


def _grow_trees(
    now: Round, rollout: RolloutState, drafters: Drafters, chains: Sequence[Sequence[int]]
) -> list[DraftTree]:
    """Return a tree for each row. A row gets draft tokens only if it has no look-ahead chain and the target's outputs
    for it were finite so far."""
    strategy, target, trees = now.strategy, rollout.runner.target, None
    drafter = drafters.usable.get(strategy.drafter)
    if drafter is not None:
        tokens, room = np.array(
            [(row.root, row.room * (row.finite and not chain)) for row, chain in zip(now.rows, chains, strict=True)]
        ).T
        roots = Roots(tokens, room, now.batch.stops, now.batch.for_drafters, target.device)
        noise = DraftNoise(rollout.noise, now.positions, strategy.depth)
        calibration = drafters.calibrations[strategy.drafter]
        trees = drafters.propose(
            strategy.drafter,
            lambda: grow(drafter, roots, strategy, noise, target.options.vocab_size, calibration),
        )
    return trees or now.roots()
