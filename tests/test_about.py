"""Notes of a run at its start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import tiny_tree
from transformers import MixtralConfig

from tlt.build import for_machine
from tlt.config import Config, parse_config
from tlt.run.about import about_folder, about_memory, about_model, about_prompts
from tlt.types import Prompt

REPEATS = "each step repeats prompts (rollout.prompts_per_step = "
NO_TEMPLATE = "the model's chat template is not used (data.chat = true uses it)"
ONE_END = "a turn ends only at an end token of the model"
NO_BALANCE = "no loss balances its experts (router_aux_loss_coef = 0.5 is not used)"
UNTRAINED = "speculation: adaptive, a learned drafter that starts untrained"
SHARED = "one worker with all cores may be faster"
GAME = {"name": None, "environment": "tiny_environments:Echo", "turns": 2}
VLLM = {
    "model": {"dtype": "float32"},
    "engine": {"backend": "vllm"},
    "speculation": {"drafter": "adaptive", "path": "f"},
}


def config_of(home: Path, **sections: dict[str, Any]) -> Config:
    tree = tiny_tree(home, **sections)
    return parse_config({name: {k: v for k, v in section.items() if v is not None} for name, section in tree.items()})


@pytest.mark.parametrize(
    ("note", "sections", "template", "is_said"),
    [
        *((REPEATS, {"rollout": {"prompts_per_step": count}}, None, count == 3) for count in (2, 3)),
        (NO_TEMPLATE, {}, "{{ x }}", True),
        (NO_TEMPLATE, {"data": {"chat": True}}, "{{ x }}", False),
        (NO_TEMPLATE, {}, None, False),
        *((ONE_END, {"reward": GAME, "rollout": {"stop_strings": ends}}, None, not ends) for ends in ([], ["\n"])),
    ],
)
def test_notes_about_prompts(tmp_path: Path, note: str, sections: Any, template: str | None, is_said: bool) -> None:
    prompts = [Prompt(number, "a", (1,)) for number in range(2)]
    said = about_prompts(config_of(tmp_path, **sections), prompts, SimpleNamespace(chat_template=template))
    assert (note in said) == is_said


@pytest.mark.parametrize(
    ("note", "sections", "is_said"),
    [
        *((NO_BALANCE, {"model": {"path": f"EXPERTS {weight}"}}, weight == 0.5) for weight in (0.5, 0.0)),
        *((SHARED, {"cluster": {"workers": workers}}, workers == 2) for workers in (1, 2)),
        (SHARED, {"cluster": {"workers": 2, "address": "auto"}}, False),
        ("adaptive with f, with vLLM", VLLM, True),
        ("not tested", {}, False),
        *((UNTRAINED, {"cluster": {"workers": n}, "speculation": {"drafter": "adaptive"}}, n == 2) for n in (1, 2)),
        (UNTRAINED, {"cluster": {"workers": 2}, "speculation": {"drafter": "adaptive", "path": "f"}}, False),
        (UNTRAINED, {"cluster": {"workers": 2}, "speculation": {"drafter": "suffix"}}, False),
    ],
)
def test_notes_about_the_model(tmp_path: Path, note: str, sections: Any, is_said: bool) -> None:
    path = sections.get("model", {}).get("path", "")
    if path.startswith("EXPERTS"):
        weight = float(path.split()[1])
        sizes = {"num_hidden_layers": 1, "hidden_size": 32}
        MixtralConfig(**sizes, router_aux_loss_coef=weight).save_pretrained(tmp_path / "experts")
        sections = {"model": {"path": str(tmp_path / "experts")}}
    config = config_of(tmp_path, **sections)
    assert (note in about_model(for_machine(config) if "engine" in sections else config)) == is_said


def test_a_family_that_was_not_tried_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt.run.about.TRIED", frozenset())
    assert "(qwen3 is not tested with tlt yet: each sync compares" in about_model(config_of(tmp_path))


def test_the_files_that_a_run_will_write(tmp_path: Path) -> None:
    def said(**run: Any) -> str:
        return about_folder(config_of(tmp_path, run={"folder": "R", "keep": 2, "trackers": []} | run))

    files = "writes to R: metrics.jsonl, completions.jsonl, report.html, summary.json; a checkpoint"
    assert said(save_every=5000) == f"{files} every 5,000 steps and at the end (the newest 2 are kept)"
    then = "at the end (the newest 2 are kept), then runs cp {checkpoint} there; metrics go to tensorboard"
    assert said(save_every=0, on_save="cp {checkpoint} there", trackers=["tensorboard"]) == f"{files} {then}"


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
    cache = f"key-value cache: at most {limit} (engine.kv_memory_mb)"
    expected = f"memory: 2.5 GiB free on this machine; {cache}; at most {batch} (engine.max_rows)"
    assert about_memory(config_of(tmp_path, engine={"kv_memory_mb": size, "max_rows": rows})) == expected
