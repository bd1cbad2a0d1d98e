"""`tlt train --check` makes the checks of a run, and neither trains nor writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import tiny_tree, write_recipe

from tlt.cli import main


def checked(home: Path, *words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["train", str(home / "recipe.toml"), "--check", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_recipe(tmp_path / "recipe.toml", tiny_tree(tmp_path))
    return tmp_path


def test_a_good_recipe_is_shown_and_nothing_is_written(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(home.rglob("*"))
    assert checked(home) == 0
    said = capsys.readouterr().out
    assert "the first prompt, as the model sees it:\ntwo and two\n" in said
    assert "all checks passed: this recipe can train for" in said
    assert sorted(home.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data.prompt_column=nothing"], "set data.prompt_column to one of its columns"),
        (["--reward.name=reasoning_gym"], "reasoning_gym"),
        (
            ["--train.micro_batch_tokens=10000000", "--rollout.max_new_tokens=400", "--rollout.group_size=9000"],
            "memory",
        ),
        (["--resume"], "--check is for a new run: leave out --resume"),
    ],
)
def test_a_fault_is_found(home: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(home, *words) == 2
    assert said in capsys.readouterr().err
    assert not (home / "run").exists()


def test_too_little_memory_is_found(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tlt.rl.dry_run.free_bytes", lambda device: 1000)
    assert checked(home) == 2
    assert "an update does not fit the memory of cpu" in capsys.readouterr().err
