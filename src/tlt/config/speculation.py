"""What drafts, where it comes from, and how it is trained."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from tlt.config.registry import DRAFTERS, learned, may_be_learned
from tlt.config.section import Section
from tlt.types import MOST_GUESSES


class DrafterTrainConfig(Section):
    """How the learned drafter is trained: by `tlt draft train`, and while the policy is."""

    unroll: int = Field(default=7, gt=0, le=16)
    """guesses in a row that training goes through at most, each on the drafter's own output of the one before; one more
    than are right by now"""
    loss: Literal["cross_entropy", "total_variation", "hybrid", "agreement"] = "cross_entropy"
    """measured from random weights, `hybrid` learns as `cross_entropy` does and the other two next to nothing"""
    decay: float = Field(default=0.4, gt=0, le=1)
    """weight of each guess against the one before"""
    learning_rate: float = Field(default=1e-3, gt=0)
    """of the drafter"""
    warmup_steps: int = Field(default=20, gt=0)
    """its rate rises evenly over the first so many micro-batches"""
    max_grad_norm: float = Field(default=0.5, gt=0)
    """its gradient is clipped to this norm"""
    micro_batch_tokens: int = Field(default=1024, gt=0)
    """entries of one pack, which is one optimizer step"""
    idle: bool = True
    """Train the drafter on idle workers (several workers only). Training starts from `speculation.path`, or from random
    weights if `speculation.drafter` is adaptive and no path is given."""
    extra: float = Field(default=0.0, ge=0, le=1)
    """Share of the rollout's time during which training of the drafter may delay a step. A single worker is never idle,
    so it trains a drafter only if this is above 0."""
    buffer_tokens: int = Field(default=200_000, gt=0)
    """entries of harvest kept in host memory: of the rollout under way, and up to half of them of those before it,
    what ends latest first"""


class SpeculationConfig(Section):
    """What drafts, where it comes from, and how it is trained."""

    drafter: str = "adaptive"
    """`adaptive` picks a strategy for each round, or none, in vLLM one for the run (docs/vllm.md); `eagle` (learned)
    and `suffix` (model-free) always draft, by depth, branching, verify_tokens and min_chance; `off`: nothing does"""
    trees: bool = False
    """`adaptive` may draft trees too, not chains alone: on CPUs they were never the fastest"""
    path: str | None = None
    """folder of a learned drafter, looked up as model.path is; `tlt draft train` makes one"""
    kind: Literal["eagle1", "eagle3"] = "eagle1"
    """of a drafter that is made, not read from `path`: `eagle3` reads three layers of the target, `eagle1` only its
    last hidden state, a quarter of the traffic"""
    window: int = Field(default=512, gt=0)
    """of such a drafter: tokens whose features are kept for each live request, and which it attends"""
    depth: int = Field(default=6, gt=0, le=32)
    """guesses in a row"""
    branching: int = Field(default=2, gt=0, le=16)
    """guesses beside each other, of which the likeliest are kept; 1: a chain"""
    verify_tokens: int = Field(default=8, gt=0, le=256)
    """nodes of a tree verified in one pass, the root counted; 1 is plain decoding"""
    min_chance: float = Field(default=0.5, ge=0, lt=1)
    """a drafted token less likely to be reached than this is not verified; the chances are counted online"""
    history_tokens: int = Field(default=200_000, gt=0)
    """tokens of earlier epochs that the suffix drafter keeps; the oldest age out"""
    look_ahead: int = Field(default=4, ge=0)
    """with `adaptive`, idle workers decode the requests of so many steps to come, as drafts of what the target will say
    then; 0: of none"""
    look_ahead_tokens: int = Field(default=16_000_000, gt=0)
    """of these drafts that are kept in host memory, four bytes each; the oldest age out"""
    training: DrafterTrainConfig = DrafterTrainConfig()

    @field_validator("drafter")
    @classmethod
    def _known(cls, drafter: str) -> str:
        choices = ("off", *DRAFTERS, "adaptive")
        if drafter not in choices:
            raise ValueError(f'speculation.drafter: give one of {", ".join(choices)} (got "{drafter}")')
        return drafter

    @model_validator(mode="after")
    def _learned(self) -> SpeculationConfig:
        if learned(self.drafter) and self.path is None:
            raise ValueError(
                f"speculation.drafter = '{self.drafter}' needs speculation.path, the folder of a learned drafter: "
                "make one with tlt draft train"
            )
        if self.path is not None and not may_be_learned(self.drafter):
            raise ValueError(
                f"speculation.drafter = '{self.drafter}' does not use the learned drafter in speculation.path: set "
                "speculation.drafter = 'adaptive', or take the path away by --speculation.path ''"
            )
        if learned(self.drafter) and (self.depth - 1) * self.branching > MOST_GUESSES:
            raise ValueError(
                f"speculation.depth and branching ask for more than {MOST_GUESSES} guesses a row: lower one of them"
            )
        return self
