"""Prompts from reasoning-gym tasks or files, and the cursor that visits each prompt once per epoch."""

from __future__ import annotations

import hashlib
import json
import logging
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, islice, pairwise
from typing import Any

from tlt.config import DataConfig, EvalConfig
from tlt.data.chat import ChatTemplate, Messages, messages_of, text_of
from tlt.data.continuation import Continuation
from tlt.data.tables import DataError, read_rows
from tlt.files import is_text
from tlt.types import Prompt, column
from tlt_rl import install_hint

log = logging.getLogger(__name__)
Question = str | Messages
"""content of a prompt: text, or a list of chat messages"""
Encode = Callable[[Question], Sequence[int]]
Row = tuple[Question, dict[str, Any]]

_MOST_TASKS, _FIRST_ROWS = 50, 1000
_UNSHOWN = {
    "tools": "set data.chat_arguments.tools",
    "chat_template_kwargs": "set data.chat_arguments",
    "images": "the model reads text alone",
}
_NEXT_STAGE, _HELD_OUT = 1_000_003, 500_000_003  # added to seeds; far apart, because item i of a task uses seed + i


def load_prompts(config: DataConfig, encode: Encode, held_out: bool = False) -> list[Prompt]:
    """Load the prompts of an epoch, in the order of their source. `encode` returns the token ids of a prompt. If
    `held_out`, generated prompts have another seed than those of training. `prompt_id` counts the prompts from 0,
    without dropped ones. Raises DataError."""
    rows = list(_task_rows(config, held_out) if config.tasks else _file_rows(config))
    answers_in = "answer" if config.tasks else config.answer_column
    prompts: list[Prompt] = []
    for row, (question, data) in enumerate(rows):
        asked = shown_to_model(question, config)
        written = asked if isinstance(asked, str) else json.dumps(asked, ensure_ascii=False, default=str)
        if not is_text(written):
            raise DataError(f"prompt {row} contains a lone surrogate, which is not text: {written[:80]!a}")
        try:
            token_ids = tuple(encode(asked))
        except DataError as error:
            raise DataError(f"prompt {row}: {error}") from None
        if not token_ids:
            raise DataError(f"prompt {row} is empty: every prompt needs at least one token")
        if len(token_ids) > config.max_prompt_tokens:
            if config.long_prompts == "drop":
                continue
            raise DataError(
                f"prompt {row} has {len(token_ids)} tokens, more than data.max_prompt_tokens = "
                f"{config.max_prompt_tokens}: shorten it, raise the limit, or set data.long_prompts = 'drop'"
            )
        text = asked if isinstance(asked, str) else text_of(asked)
        messages = conversation(asked, config) if config.chat else []
        prompts.append(Prompt(len(prompts), text, token_ids, data, answers_in, config.prefill, messages=messages))
    if left_out := len(rows) - len(prompts):
        message = "%d of %d prompts have more than data.max_prompt_tokens = %d tokens and are left out"
        log.warning(message, left_out, len(rows), config.max_prompt_tokens)
    if not prompts:
        raise DataError(f"all prompts are longer than data.max_prompt_tokens = {config.max_prompt_tokens}: raise it")
    return _without_many_tasks(prompts, config)


def _without_many_tasks(prompts: list[Prompt], config: DataConfig) -> list[Prompt]:
    """Return the prompts. If a file has more than 50 tasks, turn off the metrics by task of these prompts, because each
    task would be a metric."""
    tasks = {prompt.task for prompt in prompts}
    if not config.path or len(tasks) <= _MOST_TASKS:
        return prompts
    message = (
        "%s has %d different values of task or data_source: metrics by task are off, because they are limited to %d "
        "tasks"
    )
    log.warning(message, config.path, len(tasks), _MOST_TASKS)
    return [replace(prompt, counts_by_task=False) for prompt in prompts]


