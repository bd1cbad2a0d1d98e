"""Every field of the configuration, each in one section, and the combinations that are refused."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from tlt.config.lora import LoraConfig
from tlt.config.registry import TRACKERS
from tlt.config.rewards import RewardConfig
from tlt.config.section import LONGEST, Section
from tlt.config.speculation import SpeculationConfig


class ModelConfig(Section):
    path: str
    """folder of a Hugging Face checkpoint, looked up beside the recipe first, then from the working directory"""
    dtype: Literal["auto", "float64", "float32", "bfloat16"] = "auto"
    """`auto`: bfloat16 on a CUDA device, over float32 masters, and float32 on the CPU"""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d{1,4})?)$")
    """`auto`, `cpu`, or a CUDA device such as `cuda:0`"""


class TaskConfig(Section):
    name: str
    """a reasoning-gym task, such as `chain_sum`"""
    weight: float = Field(default=1.0, gt=0, le=1e30)
    """share of the mixture, against the other tasks' weights"""
    params: dict[str, JsonValue] = {}
    """the task's own parameters, as reasoning-gym names them"""
    stage: int = Field(default=0, ge=0)
    """a curriculum: the first epoch goes through the stages in order, later ones mix them all"""


class DataConfig(Section):
    tasks: list[TaskConfig] = []
    """a mixture of reasoning-gym tasks; give this or `path`"""
    path: str | None = None
    """a .jsonl, .json or .parquet file, a data set saved to disk by `datasets`, a folder of files, or several by a
    pattern such as `data/*.jsonl`; give this or `tasks`"""
    prompt_column: str = "question"
    """of `path`: the column with the prompt, text or a list of messages with role and content"""
    answer_column: str = "answer"
    """of `path`: the column with what a response is compared with; this or the one before may lie deeper:
    `reward_model.ground_truth`"""
    template: str = "{question}"
    """the text the model sees; `{question}` stands for the prompt's text"""
    chat: bool = False
    """put that text into the tokenizer's chat template, as the user's turn; lists of messages need it"""
    system: str = ""
    """with `chat`, a system message before prompts that have none"""
    chat_arguments: dict[str, JsonValue] = {}
    """with `chat`, of the template, such as { enable_thinking = false }"""
    now: str | None = None
    """with `chat`, the time for templates that write the date, such as `2026-11-25`; left out: when the run began"""
    prefill: str = ""
    """what each response begins with: the model goes on from there, and rewards see it"""
    size: int = Field(default=2000, gt=0, le=1_000_000)
    """prompts generated from `tasks` (an epoch)"""
    seed: int = Field(default=0, ge=0)
    """of the generated tasks"""
    shuffle: bool = True
    """another order in each epoch; else that of the source"""
    max_prompt_tokens: int = Field(default=1024, gt=0)
    long_prompts: Literal["refuse", "drop"] = "refuse"
    """what becomes of longer ones: an error at start, or left out and counted"""

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if bool(self.tasks) == bool(self.path):
            raise ValueError(
                "give either data.tasks (reasoning-gym tasks by name) or data.path (a JSONL or Parquet file)"
            )
        if "{question}" not in self.template:
            raise ValueError("data.template must contain {question}")
        if (self.system or self.chat_arguments or self.now) and not self.chat:
            raise ValueError("data.system, data.chat_arguments and data.now go with data.chat = true")
        return self

    @field_validator("now")
    @classmethod
    def _a_time(cls, now: str | None) -> str | None:
        try:
            datetime.fromisoformat(now or "2026-11-25")
        except ValueError:
            raise ValueError(f"data.now: give a time such as 2026-11-25 or 2026-11-25T08:00 (got {now!r})") from None
        return now


class RolloutConfig(Section):
    prompts_per_step: int = Field(default=16, gt=0)
    """groups of responses that a step decodes"""
    group_size: int = Field(default=8, gt=1)
    """responses to each prompt, which are compared with each other"""
    max_new_tokens: int = Field(default=512, gt=0)
    """a longer response is cut off there"""
    temperature: float = Field(default=1.0, ge=0)
    """logits are divided by it, in the rollout and in the update"""
    top_k: int = Field(default=0, ge=0)
    """tokens are drawn from the so many likeliest; 0: from all"""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """tokens are drawn from the likeliest that have this chance together; 1: from all"""
    stop_strings: list[Annotated[str, Field(min_length=1)]] = []
    """a response ends with the first of them, or with one of the model's end tokens; they may name special tokens, such
    as `<|im_end|>`"""
    max_waves: int = Field(default=0, ge=0)
    """dynamic sampling: up to this many waves of prompts_per_step prompts a step, until that many groups have rewards
    that differ. 0: one wave, every group is used"""
    leftover: Literal["carry", "drop"] = "carry"
    """groups that dynamic sampling has decoded beyond those open the next step, or are dropped, as DAPO does"""
    overlong_tokens: int = Field(default=0, ge=0)
    """soft overlong penalty: over the last so many of max_new_tokens a reward sinks by up to 1; 0: off"""


