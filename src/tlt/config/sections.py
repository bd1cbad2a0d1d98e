"""All sections of the configuration with their fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from tlt.config.combinations import RULES
from tlt.config.data import DataConfig
from tlt.config.lora import LoraConfig
from tlt.config.rewards import RewardConfig
from tlt.config.run import RunConfig
from tlt.config.section import LONGEST, Section
from tlt.config.speculation import SpeculationConfig

_VERIFIERS = "tlt.rewards.verifiers:Episode"  # runs environments of the package verifiers
_MOST_RESPONSES = 1_000_000  # largest number in a step


class ModelConfig(Section):
    path: str
    """Folder of a Hugging Face checkpoint, or a model's name on the Hugging Face hub, such as `Qwen/Qwen3-0.6B` or
    `Qwen/Qwen3-0.6B@main`. A relative path is looked up in the recipe's folder first, then in the working directory,
    then on the hub."""
    hub: str | None = None
    """Name and commit on the Hugging Face hub, if `path` is a name there. A run records it, and --resume loads the same
    commit."""
    dtype: Literal["auto", "float64", "float32", "bfloat16"] = "auto"
    """Number format of the weights. `auto` is bfloat16 with float32 master weights on a CUDA device, and float32 on the
    CPU."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d{1,4})?)$")
    """`cpu`, a CUDA device such as `cuda:0`, or `auto` (CUDA if there is one)."""
    cuda_graphs: bool = True
    """On a CUDA device, replay decoding passes and drafts as CUDA graphs. Without them the host's work for each kernel
    makes a round of a small model three times as long."""


class RolloutConfig(Section):
    prompts_per_step: int = Field(default=16, gt=0)
    """Number of prompts in a step. Each gets `group_size` responses."""
    group_size: int = Field(default=8, gt=1)
    """Number of responses to each prompt. Advantages compare them with each other."""
    max_new_tokens: int = Field(default=512, gt=0)
    """Longest response, in tokens. Longer responses are truncated."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature. It divides the logits in the rollout and in the update."""
    top_k: int = Field(default=0, ge=0)
    """Sample from the k most likely tokens. 0 samples from all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most likely tokens whose probabilities sum to this. 1 samples from all."""
    stop_strings: list[Annotated[str, Field(min_length=1)]] = []
    """A response ends after the first of these strings, or at an end token of the model. A string may name a special
    token, such as `<|im_end|>`."""
    max_waves: int = Field(default=0, ge=0, le=1000)
    """Dynamic sampling: decode up to this many times `prompts_per_step` prompts in a step, until `prompts_per_step`
    groups have rewards that differ. 0 decodes once and uses every group."""
    leftover: Literal["carry", "drop"] = "carry"
    """Groups that dynamic sampling decoded beyond those it needs: `carry` uses them in the next step, `drop` discards
    them as DAPO does."""
    overlong_tokens: int = Field(default=0, ge=0)
    """Soft penalty for long responses: over the last `overlong_tokens` tokens before `max_new_tokens`, the reward falls
    by up to 1. 0 turns it off."""

    @model_validator(mode="after")
    def _few_enough(self) -> RolloutConfig:
        if self.prompts_per_step * self.group_size > _MOST_RESPONSES:
            raise ValueError(
                f"rollout.prompts_per_step = {self.prompts_per_step} times rollout.group_size = {self.group_size} is "
                f"more than {_MOST_RESPONSES:,} responses per step: lower one of them"
            )
        return self


class EngineConfig(Section):
    backend: Literal["tlt", "vllm"] = "tlt"
    """`tlt` is our own engine. `vllm` is vLLM with our noise, which gives the same tokens (docs/vllm.md)."""
    max_rows: int = Field(default=64, gt=0)
    """Number of requests decoded at once. The others wait."""
    kv_memory_mb: int | Literal["auto"] = "auto"
    """Largest size of the key-value cache in MiB. `auto` is 80 % of the CUDA memory, or a quarter of the host memory,
    that is free when a rollout begins; with vLLM, which never gives it back, 1024. A request that does not fit waits. A
    request that outgrows the cache is preempted and resumed."""
    prefill_tokens: int = Field(default=2048, gt=0)
    """Number of tokens in one prefill pass, padding included."""
    vllm: dict[str, JsonValue] = {}
    """Further arguments of vLLM, with its names, such as `tensor_parallel_size` or `enforce_eager`."""

    @field_validator("kv_memory_mb", mode="before")
    @classmethod
    def _size(cls, size: object) -> object:
        if size != "auto" and (type(size) is not int or size < 1):
            raise ValueError(f'engine.kv_memory_mb: give a number of MiB above 0, or "auto" (got {size})')
        return size

    @property
    def ours(self) -> EngineConfig:
        """The same section with our own engine."""
        return self.model_copy(update={"backend": "tlt", "vllm": {}})


