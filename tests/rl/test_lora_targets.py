"""Names in `train.lora.targets`: each names layers of the model, and what it names is trained, merged and exported."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tiny import tiny_config

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import families

from tlt.config import ConfigError, RolloutConfig, TrainConfig, parse_section
from tlt.config.sections import LoraConfig
from tlt.models.hugging_face import empty_model, load_model
from tlt.models.model_folder import ModelError
from tlt.rl import lora
from tlt.rl.dry_run import memory_needed
from tlt.rl.lora import AdaptedPolicy, add_adapters, merged_state, whole_model
from tlt.run.about import about_adapters

CPU = torch.device("cpu")
ATTENTION = "q_proj, k_proj, v_proj, o_proj"
MLP = "gate_proj, up_proj, down_proj"
EXPERTS = "experts.gate_up_proj, experts.down_proj"
KINDS = {
    "llama": f"{ATTENTION}, {MLP}",
    "phi3": "o_proj, qkv_proj, gate_up_proj, down_proj",
    "glm": f"{ATTENTION}, gate_up_proj, down_proj",
    "gpt2": "c_attn, c_proj, c_fc",
    "ctrl": "Wq, Wk, Wv, dense, ffn.0, ffn.2",
    "mixtral": f"{ATTENTION}, {EXPERTS}",
    "qwen2_moe": f"{ATTENTION}, {MLP}, shared_expert_gate, {EXPERTS}",
    "afmoe": f"{ATTENTION}, {MLP}, gate, {EXPERTS}",  # gate_proj also in the attention
    "beam": f"{ATTENTION}, {MLP}",  # PEFT looks for experts, and the first three layers have none
    "laguna": f"{ATTENTION}, g_proj, {MLP}, {EXPERTS}",
}


def sentence(name: str, targets: Any = "all-linear") -> str:
    """Return what is said of a small model of this family. It has three layers."""
    with torch.device("meta"):
        model = empty_model(families.small_config(name))
        return add_adapters(model, LoraConfig.model_validate({"rank": 2, "targets": targets})).sentence(model)


def test_layers_are_adapted_as_modules_where_peft_takes_them() -> None:
    """Engines do not read adapters of parameters. PEFT passes over layers of these names in mixtures of experts."""
    for name, modules, parameters in (("llama", ["up_proj", "q_proj"], []), ("afmoe", ["q_proj"], ["up_proj.weight"])):
        with torch.device("meta"):
            model = empty_model(families.small_config(name))
            found = add_adapters(model, LoraConfig(rank=2, targets=["up_proj", "q_proj"]))
        assert (found.modules, found.parameters) == (modules, parameters)


@pytest.mark.parametrize("name", KINDS)
def test_by_default_the_linear_layers_of_the_family_are_trained(name: str) -> None:
    said = sentence(name)
    assert re.match(r"LoRA \(train.lora.targets = all-linear\) on (\d+) of \1 linear layers, [\d.]+ % of", said)
    assert said.endswith(f": {KINDS[name]}")


@pytest.mark.parametrize(
    ("name", "targets", "trained"),
    [
        (
            "llama",
            ["q_proj"],
            "3 of 21 linear layers, 0.7 % of the weights: q_proj; not on k_proj, v_proj, o_proj, gate",
        ),
        ("llama", "layers.0.self_attn.q_proj", "1 of 21 linear layers"),
        ("llama", ["all-linear", "lm_head", "embed_tokens"], "23 of 23 linear layers"),
        ("qwen2_moe", ["down_proj"], "6 of 30 linear layers"),  # three of shared experts, three of all experts
        ("qwen2_moe", ["gate_proj"], "3 of 30 linear layers"),
        ("qwen2_moe", ["experts.down_proj"], "3 of 30 linear layers"),
        ("afmoe", ["gate_proj"], "6 of 30 linear layers"),  # PEFT would ask for up_proj, and adapt the experts
        ("afmoe", ["self_attn.gate_proj", "gate"], "5 of 30 linear layers"),  # two layers have a router
    ],
)
def test_a_target_is_the_end_of_a_name(name: str, targets: Any, trained: str) -> None:
    assert f") on {trained}" in sentence(name, targets)


@pytest.mark.parametrize(
    ("name", "odd"),
    [
        *[("llama", odd) for odd in ("v_porj", "proj", "self_attn", "embed_tokens.weight", "norm")],
        *[("mixtral", odd) for odd in ("gate_proj", "w1", "gate", "experts")],
        ("phi3", "q_proj"),
        ("gpt2", "wpe"),
    ],
)
def test_a_target_that_names_no_layer_is_refused_with_the_names_of_all(name: str, odd: str) -> None:
    error = f"targets has {odd}, but the model has no linear layer of this name: name some of {KINDS[name]}, or all-"
    with pytest.raises(ModelError, match=error):
        sentence(name, [KINDS[name].split(", ")[0], odd])


@pytest.mark.parametrize(
    ("name", "targets", "said"),
    [
        ("beam", "all-linear", r"PEFT does not adapt model.layers.0.mlp.down_proj as train\.lora\.targets asks"),
        ("afmoe", "gate_proj", r"PEFT cannot adapt train\.lora\.targets \(Cannot convert"),
    ],
)
def test_a_layer_that_peft_passes_over_is_an_error(
    name: str, targets: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT takes these names for those of experts."""
    monkeypatch.setattr(lora, "_TAKEN", ())
    with pytest.raises(ModelError, match=said):
        sentence(name, targets)


