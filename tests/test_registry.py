"""Names in recipes: each entry can be created, and unknown names are refused."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import get_args

import pytest

from tlt.config import ConfigError, EngineConfig, SpeculationConfig, parse_config
from tlt.config.registry import BACKENDS, DRAFTERS, REWARDS, TRACKERS, maker
from tlt.config.rewards import RewardTerm
from tlt.config.section import Section
from tlt.config.sections import RunConfig, TrainConfig
from tlt.engine.state import LOOK_AHEAD, TARGET
from tlt.rl.groups import ADVANTAGES
from tlt.rl.losses import LOSSES


def test_every_entry_leads_to_a_callable() -> None:
    for entry in [*BACKENDS.values(), *DRAFTERS.values(), *REWARDS.values(), *TRACKERS.values()]:
        assert callable(maker(entry)), entry.make


def test_each_backend_of_a_recipe_has_an_entry() -> None:
    assert get_args(EngineConfig.model_fields["backend"].annotation) == tuple(BACKENDS)


@pytest.mark.parametrize(
    ("section", "field", "entries"),
    [
        (EngineConfig, "backend", BACKENDS),
        (SpeculationConfig, "drafter", DRAFTERS),
        (RewardTerm, "name", REWARDS),
        (RunConfig, "trackers", TRACKERS),
        (TrainConfig, "loss", LOSSES),
        (TrainConfig, "advantage", ADVANTAGES),
    ],
)
def test_the_description_of_a_field_has_every_entry(section: type[Section], field: str, entries: Iterable[str]) -> None:
    """`tlt config` prints it."""
    words = re.findall(r"\w+", section.model_fields[field].description or "")
    assert [name for name in entries if name not in words] == []


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    recipe = {"model": {"path": "m"}, "data": {"path": "d"}, "reward": {"name": "exact"}}
    with pytest.raises(ConfigError, match=r"neptune.*wandb|wandb.*neptune"):
        parse_config(recipe | {"run": {"trackers": ["tensorboard", "neptune"]}})


def test_each_source_of_a_token_has_its_own_letter() -> None:
    """Completions and the report name the source of an accepted token by one letter."""
    letters = [*(name[0] for name in DRAFTERS), LOOK_AHEAD, TARGET]
    assert len({*letters}) == len(letters)
