"""An exported drafter in `speculators`, if it is installed: its logits equal ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("speculators", reason="speculators is not installed")

from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from tiny import qwen3

from tlt.draft.eagle import EagleLayer, eagle_options
from tlt.draft.formats import Words, write_drafter
from tlt.files import read_json
from tlt.models.decoder import Decoder
from tlt.models.families import decoder_options, read_config
from tlt.models.weights import read_safetensors
from tlt.spot.unroll import Pack, unroll

T, STEPS = 24, 3


@pytest.mark.parametrize("window", [512, 8])
def test_speculators_gives_our_logits(tmp_path: Path, window: int) -> None:
    qwen3(vocab_size=50, num_hidden_layers=8, rope_theta=5e5).float().save_pretrained(tmp_path / "model")
    options = decoder_options(read_config(tmp_path / "model"))
    torch.manual_seed(1)
    layer = EagleLayer(eagle_options(options, "eagle3", window)).eval()
    weights = read_safetensors(tmp_path / "model")
    head, embedding = weights["lm_head.weight"].float(), weights["model.embed_tokens.weight"].float()
    target = read_json(tmp_path / "model" / "config.json") | {"_name_or_path": str(tmp_path / "model")}
    write_drafter(layer, target, tmp_path / "drafter", "speculators", Words(embedding, head))

    config = Eagle3SpeculatorConfig.from_pretrained(tmp_path / "drafter")
    config.transformer_layer_config._attn_implementation = "eager"
    model: Any = Eagle3DraftModel.from_pretrained(tmp_path / "drafter", config=config).float().eval()
    for name, tensor in load_file(tmp_path / "drafter" / "model.safetensors").items():
        assert torch.equal(model.state_dict()[name], tensor), f"{name} was not taken: speculators only logs that"
    assert torch.equal(model.embed_tokens.weight, embedding)

    tokens, features = torch.randint(50, (T,)), torch.randn(T, 3 * options.hidden_size)
    theirs: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, given, out: theirs.append(out[0].detach()))
    with torch.no_grad():
        model(features[None], tokens[None], torch.zeros(1, T, dtype=torch.long), ttt_steps=STEPS)

    decoder = Decoder(options, torch.float32, torch.device("cpu"))
    angles = decoder.cis(torch.arange(T + STEPS))[:, 0]
    cos_sin = tuple(torch.cat([part, part], dim=-1) for part in (angles.real, angles.imag))
    last = torch.zeros(T, options.hidden_size)
    nothing = torch.zeros(T, dtype=torch.long)
    batch = Pack(tokens, torch.cat([features, last], dim=-1), torch.arange(T), nothing, nothing.bool(), 0)
    with torch.no_grad():
        ours = [column @ head.T for column in unroll(layer, embedding, cos_sin, batch, STEPS)]  # type: ignore[arg-type]
    for step, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
        apart = (mine - its)[: T - step].abs().max()
        assert apart < 1e-5, f"step {step}: {apart}"
