"""One of two processes of a GRPOTrainer (`test_trl.py` starts both). It runs one scenario, and prints its results."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
sys.path.insert(0, str(Path(__file__).parent.parent))

from integrations.real_trl import run

from tlt.integrations.trl import Rollout, Trained

PARTS = {"per_device_train_batch_size": 2, "ddp_backend": "gloo"}
HARD = {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 3}
TRAINED = {"micro_batch_tokens": 32, "unroll": 2, "buffer_tokens": 256}


def modes(folder: Path) -> dict[str, Any]:
    path = str(folder / "drafter")
    found = {}
    for mode in ("off", "suffix", "eagle", "adaptive"):
        learned = {"path": path, "training": TRAINED} if mode in ("eagle", "adaptive") else {}
        mine = Rollout(speculation={"drafter": mode, **learned})

        def uneven(prompts: Any, trainer: Any, mine: Rollout = mine) -> dict[str, Any]:
            if os.environ["RANK"] == "1":
                time.sleep(0.2)  # the other one waits for it
            return mine(prompts, trainer)

        with patch("tlt.spot.schedule.Schedule._spend"):  # however short the run
            result = run(folder, uneven, **PARTS, **HARD)
        tokens = sum(log.get("tlt/drafter_tokens", 0.0) for log in result.logs)
        found[mode] = {"sha256": result.sha256, "completions": result.completions, "drafter_tokens": tokens}
    return found


def shard(trainer: Any) -> None:
    """Shard the model by FSDP2, as accelerate does on GPUs. It does not on CPUs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for layer in trainer.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(trainer.model, mesh=mesh)
    trainer.accelerator.prepare_model = lambda model, **named: model


def sharded(folder: Path) -> dict[str, Any]:
    """Train the same run with DDP and with shards, with and without speculation."""
    found = {}
    for name, drafter, prepare in (("ddp", "off", None), ("plain", "off", shard), ("adaptive", "adaptive", shard)):
        path = str(folder / "drafter") if drafter == "adaptive" else None
        rollout = Rollout(speculation={"drafter": drafter, "path": path})
        result = run(folder, rollout, prepare=prepare, **PARTS, max_steps=3)
        whole = Trained(result.trainer).state_dict()
        found[name] = {"completions": result.completions, "weights": whole["model.norm.weight"].tolist()}
    return found


if __name__ == "__main__":
    what = {"modes": modes, "sharded": sharded}[sys.argv[1]]
    print(json.dumps(what(Path(sys.argv[2]))))
