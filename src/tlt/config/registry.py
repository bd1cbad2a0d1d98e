"""Names that a recipe may use: backends, drafters, rewards, trackers. To add one, write a file and an entry here.
Modules are imported at their first use, because recipes are read before torch is imported."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple


class DrafterEntry(NamedTuple):
    make: str
    """`module:function` that makes the drafter. It is called with `Sources`. It returns a `Drafter`, or None if the
    drafter does not support the target model; see `tlt.draft.drafter`."""
    depths: tuple[int, ...]
    """maximum numbers of draft tokens that speculation.drafter = 'adaptive' may choose, ascending"""
    min_chance: float
    """A draft ends where the estimated probability that all its tokens are accepted would fall below this."""
    learned: bool = False
    """whether the drafter needs trained weights, from speculation.path or from training during the run"""
    preparation: float = 0.0
    """duration of the drafter's first draft, in rounds of plain decoding"""


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
    "tlt": BackendEntry("tlt.engine.own_backend:OwnBackend"),
    "vllm": BackendEntry("tlt.vllm.vllm_engine:VllmBackend"),
}
# With the learned drafter, values of `min_chance` from 0.2 to 0.4 were equally fast at batch sizes 1 and 4, and 0.5 was
# slower.
DRAFTERS = {
    "eagle": DrafterEntry("tlt.draft.learned:make", (1, 2, 4, 8, 16), 0.3, learned=True),
    "quantized": DrafterEntry("tlt.draft.quantized:make", (1, 2, 4, 8), 0.3, preparation=25),  # quantizes the model
    "suffix": DrafterEntry("tlt.draft.suffix:make", (4,), 0.5),
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
}


def learned(drafter: str) -> bool:
    return drafter in DRAFTERS and DRAFTERS[drafter].learned


def may_be_learned(drafter: str) -> bool:
    """Return whether a value of speculation.drafter, such as adaptive, may use a learned drafter."""
    return drafter == "adaptive" or learned(drafter)


def maker(entry: BackendEntry | DrafterEntry | RewardEntry | TrackerEntry) -> Any:
    module, _, name = entry.make.partition(":")
    return getattr(import_module(module), name)
