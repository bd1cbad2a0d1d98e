"""Prompts: from reasoning-gym tasks by name, or from a JSONL file; and the cursor that hands each out once an epoch."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt.config import DataConfig
from tlt.types import Prompt

Encode = Callable[[str], Sequence[int]]


class DataError(ValueError):
    """Prompts that cannot be used; the message names the file, the row and the remedy."""


def load_prompts(config: DataConfig, encode: Encode) -> list[Prompt]:
    """All prompts of an epoch, in their source's order; `prompt_id` is the row. Raises DataError."""
    rows = _task_rows(config) if config.tasks else _jsonl_rows(config)
    prompts = []
    for row, (question, data) in enumerate(rows):
        text = config.template.replace("{question}", question)
        token_ids = tuple(encode(text))
        if not token_ids:
            raise DataError(f"prompt {row} is empty: every prompt needs at least one token")
        if len(token_ids) > config.max_prompt_tokens:
            raise DataError(
                f"prompt {row} has {len(token_ids)} tokens, more than data.max_prompt_tokens = "
                f"{config.max_prompt_tokens}: shorten it or raise the limit"
            )
        prompts.append(Prompt(row, text, token_ids, data))
    return prompts


def task_dataset(config: DataConfig) -> Any:
    """The reasoning-gym mixture; its `score_answer(answer, entry)` is the tasks' own checker. Raises DataError."""
    try:
        import reasoning_gym
        from reasoning_gym.composite import DatasetSpec
    except ImportError:
        raise DataError("data.tasks needs reasoning-gym: pip install 'tlt[tasks]'") from None
    specs = [DatasetSpec(task.name, task.weight, dict(task.params)) for task in config.tasks]
    try:
        return reasoning_gym.create_dataset("composite", size=config.size, seed=config.seed, datasets=specs)
    except (ValueError, TypeError, AssertionError) as error:
        names = ", ".join(task.name for task in config.tasks)
        raise DataError(f"reasoning-gym refuses data.tasks ({names}): {error}") from None


def _task_rows(config: DataConfig) -> list[tuple[str, dict[str, Any]]]:
    dataset = task_dataset(config)
    return [(entry["question"], {"entry": entry}) for entry in (dataset[i] for i in range(config.size))]


def _jsonl_rows(config: DataConfig) -> list[tuple[str, dict[str, Any]]]:
    assert config.path is not None, "the configuration has either tasks or a path"
    path = Path(config.path)
    if not path.is_file():
        raise DataError(f"there is no file {path}: data.path must name a JSONL file")
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):  # str.splitlines breaks at U+2028 too
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number} is not JSON: {error}") from None
        question = row.get(config.prompt_column) if isinstance(row, dict) else None
        if not isinstance(question, str):
            raise DataError(f"{path}, line {number} has no text under {config.prompt_column!r}: set data.prompt_column")
        rows.append((question, {**row, "answer": row.get(config.answer_column)}))
    if not rows:
        raise DataError(f"{path} holds no prompts: give one JSON object a line")
    return rows


@dataclass
class Cursor:
    """Hands out each row once an epoch, in an order that is a function of (seed, epoch); a batch may span two
    epochs."""

    size: int
    seed: int
    shuffle: bool
    epoch: int = 0
    position: int = 0

    def take(self, count: int) -> list[tuple[int, int]]:
        """The next `count` (row, epoch)."""
        taken: list[tuple[int, int]] = []
        while len(taken) < count:
            rows = self._order()[self.position : self.position + count - len(taken)]
            taken += [(row, self.epoch) for row in rows]
            self.position += len(rows)
            if self.position == self.size:
                self.epoch, self.position = self.epoch + 1, 0
        return taken

    def _order(self) -> list[int]:
        rows = list(range(self.size))
        if self.shuffle:
            random.Random(f"{self.seed}/{self.epoch}").shuffle(rows)
        return rows
