"""All sections of the configuration with their fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, ValidationInfo, field_validator, model_validator

from tlt.config.combinations import RULES
from tlt.config.data import DataConfig
from tlt.config.registry import DRAFTERS, TRACKERS, learned, may_be_learned
from tlt.config.rewards import RewardConfig
from tlt.config.section import LONGEST, STATE, Section


class DrafterTrainConfig(Section):
    """Training of the learned drafter, by `tlt draft train` and during a run."""

    unroll: int = Field(default=7, gt=0, le=16)
    """Largest number of consecutive draft tokens that the drafter is trained on. It predicts each token from its own
    output for the previous token. Training covers one draft token more than are accepted on average, at most
    `unroll`."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak learning rate of the drafter. In a run it falls as more draft tokens are accepted. In `tlt draft train` it
    falls linearly with time."""
    micro_batch_tokens: int = Field(default=1024, gt=0)
    """Number of tokens in a micro-batch of drafter training. Each micro-batch is one optimizer step."""
    idle: bool = True
    """Train the drafter on idle workers (several workers only). Training starts from `speculation.path`, or from random
    weights if `speculation.drafter` is adaptive and no path is given."""
    extra: float = Field(default=0.0, ge=0, le=1)
    """Extra time for training the drafter after each rollout, as a fraction of the rollout's time. It delays the step.
    A single worker is never idle, so it trains a drafter only if this is above 0."""
    buffer_tokens: int = Field(default=200_000, gt=0)
    """Largest number of tokens of training data that a run keeps in host memory. Up to half of them are from finished
    rollouts. `tlt draft train` has --tokens instead."""


class SpeculationConfig(Section):
    """Speculative decoding: the drafter, the length of its drafts, and look-ahead drafts."""

    drafter: str = "adaptive"
    """Drafter of a run. `adaptive` chooses the fastest strategy for each round, which may be plain decoding.
    `eagle` (learned), `quantized` (the model itself with int8 weights, on CPUs) and `suffix` (model-free) always draft.
    `off` never drafts."""
    path: str | None = None
    """Folder of a learned drafter, as made by `tlt draft train`. A relative path is looked up in the recipe's folder
    first, then in the working directory."""
    kind: Literal["eagle1", "eagle3"] = "eagle1"
    """Architecture of a new drafter. `eagle1` reads the target's last hidden state, which is saved for each token.
    `eagle3` reads the hidden states of three layers, which are saved for each token together with the last hidden
    state. A drafter from `path` has its own kind."""
    window: int = Field(default=512, gt=0)
    """Attention window of a new drafter, in tokens. Hidden states of the last `window` tokens are kept for each active
    request."""
    depth: int = Field(default=6, gt=0, le=32)
    """Largest number of draft tokens of a row in a round. Unlikely draft tokens are not verified, so a draft may be
    shorter. `adaptive` chooses its own number."""
    look_ahead: int = Field(default=4, ge=0)
    """Number of future steps whose requests are decoded in advance. The results serve as drafts in those steps. Idle
    workers decode them. A single worker does so only on a GPU, when few of its responses are left. Needs
    `drafter = "adaptive"`. 0 turns look-ahead off."""
    training: DrafterTrainConfig = DrafterTrainConfig()

    @field_validator("drafter")
    @classmethod
    def _known(cls, drafter: str) -> str:
        choices = ("off", *DRAFTERS, "adaptive")
        if drafter not in choices:
            raise ValueError(f'speculation.drafter: give one of {", ".join(choices)} (got "{drafter}")')
        return drafter

    @model_validator(mode="after")
    def _learned(self) -> SpeculationConfig:
        if learned(self.drafter) and self.path is None:
            raise ValueError(
                f"speculation.drafter = '{self.drafter}' needs speculation.path, the folder of a learned drafter: "
                "make one with tlt draft train"
            )
        if self.path is not None and not may_be_learned(self.drafter):
            raise ValueError(
                f"speculation.drafter = '{self.drafter}' does not use the learned drafter in speculation.path: set "
                "speculation.drafter = 'adaptive', or remove the path with --speculation.path ''"
            )
        return self


# -- the other sections ------------------------------------------------------------------------------------------------


class RunConfig(Section):
    folder: str = "runs/latest"
    """Folder of the run, for its checkpoints, metrics and other files. A relative path begins in the working
    directory."""
    seed: int = Field(default=0, ge=0)
    """Random seed for the sampling of all responses, for the order of the prompts if data.shuffle is true, and for a
    new drafter and its training."""
    save_every: int = Field(default=20, ge=0)
    """Number of steps between checkpoints. A checkpoint is also saved at the end of the run, after a signal such as
    SIGTERM, and after an error. 0 saves only in these cases."""
    stop_within: float = Field(default=20.0, gt=0, le=LONGEST)
    """Timeout in seconds for the current step after SIGTERM, SIGHUP or Ctrl-C. If the update may already have changed
    weights when the timeout is over, the step gets the same time again. A step that takes longer is abandoned. Then the
    state before the step is saved, unless the weights may have changed. In that case the run can only be resumed from
    the last checkpoint."""
    keep: int = Field(default=2, gt=0)
    """Number of checkpoints to keep. Older ones are deleted."""
    on_save: str | None = Field(default=None, min_length=1)
    """Command that runs in the background after each save, such as `aws s3 cp --recursive {checkpoint}
    s3://bucket/run/{name}`. `{checkpoint}` is the checkpoint's folder, and `{name}` its name. No shell is used."""
    compare_every: int = Field(default=0, ge=0)
    """Number of steps between comparisons of speculative with plain decoding. In a comparison, the step's requests are
    also decoded without drafts, and both times are reported. 0 turns comparisons off."""
    trackers: list[str] | None = None
    """Trackers that receive the metrics: `tensorboard`, `wandb`, or your own `module:Class`. Each needs a package, such
    as the extra tlt-rl[wandb] (default: TensorBoard if it is installed)."""
    overwrite: bool = False
    """Start a new run in `folder` even if an older run is there. The older run is deleted when all checks before the
    first step have passed."""

    @field_validator("trackers", mode="before")
    @classmethod
    def _listed(cls, trackers: Any) -> Any:
        return trackers.split(",") if isinstance(trackers, str) else trackers

    @field_validator("trackers")
    @classmethod
    def _known(cls, trackers: list[str] | None) -> list[str] | None:
        for name in trackers or ():
            if name not in TRACKERS and ":" not in name:
                choices = ", ".join(TRACKERS)
                raise ValueError(f'run.trackers: give some of {choices}, or your own as module:Class (got "{name}")')
        return trackers


