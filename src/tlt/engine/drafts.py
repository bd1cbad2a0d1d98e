"""Draft of a round: draft tokens for each row, from its look-ahead draft or from the strategy's drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tlt.draft.ahead import LookAhead
from tlt.draft.chains import Draft, Roots, draft_chains
from tlt.engine.drafters import Drafters
from tlt.engine.memory import most_new
from tlt.engine.noise_window import DraftNoise, NoiseWindow
from tlt.engine.rows import RowTable
from tlt.engine.state import Round
from tlt.models.decoder import Decoder


class Drafted(Protocol):
    """Rows that get drafts, with their noise and their positions in look-ahead drafts."""

    @property
    def rows(self) -> RowTable: ...
    @property
    def noise(self) -> NoiseWindow: ...
    @property
    def ahead(self) -> LookAhead: ...
    @property
    def target(self) -> Decoder: ...


def draft_rows(now: Round, rollout: Drafted, drafters: Drafters) -> list[Draft]:
    """Return a draft for each row, from its look-ahead draft if it has one, else from the strategy's drafter."""
    if now.strategy.depth == now.strategy.ahead == 0:
        return now.no_drafts()
    offers = look_ahead_offers(rollout) if now.strategy.ahead else [0] * len(now.rows)
    chains = rollout.ahead.propose([min(offer, now.strategy.ahead) for offer in offers])
    drafted = now.no_drafts() if all(chains) else _by_drafter(now, rollout, drafters, chains)
    return [Draft(chain, ahead=True) if chain else draft for chain, draft in zip(chains, drafted, strict=True)]


def look_ahead_offers(rollout: Drafted) -> list[int]:
    """Return for each row the number of look-ahead tokens that it can propose in this round."""
    rows, offers = rollout.rows, rollout.ahead.offers()
    if not any(offers):
        return offers
    longest = min(rollout.noise.width, most_new(len(rows), rollout.target.options.vocab_size)) - 1
    found = zip(rows, offers, strict=True)
    return [min(offer, longest, row.room - 1) if offer and row.finite else 0 for row, offer in found]


def _by_drafter(now: Round, rollout: Drafted, drafters: Drafters, chains: Sequence[Sequence[int]]) -> list[Draft]:
    """Return a draft for each row. A row gets draft tokens only if it has no look-ahead chain and the target's outputs
    for it were finite so far."""
    strategy, target = now.strategy, rollout.target
    drafter = drafters.usable.get(strategy.drafter)
    if drafter is None:
        return now.no_drafts()
    tokens, room = np.array(
        [(row.root, row.room * (row.finite and not chain)) for row, chain in zip(now.rows, chains, strict=True)]
    ).T
    roots = Roots(tokens, room, now.batch.stops, now.batch.for_drafters, target.device)
    noise = DraftNoise(rollout.noise, now.positions, strategy.depth)
    calibration = drafters.calibrations[strategy.drafter]
    drafts = drafters.propose(
        strategy.drafter,
        lambda: draft_chains(drafter, roots, strategy, noise, target.options.vocab_size, calibration),
    )
    return drafts or now.no_drafts()