class EngineConfig(Section):
    backend: Literal["tlt", "vllm"] = "tlt"
    """`tlt`: our own, nothing to install; `vllm`: vLLM with our noise, the same tokens; see docs/vllm.md"""
    max_rows: int = Field(default=64, gt=0)
    """requests decoded at once; the others wait"""
    kv_memory_mb: int = Field(default=1024, gt=0)
    """bound of the key-value cache; a request that does not fit waits, one that outgrows it is preempted and resumed"""
    prefill_tokens: int = Field(default=2048, gt=0)
    """tokens of one prefill pass, padding counted"""
    vllm: dict[str, JsonValue] = {}
    """more arguments for vLLM, by its own names, such as `tensor_parallel_size` or `enforce_eager`"""

    @property
    def ours(self) -> EngineConfig:
        """The same by our own engine."""
        return self.model_copy(update={"backend": "tlt", "vllm": {}})


class TrainConfig(Section):
    steps: int = Field(default=100, gt=0, le=1_000_000_000)
    learning_rate: float = Field(default=1e-6, gt=0, le=10)
    warmup_steps: int = Field(default=0, ge=0)
    """the rate rises evenly over the first so many steps"""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """of the rate after the warm-up; linear and cosine fall towards 0 at the last step"""
    weight_decay: float = Field(default=0.0, ge=0, le=100)
    """of the matrices; norms and biases do not decay"""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    max_grad_norm: float = Field(default=1.0, gt=0)
    advantage: Literal["grpo", "grpo_batch", "dr_grpo", "rloo", "reinforce_pp"] = "grpo"
    """grpo: (reward - mean) / deviation in the group; grpo_batch: the deviation of the whole rollout; dr_grpo: reward -
    mean; rloo: reward - mean of the others; reinforce_pp: mean and deviation of the whole rollout"""
    advantage_epsilon: float = Field(default=1e-6, ge=0)
    """added to a deviation that divides; 1e-4 in TRL"""
    loss: Literal["ppo", "grpo", "dapo", "dr_grpo", "gspo"] = "ppo"
    """ppo: every token counts the same; grpo: every response; dapo: every token, and a higher upper clip; dr_grpo:
    every token, divided by rollout.max_new_tokens; gspo: every response, with one ratio each"""
    clip_low: float | None = Field(default=None, gt=0, le=1)
    """the ratio is clipped below 1 minus this; left out, as the loss's authors have it: 0.2, gspo 3e-4"""
    clip_high: float | None = Field(default=None, gt=0)
    """the ratio is clipped above 1 plus this; left out: 0.2, dapo 0.28, gspo 4e-4"""
    dual_clip: float = Field(default=3.0, ge=0)
    """where the advantage is negative the ratio counts as at most this; 0: as what it is"""
    mask_truncated: bool = False
    """responses cut off at rollout.max_new_tokens are compared with their group, but not trained on"""
    kl_weight: float = Field(default=0.0, ge=0, le=1e30)
    """of the divergence from the model that training started from, which is kept in memory as a second model; 0: off"""
    kl_in: Literal["loss", "reward"] = "loss"
    """added to the loss of each token, or, summed over a response, taken off its reward before rewards are compared"""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """of the divergence at each token; left out: k3 in the loss, k1 in the reward"""
    kl_unbiased: bool = True
    """in the loss it is multiplied by the ratio, so that its gradient is on average that of the divergence (DeepSeek-
    V3.2, arXiv 2512.02556), as TRL does; false: as verl does"""
    importance_cap: float = Field(default=0.0, ge=0)
    """truncated importance weights min(trainer / rollout, cap) on the loss; rollout log-probs enter the update only
    here, so that runs which round differently no longer end in the same bits. 0: off"""
    updates_per_step: int = Field(default=1, gt=0)
    """optimizer steps on each rollout: its responses, in prompt order, are split into this many mini-batches"""
    epochs: int = Field(default=1, gt=0)
    """how often the update goes through all of these"""
    micro_batch_tokens: int = Field(default=4096, gt=0)
    """tokens of one forward and backward pass, packing gaps counted"""
    logits_mb: int = Field(default=256, gt=0)
    """the logits of so many MiB are computed at once, and once more for the gradient where there are several such
    chunks; a chunk needs about four times this"""
    gradient_checkpointing: bool = False
    """keep only each layer's input and compute the rest once more for the gradient"""
    lora: LoraConfig = LoraConfig()
    shard: bool = False
    """FSDP2, for a model that one device cannot hold: the decoder layers' parameters, gradients and moments are split
    over the workers; a lost worker then ends the run, which --resume takes up from a checkpoint (run.save_every)"""


