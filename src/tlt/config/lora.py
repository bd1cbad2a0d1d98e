"""Section [train.lora]: LoRA adapters, which are trained instead of the policy's own weights."""

from __future__ import annotations

from pydantic import Field

from tlt.config.section import Section


class LoraConfig(Section):
    rank: int = Field(default=0, ge=0)
    """Rank of the LoRA adapters (arXiv 2106.09685), which PEFT adds to the policy. The policy's own weights are then
    frozen. 0 turns LoRA off."""
    alpha: float = Field(default=32.0, gt=0, le=10_000)
    """Scale of the LoRA adapters: the output of each is multiplied by alpha / rank."""
    targets: list[str] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    """Linear layers that get LoRA adapters. Each entry is the end of a layer's name."""
