"""A GRPOTrainer of the installed TRL on the tiny model, and its results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from tiny import QUESTIONS, tiny_model
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tlt.models.weights import sha256

PROMPTS = [{"prompt": question} for question in QUESTIONS]
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def share_of_low_bytes(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [sum(token < 128 for token in ids) / len(ids) for ids in completion_ids]


class Result(NamedTuple):
    completions: list[list[int]]
    sha256: str
    logs: list[dict[str, float]]
    trainer: GRPOTrainer


def settings(folder: Path, **changes: Any) -> GRPOConfig:
    plain: dict[str, Any] = {
        **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size", "num_generations"), 4),
        **{"max_completion_length": 16, "max_steps": 2, "learning_rate": 1e-2, "temperature": 0.7},
        **{"output_dir": str(folder / "trl"), "logging_steps": 1, "save_strategy": "no", "report_to": []},
        **{"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True},
    }
    return GRPOConfig(**plain | changes)


def make(
    folder: Path,
    rollout: Any = None,
    prompts: Any = None,
    dtype: Any = torch.float64,
    peft: Any = None,
    given: dict[str, Any] | None = None,
    **changes: Any,
) -> GRPOTrainer:
    """Return a trainer. `given` are further arguments of the trainer, such as tools. `changes` are settings."""
    if not (folder / "model").is_dir():
        tiny_model(folder / "model")
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = CHAT
    rows = Dataset.from_list(prompts or PROMPTS)
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype),
        reward_funcs=share_of_low_bytes,
        args=settings(folder, **changes),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tokenizer,
        rollout_func=rollout,
        peft_config=peft,
        **given or {},
    )


def run(
    folder: Path, rollout: Any = None, prepare: Callable[[GRPOTrainer], None] | None = None, **changes: Any
) -> Result:
    completions: list[list[int]] = []

    def kept(prompts: Any, trainer: GRPOTrainer) -> dict[str, Any]:
        found = rollout(prompts, trainer)
        completions.extend(found["completion_ids"])
        return found

    trainer = make(folder, kept if rollout else None, **changes)
    if prepare:
        prepare(trainer)
    trainer.train()
    weights = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in trainer.model.state_dict().items()}
    return Result(completions, sha256(weights), trainer.state.log_history, trainer)
