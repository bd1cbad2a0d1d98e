"""Adapters that are trained in the place of the policy's own weights."""

from __future__ import annotations

from pydantic import Field

from tlt.config.section import Section


class LoraConfig(Section):
    rank: int = Field(default=0, ge=0)
    """of the adapters (arXiv 2106.09685, by PEFT): the policy's own weights then stay as they are; 0: off"""
    alpha: float = Field(default=32.0, gt=0, le=10_000)
    """an adapter is added alpha / rank times"""
    targets: list[str] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    """the matrices that have one, by the ends of their names"""
