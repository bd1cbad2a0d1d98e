"""Types shared by several packages. This module does not import torch, so the types can be used without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_DRAFT_TOKENS = 64
"""maximum number of draft tokens of one row in a round"""


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of the distribution that a response is sampled from, and conditions that end the response. `top_k=0`
    turns top-k off, `top_p=1.0` turns top-p off, and `temperature=0` is argmax."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    continues: bool = False
    """whether an environment may continue the response after a turn; the engine then keeps the keys and values of the
    response"""

    def __post_init__(self) -> None:
        if "" in self.stop_strings:
            raise ValueError("stop_strings contains an empty string: remove it")


def column(row: Any, name: str) -> Any:
    """Return the value of `row` under a name, or under a dotted path such as `reward_model.ground_truth`; None if the
    row has no such value."""
    if not isinstance(row, dict) or name in row:
        return row.get(name) if isinstance(row, dict) else None
    first, _, rest = name.partition(".")
    return column(row.get(first), rest) if rest else None


@dataclass(frozen=True)
class Prompt:
    """Prompt of a data set. `prompt_id` is its row in the source, `data` holds the columns that rewards read."""

    prompt_id: int
    text: str
    token_ids: tuple[int, ...]
    data: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)
    answer_column: str = "answer"
    """column of `data` that has the reference answer, or a dotted path to it"""
    prefill: str = ""
    """text that each response begins with; its tokens are the last ones of `token_ids`"""
    counts_by_task: bool = True
    """whether the metrics by task include this prompt's rewards"""
    messages: list[dict[str, Any]] = field(default_factory=list, hash=False, compare=False, repr=False)
    """the prompt as chat messages; empty without a chat template"""

    @property
    def ground_truth(self) -> Any:
        """Reference answer in the data; None if there is none."""
        return column(self.data, self.answer_column)

    @property
    def task(self) -> str:
        """Name of the task of the prompt: `task` of the data, or verl's `data_source`; empty if there is neither."""
        return str(self.data.get("task") or self.data.get("data_source") or "")


@dataclass(frozen=True)
class Request:
    """Request for one response. The response's tokens are a function of (target version, prompt, seed) only."""

    prompt: Prompt
    index: int
    """number of the response in its group of G responses to the prompt, 0 .. G-1"""
    epoch: int
    seed: int
    """64-bit seed of the noise, from `sampling.request_seed`"""
    sampling: SamplingParams


@dataclass
class PassCounts:
    """Counters of target passes and draft tokens, for one row or several. No token depends on them."""

    row_passes: int = 0
    """number of target passes, counted once for each row in a pass"""
    draft_passes: int = 0
    """number of `row_passes` with a draft"""
    drafted: int = 0
    accepted: int = 0
    ahead_passes: int = 0
    """number of `row_passes` whose draft came from look-ahead"""
    ahead_committed: int = 0
    """tokens committed by `ahead_passes`, including the target's own token of each pass"""
    ahead_drafted: int = 0
    """draft tokens that came from look-ahead"""
    seen_ahead: int = 0
    """accepted draft tokens that came from look-ahead"""

    def count_draft(self, drafted: int, accepted: int, committed: int, ahead: bool) -> None:
        """Count the draft of a target pass over a row, apart from the pass itself. `committed` includes the target's
        own token. `ahead` says that the draft came from look-ahead."""
        self.draft_passes += 1
        self.drafted += drafted
        self.accepted += accepted
        if ahead:
            self.ahead_passes += 1
            self.ahead_committed += committed
            self.ahead_drafted += drafted
            self.seen_ahead += accepted


class Reply(NamedTuple):
    """Reply of an environment: its text, and the range [start, end) of its tokens in the response."""

    start: int
    end: int
    text: str