@pytest.mark.parametrize("targets", [[], [""]])
def test_no_targets_are_refused(targets: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"lora\.targets.*at least 1"):
        parse_section(TrainConfig, {"lora": {"rank": 2, "targets": targets}}, "recipe")


def test_a_run_says_what_it_trains_before_it_loads_the_weights(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, train={"lora": {"rank": 2}})
    (tmp_path / "model" / "model.safetensors").unlink()
    assert about_adapters(config) == (
        f"LoRA (train.lora.targets = all-linear) on 14 of 14 linear layers, 7.8 % of the weights: {KINDS['llama']}"
    )


def adapted(folder: Path, base: Path, **train: Any) -> AdaptedPolicy:
    config = TrainConfig.model_validate({"learning_rate": 1e-2, "lora": {"rank": 2}} | train)
    return AdaptedPolicy(folder, torch.float64, CPU, config, RolloutConfig(), reference=base)


def small(name: str, folder: Path) -> Path:
    families.save_small(name, folder)
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 20)[None]).logits


def randomize(model: Any) -> None:
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)


@pytest.mark.parametrize("name", ["phi3", "mixtral", "afmoe", "laguna"])
def test_engine_checkpoint_and_export_have_all_adapters(name: str, tmp_path: Path) -> None:
    """PEFT itself does not load what it saves for the shared experts of Laguna, because it renames them."""
    base = small(name, tmp_path / "model")
    assert families._adapt(base, torch.float64) == ""
    policy = adapted(base, base)
    before = logits(policy.model)
    randomize(policy.model)
    policy.save(tmp_path)
    assert adapted(tmp_path / "policy", base).sha256() == policy.sha256()
    whole = logits(whole_model(tmp_path / "policy", torch.float32))
    assert (whole - logits(policy.model)).abs().max() < 1e-3 < (whole - before).abs().max()
    theirs = peft.PeftModel.from_pretrained(load_model(base, torch.float64, CPU), str(tmp_path / "policy")).eval()
    assert name == "laguna" or (logits(theirs) - logits(policy.model)).abs().max() < 1e-5


@pytest.mark.parametrize("targets", [["w1", "w2", "w3"], "all-linear"])
def test_adapters_that_peft_makes_for_experts_are_merged(targets: Any, tmp_path: Path) -> None:
    """Models of TRL have them. PEFT turns these names of transformers 4 into tensors, with twice the rank for two."""
    small("mixtral", tmp_path)
    shape = peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(load_model(tmp_path, torch.float64, CPU), shape, autocast_adapter_dtype=False)
    randomize(model)
    merged = load_model(tmp_path, torch.float64, CPU)
    merged.load_state_dict(merged_state(model.get_base_model()))
    assert (logits(merged) - logits(model)).abs().max() < 1e-9


def test_experts_with_adapters_have_the_gradient_of_the_merged_weights(tmp_path: Path) -> None:
    """An adapter adds `s * B @ A` to a weight. If the weight has the gradient `G`, then `B` has `s * G @ A.T`.
    Checkpointing changes nothing."""
    base = small("mixtral", tmp_path)
    policy, saving = adapted(base, base), adapted(base, base, gradient_checkpointing=True)
    randomize(policy.model)
    saving.load_state_dict(policy.trained_state())
    merged = load_model(base, torch.float64, CPU)
    merged.load_state_dict(policy.state_dict())
    tokens = torch.arange(3, 20)[None]
    for model in (policy.model, saving.model, merged):
        model(tokens).logits.log_softmax(-1)[..., 7].sum().backward()
    layer, whole = policy.model.model.layers[1].mlp.experts, merged.model.layers[1].mlp.experts.down_proj.grad
    first, second = layer.lora_A["default"].weight, layer.lora_B["default"].weight.grad
    for expert in range(4):  # its rows of A are neighbours, and its columns of B are four apart
        expected = layer.scaling["default"] * whole[expert] @ first[2 * expert : 2 * expert + 2].T
        assert torch.allclose(second[:, expert::4], expected)
    for ours, theirs in zip(policy.model.parameters(), saving.model.parameters(), strict=True):
        assert not ours.requires_grad or torch.allclose(ours.grad, theirs.grad)


def test_memory_for_the_merged_weights_of_experts_is_counted(tmp_path: Path) -> None:
    """A forward pass keeps a copy of all experts for the backward pass, however short it is."""
    policy = adapted(base := small("mixtral", tmp_path / "model"), base)
    experts = sum(p.nbytes for name, p in policy.model.named_parameters() if name.endswith(("_up_proj", "down_proj")))
    needs = []
    for micro in (64, 128):
        settings = {"lora": {"rank": 2}, "micro_batch_tokens": micro}
        config = tiny_config(tmp_path, train=settings, rollout={"prompts_per_step": 8, "group_size": 8})
        needs.append(memory_needed(policy, config, 4).activations)
    assert 2 * needs[0] - needs[1] == pytest.approx(experts, rel=0.01)
