"""Lines that are logged at the start of a run, on its prompts, model, memory and output files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from tlt.build import backend_of
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