@dataclass
class Row:
    """Request that is being decoded, with its tokens so far. The KV cache has all tokens except the last one."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    full_logprobs: list[float] = field(default_factory=list)
    harvested: int = 0
    """position in the sequence; hidden states before it are already saved as training data of the drafter"""
    finite: bool = True
    """whether all outputs of the target for this row were finite so far"""
    ahead: bool = False
    """whether this is a look-ahead row, whose tokens become a draft for a later rollout instead of a response"""
    decoded: PassCounts = field(default_factory=PassCounts)
    """counters of the target passes over this row"""
    proposed: str = ""
    """one letter per token: the source of the draft token that was accepted (`engine.state.count_row`), or `.` if none
    was"""
    replies: list[Reply] = field(default_factory=list)
    """replies of the environment so far"""

    @property
    def turn(self) -> int:
        """Position of the first token of the current turn."""
        return self.replies[-1].end if self.replies else 0

    @property
    def context(self) -> tuple[int, ...]:
        return (*self.request.prompt.token_ids, *self.tokens)

    @property
    def kv_length(self) -> int:
        return len(self.request.prompt.token_ids) + len(self.tokens) - 1

    @property
    def root(self) -> int:
        return self.tokens[-1] if self.tokens else self.request.prompt.token_ids[-1]

    @property
    def room(self) -> int:
        """Number of tokens that may still be decoded for the response."""
        return self.request.sampling.max_new_tokens - len(self.tokens)


@dataclass
class Response:
    """Result of a request. Lists have one entry per token, including the stop token."""

    request: Request
    token_ids: list[int]
    logprobs: list[float]
    """log-probs under the distribution that was sampled from (after temperature, top-k, top-p)"""
    full_logprobs: list[float]
    """log-probs under softmax(logits / temperature) over the whole vocabulary, comparable with the trainer's"""
    finish_reason: str
    """`stop` or `length`; for an episode also `turns` or `reply` (`tlt.environments.episodes`)"""
    text: str = ""
    """the prompt's prefill and the decoded text"""
    reward: float | None = None
    """reward; None if there is none. The statistics of the group and the update leave out responses without reward."""
    outcome: str = ""
    """reason why there is no reward; empty if there is one"""
    scores: dict[str, float] = field(default_factory=dict)
    """score of each reward term before its weight, or the environment's `scores`"""
    advantage: float | None = None
    """advantage; None if the policy is not trained on this response"""
    decoded: PassCounts = field(default_factory=PassCounts)
    """counters of the target passes that decoded this response"""
    proposed: str = ""
    """same as `Row.proposed`"""
    old_logprobs: list[float] | None = None
    """log-probs under the policy that decoded the response; only for a response that is kept for the next step"""
    answer: str = ""
    """the part of `text` that rewards take as the answer"""
    replies: list[Reply] = field(default_factory=list)
    """replies of the environment; their tokens have log-probs of 0 and are not trained on"""

    @property
    def turn(self) -> int:
        """Position of the first token of the last turn."""
        return self.replies[-1].end if self.replies else 0

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the model sampled: the length in all metrics and penalties."""
        return len(self.token_ids) - sum(end - start for start, end, _ in self.replies)

    @property
    def is_truncated(self) -> bool:
        """Whether `max_new_tokens` cut the response off. The turns of an episode that had `reward.turns` are whole."""
        return self.finish_reason in ("length", "reply")

    @property
    def mask(self) -> list[bool]:
        """One entry per token: True if the model sampled it, False if it is part of an environment's reply."""
        mask = [True] * len(self.token_ids)
        for start, end, _ in self.replies:
            mask[start:end] = [False] * (end - start)
        return mask


@dataclass
class Group:
    """G responses to one prompt, in index order."""

    prompt: Prompt
    responses: list[Response]


