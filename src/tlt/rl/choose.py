"""Factory that makes the policy of a recipe: plain, with LoRA adapters, or sharded by FSDP2."""

from __future__ import annotations

from pathlib import Path

from tlt.config import Config
from tlt.models.device import torch_device, torch_dtype
from tlt.rl.lora import AdaptedPolicy
from tlt.rl.policy import Policy
from tlt.rl.sharded import ShardedPolicy


def make_policy(config: Config, folder: str | Path | None = None) -> Policy:
    """Return the policy of a recipe, with weights from `folder` (default: the recipe's model). It is sharded if
    `train.shard` is set, and has adapters if `train.lora.rank` is set. Raises ModelError."""
    folder = folder or config.model.path
    kind = ShardedPolicy if config.train.shard else AdaptedPolicy if config.train.lora.rank else Policy
    dtype, device = torch_dtype(config.model), torch_device(config.model)
    return kind(folder, dtype, device, config.train, config.rollout, reference=config.model.path)