def shown_to_model(question: Question, config: DataConfig) -> Question:
    """Return the prompt inserted into data.template. Raises DataError for messages if data.template is set."""
    if isinstance(question, str):
        return config.template.replace("{question}", question)
    if config.template != "{question}":
        problem = "data.template is for prompts that are text, but these are lists of messages"
        raise DataError(f"{problem}: give the prompts as text, or remove data.template")
    return question


def first_prompts(config: DataConfig) -> list[Prompt]:
    """Return the prompts of the first 1,000 rows of data.path, without token ids. Raises DataError for a missing file
    or column, as `load_prompts` does. It is fast, and needs no tokenizer."""
    rows = list(islice(_questions(config), _FIRST_ROWS))
    if len(rows) < _FIRST_ROWS:  # these are all rows
        _refuse_no_answers(config, rows)
    shown = [(shown_to_model(question, config), data) for question, data in _with_answers(config, rows)]
    texts = [asked if isinstance(asked, str) else text_of(asked) for asked, _ in shown]
    return [Prompt(row, text, (), shown[row][1], config.answer_column) for row, text in enumerate(texts)]


def held_out_data(config: DataConfig, held_out: EvalConfig) -> DataConfig:
    """Return the section [data] for the held-out prompts."""
    tasks = [] if held_out.path else config.tasks
    return config.model_copy(update={"path": held_out.path, "tasks": tasks, "size": 4 * held_out.size})


