"""Mistakes in a recipe or a command, which are refused before torch is imported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny_tree, write_recipe

from tlt.config import RewardConfig
from tlt.rewards import RewardError
from tlt.rewards.scores import refuse_missing_functions

REWARDS = """
from functools import partial

def good(prompt, answer):
    return 0.0

if True:
    later = partial(good)
"""
MISTAKES = {
    "train RECIPE --model.path HOME/none": "model.path: there is no folder",
    "train RECIPE --model.path org/tiny": "HF_HUB_OFFLINE is set",
    "train RECIPE --model.path HOME/empty": "has no config.json",
    "train RECIPE --model.path HOME/bare": "model.path: HOME/bare has no weights file model.safetensors",
    "train RECIPE --data.path HOME/none.jsonl": "tlt: data.path: there is no file HOME/none.jsonl: give a .jsonl",
    "train RECIPE --data.prompt_column text": "set data.prompt_column to one of its columns, question, answer",
    "train RECIPE --data.answer_column gold": "has nothing under data.answer_column = 'gold'",
    "train RECIPE --eval.every 1 --eval.path HOME/none.jsonl": "eval.path: there is no file HOME/none.jsonl: give",
    "train RECIPE --data.prompt_colum text": "did you mean data.prompt_column?",
    "train RECIPE --reward.folder HOME --reward.name no_module:f": "No module named 'no_module'",
    "train RECIPE --reward.folder HOME --reward.name own:goood": "module 'own' has no attribute 'goood'",
    "train RECIPE --reward.name reasoning_gym --reward.folder HOME --reward.environment own:Game": "attribute 'Game'",
    "train RECIPE --reward.name exact --data.path HOME/open.jsonl": "has no right answer",
    "train RECIPE --run.folder HOME/used": "already contains a run",
    "train RECIPE --run.trackers ['own_tracker:Log']": "own_tracker",
    "train RECIPE --train.steps many": "valid integer",
    "train RECIPE --speculation.drafter adaptive --speculation.path HOME/none": "speculation.path: HOME/none is not a",
    "train RECIPE --speculation.drafter adaptive --speculation.path HOME/empty": "no readable drafter",
    "train RECIPE --speculation.drafter adaptive --speculation.path HOME/drafter": "for a target with hidden_size 8",
    "train RECIPE --data.chat true": "the model's tokenizer has no chat template: set data.chat = false",
    "train RECIPE --rollout.max_new_tokens 99999": "lower rollout.max_new_tokens",
    "export HOME/none HOME/new": "there is no folder",
    "export HOME/model HOME/used": "is not empty",
    "train RECIPE --cluster.workers 0": "cluster.workers",
    "train RECIPE --cluster.workers 9999": "has room for at most",
    "estimate RECIPE --data.path HOME/none.jsonl": "data.path: there is no file",
    "verify RECIPE --model.path HOME/none": "model.path: there is no folder",
    "draft train RECIPE --out HOME/new --data.path HOME/none.jsonl": "data.path: there is no file",
    "draft train RECIPE --out HOME/used": "is not empty",
    "generate HOME/none --prompt a": "model.path: there is no folder",
    "generate HOME/model --data HOME/none.jsonl": "there is no file",
    "generate HOME/model --data HOME/prompts.jsonl --data.prompt_column text": "set data.prompt_column",
}
REFUSED = """
import json, sys
from tlt.cli import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as end:
        print(end.code, [name for name in ("torch", "transformers") if name in sys.modules], file=sys.stderr)
"""


def test_mistakes_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.toml", tiny_tree(tmp_path))
    (tmp_path / "empty").mkdir()
    (tmp_path / "own.py").write_text(REWARDS, encoding="utf-8")
    (tmp_path / "open.jsonl").write_text('{"question": "a"}\n', encoding="utf-8")
    shutil.copytree(tmp_path / "model", tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "used").mkdir()
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "config.json").write_text('{"tlt_drafter": {"hidden_size": 8}}', encoding="utf-8")
    for name, content in ((".tlt.lock", ""), ("metrics.jsonl", "{}\n")):
        (tmp_path / "used" / name).write_text(content, encoding="utf-8")
    commands = [words.replace("RECIPE", str(recipe)).replace("HOME", str(tmp_path)).split() for words in MISTAKES]
    program = [sys.executable, "-c", REFUSED, json.dumps(commands)]
    tests = Path(__file__).parent.parent  # the recipe's reward is in this folder
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, cwd=tests, check=True)
    lines = done.stderr.splitlines()
    assert lines[1::2] == ["2 []"] * len(MISTAKES), lines
    for refusal, (words, said) in zip(lines[::2], MISTAKES.items(), strict=True):
        assert said.replace("HOME", str(tmp_path)) in refusal, words
    assert not (tmp_path / "run").exists(), "a refused command leaves no folder"


@pytest.mark.parametrize(
    ("name", "source", "is_refused"),
    [
        ("own:good", REWARDS, False),
        ("own:later", REWARDS, False),
        ("own:partial", REWARDS, False),
        ("own:bad", REWARDS, True),
        ("own:good", "def good(:", True),
        ("own:f", "from os import *", False),
        ("own:f", "globals().update(f=len)", False),
        ("own:f", "def __getattr__(name): return len", False),
        ("own.inner:f", "", True),
        ("time:sleep", "", False),
        ("json.decoder:JSONDecoder", "", False),
        ("json.none:f", "", True),
    ],
)
def test_a_reward_that_its_module_cannot_have_is_refused(
    tmp_path: Path, name: str, source: str, is_refused: bool
) -> None:
    """The module itself would end the process."""
    end = "import os; os._exit(1)\n" if not source.startswith("def good(:") else ""
    (tmp_path / "own.py").write_text(source + "\n" + end, encoding="utf-8")
    config = RewardConfig(name=name, folder=str(tmp_path))
    if is_refused:
        with pytest.raises(RewardError, match=r"cannot be imported .*whose form is 'module:function'"):
            refuse_missing_functions(config)
    else:
        refuse_missing_functions(config)