# -- section [run] -----------------------------------------------------------------------------------------------------


_MOST_RESPONSES = 1_000_000  # largest number of responses in a step
_MOST_ROWS = {"cpu": 64, "cuda": 256}  # largest numbers of rows in a batch if engine.max_rows = "auto"


class LoraConfig(Section):
    rank: int = Field(default=0, ge=0)
    """Rank of the LoRA adapters (arXiv 2106.09685), which PEFT adds to the policy with an alpha of 2 * rank. The
    policy's own weights are then frozen. 0 turns LoRA off."""
    targets: list[Annotated[str, Field(min_length=1)]] = Field(default=["all-linear"], min_length=1)
    """Linear layers that get LoRA adapters. Each entry is the end of a layer's name, such as `q_proj`, or of the name
    of a tensor that holds the weights of all experts, such as `experts.down_proj`. `all-linear` stands for all of these
    except the head. The start of a run says which kinds are trained."""

    @field_validator("targets", mode="before")
    @classmethod
    def _listed(cls, targets: object) -> object:
        return targets.split(",") if isinstance(targets, str) else targets


class ModelConfig(Section):
    path: str
    """Folder of a Hugging Face checkpoint, or a model's name on the Hugging Face hub, such as `Qwen/Qwen3-0.6B` or
    `Qwen/Qwen3-0.6B@main`. A relative path is looked up in the recipe's folder first, then in the working directory,
    then on the hub."""
    hub: str | None = Field(default=None, json_schema_extra=STATE)
    """Name and commit of the model, if `path` is a name on the Hugging Face hub."""
    dtype: Literal["auto", "float64", "float32", "bfloat16"] = "auto"
    """Number format of the weights. `auto` is bfloat16 with float32 master weights on a CUDA device, and on a CPU with
    instructions for bfloat16 (AVX512-BF16 or AMX). It is float32 on other CPUs. A resumed run keeps its format."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d{1,4})?)$")
    """Device of the model: `cpu`, a CUDA device such as `cuda:0`, or `auto` (CUDA if there is a CUDA device)."""
    cuda_graphs: bool = True
    """Replay decoding and drafting passes as CUDA graphs, if the model is on a CUDA device. Without CUDA graphs the
    launch overhead of kernels makes a decoding round of a small model three times as long."""


class RolloutConfig(Section):
    prompts_per_step: int = Field(default=16, gt=0)
    """Number of prompts in a step. Each gets `group_size` responses."""
    group_size: int = Field(default=8, gt=1)
    """Number of responses to each prompt. They form a group, and advantages compare the rewards in a group."""
    max_new_tokens: int = Field(default=512, gt=0)
    """Largest length of a response in tokens. Longer responses are truncated."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature. The logits are divided by it in the rollout and in the update."""
    top_k: int = Field(default=0, ge=0)
    """Sample from the k most likely tokens. 0 samples from all tokens."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most likely tokens whose probabilities sum to this. 1 samples from all tokens."""
    stop_strings: list[Annotated[str, Field(min_length=1)]] = []
    """Strings that end a response, in addition to the end tokens of the model. The response ends after the first
    occurrence of one. A string may name a special token, such as `<|im_end|>`."""
    max_waves: int = Field(default=0, ge=0, le=1000)
    """Dynamic sampling (DAPO): largest number of waves in a step. A wave decodes `prompts_per_step` prompts. Waves end
    when `prompts_per_step` groups have rewards that are not all equal. 0 decodes one wave and uses every group."""

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
    """Engine that decodes the rollouts. `tlt` is the engine of this package. `vllm` is vLLM, which samples with the
    same noise. So both give the same tokens, except for rounding (docs/vllm.md)."""
    max_rows: int | Literal["auto"] = "auto"
    """Largest number of requests that are decoded in one batch. Further requests wait. `auto` is a power of two, at
    most 64 on CPUs and 256 on CUDA. With our engine it is smaller if the key-value cache has no room for a quarter of
    the longest possible sequence of each row. It is found when a rollout begins, and changes no token."""
    kv_memory_mb: int | Literal["auto"] = "auto"
    """Largest size of the key-value cache in MiB. `auto` is a share of the memory that is free when a rollout begins:
    80 % on CUDA, a quarter on CPUs. With vLLM `auto` is 1024, because vLLM allocates its cache when it
    starts. A request that does not fit waits. If the cache is full during decoding, requests are preempted and resumed
    later."""
    prefill_tokens: int = Field(default=2048, gt=0)
    """Maximum number of tokens in one prefill pass, including padding. A longer prompt is split into several passes."""
    vllm: dict[str, JsonValue] = {}
    """Further engine arguments of vLLM, with vLLM's names, such as `tensor_parallel_size` or `enforce_eager`."""

    @field_validator("max_rows", "kv_memory_mb", mode="before")
    @classmethod
    def _number_or_auto(cls, number: object, field: ValidationInfo) -> object:
        if number != "auto" and (type(number) is not int or number < 1):
            unit = " of MiB" if field.field_name == "kv_memory_mb" else ""
            raise ValueError(f'engine.{field.field_name}: give a number{unit} above 0, or "auto" (got {number})')
        return number

    def most_rows(self, device_type: str) -> int:
        """Return the largest number of rows in a batch on a device of this type."""
        return _MOST_ROWS[device_type] if self.max_rows == "auto" else self.max_rows

    @property
    def ours(self) -> EngineConfig:
        """Copy of this section that selects the engine of this package (backend `tlt`)."""
        return self.model_copy(update={"backend": "tlt", "vllm": {}})


