"""Small models as transformers 4 publishes them, and their logits, for tests/models/test_transformers_4.py.

    .venv-tf4/bin/python tests/peers/transformers_4.py publish FOLDER < fields.json
    .venv-tf4/bin/python tests/peers/transformers_4.py distances PUBLISHED EXPORTED

Nothing of tlt is imported."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

TOKENS = torch.arange(3, 103)[None]


def publish(folder: Path, families: dict[str, dict[str, Any]]) -> None:
    """Write a random model of each family to a folder of its name. Fields that its config does not have are left out.
    Weights are large enough for the logits to depend on the positions."""
    for name, fields in families.items():
        kind = CONFIG_MAPPING[name]
        known = kind().to_dict() | kind.attribute_map
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(kind(**{key: fields[key] for key in fields.keys() & known.keys()}))
        for weight in model.parameters():
            weight.data.mul_(2.0 if weight.dim() > 1 else 1.0)
        model.save_pretrained(folder / name)


def distances(published: Path, exported: Path) -> dict[str, Any]:
    """Return the largest distance between the logits of each exported model and its published one, or the error."""
    found: dict[str, Any] = {}
    for folder in sorted(exported.iterdir()):
        try:
            one, other = (_logits(place / folder.name) for place in (published, exported))
            found[folder.name] = (one - other).abs().max().item()
        except Exception as error:
            found[folder.name] = f"{type(error).__name__}: {error}"
    return found


@torch.no_grad()
def _logits(folder: Path) -> torch.Tensor:
    model, loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(loaded.values()), loaded
    return model.eval()(TOKENS).logits


if __name__ == "__main__":
    command, *folders = sys.argv[1:]
    if command == "publish":
        publish(Path(folders[0]), json.load(sys.stdin))
    else:
        print(json.dumps(distances(*map(Path, folders))))
