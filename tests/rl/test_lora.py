"""Adapters: trained alone, merged for the engine, saved in PEFT's format, and resumed bit for bit."""

from __future__ import annotations

import os
import signal
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import peft
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiny import random_batch, save_tokenizer, tiny_tree
from transformers import AutoModelForCausalLM

from tlt.commands.export import export
from tlt.config import ConfigError, RolloutConfig, TrainConfig, parse_config
from tlt.metrics import read_metrics
from tlt.models.decoder import Decoder
from tlt.models.families import decoder_options, read_config
from tlt.models.hugging_face import is_tied, load_model
from tlt.models.model_folder import ModelError
from tlt.rl.lora import AdaptedPolicy, whole_model
from tlt.rl.parity import take_weights
from tlt.rl.policy import Update
from tlt.run.display import Display
from tlt.run.train import train
from tlt.stopping import Stopped

VOCAB = 31
TOKENS = torch.tensor([[1, 7, 3, 20, 5]])


def adapted(folder: Path, base: Path, **lora: Any) -> AdaptedPolicy:
    settings = {"learning_rate": 1e-2, "loss": "grpo", "lora": {"rank": 4} | lora}
    config = TrainConfig.model_validate(settings)
    return AdaptedPolicy(folder, torch.float64, torch.device("cpu"), config, RolloutConfig(), reference=base)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def test_only_adapters_are_trained_and_they_add_nothing_at_first(folder: Path) -> None:
    policy = adapted(folder, folder)
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    assert torch.equal(logits(policy.model), logits(load_model(folder, torch.float64, torch.device("cpu"))))
    assert policy.update(random_batch(VOCAB), 0)["grad_norm"] > 0
    changed = {n for n, t in policy.model.state_dict().items() if not torch.equal(t, before[n])}
    assert changed
    assert all(".lora_" in name for name in changed)
    assert {name.split("/")[0] for name in policy.optimizer_state()} == set(policy.trained_state())


def test_the_engine_gets_the_merged_model(folder: Path) -> None:
    policy = adapted(folder, folder)
    for step in range(3):
        policy.update(random_batch(VOCAB, seed=step), step)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    start = logits(plain)
    plain.load_state_dict(policy.state_dict())
    assert (logits(plain) - logits(policy.model)).abs().max() < 1e-5
    assert (logits(plain) - start).abs().max() > 1e-3


def test_a_checkpoint_has_peft_adapters_alone_and_resumes_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    policy = adapted(folder, folder)
    policy.update(random_batch(VOCAB), 0)
    policy.save(tmp_path)
    saved = load_file(tmp_path / "policy" / "adapter_model.safetensors")
    assert sum(t.numel() for t in saved.values()) == sum(t.numel() for t in policy.trained_state().values())
    assert not (tmp_path / "policy" / "model.safetensors").exists()
    assert torch.equal(logits(with_peft(folder, tmp_path / "policy")), logits(policy.model))
    resumed = adapted(tmp_path / "policy", folder)
    resumed.load_optimizer(tmp_path)
    for step in (1, 2):
        ours, again = (p.update(random_batch(VOCAB, seed=step), step) for p in (policy, resumed))
        assert ours == again
    assert policy.sha256() == resumed.sha256()


def test_an_export_is_a_whole_model(folder: Path, tmp_path: Path) -> None:
    policy = adapted(folder, folder)
    policy.update(random_batch(VOCAB), 0)
    policy.save(tmp_path)
    save_tokenizer(tmp_path / "policy")
    export(tmp_path / "policy", tmp_path / "whole", "hf", "float32")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float64).eval()
    assert (logits(whole) - logits(policy.model)).abs().max() < 1e-4  # it is written in float32
    assert is_tied(whole_model(tmp_path / "policy", torch.float32)), "the head has no adapter"


