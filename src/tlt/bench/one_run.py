"""One training run of `tlt bench train`, in a process of its own: python -m tlt.bench.one_run CONFIG THREADS MODE"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tlt.bench import forks
from tlt.bench.serial import serially, unpublished
from tlt.config import parse_config
from tlt.display import Display
from tlt.loop import StepResult
from tlt.run import train
from tlt.stopping import Stopped

SERIAL = "serial.json"
"""in the run's folder: drafter tokens to train on after each step"""


class Recording(Display):
    """Writes down the responses of each step, between two steps."""

    def step(self, result: StepResult) -> None:
        forks.record(Path(self.config.run.folder), result.groups)
        super().step(result)


def main(config_file: str, threads: str, mode: str) -> None:
    torch.set_num_threads(int(threads))
    config = parse_config(json.loads(Path(config_file).read_text(encoding="utf-8")), config_file)
    wrap = unpublished if mode == "unpublished" else None
    if mode == "serial":
        wrap = serially(json.loads((Path(config.run.folder) / SERIAL).read_text(encoding="utf-8"))["tokens"])
    try:
        train(config, resume=False, display=Recording(), wrap=wrap)
    except (ValueError, OSError) as error:
        sys.exit(f"tlt: {' '.join(str(error).split())}")
    except Stopped as stopped:
        sys.exit(stopped.exit_code)


if __name__ == "__main__":
    main(*sys.argv[1:])
