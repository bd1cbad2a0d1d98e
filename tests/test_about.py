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

ASKED = [{"role": "user", "content": "2 + 3?"}]
WHOLE = [*ASKED, {"role": "assistant", "content": "5"}]
GAME = {"name": "reasoning_gym", "environment": "tiny_environments:Echo", "turns": 2}


@pytest.mark.parametrize(
    ("sections", "conversation", "note"),
    [
        ({"rollout": {"prompts_per_step": 2}}, ASKED, ""),
        ({"rollout": {"prompts_per_step": 3}}, [], "each step repeats prompts (rollout.prompts_per_step = 3 is above)"),
        # a column of whole conversations would show the model the right answers
        ({}, WHOLE, "2 with a last message of the model, which the response continues"),
        ({"data": {"chat": False}}, [], "the model's chat template is not used (data.chat = true uses it)"),
        ({"eval": {"path": "held_out.jsonl"}}, [], "eval.path is not used (eval.every above 0 uses it)"),
        ({"eval": {"path": "held_out.jsonl", "every": 1}}, [], ""),
        ({"reward": GAME, "data": {"chat": False}}, [], "a turn ends only at an end token of the model"),
        ({"reward": GAME, "rollout": {"stop_strings": ["\n"], "prompts_per_step": 2}}, [], ""),
    ],
)
def test_what_the_user_may_not_expect_of_the_prompts_is_named(
    tmp_path: Path, sections: Any, conversation: Any, note: str
) -> None:
    config = parse_config(tiny_tree(tmp_path, **{"data": {"chat": True}} | sections))
    prompts = [Prompt(number, "a", (1,), messages=conversation) for number in range(2)]
    said = about_prompts(config, prompts, SimpleNamespace(chat_template="{{ x }}"))
    assert (note in said) if note else said.startswith("2 prompts of") and said.count(";") == 2, said


def test_the_files_that_a_run_will_write(tmp_path: Path) -> None:
    def said(**run: Any) -> str:
        return about_folder(tiny_config(tmp_path, run={"folder": "R", "keep": 2, "trackers": []} | run))

    files, kept = "writes to R: metrics.jsonl", "at the end (the newest 2 are kept)"
    page = "report.html, summary.json; a checkpoint"
    assert said(save_every=5000) == f"{files}, completions.jsonl, {page} every 5,000 steps and {kept}"
    assert said(save_every=1) == f"{files}, completions.jsonl, {page} every 1 step and {kept}"
    fewer = said(save_every=0, completions_mb=0, on_save="cp {checkpoint} there", trackers=["tensorboard"])
    assert fewer == f"{files}, {page} {kept}, then runs cp {{checkpoint}} there; metrics go to tensorboard"


@pytest.mark.parametrize(("size", "limit"), [("auto", "25 % of the free memory"), (2048, "2,048 MiB")])
def test_memory_and_largest_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: object, limit: str) -> None:
    monkeypatch.setattr("tlt.run.about.free_bytes", lambda device: 5 * 2**29)
    config = tiny_config(tmp_path, engine={"kv_memory_mb": size})
    expected = f"memory: 2.5 GiB free on this machine; key-value cache: at most {limit} (engine.kv_memory_mb)"
    assert about_memory(config) == expected


@pytest.mark.parametrize(("weight", "named"), [(0.5, True), (0.0, False)])
def test_a_router_loss_that_the_update_does_not_add_is_named(tmp_path: Path, weight: float, named: bool) -> None:
    MixtralConfig(num_hidden_layers=1, hidden_size=32, router_aux_loss_coef=weight).save_pretrained(tmp_path)
    said = about_model(tiny_config(tmp_path, model={"path": str(tmp_path)}))
    assert ("no loss balances its experts (router_aux_loss_coef = 0.5 is not used)" in said) == named