def with_peft(base: Path, adapters: Path) -> Any:
    plain = load_model(base, torch.float64, torch.device("cpu"))  # aligned, so that all products round alike
    return peft.PeftModel.from_pretrained(plain, str(adapters), autocast_adapter_dtype=False).eval()


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens", "o_proj"], ["lm_head", "embed_tokens"]])
def test_adapters_on_a_tied_head_give_one_model_in_engine_checkpoint_and_export(
    folder: Path, tmp_path: Path, targets: list[str]
) -> None:
    policy = adapted(folder, folder, targets=targets)
    for step in range(2):
        policy.update(random_batch(VOCAB, seed=step), step)
    target = Decoder(decoder_options(read_config(folder)), torch.float64, torch.device("cpu"))
    take_weights(target, policy, 2)
    policy.save(tmp_path)
    theirs = with_peft(folder, tmp_path / "policy")
    assert torch.equal(logits(theirs), logits(policy.model)), "PEFT passes over names that it does not know"
    resumed = adapted(tmp_path / "policy", folder, targets=targets)
    assert resumed.sha256() == policy.sha256()
    whole = whole_model(tmp_path / "policy", torch.float32)
    assert (logits(whole) - logits(policy.model)).abs().max() < 1e-4
    assert not is_tied(whole)
    assert not whole.config.tie_word_embeddings


@pytest.mark.parametrize("fault", ["missing", "odd"])
def test_a_file_of_adapters_that_lacks_one_or_has_another_is_refused(folder: Path, tmp_path: Path, fault: str) -> None:
    """PEFT would load those that fit, and leave the others random."""
    adapted(folder, folder).save(tmp_path)
    file = tmp_path / "policy" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if ".lora_B." in name)
    tensor = tensors.pop(name)
    if fault == "odd":
        tensors |= {name: tensor, name.replace(".0.", ".7."): tensor.clone()}
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"does not fit adapter_config\.json: only one .*: restore both"):
        whole_model(tmp_path / "policy", torch.float32)
    said = "lacks the adapter" if fault == "missing" else r"train\.lora\.targets does not name"
    with pytest.raises(ModelError, match=said):
        adapted(tmp_path / "policy", folder)


def run(home: Path, name: str, resume: bool = False, display: Any = None, **training: Any) -> str:
    sections = {
        "train": {"steps": 3, "lora": {"rank": 2}, "learning_rate": 1e-2} | training,
        "run": {"folder": str(home / name), "save_every": 1},
        "reward": {"name": "tiny_rewards:share_of_low_bytes", "folder": str(Path(__file__).parent.parent)},
    }
    config = parse_config(tiny_tree(home, **sections))
    return train(config, resume, display or Display(Console(quiet=True)))["policy_sha256"]


def test_a_resumed_run_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:

    class Stopping(Display):
        def phase(self, step: int, name: str, total: int) -> None:
            if (step, name) == (1, "update"):
                os.kill(os.getpid(), signal.SIGTERM)

    training = {"epochs": 3, "updates_per_step": 2}
    whole = run(tmp_path, "whole", **training)
    assert whole != run(tmp_path, "more", **training | {"epochs": 4})
    with pytest.raises(Stopped, match="saved after step 2 of 3"):
        run(tmp_path, "stopped", display=Stopping(Console(quiet=True)), **training)
    assert run(tmp_path, "stopped", True, **training) == whole
    step, calls = Update._optimizer_step, count()

    def fails(self: Update, *arguments: Any) -> dict[str, Any]:
        if next(calls) == per_step + per_step // 2:
            raise ValueError("amid the second step")
        return step(self, *arguments)

    per_step = 3 * 2
    with patch.object(Update, "_optimizer_step", fails), pytest.raises(ValueError, match="amid the second step"):
        run(tmp_path, "failed", **training)
    assert run(tmp_path, "failed", True, **training) == whole
    assert len(read_metrics(tmp_path / "failed")) == len(read_metrics(tmp_path / "stopped")) == 3


def test_adapters_are_not_merged_into_another_base(tmp_path: Path) -> None:
    run(tmp_path, "run", steps=1)
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"model.norm.weight": 1.5 * weights["model.norm.weight"]}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model are not those that the adapters in .*policy were trained on: restore"):
        export(tmp_path / "run", tmp_path / "whole", "hf", "float32")
    with pytest.raises(ConfigError, match=r"the files in model\.path differ from those of the run to be resumed"):
        run(tmp_path, "run", True, steps=2)


def test_adapters_of_another_rank_are_refused(folder: Path, tmp_path: Path) -> None:
    adapted(folder, folder).save(tmp_path)
    with pytest.raises(ModelError, match=r"the adapters in .* do not fit the model: set train\.lora\.rank"):
        adapted(tmp_path / "policy", folder, rank=3)


def test_an_error_about_a_folder_of_adapters_names_export(folder: Path, tmp_path: Path) -> None:
    adapted(folder, folder).save(tmp_path)
    with pytest.raises(ModelError, match=r"holds only adapters: run tlt export .*policy FOLDER to merge them"):
        read_config(tmp_path / "policy")