class TrainConfig(Section):
    steps: int = Field(default=100, gt=0, le=1_000_000_000)
    """Number of training steps. A step is a rollout, its rewards, an update and a sync of the weights to the engine."""
    learning_rate: float = Field(default=1e-6, gt=0, le=10)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of steps at the start over which the learning rate rises linearly to its peak. 0 turns the warm-up off."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule after the warm-up. `linear` and `cosine` fall towards 0 at the end of the run."""
    weight_decay: float = Field(default=0.0, ge=0, le=100)
    """Weight decay of AdamW for weight matrices. Weights of norms and biases are not decayed."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay rate of AdamW's second moment."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Largest norm of the gradients. If the norm is larger, the gradients are scaled down to it."""
    advantage: Literal["grpo", "grpo_batch", "dr_grpo", "rloo", "reinforce_pp"] = "grpo"
    """Advantage of a response. grpo: (reward - mean) / standard deviation, both of the group. grpo_batch: like grpo,
    with the standard deviation of the whole rollout. dr_grpo: reward - mean of the group. rloo: reward - mean of the
    other responses of the group. reinforce_pp: like grpo, with mean and standard deviation of the whole rollout."""
    advantage_epsilon: float = Field(default=1e-6, ge=0)
    """Number added to the standard deviation before an advantage is divided by it (TRL uses 1e-4)."""
    loss: Literal["ppo", "grpo", "dapo", "dr_grpo", "gspo"] = "ppo"
    """Loss of the policy, with a clipped importance ratio. ppo: mean over tokens. grpo: mean over responses. dapo: mean
    over tokens, with a higher upper clip. dr_grpo: mean over responses of the sum over tokens divided by
    rollout.max_new_tokens. gspo: mean over responses, with one ratio per response instead of one per token."""
    clip_low: float | None = Field(default=None, gt=0, le=1)
    """Lower clipping range: the importance ratio is clipped below 1 - clip_low (default 0.2, and 3e-4 for gspo)."""
    clip_high: float | None = Field(default=None, gt=0)
    """Upper clipping range: the importance ratio is clipped above 1 + clip_high (default 0.2, 0.28 for dapo and 4e-4
    for gspo)."""
    dual_clip: float = Field(default=3.0, ge=0)
    """Dual-clip PPO: upper bound of the importance ratio if the advantage is negative. 0 turns the bound off."""
    mask_truncated: bool = False
    """Leave responses that rollout.max_new_tokens cut off out of the loss. Their rewards still count in the advantages
    of their group."""
    kl_weight: float = Field(default=0.0, ge=0, le=1e30)
    """Weight of the KL divergence from the initial model, which is then kept in memory as a second model. 0 turns the
    KL term off."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Place of the KL term: `loss` adds the KL divergence to the loss of each token, `reward` subtracts its sum over
    the response from the reward. In the loss it is the estimator k3 times the importance ratio, so that its gradient is
    unbiased (DeepSeek-V3.2, arXiv 2512.02556). In the reward it is k1."""
    importance_cap: float = Field(default=0.0, ge=0)
    """Cap of the importance weights min(p_trainer / p_rollout, cap) that multiply the loss (truncated importance
    sampling). These weights depend on the rollout's log-probs, so runs whose rollouts round differently end with
    slightly different policies. 0 turns the weights off."""
    updates_per_step: int = Field(default=1, gt=0)
    """Number of optimizer steps in each pass over the rollout. The responses are split into this number of
    mini-batches, in prompt order."""
    epochs: int = Field(default=1, gt=0, le=1000)
    """Number of passes over the rollout in an update, which has `epochs` x `updates_per_step` optimizer steps."""
    micro_batch_tokens: int = Field(default=4096, gt=0)
    """Number of tokens in one forward and backward pass of the update, including padding. Before the first step, a pass
    of this size is tried on a CUDA device, or estimated on the CPU. If it does not fit the memory, the run ends with an
    error that says what to change."""
    gradient_checkpointing: bool = False
    """Keep only the input of each layer in the forward pass, and recompute the other activations in the backward pass.
    This saves memory and costs time."""
    deterministic: bool = True
    """Sum gradients in a fixed order on CUDA, so that two runs with the same responses end with bit-identical weights.
    If an operation of the model has no deterministic implementation, the run ends with an error. Then set this to
    false."""
    lora: LoraConfig = LoraConfig()
    shard: bool = False
    """Shard parameters, gradients and optimizer state of the decoder layers over the workers (FSDP2), for a model that
    does not fit one device. If a worker is lost, the run ends, and --resume continues from a checkpoint
    (run.save_every)."""