class EvalConfig(Section):
    every: int = Field(default=0, ge=0)
    """steps between evaluations on held-out prompts: before the first, every so many, and at the end; 0 is never"""
    samples: int = Field(default=4, gt=0)
    """responses to each prompt"""
    size: int = Field(default=64, gt=0, le=250_000)
    """prompts, from `data.tasks` with another seed or from `path`, less those that training has"""
    path: str | None = None
    """held-out prompts for a `data.path`, with the same columns"""
    solved: float = 1.0
    """a response with at least this reward is right, for pass@k"""
    keep_best: bool = True
    """the policy with the highest mean reward of an evaluation stays in the run's folder, under best/"""
    temperature: float | None = Field(default=None, ge=0)
    """this and the three below: of these responses; left out, as in `rollout`"""
    top_k: int | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_new_tokens: int | None = Field(default=None, gt=0)


class ClusterConfig(Section):
    """Workers: each with its own engine, its replica of the policy, and its drafter."""

    workers: int = Field(default=1, gt=0, le=10_000)
    """1: in this process; more: processes on Ray, each with its own cores, or its own CUDA device"""
    address: str | None = None
    """of the Ray cluster to join, such as `10.0.0.1:6379`, which sees all files under the same paths; left out: this
    machine alone"""
    allow_no_token: bool = False
    """join a Ray cluster that asks nobody for a token, as on a network that nobody else reaches"""
    min_workers: int | None = Field(default=None, gt=0)
    """a run begins, and goes on, with so many where there is no place for the others, as a node is gone; it takes these
    in once there is, and the result is the same. Left out: all to begin, 1 to go on; all where train.shard"""
    grace: float = Field(default=60.0, gt=0, le=LONGEST)
    """seconds that a worker's process has to begin, before the run goes on without it"""
    slice_seconds: float = Field(default=0.2, gt=0, le=LONGEST)
    """a worker decodes for so long before it reports and may be given other work"""
    patience: float = Field(default=300.0, gt=0, le=LONGEST)
    """seconds: a worker that decodes or trains its drafter and has not reported for so long hangs, and is replaced; an
    update or a save may take longer: ten times as long as they lately did"""


