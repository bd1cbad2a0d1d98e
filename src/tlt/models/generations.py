"""Model config.json that both transformers 4 and transformers 5 can read.

Version 5 moved or renamed fields. If version 4 does not find a field, it silently uses a default. Inference engines
require one version or the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def for_both_generations(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a version 5 config with version 4's fields added: rope_theta, rope_scaling and torch_dtype."""
    rope = dict(config.get("rope_parameters") or {})
    found = dict(config)
    if "rope_theta" in rope:
        found["rope_theta"] = rope.pop("rope_theta")
    if rope.get("rope_type", "default") != "default":
        found["rope_scaling"] = rope
    if rope.get("rope_type") == "longrope" and "original_max_position_embeddings" in rope:
        found["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    if dtype := config.get("dtype"):
        found["torch_dtype"] = dtype
    return found
