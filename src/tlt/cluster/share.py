"""What one worker has of a rollout."""

from __future__ import annotations

from dataclasses import dataclass, field

from tlt.cluster.worker import Slice
from tlt.types import Row


@dataclass
class Share:
    """A worker's part of the rollout."""

    rows: dict[int, Row] = field(default_factory=dict)
    """by seed: what it was given, as it was then, and has not ended"""
    promised: list[Row] = field(default_factory=list)
    """given up by others for it"""
    asked: list[int] = field(default_factory=list)
    """seeds that it shall give up with its next slice"""
    helper: int | None = None
    """for whom"""
    heard: dict[int, list[int]] = field(default_factory=dict)
    """tokens by seed that it has told of since it was given them"""
    last: Slice | None = None
    trains: bool = True
    """whether it has harvest enough"""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of its rows, as far as it has said."""
        live = self.last.live if self.last else {}
        return tuple(live.get(seed, len(row.tokens)) for seed, row in self.rows.items())