@dataclass
class RolloutStats(PassCounts):
    """Counters of one rollout. Accept length is the number of tokens committed per target pass and row, including the
    target's own token."""

    tokens: int = 0
    rounds: int = 0
    prefill_tokens: int = 0
    ahead_tokens: int = 0
    """tokens of look-ahead drafts that were decoded for future steps"""
    preemptions: int = 0
    drafter_failures: int = 0
    drafter_tokens: int = 0
    """tokens that the drafter was trained on during the rollout"""
    strategies: dict[str, int] = field(default_factory=dict)
    """number of rounds by strategy"""
    acceptance_rate: dict[str, float] = field(default_factory=dict)
    """recent acceptance rate of the first draft token, for each drafter"""
    verified_to: dict[str, int] = field(default_factory=dict)
    """Number of drafts by drafter and depth, with keys such as `eagle 2`. The depth is that of the first rejected draft
    token, or of the last draft token if none was rejected."""
    accepted_to: dict[str, int] = field(default_factory=dict)
    """Number of drafts by drafter and depth, with keys as in `verified_to`. The depth is that of the deepest accepted
    draft token, or 0 if none was accepted."""
    alarms: dict[str, float] = field(default_factory=dict)
    """recent acceptance rate of each drafter whose rate is less than half of what it was when the drafter was new"""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by kind of work: `prefill`, `draft`, `verify` and `commit`; look-ahead (`ahead`), which uses
    idle time; and drafter training that delayed the rollout (`spot`)."""
    spot: dict[str, float] = field(default_factory=dict)
    """drafter training: drafter version, accept length of the current drafter and of the candidate, whether training is
    paused"""

    @property
    def accept_length(self) -> float:
        return self.tokens / self.row_passes if self.row_passes else 1.0

    def __add__(self, other: RolloutStats) -> RolloutStats:
        """Return the sum of the counters of two rollouts. `acceptance_rate` and `alarms` are those of `other`, the
        later rollout. Entries of `other.spot` replace those of `self.spot`."""
        mine, theirs = vars(self), vars(other)
        counts = {name: mine[name] + theirs[name] for name in mine if isinstance(mine[name], int)}
        return RolloutStats(
            **counts,
            strategies=_sum_by_key(self.strategies, other.strategies),
            verified_to=_sum_by_key(self.verified_to, other.verified_to),
            accepted_to=_sum_by_key(self.accepted_to, other.accepted_to),
            seconds=_sum_by_key(self.seconds, other.seconds),
            acceptance_rate=other.acceptance_rate,
            alarms=other.alarms,
            spot=self.spot | other.spot,
        )


def _sum_by_key(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    return mine | {key: mine.get(key, 0) + value for key, value in theirs.items()}


@dataclass
class TrainBatch:
    """Input of an update of the policy. Responses are in prompt order, whatever the order in which they arrived."""

    prompt_ids: list[tuple[int, ...]]
    response_ids: list[list[int]]
    advantages: list[float]
    rollout_logprobs: list[list[float]]
    """log-probs of the rollout, for the mismatch metric and for truncated importance weights"""
    rewards: list[list[float]] = field(default_factory=list)
    """rewards [group][response], from which the advantages were computed"""
    old_logprobs: dict[int, list[float]] = field(default_factory=dict)
    """response index -> log-probs under the policy that decoded it, for responses kept from the previous step"""
    masked: set[int] = field(default_factory=set)
    """indices of responses that count in the advantages of their group but are not trained on"""
    masks: dict[int, list[bool]] = field(default_factory=dict)
    """Response index -> whether the model sampled each token, if the environment replied. Log-probs cover sampled
    tokens only."""

    def lengths(self, members: Sequence[int]) -> list[int]:
        """Return the number of tokens of each sequence, prompt included."""
        return [len(self.prompt_ids[i]) + len(self.response_ids[i]) for i in members]

    def num_sampled(self, i: int) -> int:
        """Return the number of tokens of a response that the model sampled."""
        return sum(self.mask(i))

    def mask(self, i: int) -> list[bool]:
        """Return for each token of a response whether the model sampled it."""
        return self.masks.get(i, [True] * len(self.response_ids[i]))


class WorkerNow(NamedTuple):
    """Present state of a worker, for the display."""

    state: str
    """a state of `tlt.trace`"""
    live: tuple[int, ...] = ()
    """number of tokens so far of each active row"""
    ahead: tuple[int, ...] = ()
    """future steps for which the worker decodes look-ahead drafts; 1 is the next step"""


@dataclass
class StepMetrics:
    """One line of metrics.jsonl; docs/metrics.md explains each number. The first `step` is 1. `reward` is the mean over
    responses that have a reward, 0 if none has. `seconds` is wall-clock time of the driver; the phases do not overlap
    and sum to `seconds['total']`."""

    step: int
    reward: float
    reward_std: float
    rewards: dict[str, dict[str, float]]
    """mean and standard deviation of each reward term before its weight, or of each of the environment's `scores`"""
    tasks: dict[str, dict[str, float]]
    """mean and standard deviation of the reward, and number of responses, for each task"""
    lengths: dict[str, float]
    accept_length: float
    responses: int
    tokens: int
    tokens_per_second: float
    seconds: dict[str, float]
    update: dict[str, float]
    rollout: dict[str, Any]
    batch: dict[str, float] = field(default_factory=dict)
    """Counts by name: `waves` (number of times that prompts were sampled, see `rollout.max_waves`), groups in the
    update, groups kept for the next step, and groups or responses with a fault (docs/metrics.md)."""
    outcomes: dict[str, int] = field(default_factory=dict)
    """number of responses without a reward, by reason"""
    episodes: dict[str, Any] = field(default_factory=dict)
    """turns, tokens of replies, and numbers of episodes by how they ended; empty without an environment"""
    eval: dict[str, float] = field(default_factory=dict)
    """evaluation of the policy before this step on held-out prompts; empty if there was none"""
    prompts: list[tuple[int, int]] = field(default_factory=list)
    """(prompt id, epoch) of each prompt of the step, in order"""
    compared: dict[str, int] = field(default_factory=dict)
    """comparison with plain decoding: numbers of tokens, of responses, and of responses that differ; empty if there was
    none. The comparison takes seconds['compare']."""
    workers: list[dict[str, float]] = field(default_factory=list)
    """each worker's seconds by state"""
    useful_share: float = 0.0
    """useful share of the workers' time in the step, see `tlt.metrics.useful_share`"""
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    """peak memory so far in MiB of the driver and each worker: `resident`, and `cuda` on its device"""
    energy: dict[str, Any] = field(default_factory=dict)
    """CPU seconds, joules and cost of the step; empty if nothing is measured"""
    tokens_seen: int = 0
    """tokens of prompts and responses in all steps so far"""
    seconds_left: float = 0.0
    """estimated seconds of the remaining steps, see `tlt.run.record.RunProgress`"""
