"""Notes of a run at its start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import tiny_config, tiny_tree
from transformers import MixtralConfig

from tlt.config import parse_config
from tlt.run.about import about_folder, about_memory, about_model, about_prompts
from tlt.types import Prompt


def test_a_step_that_repeats_prompts_is_named(tmp_path: Path) -> None:
    prompts = [Prompt(number, "a", (1,)) for number in range(2)]
    for per_step, is_said in ((2, False), (3, True)):
        config = tiny_config(tmp_path, rollout={"prompts_per_step": per_step})
        said = about_prompts(config, prompts, SimpleNamespace(chat_template=None))
        assert ("each step repeats prompts (rollout.prompts_per_step = 3 is above)" in said) == is_said


def test_the_files_that_a_run_will_write(tmp_path: Path) -> None:
    def said(**run: Any) -> str:
        return about_folder(tiny_config(tmp_path, run={"folder": "R", "keep": 2, "trackers": []} | run))

    files, kept = "writes to R: metrics.jsonl", "at the end (the newest 2 are kept)"
    page = "report.html, summary.json; a checkpoint"
    assert said(save_every=5000) == f"{files}, completions.jsonl, {page} every 5,000 steps and {kept}"
    assert said(save_every=1) == f"{files}, completions.jsonl, {page} every 1 step and {kept}"
    fewer = said(save_every=0, on_save="cp {checkpoint} there", trackers=["tensorboard"])
    then = f"{kept}, then runs cp {{checkpoint}} there; metrics go to tensorboard"
    assert fewer == f"{files}, completions.jsonl, {page} {then}"


@pytest.mark.parametrize(
    ("size", "limit", "rows", "batch"),
    [
        ("auto", "25 % of the free memory", "auto", "64 responses at once, or fewer by memory"),
        (2048, "2,048 MiB", 48, "48 responses at once"),
    ],
)
def test_memory_with_the_largest_cache_and_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: object, limit: str, rows: object, batch: str
) -> None:
    monkeypatch.setattr("tlt.run.about.free_bytes", lambda device: 5 * 2**29)
    config = tiny_config(tmp_path, engine={"kv_memory_mb": size, "max_rows": rows})
    cache = f"key-value cache: at most {limit} (engine.kv_memory_mb)"
    expected = f"memory: 2.5 GiB free on this machine; {cache}; at most {batch} (engine.max_rows)"
    assert about_memory(config) == expected


@pytest.mark.parametrize(
    ("template", "chat", "named"), [("{{ x }}", False, True), ("{{ x }}", True, False), (None, False, False)]
)
def test_an_unused_chat_template_is_named(tmp_path: Path, template: str | None, chat: bool, named: bool) -> None:
    config = tiny_config(tmp_path, data={"chat": chat})
    said = about_prompts(config, [], SimpleNamespace(chat_template=template))
    assert ("the model's chat template is not used (data.chat = true uses it)" in said) == named


@pytest.mark.parametrize(("strings", "named"), [([], True), (["\n"], False)])
def test_a_game_whose_turns_end_only_at_end_tokens_is_named(tmp_path: Path, strings: list[str], named: bool) -> None:
    tree = tiny_tree(tmp_path, rollout={"stop_strings": strings})
    config = parse_config(tree | {"reward": {"environment": "tiny_environments:Echo", "turns": 2}})
    said = about_prompts(config, [], SimpleNamespace(chat_template=None))
    assert ("a turn ends only at an end token of the model" in said) == named


@pytest.mark.parametrize(("weight", "named"), [(0.5, True), (0.0, False)])
def test_a_router_loss_that_the_update_does_not_add_is_named(tmp_path: Path, weight: float, named: bool) -> None:
    MixtralConfig(num_hidden_layers=1, hidden_size=32, router_aux_loss_coef=weight).save_pretrained(tmp_path)
    said = about_model(tiny_config(tmp_path, model={"path": str(tmp_path)}))
    assert ("no loss balances its experts (router_aux_loss_coef = 0.5 is not used)" in said) == named
