"""One training run of bench/train.py, in a process of its own: python bench/one_run.py CONFIG THREADS"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import forks
import torch
from turns import Pausing, TakingTurns, Turn, over_pipes

from tlt.cluster.remote import ClusterRollout
from tlt.cluster.workers import RayPool
from tlt.config import parse_config
from tlt.loop import Rollout, StepResult
from tlt.run.train import train
from tlt.stopping import Stopped


class Recording(TakingTurns):
    """Records the responses of each step, between two steps."""

    def step(self, result: StepResult) -> None:
        forks.record(Path(self.config.run.folder), result.groups)
        super().step(result)


def main(
    config_file: str, threads: int, turn: Turn, change: Callable[[Rollout], Rollout] = lambda rollout: rollout
) -> None:
    """Train. `change` puts another rollout in the place of the run's own."""
    torch.set_num_threads(threads)
    config = parse_config(json.loads(Path(config_file).read_text(encoding="utf-8")), config_file)
    pausing = Pausing(turn)

    def wrap(rollout: Rollout) -> Rollout:
        if isinstance(rollout, ClusterRollout) and isinstance(rollout.supervisor.pool, RayPool):
            pausing.folder = rollout.supervisor.pool.folder
        return change(rollout)

    try:
        train(config, resume=False, display=Recording(pausing), wrap=wrap)
    except (ValueError, OSError) as error:
        sys.exit(f"tlt: {' '.join(str(error).split())}")
    except Stopped as stopped:
        sys.exit(stopped.exit_code)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), over_pipes())
