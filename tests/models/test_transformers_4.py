"""Exports as transformers 4 reads them, in a process and an environment of its own: make test-tf4."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from test_generic import families
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tlt.commands.export import export

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-tf4" / "bin" / "python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="make tf4 builds the environment")

ORIGINAL = {"original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 8.0}
YARN = {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}
ROPE = {"rope_theta": 3e4, "rotary_emb_base": 3e4, "rope_local_base_freq": 3e3}
ROPE |= {"partial_rotary_factor": 0.25, "rotary_pct": 0.5}
"""other than the families' defaults, which a model gets whose config has no field that is read"""
SCALED = {"gemma3_text": LINEAR, "llama": LLAMA3, "olmo3": YARN | {"attention_factor": 1.2}, "qwen3_moe": YARN}
FAMILIES = (  # of docs/models.md that transformers 4.57 has
    *("apertus", "arcee", "aria_text", "biogpt", "bitnet", "cohere", "cohere2", "ctrl", "ernie4_5", "ernie4_5_moe"),
    *("exaone4", "flex_olmo", "gemma", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt-sw3", "gpt2", "gpt_neox"),
    *("granite", "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "lfm2", "llama"),
    *("ministral", "mistral", "mixtral", "modernbert-decoder", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon"),
    *("phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2"),
)


def transformers_4(*command: str | Path, given: str = "") -> str:
    """Run peers/transformers_4.py in its environment. Return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script = ROOT / "tests" / "peers" / "transformers_4.py"
    done = subprocess.run([PYTHON, script, *command], input=given, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with published models and their exports."""
    place = tmp_path_factory.mktemp("transformers_4")
    fields = families.SIZES | families.MORE | ROPE
    of_each = {name: fields | ({"rope_scaling": SCALED[name]} if name in SCALED else {}) for name in FAMILIES}
    transformers_4("publish", place / "published", given=json.dumps(of_each))
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(families.VOCABULARY)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2")
    for name in FAMILIES:
        tokenizer.save_pretrained(place / "published" / name)
        export(place / "published" / name, place / "exported" / name, "hf", "float32")
    return place


@pytest.fixture(scope="module")
def distances(place: Path) -> dict[str, Any]:
    """Return the largest distance of each export's logits from those of the published model, or the error."""
    return json.loads(transformers_4("distances", place / "published", place / "exported"))


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_is_the_model_that_was_published(place: Path, distances: dict[str, Any], family: str) -> None:
    assert shapes(place / "exported" / family) == shapes(place / "published" / family)
    assert distances[family] == 0.0
