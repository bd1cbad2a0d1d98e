"""Options of `tlt train` and the run that they start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_tree

from tlt.cli import main


def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[Any, Any, dict[str, Any]]:
    """Return exit code, configuration and other arguments of the run that these options start."""
    given: list[tuple[Any, Any]] = []
    monkeypatch.setattr("tlt.run.train.train", lambda config, resume, view, **more: given.append((config, more)) or {})
    monkeypatch.setattr("tlt.run.display.closing", lambda summary, folder: [])
    lines = []
    for name, section in tiny_tree(tmp_path).items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())]
    (tmp_path / "recipe.toml").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["train", str(tmp_path / "recipe.toml"), *options])
    return (ended.value.code, *(given[0] if given else (None, {})))


def test_the_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero is refused, because it is not the same as no option."""
    code, config, _ = start(tmp_path, monkeypatch, "--workers", "3")
    assert (code, config.cluster.workers) == (0, 3)
    assert start(tmp_path, monkeypatch, "--workers", "0")[0] == 2


def test_a_resume_passes_the_fields_that_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--resume", "--force", "train.learning_rate", "--force", "run.seed")
    code, _, more = start(tmp_path, monkeypatch, *words)
    assert (code, more) == (0, {"force": ["train.learning_rate", "run.seed"]})
