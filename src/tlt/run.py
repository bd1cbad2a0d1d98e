"""A training run in its folder: build the parts, start or resume, record every step, save checkpoints, sum up."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tlt import checkpoint
from tlt.cluster.local import (
    LocalRollout,
    load_tokenizer,
    make_engine,
    make_target,
    stop_token_ids,
    torch_device,
    torch_dtype,
)
from tlt.config import Config, ConfigError
from tlt.data import Cursor, load_prompts
from tlt.display import Display
from tlt.loop import Parts, steps
from tlt.metrics import MetricsWriter, summarize, timed, write_json
from tlt.models.weights import sha256
from tlt.rewards import make_reward
from tlt.rl.policy import Policy
from tlt.types import SamplingParams


def train(config: Config, resume: bool, display: Display) -> dict[str, Any]:
    """Run or go on with a run; returns its summary. Raises a ValueError of one sentence for anything the user can
    mend."""
    folder = _claim_folder(config, resume)
    found = checkpoint.latest(folder / "checkpoints") if resume else None
    display.note(f"loading {config.model.path}")
    tokenizer = load_tokenizer(config.model.path)
    policy = make_policy(config, found.folder / "policy" if found else None)
    parts = make_parts(config, tokenizer, policy)
    first = 0
    if found:
        policy.load_optimizer(found.folder)
        parts.cursor = Cursor(**found.state["cursor"])
        first = found.state["step"]
        display.note(f"going on from step {first} ({found.folder})")
    parts.rollout.load(policy.state_dict(), version=first)
    write_json(folder / "config.json", config.model_dump())
    writer = MetricsWriter(folder, first)
    with display.live(config, first):
        for result in steps(parts, config, display, first):
            done = result.metrics.step + 1
            every = config.run.save_every
            if done == config.train.steps or (every and done % every == 0):
                with timed("save", result.metrics.seconds):
                    display.phase(result.metrics.step, "save", 0)
                    _save(config, done, parts, policy, tokenizer)
                result.metrics.seconds["total"] += result.metrics.seconds["save"]
            writer.write(result.metrics)
            display.step(result)
    writer.close()
    return summarize(folder, sha256(policy.state_dict()))


def make_policy(config: Config, folder: Path | None = None) -> Policy:
    read = folder or config.model.path
    device = torch_device(config.model)
    return Policy(read, torch_dtype(config.model), device, config.train, config.rollout.temperature)


def make_parts(config: Config, tokenizer: Any, policy: Policy) -> Parts:
    """All that the loop needs. The engine is built, and refuses what it cannot do, before any step runs."""
    prompts = load_prompts(config.data, lambda text: tokenizer(text)["input_ids"])
    rollout = LocalRollout(make_engine(config, make_target(config.model), tokenizer))
    cursor = Cursor(len(prompts), config.run.seed, config.data.shuffle)
    return Parts(prompts, cursor, rollout, make_reward(config), policy, sampling_params(config, tokenizer))


def sampling_params(config: Config, tokenizer: Any) -> SamplingParams:
    r = config.rollout
    stops = stop_token_ids(config.model.path, tokenizer)
    return SamplingParams(r.temperature, r.top_k, r.top_p, r.max_new_tokens, stops, tuple(r.stop_strings))


def _claim_folder(config: Config, resume: bool) -> Path:
    folder = Path(config.run.folder)
    used = (folder / "metrics.jsonl").is_file() or (folder / "checkpoints").is_dir()
    if used and not resume and not config.run.overwrite:
        raise ConfigError(
            f"{folder} already holds a run: go on with --resume, or give --run.overwrite true or another --run.folder"
        )
    if used and not resume:
        for name in ("metrics.jsonl", "summary.json"):
            (folder / name).unlink(missing_ok=True)
        for name in ("checkpoints", "tensorboard"):
            shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _save(config: Config, done: int, parts: Parts, policy: Policy, tokenizer: Any) -> None:
    def write(folder: Path) -> None:
        policy.save(folder)
        tokenizer.save_pretrained(folder / "policy")

    state = {"step": done, "cursor": asdict(parts.cursor)}
    checkpoint.save(Path(config.run.folder) / "checkpoints", done, state, write, config.run.keep)
