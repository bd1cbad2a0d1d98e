"""Names that a recipe may use: backends, drafters, rewards, trackers. To add one, write a file and an entry here.
Modules are imported at their first use, because recipes are read before torch is imported."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

Shape = tuple[int, int, int, float]
"""Shape of a draft: depth in tokens, children per node (1 is a chain), number of nodes to verify including the root,
and smallest estimated probability that a node and all nodes before it are accepted."""


class DrafterEntry(NamedTuple):
    make: str
    """`module:function` that makes the drafter. It is called with `Sources`. It returns a `Drafter`, or None if the
    drafter does not support the target model; see `tlt.draft.drafter`."""
    chains: tuple[Shape, ...]
    """shapes of chains that speculation.drafter = 'adaptive' may choose, from short to long"""
    trees: tuple[Shape, ...] = ()
    """shapes of trees that `adaptive` may choose too if speculation.trees is true; empty for drafters of chains only"""
    learned: bool = False
    """whether the drafter needs trained weights, from speculation.path or from training during the run"""


class RewardEntry(NamedTuple):
    make: str
    """`module:function` that makes the reward. It is called with (term, config), and returns the reward function
    f(prompt, answer); see `tlt.rewards.scores`."""
    quick: bool = False
    """whether the reward runs in the driver's process, because it runs no user code and cannot hang"""
    compares: bool = False
    """whether the reward compares the model's answer with the right answer in the data"""


class TrackerEntry(NamedTuple):
    make: str
    """`module:class` that is called with a `TrackedRun` and returns a `Tracker`; see `tlt.run.trackers`"""
    package: str
    """import name of the package that the tracker needs"""


class BackendEntry(NamedTuple):
    make: str
    """`module:class` of a `Backend`, which provides an engine for rollouts; see `tlt.engine.protocol`"""


BACKENDS = {
    "tlt": BackendEntry("tlt.engine.backend:OwnBackend"),
    "vllm": BackendEntry("tlt.vllm.backend:VllmBackend"),
}
# The last number of a shape is a minimum probability. For the learned drafter it is 0.3: a chain ends where the
# probability that all its tokens are accepted would fall below 0.3. Values from 0.2 to 0.4 were equally fast at batch
# sizes 1 and 4, and 0.5 was slower.
DRAFTERS = {
    "eagle": DrafterEntry(
        "tlt.draft.learned:make",
        ((1, 1, 2, 0.3), (2, 1, 3, 0.3), (4, 1, 5, 0.3), (8, 1, 9, 0.3), (16, 1, 17, 0.3)),
        ((6, 2, 12, 0.1),),
        learned=True,
    ),
    "quantized": DrafterEntry(
        "tlt.draft.quantized:make", ((1, 1, 2, 0.3), (2, 1, 3, 0.3), (4, 1, 5, 0.3), (8, 1, 9, 0.3))
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
    """Return whether a value of speculation.drafter, such as adaptive, may use a learned drafter."""
    return drafter == "adaptive" or learned(drafter)


def maker(entry: BackendEntry | DrafterEntry | RewardEntry | TrackerEntry) -> Any:
    module, _, name = entry.make.partition(":")
    return getattr(import_module(module), name)
