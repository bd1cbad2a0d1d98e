"""Prompts: from reasoning-gym tasks by name, or from a JSONL or Parquet file; and the cursor that hands each out once
an epoch."""

from __future__ import annotations

import hashlib
import json
import logging
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from tlt.config import DataConfig, EvalConfig
from tlt.files import is_text, parse_json, telling
from tlt.types import Prompt

log = logging.getLogger(__name__)
Encode = Callable[[str], Sequence[int]]
Row = tuple[str, dict[str, Any]]

_NEXT_STAGE, _HELD_OUT = 1_000_003, 500_000_003  # far apart: reasoning-gym seeds item i of a task with seed + i


class DataError(ValueError):
    """Prompts that cannot be used; the message names the file, the row and the remedy."""


def load_prompts(config: DataConfig, encode: Encode) -> list[Prompt]:
    """All prompts of an epoch, in their source's order; `prompt_id` is the row. Raises DataError."""
    rows = _task_rows(config) if config.tasks else _file_rows(config)
    prompts = []
    for row, (question, data) in enumerate(rows):
        text = config.template.replace("{question}", question)
        if not is_text(text):
            raise DataError(f"prompt {row} holds half of a surrogate pair, which is no text: {text[:80]!a}")
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


def load_held_out(config: DataConfig, held_out: EvalConfig, encode: Encode, training: Sequence[Prompt]) -> list[Prompt]:
    """`eval.size` prompts that training has not, evenly from `eval.path`, or from the tasks with another seed."""
    tasks = [] if held_out.path else config.tasks
    changes = {"path": held_out.path, "tasks": tasks, "size": 4 * held_out.size, "seed": config.seed + _HELD_OUT}
    seen = {prompt.text for prompt in training}
    new = [prompt for prompt in load_prompts(config.model_copy(update=changes), encode) if prompt.text not in seen]
    if not new:
        source = held_out.path or "the tasks"
        raise DataError(f"no prompt is held out: all that {source} can give eval are among the training prompts")
    return new[:: max(1, len(new) // held_out.size)][: held_out.size]


def encoder(tokenizer: Any, chat: bool) -> Encode:
    """Text -> token ids, in the tokenizer's chat template where asked. Raises DataError where it has none."""
    if not chat:
        return lambda text: _one_bos(tokenizer, tokenizer(text)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise DataError("data.chat = true, but the model's tokenizer has no chat template: set data.chat = false")

    def encode(text: str) -> Sequence[int]:
        turn = [{"role": "user", "content": text}]
        try:
            whole = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program of its own
            raise DataError(f"the tokenizer's chat template refuses a prompt: {error}") from None
        return tokenizer(whole, add_special_tokens=False)["input_ids"]  # the template has written them already

    return encode


def _one_bos(tokenizer: Any, token_ids: Sequence[int]) -> Sequence[int]:
    """A text that begins with the BOS token's text would have two: the tokenizer adds one of its own."""
    bos = tokenizer.bos_token_id
    if bos is None or list(token_ids[:2]) != [bos, bos]:
        return token_ids
    _tell_of_two(tokenizer.bos_token)
    return token_ids[1:]


@cache
def _tell_of_two(bos: str) -> None:
    log.warning("prompts begin with two %s, the text's own and the tokenizer's: one is left out", bos)


def refuse_foreign_tokens(prompts: Sequence[Prompt], vocab_size: int) -> None:
    """A tokenizer of another model gives tokens that this one has no row for."""
    for prompt in prompts:
        if max(prompt.token_ids) >= vocab_size:
            raise DataError(
                f"prompt {prompt.prompt_id} has token {max(prompt.token_ids)}, beyond the model's vocabulary of "
                f"{vocab_size}: the tokenizer in model.path is not this model's"
            )


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """sha256 of the prompts' tokens and answers: a resumed run must be given the very same."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.token_ids, str(prompt.data.get("answer"))]).encode())
    return digest.hexdigest()


# -- reasoning-gym -----------------------------------------------------------------------------------------------------


def task_dataset(config: DataConfig, stage: int) -> Any:
    """The reasoning-gym mixture of one stage; its `score_answer(answer, entry)` is the tasks' own checker. Raises
    DataError."""
    try:
        import reasoning_gym
        from reasoning_gym.composite import DatasetSpec
    except ImportError:
        raise DataError("data.tasks needs reasoning-gym: pip install 'tlt[tasks]'") from None
    tasks = [task for task in config.tasks if task.stage == stage]
    specs = [DatasetSpec(task.name, task.weight, dict(task.params)) for task in tasks]
    seed = config.seed + stage * _NEXT_STAGE
    try:
        return reasoning_gym.create_dataset("composite", size=config.size, seed=seed, datasets=specs)
    except (ValueError, TypeError, AssertionError) as error:
        names = ", ".join(task.name for task in tasks)
        raise DataError(f"reasoning-gym refuses data.tasks ({names}): {error}") from None


def _task_rows(config: DataConfig) -> Iterator[Row]:
    for stage, size in _stage_sizes(config).items():
        dataset = task_dataset(config, stage)
        for entry in (dataset[i] for i in range(size)):
            task = entry["metadata"]["source_dataset"]
            yield entry["question"], {"entry": entry, "answer": entry["answer"], "stage": stage, "task": task}


def _stage_sizes(config: DataConfig) -> dict[int, int]:
    """Each stage's share of `size`, by the weights of its tasks."""
    weights = dict.fromkeys(sorted(task.stage for task in config.tasks), 0.0)
    for task in config.tasks:
        weights[task.stage] += task.weight
    total = sum(weights.values()) or 1.0  # a file has no stages
    borders = [round(config.size * weight / total) for weight in accumulate(weights.values(), initial=0.0)]
    return {stage: end - start for stage, (start, end) in zip(weights, pairwise(borders), strict=True)}


# -- files -------------------------------------------------------------------------------------------------------------


def _file_rows(config: DataConfig) -> list[Row]:
    assert config.path is not None, "the configuration has either tasks or a path"
    path = Path(config.path)
    if not path.is_file():
        raise DataError(f"there is no file {path}: name a JSONL or Parquet file")
    rows = []
    for where, row in _parquet(path) if path.suffix == ".parquet" else _json_lines(path):
        question = row.get(config.prompt_column) if isinstance(row, dict) else None
        if not isinstance(question, str):
            raise DataError(f"{path}, {where} has no text under {config.prompt_column!r}: set data.prompt_column")
        rows.append((question, {**row, "answer": row.get(config.answer_column)}))
    if not rows:
        raise DataError(f"{path} holds no prompts: give one JSON object a line, or one row each")
    return rows


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):  # str.splitlines breaks at U+2028 too
        if not line.strip():
            continue
        try:
            yield f"line {number}", parse_json(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number} is not JSON: {error}") from None


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow.parquet import read_table
    except ImportError:
        raise DataError(f"{path} needs pyarrow: pip install 'tlt[parquet]'") from None
    with telling(DataError, f"{path} is not a Parquet file that can be read"):
        rows = read_table(path).to_pylist()
    yield from ((f"row {number}", row) for number, row in enumerate(rows))


# -- the cursor --------------------------------------------------------------------------------------------------------


def make_cursor(config: DataConfig, size: int, seed: int) -> Cursor:
    """A cursor over the `size` prompts of `config`."""
    return Cursor(size, seed, config.shuffle, stages=list(_stage_sizes(config).values()))


@dataclass
class Cursor:
    """Hands out each row once an epoch, in an order that is a function of (seed, epoch); a batch may span two
    epochs."""

    size: int
    seed: int
    shuffle: bool
    epoch: int = 0
    position: int = 0
    stages: list[int] = field(default_factory=list)
    """sizes of the curriculum's stages, whose rows lie one after another: the first epoch takes them in turn"""

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
        if self.stages and self.epoch == 0:
            borders = list(accumulate(self.stages))
            rows.sort(key=lambda row: bisect_right(borders, row))  # stable: the order within a stage stays
        return rows
