"""Saving with the config of the source, and activation checkpointing of families that the fused decoder does not
support."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from test_generic import families
from torch.testing._internal.distributed.fake_pg import FakeStore

from tlt.config import RolloutConfig, TrainConfig
from tlt.files import read_json
from tlt.models.hugging_face import is_tied, load_model, save_model
from tlt.models.model_folder import ModelError
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


LINEAR = {"rope_type": "linear", "factor": 8.0}
PUBLISHED = {  # fields of families whose names transformers 5 changes
    "qwen3": {"rope_theta": 5e5, "rope_scaling": LINEAR},
    "phi": {"rope_theta": 3e4, "partial_rotary_factor": 0.25},
    "gpt_neox": {"rotary_emb_base": 3e4, "rotary_pct": 0.5},
    "gemma3_text": {"rope_theta": 5e5, "rope_local_base_freq": 3e3, "rope_scaling": LINEAR},
    "qwen3_moe": {"rope_theta": 5e5, "num_experts": 4},
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_saved_model_keeps_the_config_that_was_published(tmp_path: Path, family: str) -> None:
    families.save_small(family, source := tmp_path / "source")
    saved = {key: value for key, value in read_json(source / "config.json").items() if key not in PUBLISHED[family]}
    del saved["dtype"], saved["rope_parameters"]
    published = (
        saved | PUBLISHED[family] | {"torch_dtype": "float64", "architectures": ["Any"], "of_others": {"é": [1]}}
    )
    (source / "config.json").write_text(json.dumps(published))
    model = load_model(source, torch.float32, torch.device("cpu"))
    save_model(model, out := tmp_path / "out")
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors"}
    changed = {"dtype": "float32", "torch_dtype": "float32", "tie_word_embeddings": is_tied(model)}
    assert read_json(out / "config.json") == published | changed
    del model.source_config["architectures"]
    save_model(model, out)
    assert read_json(out / "config.json")["architectures"] == [type(model).__name__], "vLLM needs them"
    names, found = (load_file(folder / "model.safetensors") for folder in (source, out))
    assert {name: tensor.shape for name, tensor in found.items()} == {n: tensor.shape for n, tensor in names.items()}


def test_a_worker_of_any_rank_saves_the_model(tmp_path: Path) -> None:
    """In a process group, transformers itself writes only on rank 0."""
    families.save_small("qwen3", tmp_path / "source")
    model = load_model(tmp_path / "source", torch.float32, torch.device("cpu"))
    save_model(model, tmp_path / "alone")
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        save_model(model, tmp_path / "second")
    finally:
        dist.destroy_process_group()
    saved = {path.name: path.read_bytes() for path in (tmp_path / "second").iterdir()}
    assert saved == {path.name: path.read_bytes() for path in (tmp_path / "alone").iterdir()}
    assert {"config.json", "model.safetensors"} <= saved.keys()
