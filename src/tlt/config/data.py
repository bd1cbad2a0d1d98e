"""Section [data]: the source and the format of prompts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue, model_validator

from tlt.config.section import STATE, Section


class TaskConfig(Section):
    name: str
    """Name of a reasoning-gym task, such as `chain_sum`."""
    weight: float = Field(default=1.0, gt=0, le=1e30)
    """Weight of the task in the mixture of tasks, relative to the weights of the other tasks."""
    params: dict[str, JsonValue] = {}
    """Parameters of the task, with the names that reasoning-gym gives them."""
    stage: int = Field(default=0, ge=0)
    """Curriculum stage of the task. The first epoch visits the stages in increasing order, later epochs ignore them."""


class DataConfig(Section):
    tasks: list[TaskConfig] = []
    """Mixture of reasoning-gym tasks that generate the prompts. Give either `tasks` or `path`."""
    path: str | None = None
    """Source of the prompts: a .jsonl, .json or .parquet file, a data set saved to disk by `datasets`, a folder of
    numbered files, a pattern such as `data/*.jsonl`, or a data set on the Hugging Face hub. A data set on the hub is
    named `NAME:SUBSET/SPLIT@REVISION`, such as `openai/gsm8k:main/train`. SUBSET and SPLIT are those of `load_dataset`.
    SUBSET is needed only if there are several. SPLIT is `train` by default. REVISION is a branch, a tag or a commit.
    Data sets of the hub need the extra tlt-rl[data]. A relative path is looked up in the recipe's folder
    first, then in the working directory. Give either `tasks` or `path`."""
    hub: str | None = Field(default=None, json_schema_extra=STATE)
    """Name and commit of the data set, if `path` is a name on the Hugging Face hub."""
    prompt_column: str = "question"
    """Column of the data in `path` that contains the prompt: text, or a list of messages with role and content. A
    dotted name such as `extra.prompt` reads a nested field."""
    answer_column: str = "answer"
    """Column of the data in `path` that contains the right answer. A dotted name such as `reward_model.ground_truth`
    reads a nested field."""
    template: str = "{question}"
    """Template of the text that the model sees. `{question}` is replaced by the prompt's text."""
    chat: bool = False
    """Apply the tokenizer's chat template. The text of `template` becomes the user's message. This is required if
    prompts are lists of messages."""
    system: str = ""
    """System message for prompts that have none. Needs `chat`."""
    chat_arguments: dict[str, JsonValue] = {}
    """Arguments of the chat template, such as { enable_thinking = false }. Needs `chat`."""
    now: str | None = Field(default=None, json_schema_extra=STATE)
    """Time at which the run began, for chat templates that write the date."""
    prefill: str = ""
    """Text at the beginning of each response. The model continues it. Rewards receive it as a part of the response."""
    size: int = Field(default=2000, gt=0, le=1_000_000)
    """Number of prompts generated from `tasks`. They are one epoch."""
    shuffle: bool = True
    """Shuffle the prompts in each epoch. If false, keep the order of the source."""
    max_prompt_tokens: int = Field(default=1024, gt=0)
    """Largest length of a prompt in tokens, with chat template and `prefill`. See `long_prompts` for longer ones."""
    long_prompts: Literal["refuse", "drop"] = "refuse"
    """Handling of prompts longer than `max_prompt_tokens`: `refuse` ends the run with an error at its start, `drop`
    leaves them out and logs their number."""

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if bool(self.tasks) == bool(self.path):
            raise ValueError(
                "give either data.tasks (reasoning-gym tasks by name) or data.path (a JSONL or Parquet file, or a data "
                "set's name on the Hugging Face hub)"
            )
        if "{question}" not in self.template:
            raise ValueError("data.template must contain {question}")
        if (self.system or self.chat_arguments) and not self.chat:
            raise ValueError("data.system and data.chat_arguments need data.chat = true")
        return self

    @property
    def source(self) -> tuple[str, str]:
        """Configuration field that sets the source of prompts, such as `data.path`, and its value for display."""
        if self.path:
            return "data.path", self.hub or self.path
        return "data.tasks", ", ".join(dict.fromkeys(task.name for task in self.tasks))
