"""Saving the drafter while it works: only what is trained, in a thread of its own, whole or not at all."""

from __future__ import annotations

from pathlib import Path

from tlt.draft.average import Replica
from tlt.draft.eagle import EagleLayer, EagleOptions


class DrafterSaver:
    """Writes `folder/drafter_<number>`: each is a drafter's folder (for speculation.path) with the optimizer beside it."""

    def __init__(self, folder: Path, options: EagleOptions, keep: int = 2) -> None:
        raise NotImplementedError

    def save(self, number: int, replica: Replica, published: float | None = None) -> None:
        """Returns at once; the replica's tensors must not change any more. Of several that wait, only the newest is
        written. A disk that is full or fails is logged, and costs the save alone."""

    def close(self) -> None:
        """Wait for what is being written."""


def load_latest(folder: Path, options: EagleOptions) -> tuple[int, EagleLayer, Replica] | None:
    """The newest whole one and its number; None if there is none."""