class TrainConfig(Section):
    steps: int = Field(default=100, gt=0, le=1_000_000_000)
    """Number of steps: rollout, reward, update, sync."""
    learning_rate: float = Field(default=1e-6, gt=0, le=10)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of steps over which the learning rate rises linearly."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up. `linear` and `cosine` fall to 0 at the last step."""
    weight_decay: float = Field(default=0.0, ge=0, le=100)
    """Weight decay of matrices. Norms and biases are not decayed."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of AdamW's first moment."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay rate of AdamW's second moment."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Largest norm of the gradients. Larger gradients are clipped to it."""
    advantage: Literal["grpo", "grpo_batch", "dr_grpo", "rloo", "reinforce_pp"] = "grpo"
    """Advantage of a response. grpo: (reward - mean) / deviation in the group. grpo_batch: like grpo, with the
    deviation of the whole rollout. dr_grpo: reward - mean. rloo: reward - mean of the other responses. reinforce_pp:
    mean and deviation of the whole rollout."""
    advantage_epsilon: float = Field(default=1e-6, ge=0)
    """Number added to the deviation before dividing (TRL uses 1e-4)."""
    loss: Literal["ppo", "grpo", "dapo", "dr_grpo", "gspo"] = "ppo"
    """Loss. ppo: mean over tokens. grpo: mean over responses. dapo: mean over tokens, with a higher upper clip.
    dr_grpo: sum over tokens divided by rollout.max_new_tokens. gspo: mean over responses, with one ratio for each."""
    clip_low: float | None = Field(default=None, gt=0, le=1)
    """The ratio is clipped below 1 - clip_low (default 0.2, and 3e-4 for gspo)."""
    clip_high: float | None = Field(default=None, gt=0)
    """The ratio is clipped above 1 + clip_high (default 0.2, 0.28 for dapo and 4e-4 for gspo)."""
    dual_clip: float = Field(default=3.0, ge=0)
    """Upper bound of the ratio if the advantage is negative. 0 turns it off."""
    mask_truncated: bool = False
    """Leave truncated responses out of the loss. Their rewards still count in the advantages of their group."""
    kl_weight: float = Field(default=0.0, ge=0, le=1e30)
    """Weight of the KL divergence from the initial model, which is kept in memory as a second model. 0 turns it off."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL divergence enters: `loss` adds it to the loss of each token, `reward` subtracts its sum over the
    response from the reward."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Estimator of the KL divergence at each token (default k3 in the loss, k1 in the reward)."""
    kl_unbiased: bool = True
    """Multiply the KL term of the loss by the ratio, so that its gradient is unbiased (DeepSeek-V3.2, arXiv
    2512.02556), as TRL does. If false, do not, as verl does."""
    importance_cap: float = Field(default=0.0, ge=0)
    """Cap of the importance weights min(p_trainer / p_rollout, cap) that multiply the loss (truncated importance
    sampling). The weights depend on the rollout's log-probs. So runs whose rollouts round differently end with
    different bits. 0 turns it off."""
    updates_per_step: int = Field(default=1, gt=0)
    """Number of optimizer steps in each pass over the rollout. The responses are split into this many mini-batches, in
    prompt order."""
    epochs: int = Field(default=1, gt=0, le=1000)
    """Number of passes over the rollout in an update. There are `epochs` x `updates_per_step` optimizer steps."""
    early_update: bool = True
    """Let idle workers compute gradients of finished groups before the rollout ends. With several optimizer steps per
    rollout, train.kl_in = 'reward', or train.advantage = 'grpo_batch' or 'reinforce_pp', they compute the old and
    reference log-probs instead. The result is the same. This needs several workers. It is not used with train.shard,
    because a pass then needs all workers. A worker with too little memory continues without it and logs this."""
    micro_batch_tokens: int = Field(default=4096, gt=0)
    """Number of tokens in one forward and backward pass, including gaps of the packing. Before the first step, a pass
    of this size is tried on a CUDA device, or estimated on the CPU. If it does not fit the memory, the run ends with an
    error that says what to change."""
    logits_mb: int = Field(default=256, gt=0)
    """Size of the logits computed at once, in MiB. If the logits need several chunks, each is computed again for the
    gradient. A chunk needs about three times this memory."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input, and recompute the rest for the gradient. It saves memory and costs time."""
    deterministic: bool = True
    """Add up gradients in a fixed order on CUDA, so that two runs of the same responses end with the same bits. If an
    operation of the model cannot do that, the run ends with an error. Set this to false then."""
    lora: LoraConfig = LoraConfig()
    shard: bool = False
    """Shard parameters, gradients and moments of the decoder layers over the workers (FSDP2), for a model that does not
    fit one device. If a worker is lost, the run ends, and --resume continues from a checkpoint (run.save_every)."""


