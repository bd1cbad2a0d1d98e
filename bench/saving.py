"""How long a caller waits for its drafter to be saved: in the background, and at once.

    python bench/saving.py [--hidden 2048] [--folder DIR] [--json FILE]

The drafter has the shape for a target of that hidden size. Three ways are timed in turn: everything at once (the
trainable tensors, Adam's moments, and the target's embedding and head, as in a plain save), only trained tensors at
once, and only trained tensors in the background. For the latter the caller waits for a copy, which
handing the state to another worker needs anyway; so the copy is also timed alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tlt.draft.eagle import EagleLayer, EagleOptions
from tlt.draft.saving import DrafterSaver, TrainerState, write
from tlt.metrics import provenance, write_json

VOCABULARY = 32_768


def shape(hidden: int) -> EagleOptions:
    heads = hidden // 128
    return EagleOptions(
        "eagle3", hidden, heads, max(1, heads // 4), 128, 3 * hidden, 1e-6, VOCABULARY, 32_768, (2, 14, 25), 512
    )


def training_state(options: EagleOptions) -> TrainerState:
    """Tensors as in `SpotTrainer.state`: the weights to publish, those in training, and Adam's two moments."""
    names = {name: t.detach() for name, t in EagleLayer(options).named_parameters()}
    kinds = ("mean", "weight", "exp_avg", "exp_avg_sq")
    tensors = {f"{kind}.{name}": torch.rand_like(t) for kind in kinds for name, t in names.items()}
    return tensors | {"steps": torch.tensor(1.0, dtype=torch.float64)}


def snapshot(tensors: TrainerState) -> TrainerState:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk in question; a temporary one if left out")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        facts = measure(shape(arguments.hidden), folder, arguments.repeats)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name in ("everything, at once", "trained only, at once", "trained only, in the background"):
        print(f"{name}: the caller waits {facts[name]['seconds']:.3f} s for {facts[name]['mebibytes']:.0f} MiB")
    if arguments.json:
        write_json(arguments.json, {**facts, "hidden": arguments.hidden, **provenance()})


def measure(options: EagleOptions, folder: Path, repeats: int) -> dict[str, Any]:
    tensors, frozen = training_state(options), torch.rand(2, options.vocab_size, options.hidden_size)
    saver = DrafterSaver(folder / "background", options)
    stalls: dict[str, list[float]] = {"everything": [], "trained": [], "background": [], "copy": [], "written": []}
    for turn in range(repeats):
        began = time.perf_counter()
        write(folder / "everything", options, turn, tensors, None)
        file = folder / "everything" / "frozen.safetensors"
        save_file({"frozen": frozen}, file)
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
        stalls["everything"].append(time.perf_counter() - began)
        began = time.perf_counter()
        write(folder / "trained", options, turn, tensors, None)
        stalls["trained"].append(time.perf_counter() - began)
        began = time.perf_counter()
        copy = snapshot(tensors)
        stalls["copy"].append(time.perf_counter() - began)
        saver.save(turn, copy)
        stalls["background"].append(time.perf_counter() - began)
        saver.wait()
        stalls["written"].append(time.perf_counter() - began)
    trained = sum(t.numel() * t.element_size() for t in tensors.values()) / 2**20
    whole = trained + frozen.numel() * 4 / 2**20
    median = {name: statistics.median(values) for name, values in stalls.items()}
    return {
        "everything, at once": {"seconds": median["everything"], "mebibytes": whole},
        "trained only, at once": {"seconds": median["trained"], "mebibytes": trained},
        "trained only, in the background": {
            "seconds": median["background"],
            "copy_seconds": median["copy"],
            "mebibytes": trained,
            "written_after": median["written"],
        },
        "less_stall_than_at_once": median["trained"] / median["background"],
        "less_stall_than_everything_at_once": median["everything"] / median["background"],
        "all_seconds": stalls,
    }


if __name__ == "__main__":
    main()
