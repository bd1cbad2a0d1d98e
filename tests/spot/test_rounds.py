"""Expected rounds, worked by hand and compared with decoding. test_spot.py compares them with an enumeration of all
outcomes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tlt.build import open_workplace
from tlt.config import load_config
from tlt.draft.eagle import load_drafter
from tlt.draft.features import Harvest
from tlt.draft.learned import EagleDrafter
from tlt.draft.strategy import Strategy
from tlt.engine.engine import Engine
from tlt.engine.tuner import Fixed
from tlt.sampling import make_requests
from tlt.spot.trainer import DrafterTrainer, expected_rounds
from tlt.spot.unroll import pack

ROOT = Path(__file__).parents[2]


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
    chains = Fixed(Strategy("eagle", depth))
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
    assert expected_rounds(half, torch.zeros(3)) == pytest.approx((whole, whole / 2))


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
