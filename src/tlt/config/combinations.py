"""Rules on configuration fields that cannot be combined. A rule raises ValueError with the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tlt.config.sections import Config


def _data(config: Config) -> None:
    names = [term.name for term in config.reward.all_terms]
    if "reasoning_gym" in names and not config.data.tasks:
        raise ValueError(
            "reward.name = 'reasoning_gym' needs data.tasks: for your own data use 'math', 'exact' or 'module:function'"
        )
    if config.eval.every and config.data.path and not config.eval.path:
        raise ValueError("eval.every needs eval.path, a file of held-out prompts, if data.path is given")


def _rollout(config: Config) -> None:
    rollout = config.rollout
    if rollout.temperature == 0:
        raise ValueError(
            "rollout.temperature = 0 makes all responses of a group equal, so there is nothing to learn: "
            "give a value above 0"
        )
    if config.train.updates_per_step > rollout.prompts_per_step:
        raise ValueError("train.updates_per_step must not exceed rollout.prompts_per_step")


def _engine(config: Config) -> None:
    if config.model.dtype == "float64" and config.model.device.startswith("cuda"):
        raise ValueError("model.dtype = 'float64' is only supported on the CPU: set model.device = 'cpu'")
    if config.engine.backend == "vllm":
        _for_vllm(config)
    elif config.engine.vllm:
        raise ValueError(
            f"engine.vllm.{min(config.engine.vllm)} needs engine.backend = 'vllm': set that, or remove engine.vllm "
            "(--engine.vllm '{}' if the recipe has it)"
        )


def _for_vllm(config: Config) -> None:
    if config.model.dtype == "float64":
        raise ValueError("engine.backend = 'vllm' does not support float64: set model.dtype = 'float32' or 'bfloat16'")
    if ":" in config.model.device:
        raise ValueError(
            f"model.device = {config.model.device!r}, but vLLM uses the first visible device: set it to "
            f"'{config.model.device.partition(':')[0]}', and CUDA_VISIBLE_DEVICES to the device"
        )


def _cluster(config: Config) -> None:
    shard, cluster = config.train.shard, config.cluster
    if shard and cluster.workers == 1:
        raise ValueError("train.shard needs several workers: set cluster.workers above 1, or train.shard = false")
    if (cluster.min_workers or 1) > cluster.workers:
        raise ValueError("cluster.min_workers must not exceed cluster.workers")
    if shard and (cluster.min_workers or cluster.workers) < cluster.workers:
        raise ValueError(
            "train.shard needs all workers, because each holds a part of the policy: remove cluster.min_workers, "
            "or set train.shard = false"
        )
    if shard and config.train.lora.rank:
        raise ValueError("train.shard cannot be used with LoRA: set train.shard = false or train.lora.rank = 0")


def _train(config: Config) -> None:
    rollout, train = config.rollout, config.train
    if train.schedule != "constant" and train.warmup_steps >= train.steps:
        raise ValueError(
            f"train.schedule = {train.schedule!r} begins after train.warmup_steps, which must be less than train.steps"
        )
    if 0 < train.dual_clip <= 1:
        raise ValueError("train.dual_clip must be 0 (off) or above 1, because the importance ratio begins at 1")
    if train.importance_cap and (rollout.top_k or rollout.top_p < 1):
        raise ValueError(
            "train.importance_cap needs rollout.top_k = 0 and rollout.top_p = 1, because no weight corrects for tokens "
            "that are never sampled"
        )


RULES: tuple[Callable[[Config], None], ...] = (_data, _rollout, _engine, _cluster, _train)
