"""Section [speculation]: the drafter of speculative decoding, its training, and look-ahead drafts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from tlt.config.registry import DRAFTERS, learned, may_be_learned
from tlt.config.section import Section


class DrafterTrainConfig(Section):
    """Training of the learned drafter, by `tlt draft train` and during a run."""

    unroll: int = Field(default=7, gt=0, le=16)
    """Largest number of consecutive draft tokens that the drafter is trained on. It predicts each token from its own
    output for the previous token. Training covers one draft token more than are accepted on average, at most
    `unroll`."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak learning rate of the drafter. In a run it falls as more draft tokens are accepted. In `tlt draft train` it
    falls linearly with time."""
    micro_batch_tokens: int = Field(default=1024, gt=0)
    """Number of tokens in a micro-batch of drafter training. Each micro-batch is one optimizer step."""
    idle: bool = True
    """Train the drafter on idle workers (several workers only). Training starts from `speculation.path`, or from random
    weights if `speculation.drafter` is adaptive and no path is given."""
    extra: float = Field(default=0.0, ge=0, le=1)
    """Extra time for training the drafter after each rollout, as a fraction of the rollout's time. It delays the step.
    A single worker is never idle, so it trains a drafter only if this is above 0."""
    buffer_tokens: int = Field(default=200_000, gt=0)
    """Largest number of tokens of training data that a run keeps in host memory. Up to half of them are from finished
    rollouts. `tlt draft train` has --tokens instead."""


class SpeculationConfig(Section):
    """Speculative decoding: the drafter, the length of its drafts, and look-ahead drafts."""

    drafter: str = "adaptive"
    """Drafter of a run. `adaptive` chooses the fastest strategy for each round, which may be plain decoding.
    `eagle` (learned), `quantized` (the model itself with int8 weights, on
    CPUs) and `suffix` (model-free) always draft. `off` never drafts."""
    path: str | None = None
    """Folder of a learned drafter, as made by `tlt draft train`. A relative path is looked up in the recipe's folder
    first, then in the working directory."""
    kind: Literal["eagle1", "eagle3"] = "eagle1"
    """Architecture of a new drafter. `eagle1` reads the target's last hidden state, which is saved for each token.
    `eagle3` reads the hidden states of three layers, which are saved for each token together with the last hidden
    state. A drafter from `path` has its own kind."""
    window: int = Field(default=512, gt=0)
    """Attention window of a new drafter, in tokens. Hidden states of the last `window` tokens are kept for each active
    request."""
    depth: int = Field(default=6, gt=0, le=32)
    """Largest number of draft tokens of a row in a round. Unlikely draft tokens are not verified, so a draft may be
    shorter. `adaptive` chooses its own number."""
    look_ahead: int = Field(default=4, ge=0)
    """Number of future steps whose requests are decoded in advance. The results serve as drafts in those steps. Idle
    workers decode them. A single worker does so only on a GPU, when few of its responses are left. Needs
    `drafter = "adaptive"`. 0 turns look-ahead off."""
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
                "speculation.drafter = 'adaptive', or remove the path with --speculation.path ''"
            )
        return self
