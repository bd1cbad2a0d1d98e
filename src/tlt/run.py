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
    sampling_params,
    torch_device,
    torch_dtype,
)
from tlt.config import Config, ConfigError
from tlt.data import Cursor, load_prompts
from tlt.display import Display
from tlt.loop import Parts, steps
from tlt.metrics import MetricsWriter, summarize, timed, write_json
from tlt.models.weights import read_safetensors, sha256
from tlt.rewards import make_reward
from tlt.rl.groups import from_plain, to_plain
from tlt.rl.policy import Policy


def train(config: Config, resume: bool, display: Display) -> dict[str, Any]:
    """Run or go on with a run; returns its summary. Raises a ValueError of one sentence for anything the user can
    mend."""
    folder = _claim_folder(config, resume)
    found = checkpoint.latest(folder / "checkpoints") if resume else None
    display.note(f"loading {config.model.path}")
    tokenizer = load_tokenizer(config.model.path)
    parts, policy = make_parts(config, tokenizer, found.folder / "policy" if found else None)
    first = 0
    if found:
        policy.load_optimizer(found.folder)
        parts.cursor = Cursor(**found.state["cursor"])
        parts.carried = from_plain(found.state["carried"], parts.prompts, parts.sampling)
        first = found.state["step"]
        display.note(f"going on from step {first} ({found.folder})")
    write_json(folder / "config.json", config.model_dump())
    writer = MetricsWriter(folder, first, found.state["metrics"] if found else None)
    with display.live(config, first):
        for result in steps(parts, config, display, first):
            done = result.metrics.step + 1
            every = config.run.save_every
            if done == config.train.steps or (every and done % every == 0):
                with timed("save", result.metrics.seconds):
                    display.phase(result.metrics.step, "save", 0)
                    _save(config, done, parts, policy, tokenizer, asdict(result.metrics))
                result.metrics.seconds["total"] += result.metrics.seconds["save"]
            writer.write(result.metrics)
            display.step(result)
    writer.close()
    return summarize(folder, sha256(policy.state_dict()))


def make_parts(config: Config, tokenizer: Any, policy_folder: Path | None = None) -> tuple[Parts, Policy]:
    """All that the loop needs, what is quickly checked first; the engine holds the policy's weights."""
    folder = policy_folder or config.model.path
    prompts = load_prompts(config.data, lambda text: tokenizer(text)["input_ids"])
    reward = make_reward(config)
    target = make_target(config.model)
    target.load(read_safetensors(folder), version=0)
    engine = make_engine(config.engine, config.speculation, target, tokenizer)
    sampling = sampling_params(config.rollout, config.model.path, tokenizer)
    device, dtype = torch_device(config.model), torch_dtype(config.model)
    policy = Policy(folder, dtype, device, config.train, config.rollout, reference=config.model.path)
    cursor = Cursor(len(prompts), config.run.seed, config.data.shuffle)
    return Parts(prompts, cursor, LocalRollout(engine), reward, policy, sampling), policy


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


def _save(config: Config, done: int, parts: Parts, policy: Policy, tokenizer: Any, metrics: dict[str, Any]) -> None:
    def write(folder: Path) -> None:
        policy.save(folder)
        tokenizer.save_pretrained(folder / "policy")

    carried = to_plain(parts.carried)
    state = {"step": done, "cursor": asdict(parts.cursor), "carried": carried, "metrics": metrics}
    checkpoint.save(Path(config.run.folder) / "checkpoints", done, state, write, config.run.keep)
