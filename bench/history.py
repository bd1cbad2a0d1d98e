"""Accept length in the first, second and third epoch, with and without the last responses to each prompt as drafts. At
the first temperature a run is also killed in its second epoch and resumed. About ten minutes on one thread.

    python bench/history.py [--json FILE] [--section.key value ...]

24 prompts of recipes/sums.toml with two responses each, 12 prompts a step, in bfloat16. The suffix drafter always
drafts, so accept lengths do not depend on times. All runs of a temperature must end in the same policy sha256.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tlt.files import read_json
from tlt.metrics import provenance, read_metrics, write_json

ROOT = Path(__file__).resolve().parent.parent
PROMPTS, EPOCHS, A_STEP = 24, 3, 12
TEMPERATURES = (0.6, 1.0)
STEPS = EPOCHS * PROMPTS // A_STEP
SAVED, KILLED = PROMPTS // A_STEP + 1, PROMPTS // A_STEP + 2  # steps before the checkpoint and before the kill
RUN = "from tlt import cli; cli.main()"
WITHOUT = "from tlt import build, cli; build.HISTORY_TOKENS = 0; cli.main()"
FIXED = {
    **{"data.path": "prompts.jsonl", "model.dtype": "bfloat16", "eval.every": 0, "train.steps": STEPS},
    **{"rollout.prompts_per_step": A_STEP, "rollout.group_size": 2, "rollout.max_new_tokens": 48},
    **{"speculation.drafter": "suffix", "run.save_every": SAVED, "run.keep": 1},
}


def started(folder: Path, overrides: Sequence[str], *more: str, code: str = RUN) -> subprocess.Popen[bytes]:
    """Start a run in `folder`, in a process of its own, which executes `code`."""
    fields = FIXED | {"data.path": folder.parent / "prompts.jsonl", "run.folder": folder}
    flags = [text for key, value in fields.items() for text in (f"--{key}", str(value))]
    command = [sys.executable, "-c", code, "train", str(ROOT / "recipes" / "sums.toml"), *flags, *overrides, *more]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)


def finished(folder: Path, overrides: Sequence[str], *more: str, code: str = RUN) -> dict[str, Any]:
    """Train to the end. Return the policy's sha256, and the accept length of each step."""
    if status := started(folder, overrides, *more, code=code).wait():
        sys.exit(f"the run in {folder} ended with {status}")
    lines = [(line["tokens"], line["rollout"]["row_passes"]) for line in read_metrics(folder)]
    epochs = [lines[at : at + STEPS // EPOCHS] for at in range(0, STEPS, STEPS // EPOCHS)]
    return {
        "policy_sha256": read_json(folder / "summary.json")["policy_sha256"],
        "epochs": [accept_length(some) for some in epochs],
        "steps": [accept_length([one]) for one in lines],
    }


def accept_length(steps: Sequence[tuple[int, int]]) -> float:
    """Return tokens per pass over steps with these (tokens, passes)."""
    return round(sum(tokens for tokens, _ in steps) / sum(passes for _, passes in steps), 3)


def killed(folder: Path, overrides: Sequence[str]) -> None:
    """Train until a step after the first checkpoint has ended, and kill the process."""
    process = started(folder, overrides)
    while process.poll() is None and _steps_done(folder) < KILLED:
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()


def _steps_done(folder: Path) -> int:
    with suppress(OSError):
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    return 0


def measure(temperature: float, overrides: Sequence[str], kills: bool) -> dict[str, dict[str, Any]]:
    """Return the figures of the runs at a temperature."""
    with tempfile.TemporaryDirectory() as home:
        lines = (ROOT / "recipes" / "data" / "sums.jsonl").read_text(encoding="utf-8").splitlines()[:PROMPTS]
        (Path(home) / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
        options = ["--rollout.temperature", str(temperature), *overrides]
        found = {
            "without history": finished(Path(home) / "without", options, code=WITHOUT),
            "with history": finished(Path(home) / "with", options),
        }
        if kills:
            killed(Path(home) / "killed", options)
            found["killed and resumed"] = finished(Path(home) / "killed", options, "--resume")
    assert len({run["policy_sha256"] for run in found.values()}) == 1, found
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments, overrides = parser.parse_known_args()
    found: dict[str, Any] = {}
    for temperature in TEMPERATURES:
        found[str(temperature)] = runs = measure(temperature, overrides, kills=temperature == TEMPERATURES[0])
        for name, run in runs.items():
            print(f"temperature {temperature}, {name}: accept length by epoch {run['epochs']}", flush=True)
        if arguments.json:
            write_json(arguments.json, {"overrides": overrides, "temperatures": found, **provenance()})


if __name__ == "__main__":
    main()
