"""Share of a rollout that one worker decodes."""

from __future__ import annotations

from dataclasses import dataclass, field

from tlt.cluster.worker import Slice
from tlt.types import Row


@dataclass
class Share:
    """Rows (requests with their tokens so far) that a worker has to decode in a rollout, and what it has reported."""

    rows: dict[int, Row] = field(default_factory=dict)
    """unfinished rows by seed, in the state in which they were sent to the worker"""
    promised: list[Row] = field(default_factory=list)
    """rows that another worker released for this one"""
    asked: list[int] = field(default_factory=list)
    """seeds of rows that the worker must release in its next decode call"""
    helper: int | None = None
    """idle worker that gets the rows which this worker releases; None if none waits"""
    reported: dict[int, list[int]] = field(default_factory=dict)
    """tokens that the worker has reported for each row since the row was sent to it, by seed"""
    last: Slice | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens so far of each row in `rows`, as the worker last reported."""
        live = self.last.live if self.last else {}
        return tuple(live.get(seed, len(row.tokens)) for seed, row in self.rows.items())
