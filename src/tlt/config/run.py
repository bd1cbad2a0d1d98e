"""Section [run]: the folder of a run, and what it writes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from tlt.config.registry import TRACKERS
from tlt.config.section import LONGEST, Section


class RunConfig(Section):
    folder: str = "runs/latest"
    """Folder of the run."""
    seed: int = Field(default=0, ge=0)
    """Seed of the noise of all responses and of the order of prompts."""
    save_every: int = Field(default=20, ge=0)
    """Number of steps between checkpoints. One is also saved at the end, at a signal and at an error. 0 saves only
    then."""
    stop_within: float = Field(default=20.0, gt=0, le=LONGEST)
    """Time in seconds that a step has to finish after SIGTERM, SIGHUP or Ctrl-C, doubled if its update has begun. A
    step that takes longer is abandoned. The state before it is saved, unless its update has begun."""
    keep: int = Field(default=2, gt=0)
    """Number of newest checkpoints to keep."""
    mirror: str | None = None
    """Place to which each checkpoint is copied in the background, such as `s3://bucket/run` (tlt-rl[s3]) or another URL
    of fsspec (tlt-rl[mirror]). --resume fetches the newest checkpoint from there if it is newer than those in
    `folder`."""
    compare_every: int = Field(default=0, ge=0)
    """Number of steps between comparisons with plain decoding of the same requests. The run reports both times and the
    number of tokens that differ. 0 turns comparisons off."""
    trackers: list[str] | None = None
    """Trackers that receive the metrics: `tensorboard`, `wandb`, `mlflow`, `trackio`. Each is an extra, such as
    tlt-rl[wandb] (default: TensorBoard if it is installed)."""
    tracker_completions: int = Field(default=0, ge=0, le=10_000)
    """Number of responses of each step that `wandb` and `trackio` receive as a table. 0 sends none."""
    completions_mb: int = Field(default=1024, ge=0)
    """Largest size of the saved responses in MiB. Beyond it the oldest are deleted. 0 saves none."""
    completions_format: Literal["jsonl", "parquet"] = "jsonl"
    """`jsonl` writes completions.jsonl. `parquet` writes a file per step to completions/ and needs tlt-rl[parquet]."""
    report: bool = True
    """Write report.html, one page on the whole run, at each checkpoint and at the end; see docs/report.md."""
    watts_per_core: float | None = Field(default=None, gt=0, le=1e6)
    """Power of a busy CPU core in watts. This is only used to estimate energy where no counter measures it."""
    price_per_hour: float | None = Field(default=None, ge=0, le=1e9)
    """Price of all machines of the run for one hour, in any currency. This is only used to estimate the cost."""
    overwrite: bool = False
    """Start a new run in a folder that already holds one. The old run is moved into a subfolder, and removed when the
    new run saves its first checkpoint."""

    @field_validator("trackers")
    @classmethod
    def _known(cls, trackers: list[str] | None) -> list[str] | None:
        for name in trackers or ():
            if name not in TRACKERS:
                raise ValueError(f'run.trackers: give some of {", ".join(TRACKERS)} (got "{name}")')
        return trackers