class RunConfig(Section):
    folder: str = "runs/latest"
    """where the run keeps everything"""
    seed: int = Field(default=0, ge=0)
    """of the noise of every response, and of the order of prompts"""
    save_every: int = Field(default=20, ge=0)
    """steps between checkpoints; one is also saved at the end, at a signal and at an error. 0: at these alone"""
    stop_within: float = Field(default=20.0, gt=0, le=LONGEST)
    """seconds that a step has to end once SIGTERM, SIGHUP or Ctrl-C has asked the run to stop, twice as many amid an
    update; then it is given up, and what was done before it is saved, unless it was amid its update"""
    keep: int = Field(default=2, gt=0)
    """checkpoints kept, the newest ones"""
    mirror: str | None = None
    """where each checkpoint is copied to in the background, such as `s3://bucket/run` (tlt-rl[s3]) or another place
    that fsspec knows (tlt-rl[mirror]); --resume fetches the newest one from there, if this machine has none as new"""
    compare_every: int = Field(default=0, ge=0)
    """before every so many-th step its requests are decoded once more, by plain decoding on the same workers, so that
    the run can say what it saved, and that no token differs; 0 is never"""
    trackers: list[str] | None = None
    """`tensorboard`, `wandb`, `mlflow`: where metrics are shown beside metrics.jsonl, each an extra, such as
    tlt-rl[wandb]; left out: TensorBoard, where it is installed"""
    completions_mb: int = Field(default=1024, ge=0)
    """completions.jsonl keeps every response, and drops the oldest beyond so many MiB; 0: none is kept"""
    completions_format: Literal["jsonl", "parquet"] = "jsonl"
    """`parquet`: completions/ in its place, a file a step (tlt-rl[parquet])"""
    report: bool = True
    """Write report.html, one page on the whole run, at each checkpoint and at the end; see docs/report.md."""
    watts_per_core: float | None = Field(default=None, gt=0, le=1e6)
    """Power of a busy CPU core in watts. This is only used to estimate energy where no counter measures it."""
    price_per_hour: float | None = Field(default=None, ge=0, le=1e9)
    """Price of all machines of the run for one hour, in any currency. This is only used to estimate the cost."""
    overwrite: bool = False
    """start afresh in a folder that already holds a run"""

    @field_validator("trackers")
    @classmethod
    def _known(cls, trackers: list[str] | None) -> list[str] | None:
        for name in trackers or ():
            if name not in TRACKERS:
                raise ValueError(f'run.trackers: give some of {", ".join(TRACKERS)} (got "{name}")')
        return trackers


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
        """Whether `adaptive` stands for look-ahead there: it needs workers that are idle at times."""
        return self.speculation.drafter == "adaptive" and self.speculation.look_ahead > 0 and self.cluster.workers > 1

    @model_validator(mode="after")
    def _possible(self) -> Config:
        names = [term.name for term in self.reward.all_terms]
        if "reasoning_gym" in names and not self.data.tasks:
            raise ValueError(
                "reward.name = 'reasoning_gym' needs data.tasks; for your own data use 'math', 'exact' or "
                "'module:function'"
            )
        if self.eval.every and self.data.path and not self.eval.path:
            raise ValueError("eval.every needs eval.path, a file of held-out prompts, where data.path is given")
        if self.rollout.temperature == 0:
            raise ValueError(
                "rollout.temperature = 0 makes all responses of a group equal, so there is nothing to learn: "
                "give a value above 0"
            )
        if self.train.updates_per_step > self.rollout.prompts_per_step:
            raise ValueError("train.updates_per_step must not exceed rollout.prompts_per_step")
        if self.model.dtype == "float64" and self.model.device.startswith("cuda"):
            raise ValueError("model.dtype = 'float64' runs on the CPU: set model.device = 'cpu'")
        if self.engine.backend == "vllm":
            _for_vllm(self)
        elif self.engine.vllm:
            raise ValueError(
                f"engine.vllm.{min(self.engine.vllm)} is for engine.backend = 'vllm': set that, or leave it out "
                "(--engine.vllm '{}' where the recipe has it)"
            )
        if self.train.shard and self.cluster.workers == 1:
            raise ValueError("train.shard needs several workers: set cluster.workers above 1, or train.shard = false")
        if (self.cluster.min_workers or 1) > self.cluster.workers:
            raise ValueError("cluster.min_workers must not exceed cluster.workers")
        if self.train.shard and (self.cluster.min_workers or self.cluster.workers) < self.cluster.workers:
            raise ValueError(
                "train.shard needs all workers, as each holds a part of the policy: leave out cluster.min_workers, or "
                "set train.shard = false"
            )
        if self.train.shard and self.train.lora.rank:
            raise ValueError("train.shard and train.lora.rank do not go together: set one of them to false or 0")
        _trainable(self.rollout, self.train)
        return self


def _for_vllm(config: Config) -> None:
    if config.model.dtype == "float64":
        raise ValueError("engine.backend = 'vllm' has no float64: set model.dtype = 'float32' or 'bfloat16'")
    if ":" in config.model.device:
        raise ValueError(
            f"model.device = {config.model.device!r}, but vLLM takes the first device it sees: set it to "
            f"'{config.model.device.partition(':')[0]}', and CUDA_VISIBLE_DEVICES to the one it is to see"
        )
    if config.run.compare_every and config.speculation.drafter != "off" and not config.looks_ahead_in_vllm:
        raise ValueError(
            "run.compare_every with engine.backend = 'vllm' would need a second vLLM for plain decoding, unless it is "
            "look-ahead that drafts: set speculation.drafter = 'adaptive' and cluster.workers above 1, or "
            "run.compare_every = 0"
        )


def _trainable(rollout: RolloutConfig, train: TrainConfig) -> None:
    if rollout.overlong_tokens > rollout.max_new_tokens:
        raise ValueError("rollout.overlong_tokens must not exceed rollout.max_new_tokens: it is the last part of it")
    if train.schedule != "constant" and train.warmup_steps >= train.steps:
        raise ValueError(
            f"train.schedule = {train.schedule!r} begins after train.warmup_steps, which must be less than train.steps"
        )
    if train.kl_in == "loss" and train.kl_estimator == "k1" and not train.kl_unbiased:
        raise ValueError(
            "train.kl_estimator = 'k1' has no gradient on average, so in the loss it would do nothing: give 'k2' or "
            "'k3', train.kl_unbiased = true, or train.kl_in = 'reward'"
        )
    if 0 < train.dual_clip <= 1:
        raise ValueError("train.dual_clip must be above 1, or 0 for none: it bounds a ratio that is 1 at first")
    if train.importance_cap and (rollout.top_k or rollout.top_p < 1):
        raise ValueError(
            "train.importance_cap needs rollout.top_k = 0 and rollout.top_p = 1: no weight brings back a token that "
            "the cut keeps from being drawn"
        )
