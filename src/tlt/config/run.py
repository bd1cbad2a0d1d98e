"""Section [run]: the folder of a run, and the files, metrics and checkpoints that the run writes."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from tlt.config.registry import TRACKERS
from tlt.config.section import LONGEST, Section


class RunConfig(Section):
    folder: str = "runs/latest"
    """Folder of the run, for its checkpoints, metrics and other files. A relative path begins in the working
    directory."""
    seed: int = Field(default=0, ge=0)
    """Random seed for the sampling of all responses, for the order of the prompts if data.shuffle is true, and for a
    new drafter and its training."""
    save_every: int = Field(default=20, ge=0)
    """Number of steps between checkpoints. A checkpoint is also saved at the end of the run, after a signal such as
    SIGTERM, and after an error. 0 saves only in these cases."""
    stop_within: float = Field(default=20.0, gt=0, le=LONGEST)
    """Timeout in seconds for the current step after SIGTERM, SIGHUP or Ctrl-C. If the update may already have changed
    weights when the timeout is over, the step gets the same time again. A step that takes longer is abandoned. Then the
    state before the step is saved, unless the weights may have changed. In that case the run can only be resumed from
    the last checkpoint."""
    keep: int = Field(default=2, gt=0)
    """Number of checkpoints to keep. Older ones are deleted."""
    on_save: str | None = Field(default=None, min_length=1)
    """Command that runs in the background after each save, such as `aws s3 cp --recursive {checkpoint}
    s3://bucket/run/{name}`. `{checkpoint}` is the checkpoint's folder, and `{name}` its name. No shell is used."""
    compare_every: int = Field(default=0, ge=0)
    """Number of steps between comparisons of speculative with plain decoding. In a comparison, the step's requests are
    also decoded without drafts, and both times are reported. 0 turns comparisons off."""
    trackers: list[str] | None = None
    """Trackers that receive the metrics: `tensorboard`, `wandb`, or your own `module:Class`. Each needs a package, such
    as the extra tlt-rl[wandb] (default: TensorBoard if it is installed)."""
    overwrite: bool = False
    """Start a new run in `folder` even if an older run is there. The older run is deleted when all checks before the
    first step have passed."""

    @field_validator("trackers", mode="before")
    @classmethod
    def _listed(cls, trackers: Any) -> Any:
        return trackers.split(",") if isinstance(trackers, str) else trackers

    @field_validator("trackers")
    @classmethod
    def _known(cls, trackers: list[str] | None) -> list[str] | None:
        for name in trackers or ():
            if name not in TRACKERS and ":" not in name:
                choices = ", ".join(TRACKERS)
                raise ValueError(f'run.trackers: give some of {choices}, or your own as module:Class (got "{name}")')
        return trackers
