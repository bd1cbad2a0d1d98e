"""What a recipe may name: drafters, rewards, trackers. A new one is a file and its line here. Nothing is imported
before it is made, as recipes are read before torch is."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

Shape = tuple[int, int, int, float]
"""depth, branching, tokens to verify, least chance of a node"""


class DrafterEntry(NamedTuple):
    make: str
    """`module:function`, called as f(Sources) -> Drafter: see `tlt.draft.drafter`"""
    chains: tuple[Shape, ...]
    """what `adaptive` may use it with, from shy to bold"""
    trees: tuple[Shape, ...] = ()
    """and with speculation.trees"""
    learned: bool = False
    """it needs weights, of speculation.path or from the run's own training"""


class RewardEntry(NamedTuple):
    make: str
    """`module:function`, called as f(term, config) -> f(prompt, answer) -> float: see `tlt.rewards.scores`"""
    quick: bool = False
    """it neither runs code of others nor can hang, and needs no process of its own"""
    compares: bool = False
    """with the row's answer"""


class TrackerEntry(NamedTuple):
    make: str
    """`module:class`, called as f(Place) -> Tracker: see `tlt.run.trackers`"""
    package: str
    """that it needs"""


# A chain ends where the chance that all of it is right falls below what another level costs, in tokens: measured, 0.2
# to 0.4 were alike at batch 1 and 4, and 0.5 was worse.
DRAFTERS = {
    "eagle": DrafterEntry(
        "tlt.draft.learned:make",
        ((2, 1, 3, 0.3), (4, 1, 5, 0.3), (8, 1, 9, 0.3), (16, 1, 17, 0.3)),
        ((6, 2, 12, 0.1),),
        learned=True,
    ),
    "suffix": DrafterEntry("tlt.draft.suffix:make", ((4, 1, 5, 0.5),), ((8, 2, 12, 0.3),)),
}
REWARDS = {
    "reasoning_gym": RewardEntry("tlt.rewards.scores:reasoning_gym"),
    "math": RewardEntry("tlt.rewards.scores:mathematics", compares=True),
    "exact": RewardEntry("tlt.rewards.scores:exactly", quick=True, compares=True),
    "format": RewardEntry("tlt.rewards.scores:formatted"),
    "length": RewardEntry("tlt.rewards.scores:brief", quick=True),
}
TRACKERS = {
    "tensorboard": TrackerEntry("tlt.run.trackers:TensorBoard", "tensorboard"),
    "wandb": TrackerEntry("tlt.run.trackers:WeightsAndBiases", "wandb"),
    "mlflow": TrackerEntry("tlt.run.trackers:MLflow", "mlflow"),
    "trackio": TrackerEntry("tlt.run.trackers:Trackio", "trackio"),
}


def learned(drafter: str) -> bool:
    return drafter in DRAFTERS and DRAFTERS[drafter].learned


def may_be_learned(drafter: str) -> bool:
    """Of speculation.drafter, which may be adaptive."""
    return drafter == "adaptive" or learned(drafter)


def maker(entry: DrafterEntry | RewardEntry | TrackerEntry) -> Any:
    module, _, name = entry.make.partition(":")
    return getattr(import_module(module), name)
