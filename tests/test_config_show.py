"""`tlt config`: its output is a valid recipe, and explains every field."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tlt.cli import main
from tlt.config import load_config, parse_config
from tlt.config.section import is_state
from tlt.config.show import SECTIONS, commented, resolved

ROOT = Path(__file__).parent.parent
REQUIRED = {"model": {"path": "model"}, "data": {"path": "prompts.jsonl"}, "reward": {"name": "exact"}}


def test_the_default_recipe_is_the_defaults() -> None:
    tree = tomllib.loads(commented())
    for section, fields in REQUIRED.items():
        tree[section] |= fields
    assert parse_config(tree) == parse_config({name: dict(fields) for name, fields in REQUIRED.items()})


def test_every_field_is_printed_once_with_its_meaning() -> None:
    for section, model in SECTIONS.items():
        lines = commented(section).splitlines()
        for name, field in model.model_fields.items():
            if is_state(field):
                assert f"{name} = " not in commented(section)
                continue
            assert any(re.match(rf"(# )?({name} = |\[\[?{section}\.{name}\]\]?)", line) for line in lines), name
            if field.description:
                assert field.description.split()[0] in commented(section)
        assert all(len(line) <= 120 for line in lines)


def test_commented_fields_can_be_uncommented() -> None:
    text = re.sub(r"^# ((?:\w+ = |\[\[).*)$", r"\1", commented(), flags=re.MULTILINE)
    text = re.sub(r"^(\w+) =  \((required|not set)\)$", r"# \1", text, flags=re.MULTILINE)
    tree = tomllib.loads(text)
    assert tree["data"]["tasks"] == [{"weight": 1.0, "params": {}, "stage": 0}]


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_a_resolved_recipe_is_the_recipe(recipe: Path, tmp_path: Path) -> None:
    overrides = ["--run.folder", 'odd "name" \\ é', "--train.steps", "7"]
    config = load_config(recipe, overrides)
    saved = tmp_path / "resolved.toml"
    saved.write_text(resolved(config), encoding="utf-8")
    assert load_config(saved) == config


def test_a_resolved_recipe_marks_what_is_not_the_default() -> None:
    text = resolved(parse_config(REQUIRED | {"train": {"steps": 7}}))
    assert "steps = 7  # default: 100" in text
    assert "\nwarmup_steps = 0\n" in text


def test_the_command_prints_all_or_a_section_or_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*argv: str) -> tuple[str, str]:
        with pytest.raises(SystemExit, match="0"):
            main(["config", *argv])
        return capsys.readouterr()

    assert printed() == (commented(), "")
    assert printed("train") == (commented("train"), "")
    assert "\n[speculation.training]\n" in printed("speculation")[0]
    recipe = str(ROOT / "recipes" / "quickstart.toml")
    assert printed(recipe, "--train.steps", "3")[0] == resolved(load_config(recipe, ["--train.steps", "3"]))


def test_train_names_it_and_it_needs_nothing_heavy() -> None:
    code = "import sys; from tlt.cli import main\ntry: main(['config'])\nfinally: assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0
    shown = subprocess.run([sys.executable, "-m", "tlt", "train", "--help"], capture_output=True, text=True, timeout=60)
    assert "tlt config prints every field" in " ".join(shown.stdout.split())