class EvalConfig(Section):
    every: int = Field(default=0, ge=0)
    """Number of steps between evaluations on held-out prompts. Evaluations also run before the first step and at the
    end. 0 turns them off."""
    samples: int = Field(default=4, gt=0, le=10_000)
    """Number of responses to each held-out prompt in an evaluation."""
    size: int = Field(default=64, gt=0, le=250_000)
    """Largest number of held-out prompts. They are read from `path`, or generated from `data.tasks` with another seed.
    Training prompts are left out."""
    path: str | None = None
    """File of held-out prompts, or a data set on the Hugging Face hub such as `openai/gsm8k:main/test`. It has the
    form and the columns of `data.path`. Required if `data.path` is given and `every` is above 0."""
    hub: str | None = Field(default=None, json_schema_extra=STATE)
    """Name and commit of the data set, if `path` is a name on the Hugging Face hub."""
    solved: float = 1.0
    """Smallest reward with which a response counts as right in the metric pass@k."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature of evaluations (default: rollout.temperature). Other sampling parameters are the
    rollout's."""


class ClusterConfig(Section):
    """Workers of a run. Each worker has its own engine, its own replica of the policy, and its own drafter."""

    workers: int = Field(default=1, gt=0, le=10_000)
    """Number of workers. A single worker runs in the process of the command. Several workers are Ray processes, each
    with its own CPU cores or its own CUDA device."""
    address: str | None = None
    """Address of a Ray cluster, such as `10.0.0.1:6379` (default: workers run on this machine alone). All nodes must
    see the run's files under the same paths."""
    min_workers: int | None = Field(default=None, gt=0)
    """Minimum number of workers. A run ends if fewer are left. A run on a Ray cluster does not start if the cluster has
    resources for fewer. Missing workers join when resources are free. The result does not depend on the number of
    workers present. By default, a run starts only with resources for all `workers`, and continues while one is left.
    With train.shard, the run always needs all workers."""
    grace: float = Field(default=60.0, gt=0, le=LONGEST)
    """Timeout in seconds for the start of a worker's process. If a worker exceeds it, the run continues without that
    worker."""
    slice_seconds: float = Field(default=0.2, gt=0, le=LONGEST)
    """Time in seconds that a worker decodes before it reports to the driver and can receive other requests."""
    patience: float = Field(default=300.0, gt=0, le=LONGEST)
    """Timeout in seconds for one call of a worker that decodes or trains the drafter. A worker that exceeds it is
    replaced. Updates and saves have longer timeouts. The first update and the first save get 12 times `patience`. Later
    ones get ten times the longest of the last five, but at least `patience`."""


class GenerationConfig(Section):
    """Sections that `tlt generate` reads, in addition to [data]."""

    model: ModelConfig
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    run: RunConfig = RunConfig()


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

    @model_validator(mode="after")
    def _possible(self) -> Config:
        for refuse in RULES:
            refuse(self)
        return self

    @property
    def longest(self) -> int:
        """Largest number of tokens of a prompt and its response together."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens
