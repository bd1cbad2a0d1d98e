"""Families that the fused decoder does not support. They are decoded by transformers' own code with the engine's
attention."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import qwen3
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import families

from tlt.models.decoder import Decoder
from tlt.models.families import decoder_options, read_config
from tlt.models.generic import TRIED, GenericDecoder, attend
from tlt.models.hugging_face import as_in_files
from tlt.models.loading import decoder_for, folder_weights
from tlt.models.model_folder import ModelError
from tlt.rl.parity import take_weights

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("cohere", torch.float64),
        ("gpt2", torch.float32),
        ("mixtral", torch.float32),
        pytest.param("aria_text", torch.float64, marks=pytest.mark.slow),
        pytest.param("gemma3_text", torch.float64, marks=pytest.mark.slow),  # below with the smallest window
        pytest.param("granite", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_transformers_plain_and_drafted_before_and_after_an_update(
    name: str, dtype: torch.dtype
) -> None:
    assert families.try_family(name, [dtype]) == ""


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gpt_oss", "^models of type gpt_oss cannot be trained with tlt, because transformers"),
        ("minimax", "layers of type 'linear_attention'|keep other state"),
        ("falcon", "does not decode models of type falcon \\(the model.s layers support only their own attention"),
        ("stablelm", "do not pass the arguments"),
        ("doge", "a mask of its own"),
        ("phimoe", "does not pass on its sliding window"),
        ("deepseek_v3", "does not decode models of type deepseek_v3"),
        ("mamba", "only state is keys and values"),
    ],
)
def test_a_family_that_cannot_be_decoded_is_refused_with_the_reason(name: str, why: str) -> None:
    assert re.search(why, families.try_family(name))


def small(folder: Path, name: str = "olmo2") -> GenericDecoder:
    families.save_small(name, folder)
    target = decoder_for(read_config(folder), torch.float64, CPU)
    target.load(folder_weights(folder, torch.float64), 0)
    assert isinstance(target, GenericDecoder)
    return target


def test_it_computes_the_values_of_the_fused_decoder() -> None:
    """Hidden states, the states that enter each layer, and logits, of a model that both support."""
    model = qwen3()
    options = decoder_options(model.config)
    fused = Decoder(options, torch.float64, CPU)
    generic = GenericDecoder(options, torch.float64, CPU, model.config)
    tokens = torch.arange(12).view(2, 6)
    found = []
    share = options.num_heads // options.num_kv_heads

    def values_alone(layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
        """Stand in for the engine, which decides which tokens are attended to."""
        return value.repeat_interleave(share, dim=1).flatten(1)

    for target in (fused, generic):
        target.load(model.state_dict(), 0)
        taps = dict.fromkeys((0, 1))
        hidden = target.forward(tokens, torch.arange(6).expand(2, 6), values_alone, taps)
        found.append([hidden, taps[0], taps[1], target.logits(hidden), target.to_logits(hidden[0])])
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-6), "transformers takes norms and angles in float32"


def test_an_update_of_the_policy_reaches_the_engine_only_at_the_next_load(tmp_path: Path) -> None:
    target = small(tmp_path)
    hidden = torch.ones(1, 1, 64, dtype=torch.float64)
    policy = families.policy_of(tmp_path, torch.float64)
    take_weights(target, policy, 1)
    before = target.logits(hidden)
    assert families.update(policy, [((5, 6), (7, 8)), ((5, 6), (9,))]) == ""
    assert torch.equal(target.logits(hidden), before)
    take_weights(target, policy, 2)
    assert not torch.allclose(target.logits(hidden), before)


def test_the_head_of_a_drafter_includes_the_scale_of_the_logits(tmp_path: Path) -> None:
    target = small(tmp_path, "cohere")
    hidden = torch.randn(3, 64, dtype=torch.float64)
    assert torch.allclose(target.to_logits(hidden), target.logits(hidden))
    weight = families.policy_of(tmp_path, torch.float64).model.lm_head.weight
    assert not torch.allclose(hidden @ weight.t(), target.logits(hidden))


def test_weights_of_another_size_are_refused(tmp_path: Path) -> None:
    target = small(tmp_path)
    weights = folder_weights(tmp_path, torch.float64)
    name = next(iter(weights))
    with pytest.raises(ModelError, match=r"the weights of this olmo2 do not fit its config\.json"):
        target.load({**weights, name: weights[name][:-1]}, 1)
    assert target.version == 0


def test_a_window_may_be_shorter_than_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families.MORE, "sliding_window", 3)
    assert families.try_family("gemma3_text", [torch.float64]) == ""


def test_an_empty_window_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families.MORE, "sliding_window", 0)
    with pytest.raises(ValueError, match="layer 0 has sliding_window = 0, and so no token to attend to"):
        small(tmp_path / "empty", "gemma3_text")
    small(tmp_path / "unused", "qwen2_moe")  # its config has 0 if no layer has a window


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_an_attention_with_an_argument_that_the_engine_lacks_is_refused(name: str) -> None:
    query, settings = torch.zeros(1, 2, 3, 8), {name: 1.0}
    with pytest.raises(ValueError, match=f"the model.s attention uses {name}"):
        attend(torch.nn.Module(), query, query, query, None, lambda *_: query, **settings)


def test_a_layer_that_attends_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = small(tmp_path)
    attention = target.model.layers[0].self_attn
    once = attention.forward

    def twice(*inputs: Any, **settings: Any) -> Any:
        once(*inputs, **settings)
        return once(*inputs, **settings)

    monkeypatch.setattr(attention, "forward", twice)
    with pytest.raises(ValueError, match=f"made {target.options.num_layers + 1} calls"):
        target._check_layers()


def test_the_tested_families_are_those_of_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    listed = page.split("among them:\n\n")[1].split(".\n\n")[0]
    assert {name.strip() for name in listed.replace("\n", " ").split(",")} == TRIED


def test_weights_have_the_names_and_shapes_of_transformers_files(tmp_path: Path) -> None:
    """In memory, transformers 5 holds Mixtral's experts with other names and shapes than in its files."""
    sizes = {"vocab_size": 31, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2}
    config = CONFIG_MAPPING["mixtral"](**sizes, **heads)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    written, found = load_file(tmp_path / "model.safetensors"), as_in_files(config, model.state_dict())
    assert found.keys() - {"lm_head.weight"} == written.keys() - {"lm_head.weight"}
    for weight, tensor in written.items():
        assert torch.equal(found[weight], tensor)
