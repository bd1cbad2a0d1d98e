"""The table of memory in docs/gpu.md is what the check before the first step computes. The recipes fit their GPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import gpu_memory
from shapes import RandomPolicy, shape_config

from tlt.config import Config, load_config
from tlt.engine.memory import most_new, rows_that_fit
from tlt.engine.noise_window import NoiseWindow
from tlt.rl.dry_run import memory_needed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8").splitlines()
CUDA = 1.0  # GiB that CUDA and its libraries take, at most


def recipe(name: str) -> Config:
    return load_config(ROOT / "recipes" / f"{name}.toml")


@pytest.mark.slow
@pytest.mark.parametrize("shape", gpu_memory.MODELS)
def test_the_page_has_the_row_of_each_model(shape: str) -> None:
    assert gpu_memory.row_of(shape) in PAGE


def test_the_page_has_the_columns_of_the_script() -> None:
    header = next(row for row in PAGE if row.startswith("| model |"))
    *ways, _ = (cell.strip() for cell in header.strip("|").split("|")[1:])
    assert ways == list(gpu_memory.WAYS)


def test_memory_without_weights_is_that_of_a_real_policy() -> None:
    config = recipe("gpu_80gb")
    policy = RandomPolicy("tiny", torch.bfloat16, torch.device("cpu"), config.train)
    found = gpu_memory.memory_of("tiny", config)
    assert found.update == memory_needed(policy, config, config.data.max_prompt_tokens)
    weights = sum(parameter.numel() for parameter in policy.model.parameters())
    assert (found.policy, found.engine, found.token) == (4 * weights, 2 * weights, 2 * 2 * 2 * 8 * 2)


def test_the_part_of_a_member_is_its_shard() -> None:
    config = recipe("gpu_80gb")
    train = config.train.model_copy(update={"shard": True})
    halves = config.model_copy(update={"train": train, "cluster": config.cluster.model_copy(update={"workers": 2})})
    whole, half = (gpu_memory.memory_of("tiny", each) for each in (config, halves))
    ends = 4 * (96 * 32 + 32)  # embedding and final norm
    assert half.policy - ends == (whole.policy - ends) / 2
    assert half.update.optimizer == 3 * half.policy


@pytest.mark.parametrize(("name", "gigabytes", "rows"), [("gpu_24gb", 24, 128), ("gpu_80gb", 79, 256)])
def test_the_update_of_a_recipe_fits_and_its_rollout_has_the_rows_of_the_page(
    name: str, gigabytes: int, rows: int
) -> None:
    """In the rollout weights and moments are in memory."""
    config = recipe(name)
    memory = gpu_memory.memory_of("qwen3-1.7b", config)
    assert memory.total / 2**30 + CUDA < gigabytes
    if name == "gpu_80gb":  # the settings of the page's table
        assert any(row.startswith(f"| Qwen3-1.7B | {memory.total / 2**30:.0f} | ") for row in PAGE)
    free = (gigabytes - CUDA) * 2**30 - memory.policy - memory.engine - memory.update.optimizer
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    deepest, widest, vocab_size = 16, 64, shape_config("qwen3-1.7b").vocab_size  # drafts of the adaptive tuner

    def tokens(rows: int) -> int:
        noise = rows * NoiseWindow(rows, vocab_size, deepest, gpu_memory.CPU).row_bytes
        logits = 3 * 4 * rows * min(widest, most_new(rows, vocab_size)) * vocab_size
        return int(0.8 * (free - noise - logits) / memory.token)

    assert rows_that_fit(config.engine, torch.device("cuda"), longest, tokens) == rows
    assert any(row.startswith("| ") and f"{name}.toml" in row and row.endswith(f"| {rows} |") for row in PAGE)
