"""Layer and folder of the learned drafter: the forward pass against a slow twin, the tensors against the published
formats."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from twin import Model, make_layer, make_model

from tlt.draft.drafter_folder import DrafterError
from tlt.draft.eagle import Kind, load_drafter, save_drafter

CLASSES: tuple[Kind, ...] = ("eagle3", "eagle1")


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model(layers=8)


@pytest.mark.parametrize("listed", [11, 5])
@pytest.mark.parametrize("kind", CLASSES)
def test_a_saved_drafter_is_loaded_unchanged(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, listed: int
) -> None:
    """The drafter has the whole vocabulary, or proposes five tokens."""
    monkeypatch.setattr("tlt.draft.eagle._DRAFT_VOCABULARY", listed)
    layer, folder = make_layer(model.decoder, kind, 8).float(), tmp_path / "new" / "folder"
    layer.acceptance_rate = 0.71
    save_drafter(layer, folder)
    back = load_drafter(folder, model.decoder.options)
    assert (back.options, back.acceptance_rate) == (layer.options, 0.71)
    assert back.state_dict().keys() == layer.state_dict().keys()
    for name, tensor in layer.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor)


@pytest.mark.parametrize("token", [-1, 11])
def test_a_draft_vocabulary_beyond_the_targets_is_refused(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: int
) -> None:
    monkeypatch.setattr("tlt.draft.eagle._DRAFT_VOCABULARY", 5)
    layer = make_layer(model.decoder, "eagle1", 8)
    layer.vocabulary[2] = token  # type: ignore[index]
    save_drafter(layer, tmp_path)
    with pytest.raises(DrafterError, match="token ids outside the model's vocabulary of 11"):
        load_drafter(tmp_path, model.decoder.options)


def config_with(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["tlt_drafter"].update(changes)
        (folder / "config.json").write_text(json.dumps(config))

    return change


def tensors_with(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return rewrite


def text(name: str, content: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(content)


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (lambda folder: folder.rename(folder.parent / "elsewhere"), "tlt draft train"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    "config is no JSON": (text("config.json", "{"), "tlt draft train"),
    "config is no text": (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\x00"), "tlt draft train"),
    "config is a list": (text("config.json", "[1]"), "tlt draft train"),
    "config of something else": (text("config.json", '{"model_type": "llama"}'), "tlt draft train"),
    "drafter's config is a list": (text("config.json", '{"tlt_drafter": [1]}'), "tlt draft train"),
    "weights are no safetensors": (text("model.safetensors", "x" * 100), "tlt draft train"),
    "an unknown field": (config_with(colour="red"), "colour"),
    "an unknown kind": (config_with(kind="eagle9"), "eagle9"),
    "another hidden size": (config_with(hidden_size=32), "hidden_size 32"),
    "another vocabulary": (config_with(vocab_size=12), "vocab_size 12"),
    "heads of another size": (config_with(head_dim=4), "head_dim 4"),
    "heads that do not divide": (config_with(num_kv_heads=3), "model.safetensors"),
    "heads that are no number": (config_with(num_heads="four"), "num_heads"),
    "no window": (config_with(window=0), "window"),
    "a tap too deep": (config_with(taps=[2, 4, 8]), "layer 8"),
    "a tap below 0": (config_with(taps=[-1, 4, 5]), "taps"),
    "two taps": (config_with(taps=[2, 4]), "taps"),
    "more positions than the target": (config_with(max_positions=100_000), "max_positions"),
    "a tensor missing": (tensors_with(lambda t: t.pop("fc.weight")), "fc.weight"),
    "a tensor too many": (tensors_with(lambda t: t.update({"lm_head.weight": torch.zeros(1)})), "lm_head.weight"),
    "a tensor that is not finite": (tensors_with(lambda t: t["fc.weight"].fill_(math.nan)), "fc.weight is not finite"),
    "a tensor of another shape": (tensors_with(lambda t: t.update({"fc.weight": torch.zeros(2, 3)})), "fc"),
    "the other kind's tensors": (config_with(kind="eagle1", taps=[]), "model.safetensors"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_folder_is_refused_in_one_sentence(model: Model, tmp_path: Path, fault: str) -> None:
    (spoil, named), folder = BAD[fault], tmp_path / "drafter"
    save_drafter(make_layer(model.decoder, "eagle3", 8), folder)
    spoil(folder)
    with pytest.raises(DrafterError) as caught:
        load_drafter(folder, model.decoder.options)
    assert named in str(caught.value)
    assert str(folder) in str(caught.value)
