"""What a step loses without one mechanism of the rollout: keeping the keys and values of rows of coming
steps, or the journal of responses.

    python bench/mechanisms.py recipes/longtail.toml [--workers 2] [--steps 30] [--json FILE] [--section.key value ...]

All runs decode the same tokens and take turns, step by step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from train import mode_config, run_in_turn

from tlt import progress
from tlt.bench.rollout import ratio
from tlt.build import settled
from tlt.config import load_config
from tlt.metrics import provenance, write_json
from tlt.run.resume import at_the_time_of_the_run

WITHOUT = {
    "all": "",
    "no_parking": "from tlt.engine.parking import Parking; Parking.park = lambda self, place, row: None",
    "no_journal": "from tlt.run import train; train._journal = lambda config: None",
}
"""name of a run -> what turns the mechanism off, in the driver and in each worker"""
_IN_WORKERS = "import sys\nif any('default_worker' in word for word in sys.orig_argv):\n    {}\n"


def one_run(config_file: str, threads: int) -> None:
    import one_run
    from turns import over_pipes

    patch = WITHOUT[Path(config_file).parent.name]
    with tempfile.TemporaryDirectory() as folder:
        if patch:
            exec(patch, {})
            (Path(folder) / "sitecustomize.py").write_text(_IN_WORKERS.format(patch), encoding="utf-8")
            os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        one_run.main(config_file, threads, over_pipes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path)
    asked, overrides = parser.parse_known_args()
    config = at_the_time_of_the_run(settled(load_config(asked.recipe, overrides)), None)
    configs = {name: mode_config(config, "adaptive", asked.workers, asked.steps, folder=name) for name in WITHOUT}
    console = progress.console()
    done = run_in_turn(console, configs, dict.fromkeys(WITHOUT, Path(__file__).name))
    rows = {
        name: {
            "sum_seconds": sum(run.step_seconds),
            "median_seconds": statistics.median(run.step_seconds),
            "step_against_all": ratio(run.step_seconds, done["all"].step_seconds),
            "rollout_against_all": ratio(run.rollout_seconds, done["all"].rollout_seconds),
            "policy_sha256": run.summary["policy_sha256"],
        }
        for name, run in done.items()
    }
    for name, row in rows.items():
        low, middle, high = row["step_against_all"]
        console.print(f"{name}: {row['sum_seconds']:.1f} s, a step {middle:.3f} ({low:.3f}-{high:.3f}) times as long")
    if asked.json:
        write_json(asked.json, {"runs": rows, "steps": asked.steps, "overrides": overrides, **provenance()})


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].endswith("bench.json"):
        one_run(sys.argv[1], int(sys.argv[2]))
    else:
        main()
