"""Texts about a run: lines that are logged at its start, and the model card (README.md) of a saved policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from tlt import __version__
from tlt.build import backend_of, trains_drafter
from tlt.config import Config
from tlt.engine.memory import free_bytes
from tlt.models.device import torch_device
from tlt.models.families import decoder_options, read_config
from tlt.models.generic import TRIED
from tlt.models.hugging_face import empty_model
from tlt.rl.lora import add_adapters
from tlt.run.trackers import names_of
from tlt.types import Prompt
from tlt.wording import counted


def about_prompts(config: Config, prompts: Sequence[Prompt], tokenizer: Any) -> str:
    responses = config.rollout.prompts_per_step * config.rollout.group_size
    _, source = config.data.source
    unused = getattr(tokenizer, "chat_template", None) and not config.data.chat
    hints = "; the model's chat template is not used (data.chat = true uses it)" if unused else ""
    if config.reward.environment and not config.data.chat and not config.rollout.stop_strings:
        hints += "; a turn ends only at an end token of the model (rollout.stop_strings ends it at a text)"
    if prompts and config.rollout.prompts_per_step > len(prompts):
        hints += f"; each step repeats prompts (rollout.prompts_per_step = {config.rollout.prompts_per_step} is above)"
    shown, per_step = counted(len(prompts), "prompt"), counted(responses, "response")
    return f"{shown} of {source}{hints}; {per_step} per step; reward {config.reward.named}"


def about_model(config: Config) -> str:
    family = read_config(config.model.path)
    o = decoder_options(family)
    model = f"{o.num_layers} layers x {o.hidden_size}, vocabulary {o.vocab_size:,}, {config.model.dtype}"
    device, workers = torch_device(config.model), config.cluster.workers
    many = f", {workers} workers" if workers > 1 else ", one worker"
    if workers > 1 and device.type == "cpu" and config.cluster.address is None:
        many += " (for a large model one worker with all cores may be faster: compare them with tlt estimate)"
    backend = backend_of(config.engine)
    start = f"; {backend.start_note}" if backend.start_note else ""
    untested = f" ({family.model_type} is not tested with tlt yet: each sync compares engine and policy)"
    new = "" if family.model_type in TRIED else untested
    speculation = f"speculation: {backend.about_speculation(config)}"
    if trains_drafter(config) and not config.speculation.path:
        speculation += ", a learned drafter that starts untrained (tlt draft train makes a trained one)"
    return f"model: {model}{new}, on {device}{many}; {speculation}{start}{_about_router(family)}"


def _about_router(config: PreTrainedConfig) -> str:
    """Return a note if the model was trained with a loss that balances its experts, because the update adds none."""
    weight = getattr(config, "router_aux_loss_coef", None)
    return f"; no loss balances its experts (router_aux_loss_coef = {weight:g} is not used)" if weight else ""


def about_adapters(config: Config) -> str:
    """Return a log line with the layers that LoRA trains. Raises ModelError if the model lacks one of
    `train.lora.targets`."""
    with torch.device("meta"):
        model = empty_model(read_config(config.model.path))
        return add_adapters(model, config.train.lora).sentence(model)


def about_memory(config: Config) -> str:
    """Return a log line with the free memory of this machine and the largest size of the key-value cache."""
    free = f"memory: {free_bytes(torch.device('cpu')) / 2**30:.1f} GiB free on this machine"
    cache = backend_of(config.engine).about_cache(config)
    return f"{free}; {cache}" if cache else free


def about_folder(config: Config) -> str:
    """Return a log line with the files that the run will write, how often it saves checkpoints, and its trackers."""
    run = config.run
    files = ["metrics.jsonl", "completions.jsonl", "report.html", "summary.json"]
    every = f"every {counted(run.save_every, 'step')} and at the end" if run.save_every else "at the end"
    followed = f", then runs {run.on_save}" if run.on_save else ""
    trackers = names_of(run.trackers)
    sent = f"; metrics go to {', '.join(trackers)}" if trackers else ""
    kept = f"a checkpoint {every} (the newest {run.keep} are kept){followed}"
    return f"writes to {run.folder}: {', '.join(files)}; {kept}{sent}"


# -- model card --------------------------------------------------------------------------------------------------------


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
