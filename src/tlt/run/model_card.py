"""Model card (README.md) of a saved policy: its base model, data and training."""

from __future__ import annotations

from pathlib import Path

from tlt import __version__
from tlt.config import Config
from tlt.wording import counted

_PRECISION = {"float64": "float64", "float32": "float32", "bfloat16": "bfloat16 autocast over float32 weights"}


def model_card(config: Config, steps: int) -> str:
    """Return the text of the model card after `steps` steps, with a header in the format of the Hugging Face hub."""
    base, rollout, train = config.model.hub or config.model.path, config.rollout, config.train
    repository = (config.model.hub or "").partition("@")[0]
    parent = f"\nbase_model: {repository}" if repository else ""
    prompts, responses = counted(rollout.prompts_per_step, "prompt"), counted(rollout.group_size, "response")
    facts = {
        "prompts": config.data.source[1],
        "reward": config.reward.named,
        "a step": f"{prompts}, {responses} each",
        "responses": f"up to {counted(rollout.max_new_tokens, 'token')} at temperature {rollout.temperature:g}",
        "algorithm": f"advantage {train.advantage}, loss {train.loss}, learning rate {train.learning_rate:g}",
        "training precision": _PRECISION[config.model.dtype],
    }
    table = "\n".join(f"| {name} | {fact} |" for name, fact in facts.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [tlt, reinforcement-learning]{parent}
---
# {Path(repository or base).name}, after {counted(steps, "step")} of reinforcement learning

Trained by [tlt](https://arxiv.org/abs/2511.16665) {__version__} from `{base}`. The licence is that of the base model.

| | |
|---|---|
{table}

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("FOLDER")
    tokenizer = AutoTokenizer.from_pretrained("FOLDER")
"""
