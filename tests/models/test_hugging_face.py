"""Saving for both generations of transformers, and activation checkpointing of families that the fused decoder does not
support."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from test_generic import families
from tiny import qwen3
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen3Config

from tlt.config import RolloutConfig, TrainConfig
from tlt.files import read_json
from tlt.models.families import ModelError, decoder_options
from tlt.models.hugging_face import load_model, save_model
from tlt.rl.policy import Policy
from tlt.types import TrainBatch

BATCH = TrainBatch([(5, 6, 7)] * 2, [[9, 10, 11], [13, 14, 15]], [1.0, -1.0], [[0.0] * 3] * 2)


def policy_of(folder: Path, checkpointing: bool) -> Policy:
    config = TrainConfig(learning_rate=1e-2, gradient_checkpointing=checkpointing)
    return Policy(folder, torch.float64, torch.device("cpu"), config, RolloutConfig())


def test_checkpointed_layers_apply_no_dropout(tmp_path: Path) -> None:
    """The layers of OPT apply dropout themselves, with the rate 0.1 by default."""
    families.save_small("opt", tmp_path)
    found = []
    for checkpointing in (False, True):
        policy = policy_of(tmp_path, checkpointing)
        before, norm = policy.logprobs(BATCH), policy.update(BATCH, 0)["grad_norm"]
        found.append(np.concatenate([*before, [norm], *policy.logprobs(BATCH)]))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-9)  # the order of sums depends on the memory's alignment


@pytest.mark.parametrize("padding", [0, 16, 24])
def test_loaded_weights_are_aligned_wherever_they_begin_in_the_file(tmp_path: Path, padding: int) -> None:
    """MKL rounds by the address. A checkpoint's file has another header than the model's, so a resume would differ."""
    families.save_small("qwen3", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file(weights, file, {"format": "pt", "padding": "-" * padding})
    model = load_model(tmp_path, torch.float64, torch.device("cpu"))
    assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters())
    loaded = model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())


def test_a_family_without_checkpointing_is_refused_with_the_field(tmp_path: Path) -> None:
    families.save_small("ctrl", tmp_path)
    policy_of(tmp_path, False)
    with pytest.raises(ModelError, match=r"type ctrl .* set train\.gradient_checkpointing = false"):
        policy_of(tmp_path, True)


FACTORS = [1.0 + 0.1 * i for i in range(4)]
HALF = {"original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, **HALF},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **HALF},
        {"rope_type": "longrope", "factor": 2.0, "short_factor": FACTORS, "long_factor": FACTORS, **HALF},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_the_older_fields_alone_define_the_same_model(tmp_path: Path, rope: dict[str, Any]) -> None:
    model = qwen3(vocab_size=31, rope_parameters={"rope_theta": 5e5, **rope}).float()
    save_model(model, tmp_path)
    config = read_json(tmp_path / "config.json")
    del config["rope_parameters"], config["dtype"]
    assert config["torch_dtype"] == "float32"
    assert config.get("rope_scaling", {}).get("rope_type", "default") == rope["rope_type"]
    assert "rope_theta" not in config.get("rope_scaling", {}), "version 4 warns of fields that it does not know there"
    older, wanted = decoder_options(Qwen3Config(**config)), decoder_options(model.config)
    assert torch.equal(older.inv_freq, wanted.inv_freq)
    assert (older.attention_scaling, older.max_positions) == (wanted.attention_scaling, wanted.max_positions)


def test_a_worker_of_any_rank_saves_the_model(tmp_path: Path) -> None:
    """In a process group, transformers itself writes only on rank 0."""
    model = qwen3(vocab_size=31).float()
    save_model(model, tmp_path / "alone")
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        save_model(model, tmp_path / "second")
    finally:
        dist.destroy_process_group()
    saved = {path.name: path.read_bytes() for path in (tmp_path / "second").iterdir()}
    assert saved == {path.name: path.read_bytes() for path in (tmp_path / "alone").iterdir()}
    assert {"config.json", "model.safetensors"} <= saved.keys()
