"""Activation checkpointing of families that the fused decoder does not support."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_generic import families

from tlt.config import RolloutConfig, TrainConfig
from tlt.models.families import ModelError
from tlt.rl.policy import Policy
from tlt.types import TrainBatch

BATCH = TrainBatch([(5, 6, 7)] * 2, [[9, 10, 11], [13, 14, 15]], [1.0, -1.0], [[0.0] * 3] * 2)


def policy_of(folder: Path, checkpointing: bool) -> Policy:
    config = TrainConfig(learning_rate=1e-2, gradient_checkpointing=checkpointing)
    return Policy(folder, torch.float64, torch.device("cpu"), config, RolloutConfig())


def test_checkpointed_layers_apply_no_dropout(tmp_path: Path) -> None:
    """The layers of OPT apply dropout themselves, with the rate 0.1 by default."""
    families.save_small("opt", tmp_path)
    found = []
    for checkpointing in (False, True):
        policy = policy_of(tmp_path, checkpointing)
        found.append((policy.logprobs(BATCH), policy.update(BATCH, 0)["grad_norm"], policy.logprobs(BATCH)))
    assert found[0] == found[1]


def test_a_family_without_checkpointing_is_refused_with_the_field(tmp_path: Path) -> None:
    families.save_small("ctrl", tmp_path)
    policy_of(tmp_path, False)
    with pytest.raises(ModelError, match=r"type ctrl .* set train\.gradient_checkpointing = false"):
        policy_of(tmp_path, True)