def load_held_out(config: DataConfig, held_out: EvalConfig, encode: Encode, training: Sequence[Prompt]) -> list[Prompt]:
    """Load up to eval.size held-out prompts for evaluations, from eval.path or from data.tasks with another seed.
    Prompts in `training` are skipped. If there are more than eval.size, prompts at equal intervals are taken. If
    eval.every is 0, return an empty list. Raises DataError."""
    if not held_out.every:
        return []
    seen = {prompt.text for prompt in training}
    try:
        found = load_prompts(held_out_data(config, held_out), encode, held_out=True)
    except DataError as error:
        raise DataError(f"held-out prompts: {error}") from None
    new = [prompt for prompt in found if prompt.text not in seen]
    if held_out.path and len(new) < len(found):
        message = "%d of %d prompts of %s are left out of evaluations, because they are training prompts too"
        log.warning(message, len(found) - len(new), len(found), held_out.path)
    if not new:
        source = held_out.path or "the tasks"
        raise DataError(
            f"there are no held-out prompts, because all prompts of {source} are training prompts too: "
            "set eval.path to another file, or set eval.every = 0"
        )
    return new[:: max(1, len(new) // held_out.size)][: held_out.size]


def encoder(tokenizer: Any, config: DataConfig) -> Encode:
    """Return a function that converts a prompt, with data.prefill, to token ids. It applies the chat template if
    data.chat is true. Raises DataError if the tokenizer or its chat template cannot be used."""
    if not config.chat:
        _refuse_end_token(tokenizer)

        def plain(question: Question) -> Sequence[int]:
            if not isinstance(question, str):
                raise DataError("the prompts are lists of messages: set data.chat = true")
            return _one_bos(tokenizer, tokenizer(question + config.prefill)["input_ids"])

        return plain
    template = ChatTemplate(tokenizer, config)

    def encode(question: Question) -> Sequence[int]:
        whole = template.render(conversation(question, config))
        # the template has already written the special tokens
        return tokenizer(whole + config.prefill, add_special_tokens=False)["input_ids"]

    return encode


def conversation(question: Question, config: DataConfig) -> Messages:
    """Return a prompt as the messages that the chat template renders, with data.system."""
    turns = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
    if config.system and turns[0]["role"] not in ("system", "developer"):
        turns.insert(0, {"role": "system", "content": config.system})
    return turns


def reply_encoder(tokenizer: Any, config: DataConfig) -> Continuation:
    """Return a function that encodes a reply of an environment. If data.chat is true, a reply that is a text becomes a
    message of the role tool if data.chat_arguments has tools, else of the role user. Raises DataError."""
    return Continuation(tokenizer, ChatTemplate(tokenizer, config) if config.chat else None)


def _refuse_end_token(tokenizer: Any) -> None:
    """Raise DataError if the tokenizer appends the end token to every text, because a response would come after it."""
    if tokenizer.eos_token_id is not None and tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id:
        raise DataError(
            f"the tokenizer appends {tokenizer.eos_token} to every text, so that a prompt ends before its response: "
            "remove that token from post_processor in tokenizer.json, or set data.chat = true"
        )


def _one_bos(tokenizer: Any, token_ids: Sequence[int]) -> Sequence[int]:
    """Return the token ids without the second BOS token, if both the prompt's text and the tokenizer add one."""
    bos = tokenizer.bos_token_id
    if bos is None or list(token_ids[:2]) != [bos, bos]:
        return token_ids
    _warn_of_two(tokenizer.bos_token)
    return token_ids[1:]


@cache
def _warn_of_two(bos: str) -> None:
    log.warning("both the prompts and the tokenizer add %s: only one is kept", bos)


def fingerprints(prompts: Sequence[Prompt], config: DataConfig) -> dict[str, str]:
    """Return two sha256 hashes: of the prompts' token ids and right answers (`prompts`), and of all columns of the data
    file (`columns`), which rewards may read. A resumed run compares them with those in its checkpoint, because it needs
    the same prompts."""
    answers = [str(prompt.ground_truth) for prompt in prompts]
    rows = [prompt.data for prompt in prompts] if config.path else []  # other prompts follow from the recipe
    return {
        "prompts": _sha256([prompt.token_ids, answer] for prompt, answer in zip(prompts, answers, strict=True)),
        "columns": _sha256(rows, sort_keys=True, default=str),
    }


def _sha256(values: Iterable[Any], **options: Any) -> str:
    digest = hashlib.sha256()
    for value in values:
        digest.update(json.dumps(value, **options).encode())
    return digest.hexdigest()


# -- reasoning-gym -----------------------------------------------------------------------------------------------------


def task_dataset(config: DataConfig, stage: int, held_out: bool = False) -> Any:
    """Return the reasoning-gym data set for one curriculum stage, a mixture of its tasks. Its method
    `score_answer(answer, entry)` scores an answer. `held_out` selects another seed. Raises DataError."""
    try:
        import reasoning_gym
        from reasoning_gym.composite import DatasetSpec
    except ImportError:
        raise DataError(f"data.tasks needs reasoning-gym: {install_hint('tasks')}") from None
    tasks = [task for task in config.tasks if task.stage == stage]
    specs = [DatasetSpec(task.name, task.weight, dict(task.params)) for task in tasks]
    seed = _HELD_OUT * held_out + stage * _NEXT_STAGE
    try:
        return reasoning_gym.create_dataset("composite", size=config.size, seed=seed, datasets=specs)
    except (ValueError, TypeError, AssertionError) as error:
        names = ", ".join(task.name for task in tasks)
        raise DataError(f"reasoning-gym refuses data.tasks ({names}): {error}") from None


def _task_rows(config: DataConfig, held_out: bool) -> Iterator[Row]:
    for stage, size in _stage_sizes(config).items():
        dataset = task_dataset(config, stage, held_out)
        for entry in (dataset[i] for i in range(size)):
            task = entry["metadata"]["source_dataset"]
            yield entry["question"], {"entry": entry, "answer": entry["answer"], "stage": stage, "task": task}


def _stage_sizes(config: DataConfig) -> dict[int, int]:
    """Return curriculum stage -> number of prompts, in proportion to the weights of the stage's tasks."""
    weights = dict.fromkeys(sorted(task.stage for task in config.tasks), 0.0)
    for task in config.tasks:
        weights[task.stage] += task.weight
    total = sum(weights.values())
    borders = [round(config.size * weight / total) for weight in accumulate(weights.values(), initial=0.0)]
    return {stage: end - start for stage, (start, end) in zip(weights, pairwise(borders), strict=True)}


# -- files -------------------------------------------------------------------------------------------------------------


def _file_rows(config: DataConfig) -> list[Row]:
    rows = list(_questions(config))
    if config.chat:
        _warn_of_unshown(config, rows)
    _refuse_no_answers(config, rows)
    return _with_answers(config, rows)


def _warn_of_unshown(config: DataConfig, rows: Sequence[Row]) -> None:
    """Log a warning for each column that belongs to the prompts in other programs, but is not shown to the model."""
    for name, remedy in _UNSHOWN.items():
        known = config.chat_arguments if name == "chat_template_kwargs" else name in config.chat_arguments
        if not known and any(data.get(name) for _, data in rows):
            log.warning("the %s in the rows of %s are not in the prompts: %s", name, config.path, remedy)


def _questions(config: DataConfig) -> Iterator[Row]:
    """Yield the question and all columns of each row of data.path. Raises DataError if a row has no question."""
    assert config.path is not None, "the configuration has either tasks or a path"
    for where, row in read_rows(config.path):
        question = column(row, config.prompt_column)
        messages = messages_of(question, where)
        if messages is None and not isinstance(question, str):
            problem = f"{where} has neither text nor messages under {config.prompt_column!r}"
            if not isinstance(row, dict):
                raise DataError(f"{problem}, because the row is not a JSON object: write one JSON object per line")
            raise DataError(f"{problem}: set data.prompt_column to one of its columns, {', '.join(row)}")
        yield messages or question, row


def _refuse_no_answers(config: DataConfig, rows: Sequence[Row]) -> None:
    """Raise DataError if data.path has no rows, or no right answers although the recipe sets data.answer_column."""
    if not rows:
        raise DataError(f"{config.path} contains no prompts: it needs one JSON object per line, or one row per prompt")
    answers = (column(row, config.answer_column) for _, row in rows)
    has_answers = any(answer is not None for answer in answers) or any("ground_truth" in row for _, row in rows)
    if "answer_column" in config.model_fields_set and not has_answers:
        names = ", ".join(dict.fromkeys(name for _, row in rows for name in row))
        raise DataError(
            f"{config.path} has nothing under data.answer_column = {config.answer_column!r}: set it to one of its "
            f"columns, {names}, or remove it if no reward needs right answers"
        )


def _with_answers(config: DataConfig, rows: Sequence[Row]) -> list[Row]:
    """Add the right answer to each row as `answer`. A column of this name is kept, even if data.answer_column names
    another one."""
    return [(question, {"answer": column(row, config.answer_column), **row}) for question, row in rows]


# -- the cursor --------------------------------------------------------------------------------------------------------


def make_cursor(config: DataConfig, prompts: Sequence[Prompt], seed: int) -> Cursor:
    """Return a cursor at the start of the first epoch. `seed` sets the order of the prompts if data.shuffle is true."""
    stages = Counter(prompt.data["stage"] for prompt in prompts) if config.tasks else {}
    return Cursor(len(prompts), seed, config.shuffle, stages=list(stages.values()))


@dataclass
class Cursor:
    """Iterator over prompt indices, each once per epoch, in an order that depends only on (seed, epoch). A batch may
    span two epochs."""

    size: int
    seed: int
    shuffle: bool
    epoch: int = 0
    position: int = 0
    stages: list[int] = field(default_factory=list)
    """number of prompts in each curriculum stage, which are consecutive; the first epoch visits the stages in order"""

    def take(self, count: int) -> list[tuple[int, int]]:
        """Return the next `count` pairs (index of the prompt, epoch)."""
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
            rows.sort(key=lambda row: bisect_right(borders, row))  # stable: the order within a stage is kept
        return rows
