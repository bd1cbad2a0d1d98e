"""Expected rounds against an enumeration of all outcomes, and against simulated rounds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt.build import open_workplace
from tlt.config import load_config
from tlt.draft.eagle import load_drafter
from tlt.draft.learned import EagleDrafter
from tlt.draft.strategy import Strategy
from tlt.engine.engine import Engine
from tlt.engine.tuner import Fixed
from tlt.sampling import make_requests
from tlt.spot.buffer import Harvest
from tlt.spot.rounds import expected_rounds
from tlt.spot.trainer import DrafterTrainer
from tlt.spot.unroll import pack

ROOT = Path(__file__).parents[2]


def played(right: Sequence[Sequence[float]], rng: random.Random) -> tuple[float, float]:
    """Decode one sequence once. Return the rounds, the last one by its share within it, and the number of accepted
    first draft tokens."""
    at, rounds, firsts = 0, 0.0, 0.0
    while at < len(right):
        guesses = 0
        while guesses < len(right[at]) and rng.random() < right[at][guesses]:
            guesses += 1
        share = min(1.0, (len(right) - at) / (guesses + 1))
        rounds += share
        firsts += share * right[at][0]
        at += guesses + 1
    return rounds, firsts


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(1, 20), depth=st.integers(1, 5))
def test_it_is_the_mean_of_simulated_rounds(seed: int, length: int, depth: int) -> None:
    rng = random.Random(seed)
    right = [[rng.random() for _ in range(depth)] for _ in range(length)]
    many = [played(right, rng) for _ in range(4000)]
    rounds, firsts = expected_rounds(torch.tensor(right), torch.zeros(length))
    assert rounds == pytest.approx(sum(one for one, _ in many) / len(many), rel=0.05)
    assert firsts == pytest.approx(sum(one for _, one in many) / len(many), rel=0.1, abs=0.02)


def test_an_evaluation_predicts_decoding() -> None:
    """The drafter is a real one. Draft tokens are accepted slightly less often than 1 - TV, and the last round of a
    response is cut short."""
    config = load_config(ROOT / "recipes" / "longtail.toml", ["--rollout.max_new_tokens", "200", "--data.size", "12"])
    _, prompts, target, params = open_workplace(config)
    layer = load_drafter(ROOT / "assets" / "tiny-drafter", target.options)
    with torch.no_grad():  # as one that is trained while the policy moves
        layer.fc.weight.mul_(1 + 0.5 * torch.randn(layer.fc.weight.shape, generator=torch.Generator().manual_seed(0)))
    found: list[Harvest] = []
    depth = config.speculation.training.unroll
    chains = Fixed(Strategy("eagle", depth, 1, depth + 1, 0.0))
    drafter = EagleDrafter(layer, target)
    engine = Engine(target, config.engine, [drafter], chains, layout=layer.options.layout, on_harvest=found.append)
    responses = list(engine.generate([r for p in prompts for r in make_requests([p], 2, params, 0, "draft")]))
    seen = sum(len(response.token_ids) for response in responses) / engine.stats.row_passes
    trainer = DrafterTrainer(layer, target, config.speculation.training)
    batch = pack(found, target.device)
    [(rounds, _)], entries = trainer.judge([layer], batch)
    assert seen <= entries / rounds <= 1.2 * seen
    assert 1.5 < seen < 6.0


def test_expected_rounds_by_hand() -> None:
    """Two draft tokens at three entries, each accepted with 1/2: a round commits 1, 2 or 3 tokens with 1/2, 1/4 and
    1/4."""
    half = torch.full((3, 2), 0.5)
    last = 1 / 2 + 1 / 4 / 2 + 1 / 4 / 3  # at the last entry, a round is within it by so much
    second = 1 / 2 + 1 / 4 + 1 / 4 * 2 / 3
    whole = 1 + second / 2 + (1 / 4 + 1 / 2 * 1 / 2) * last
    assert expected_rounds(half, torch.zeros(3))[0] == pytest.approx(whole)


def test_draft_tokens_that_are_always_or_never_accepted() -> None:
    assert expected_rounds(torch.ones(12, 3), torch.zeros(12)) == (3.0, 3.0)
    assert expected_rounds(torch.zeros(12, 3), torch.zeros(12)) == (12.0, 0.0)
    assert expected_rounds(torch.zeros(0, 3), torch.zeros(0)) == (0.0, 0.0)


def test_every_sequence_begins_with_a_round_of_its_own() -> None:
    right, segments = torch.linspace(0.1, 0.9, 27).view(9, 3), torch.tensor([2, 2, 2, 2, 0, 0, 5, 5, 5])
    alone = [expected_rounds(part, torch.zeros(len(part))) for part in right.split([4, 2, 3])]
    assert expected_rounds(right, segments) == pytest.approx([sum(column) for column in zip(*alone, strict=True)])


def test_values_that_are_not_finite_stay_so() -> None:
    rounds, _ = expected_rounds(torch.full((4, 2), torch.nan), torch.zeros(4))
    assert rounds != rounds
