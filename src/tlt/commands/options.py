"""Command-line parser whose help shows the default of every option, and help texts that commands share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

RECIPE = "TOML file, such as recipes/quickstart.toml"
OVERRIDES = (
    "Any field of the configuration can be set by --section.key value, such as --train.steps 10. "
    'An empty value, such as --speculation.path "", removes the value in the recipe. '
    "tlt config prints every field with its meaning and default."
)
GENERATES = (
    "Fields of the sections model, data, rollout, engine, speculation and run can be set by --section.key value: "
    "--rollout.temperature 0 is greedy, --run.seed 1 gives other samples, --data.chat true uses the chat template "
    "(default: as the run that trained the model, else if the tokenizer has one), and --speculation.path FOLDER names "
    "a learned drafter (default: the drafter suffix). tlt config prints every field with its meaning and default."
)


class _Help(argparse.HelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        """Return the help text of an option with its default, unless the default is empty or off."""
        default, off = action.default, (None, False, "", argparse.SUPPRESS)
        if default == [] or any(default is value for value in off) or not action.option_strings:
            return action.help
        return f"{action.help} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", _Help)
        super().__init__(**options)


def output_file(text: str) -> Path:
    """Return the path of a file that a command will write. Make its folder. Raises argparse.ArgumentTypeError if it
    cannot be written."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder: give a file")
    return _checked(path, path.parent)


def output_folder(text: str) -> Path:
    """Return the path of a folder that a command will write. Make its parent folder. Raises argparse.ArgumentTypeError
    if it cannot be written."""
    path = Path(text)
    if path.is_file():
        raise argparse.ArgumentTypeError(f"{path} is a file: give a folder")
    return _checked(path, path if path.is_dir() else path.parent)


def _checked(path: Path, within: Path) -> Path:
    try:
        within.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=within):
            return path
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be written ({error.strerror}): give another path") from None


def joined(words: Sequence[str]) -> list[str]:
    """Join `--section.key value` into `--section.key=value`, so that the value is not taken for the recipe."""
    found: list[str] = []
    for word in words:
        if found and re.fullmatch(r"--\w+(\.\w+)+", found[-1]) and not word.startswith("--"):
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found
