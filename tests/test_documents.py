"""The pages of the documentation: their commands run, their links lead to files, their messages are in the source."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tlt.cli import _parser, main
from tlt.commands.options import joined
from tlt.config import load_config, load_generation

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN = {"README.md": True, "how_it_works.md": True, "getting_started.md": False, "metrics.md": False}
"""Pages whose commands are run, and whether that is slow. The commands of the other pages are parsed."""

BEFORE = {"metrics.md": ["tlt train recipes/quickstart.toml", "cp -r runs/quickstart runs/other"]}
NOT_RUN = re.compile(r"--model Qwen/|--push|recipes/(smollm2|sums)")
"""Commands that need a network or the real model. They are parsed only."""
FEW = "--data.size 40 --rollout.prompts_per_step 2 --rollout.group_size 2 --rollout.max_new_tokens 8 --eval.size 2"
SMALL = {
    "train": f"{FEW} --workers 1 --train.steps 1",
    "estimate": f"{FEW} --steps 1",
    "verify": f"{FEW} --steps 1",
    "generate": "--rollout.max_new_tokens 4",
    "draft train": f"{FEW} --tokens 100 --seconds 1",
}
"""Options that make a command short. The last value of an option counts."""
PLACEHOLDERS = {
    "RECIPE": "recipes/quickstart.toml",
    "RUN": "runs/quickstart",
    "MODEL": "assets/tiny-reasoner",
    "N": "2",
}


def commands(page: Path) -> list[str]:
    """Return the commands of tlt, and of cp, in blocks and in sentences. `tlt draft train` alone is only a name."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"(?m)^    ((?:tlt|cp) [^#\n]+)|`(tlt [^`]+)`", text)
    return [words for block, inline in found if len((words := (block or inline).strip()).split()) > 2 and names(words)]


def names(command: str) -> bool:
    """Return whether a command has an argument, and is not only named."""
    return command.startswith("cp ") or any("/" in word or word.isupper() for word in command.split()[2:])


def words_of(command: str) -> list[str]:
    return [PLACEHOLDERS.get(word, word) for word in shlex.split(command) if word not in ("...", "…")]


GIVEN = {"model.path": "assets/tiny-reasoner", "data.path": "bench/prompts.jsonl", "reward.name": "exact"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_valid(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for words in map(words_of, commands(page)):
        if words[0] == "cp":
            continue
        arguments, overrides = _parser().parse_known_args(joined(words[1:]))
        recipe = getattr(arguments, "recipe", None)
        if recipe and Path(recipe).is_file():
            load_config(recipe, overrides)
        elif words[1] == "train":  # fields instead of a recipe
            given = [f"--{field}={value}" for field, value in GIVEN.items()]
            load_config(None, [*given, *overrides])
        elif words[1] == "generate":
            load_generation(arguments.model, overrides)
        elif not recipe:
            assert not overrides, words


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * slow) for name, slow in RUN.items()])
def test_every_command_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    monkeypatch.chdir(tmp_path)
    page = next(page for page in PAGES if page.name == name)
    run = [*BEFORE.get(name, []), *commands(page)]
    assert run
    for command in run:
        words = words_of(command)
        if words[0] == "cp":
            source, target = (Path(word) for word in words[-2:])
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        elif not NOT_RUN.search(command):
            kind = " ".join(words[1:3]) if words[1] == "draft" else words[1]
            with pytest.raises(SystemExit) as ended:
                main([*words[1:], *SMALL.get(kind, "").split()])
            assert ended.value.code == 0, command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    here = [link for link in links if "://" not in link]
    assert not [link for link in here if not (page.parent / link).exists()]


def test_every_script_that_is_named_exists() -> None:
    pages = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]
    named = {name for page in pages for name in re.findall(r"bench/\w+\.(?:py|sh)", page.read_text(encoding="utf-8"))}
    assert len(named) > 10
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


def test_the_messages_of_the_troubleshooting_page_are_in_the_source() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "src" / "tlt").rglob("*.py")]
    texts = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    source = "\n".join(text for text in texts if isinstance(text, str))
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    cells = [row.split("|")[1] for row in page.splitlines() if row.startswith("| ") and "message or symptom" not in row]
    messages = [message for cell in cells for message in re.findall(r"`([^`]+ [^`]+)`", cell)]
    assert len(messages) > 15
    assert not [message for message in messages if message not in source]


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 150
    measured = text.split("## Measured")[1].split("\n## ")[0]
    tables = [line for line in measured.splitlines() if line.startswith("|")]
    assert len(tables) - 2 * sum(line.startswith("|---") for line in tables) <= 8
