"""Estimate the memory that training takes on one GPU, by size of the model. No weight is allocated.

The update is estimated by the function that checks it before the first step of a run (`rl/dry_run.py`). docs/gpu.md has
the table, and a test compares it: python bench/gpu_memory.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from shapes import random_model, shape_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tlt.attention.slot_memory import HeadShape
from tlt.config import Config, load_config
from tlt.models.families import decoder_options
from tlt.models.hugging_face import checkpoint_layers
from tlt.rl.dry_run import Need, memory_needed, own_bytes
from tlt.rl.lora import add_adapters
from tlt.rl.sharded import shard_layers

MODELS = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b")
CPU = torch.device("cpu")
RECIPE = Path(__file__).parent.parent / "recipes" / "gpu_80gb.toml"
WAYS = {
    "all weights": [],
    "LoRA, rank 32": ["--train.lora.rank=32"],
    **{f"FSDP2, {n} GPUs": ["--train.shard=true", f"--cluster.workers={n}"] for n in (2, 4, 8)},
}
"""Way to train -> fields that differ from `RECIPE`."""

# transformers asks the values of positions whether a row has several sequences, and a fake tensor has no values
_ONE_SEQUENCE = patch("transformers.masking_utils.find_packed_sequence_indices", lambda positions: None)


class Memory(NamedTuple):
    """Bytes on one GPU. The rest of its memory is for the key-value cache."""

    policy: int
    """weights of the policy; of a sharded one, this worker's part"""
    engine: int
    """the engine's copy of the weights in bfloat16"""
    update: Need
    token: int
    """keys and values of one token in the cache"""

    @property
    def total(self) -> float:
        """Bytes during an update, when the cache is free."""
        return self.policy + self.engine + sum(self.update)


def memory_of(shape: str, config: Config) -> Memory:
    """Return the memory of a worker that trains a model of this shape (`shapes.py`) with bfloat16 on a GPU."""
    sizes = shape_config(shape)
    model = random_model(sizes, torch.float32, torch.device("meta"))
    engine = sum(parameter.numel() for parameter in model.parameters()) * torch.bfloat16.itemsize
    if config.train.lora.rank:
        add_adapters(model, config.train.lora)
    with _fake_mesh(config.cluster.workers) as mesh, _ONE_SEQUENCE, FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device=CPU)
        model.tie_weights()
        if config.train.gradient_checkpointing:
            checkpoint_layers(model)
        if config.train.shard:
            shard_layers(model, mesh)
        policy: Any = SimpleNamespace(model=model, device=CPU, autocast=True)
        need = memory_needed(policy, config, config.data.max_prompt_tokens)
        heads = HeadShape.of(decoder_options(sizes), torch.bfloat16, CPU)
        return Memory(own_bytes(model.parameters()), engine, need, heads.bytes_per_token)


@contextmanager
def _fake_mesh(size: int) -> Iterator[DeviceMesh]:
    """Yield a mesh of processes of which only this one exists. Their collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield init_device_mesh("cpu", (size,))
    finally:
        dist.destroy_process_group()


def row_of(shape: str) -> str:
    """Return a model's row of the table in docs/gpu.md, in GiB. The last number is of 1,000 tokens in the cache."""
    found = [memory_of(shape, load_config(RECIPE, fields)) for fields in WAYS.values()]
    name = shape.replace("qwen", "Qwen").replace("b", "B")
    cells = [f"{memory.total / 2**30:.0f}" for memory in found]
    return f"| {name} | {' | '.join(cells)} | {1000 * found[0].token / 2**30:.2f} |"


if __name__ == "__main__":
    for shape in MODELS:
        print(row_of(shape))
