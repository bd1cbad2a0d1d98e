"""Construction of all parts of the training loop from a configuration: prompts, reward, policy and rollout workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tlt.cluster.remote import join, local_rollout
from tlt.cluster.run_worker import RunWorker
from tlt.config import Config
from tlt.data.limits import refuse_misfits
from tlt.data.prompts import encoder, load_held_out, load_prompts, make_cursor
from tlt.data.sampling_params import sampling_params
from tlt.energy import Meter, MeteredTracer
from tlt.engine.exactness import Exactness
from tlt.environments import Turns, make_turns
from tlt.loop import Parts, Rollout, Trainable
from tlt.progress import working
from tlt.rewards import Reward, make_reward, refuse_special_tokens, refuse_unanswered
from tlt.run.about import about_adapters, about_memory, about_model, about_prompts
from tlt.types import Prompt, SamplingParams


class SavablePolicy(Trainable, Protocol):
    """Interface of a policy that can be saved to a checkpoint and restored."""

    version: int | None
    """number of steps that updated the policy, including those before a resume; None during an update once a weight has
    changed"""

    @property
    def updated(self) -> float:
        """Finished share of the current update, 0 to 1. Other threads may read it at any time."""
        ...

    def save(self, folder: Path) -> None: ...

    def load_optimizer(self, folder: Path) -> None: ...

    def sha256(self) -> str: ...


class Inputs(NamedTuple):
    """Parts of a run that need no weights."""

    prompts: list[Prompt]
    held_out: list[Prompt]
    reward: Reward
    turns: Turns
    sampling: SamplingParams


def read_inputs(config: Config, tokenizer: Any, note: Callable[[str], None] = lambda text: None) -> Inputs:
    """Read the prompts and make the reward, with all checks that need no weights. `note` logs a line. Raises a
    ValueError of one sentence for errors that the user can fix."""
    encode = encoder(tokenizer, config.data)
    prompts = load_prompts(config.data, encode)
    held_out = load_held_out(config.data, config.eval, encode, prompts)
    note(about_prompts(config, prompts, tokenizer))
    refuse_special_tokens(config, tokenizer)
    refuse_misfits(config, prompts)
    refuse_misfits(config, held_out, held_out=True)
    refuse_unanswered(config, held_out)
    log = Path(config.run.folder) / "reward.log"
    reward = make_reward(config, prompts, log)
    turns = make_turns(config, tokenizer, log)
    sampling = sampling_params(config.rollout, config.model.path, tokenizer)
    sampling = replace(sampling, continues=config.reward.environment is not None)
    note(about_model(config))
    if config.train.lora.rank:
        note(about_adapters(config))
    note(about_memory(config))
    return Inputs(prompts, held_out, reward, turns, sampling)


def make_parts(
    config: Config, tokenizer: Any, policy_folder: Path | None = None, note: Callable[[str], None] = lambda text: None
) -> tuple[Parts, SavablePolicy]:
    """Build and return the parts of the training loop and the policy. Quick checks come first. The engine gets the
    policy's weights. `policy_folder` is the policy of a checkpoint (default: model.path). `note` logs a line."""
    folder = policy_folder or config.model.path
    prompts, held_out, reward, turns, sampling = read_inputs(config, tokenizer, note)
    cursor = make_cursor(config.data, prompts, config.run.seed)
    with working("start the policy and its workers"):
        rollout, policy, exactness = _start(config, folder, turns, max(len(prompt.token_ids) for prompt in prompts))
    note(exactness.meaning)
    parts = Parts(prompts, cursor, rollout, reward, policy, sampling, turns=turns, held_out=held_out)
    parts.tracer, parts.exactness = MeteredTracer(None if config.cluster.address else Meter()), exactness
    return parts, policy


def _start(
    config: Config, folder: str | Path, turns: Turns, longest_prompt: int
) -> tuple[Rollout, SavablePolicy, Exactness]:
    if config.cluster.workers > 1:
        return _many_workers(config, folder, turns, longest_prompt)
    worker = RunWorker.of_run(config, 0, folder)
    exactness = worker.check_at_start(longest_prompt)
    return local_rollout(worker, config, turns), worker.policy, exactness


def _many_workers(
    config: Config, folder: str | Path, turns: Turns, longest_prompt: int
) -> tuple[Rollout, SavablePolicy, Exactness]:
    from tlt.cluster.workers import RayPool  # Ray is an extra

    return join(RayPool(config, folder), config, turns, longest_prompt)