class EvalConfig(Section):
    every: int = Field(default=0, ge=0)
    """Number of steps between evaluations on held-out prompts. One is also run before the first step and at the end. 0
    turns them off."""
    samples: int = Field(default=4, gt=0, le=10_000)
    """Number of responses to each held-out prompt."""
    size: int = Field(default=64, gt=0, le=250_000)
    """Number of held-out prompts, from `data.tasks` with another seed or from `path`. Training prompts are left out."""
    path: str | None = None
    """File of held-out prompts if `data.path` is given, with the same columns. A name on the hub has the form of
    `data.path`, such as `openai/gsm8k:main/test`."""
    hub: str | None = None
    """Name and commit on the Hugging Face hub, if `path` is a name there. A run records it, and --resume loads the same
    commit."""
    solved: float = 1.0
    """A response with at least this reward counts as right in pass@k."""
    keep_best: bool = True
    """Keep the policy with the highest mean reward of an evaluation in the run's folder, under best/."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature of the evaluation (default: that of `rollout`)."""
    top_k: int | None = Field(default=None, ge=0)
    """Top-k of the evaluation (default: that of `rollout`)."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Top-p of the evaluation (default: that of `rollout`)."""
    max_new_tokens: int | None = Field(default=None, gt=0)
    """Longest response of the evaluation, in tokens (default: that of `rollout`)."""


class ClusterConfig(Section):
    """Workers: each with its own engine, its replica of the policy, and its drafter."""

    workers: int = Field(default=1, gt=0, le=10_000)
    """Number of workers. 1 runs in this process. More are Ray processes, each with its own cores or its own CUDA
    device."""
    address: str | None = None
    """Address of a Ray cluster, such as `10.0.0.1:6379`, whose nodes see all files under the same paths (default: this
    machine alone)."""
    allow_no_token: bool = False
    """Join a Ray cluster without authentication. Use it only on a private network."""
    min_workers: int | None = Field(default=None, gt=0)
    """Smallest number of workers with which a run starts and continues if the cluster has no room for the others. The
    others join as soon as there is room. The result does not depend on it (default: all to start, 1 to continue; all if
    train.shard)."""
    grace: float = Field(default=60.0, gt=0, le=LONGEST)
    """Timeout in seconds for the start of a worker's process. If a worker exceeds it, the run continues without that
    worker."""
    slice_seconds: float = Field(default=0.2, gt=0, le=LONGEST)
    """Time in seconds that a worker decodes before it reports and can be given other requests."""
    patience: float = Field(default=300.0, gt=0, le=LONGEST)
    """Timeout in seconds for one report of a worker that decodes or trains the drafter. A worker that exceeds it is
    replaced. The timeout of an update or a save is ten times its recent duration, if that is longer."""


class Config(Section):
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    cluster: ClusterConfig = ClusterConfig()
    run: RunConfig = RunConfig()

    @property
    def looks_ahead_in_vllm(self) -> bool:
        """Whether `adaptive` means look-ahead with vLLM. It needs several workers, because a single one is never
        idle."""
        return self.speculation.drafter == "adaptive" and self.speculation.look_ahead > 0 and self.cluster.workers > 1

    @model_validator(mode="before")
    @classmethod
    def _adapted(cls, tree: Any) -> Any:
        """Set the reward to the environment of `verifiers`, if the prompts come from one."""
        if not (isinstance(tree, dict) and isinstance(tree.get("data"), dict) and tree["data"].get("environment")):
            return tree
        return tree | {"reward": {"environment": _VERIFIERS} | tree.get("reward", {})}

    @model_validator(mode="after")
    def _possible(self) -> Config:
        for refuse in RULES:
            refuse(self)
        return self
