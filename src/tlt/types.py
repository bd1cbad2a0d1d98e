"""The nouns that cross a border between modules. No torch here: they can be read, sent and tested without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MOST_GUESSES = 64
"""nodes that a draft of one row may have, its root not counted"""


@dataclass(frozen=True)
class SamplingParams:
    """The law a response is drawn from, and where it ends. `top_k=0` and `top_p=1.0` are off; `temperature=0` is
    argmax."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    continues: bool = False
    """Whether an environment may continue a response that has ended, so that its keys and values are kept"""

    def __post_init__(self) -> None:
        if "" in self.stop_strings:
            raise ValueError("stop_strings holds an empty text: leave it out")


def column(row: Any, name: str) -> Any:
    """The value under a name, or a path of names such as `reward_model.ground_truth`; None where there is none."""
    if not isinstance(row, dict) or name in row:
        return row.get(name) if isinstance(row, dict) else None
    first, _, rest = name.partition(".")
    return column(row.get(first), rest) if rest else None


@dataclass(frozen=True)
class Prompt:
    """One question: `prompt_id` is its row in its source, `data` whatever its reward needs."""

    prompt_id: int
    text: str
    token_ids: tuple[int, ...]
    data: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)
    answer_column: str = "answer"
    """of `data`"""
    prefill: str = ""
    """text that each response begins with; its tokens are the last of `token_ids`"""
    counts_by_task: bool = True
    """whether the metrics have rewards by task"""

    @property
    def ground_truth(self) -> Any:
        """The right answer as the data has it, or None."""
        return column(self.data, self.answer_column)

    @property
    def task(self) -> str:
        """What kind of question it is, as the data says under `task`, or `data_source` as verl has it; or empty."""
        return str(self.data.get("task") or self.data.get("data_source") or "")


@dataclass(frozen=True)
class Request:
    """One response to be decoded. Its tokens are a function of (target version, prompt, seed) and of nothing else."""

    prompt: Prompt
    index: int
    """place in the group, 0 .. G-1"""
    epoch: int
    seed: int
    """64 bits, from `sampling.request_seed`"""
    sampling: SamplingParams


@dataclass
class Passes:
    """What the target's passes over a row, or over many, were given and gave. No token depends on it."""

    row_passes: int = 0
    """rows in every round, summed"""
    drafted: int = 0
    accepted: int = 0
    ahead_passes: int = 0
    """of rows that were drafted by their look-ahead"""
    ahead_committed: int = 0
    """tokens that these passes committed, the target's own ones among them"""
    ahead_drafted: int = 0
    """tokens that a look-ahead proposed"""
    seen_ahead: int = 0
    """those of them that the target accepted"""

    def count(self, drafted: int, accepted: int, committed: int, ahead: bool) -> None:
        """One more pass over a row."""
        self.row_passes += 1
        self.drafted += drafted
        self.accepted += accepted
        if ahead:
            self.ahead_passes += 1
            self.ahead_committed += committed
            self.ahead_drafted += drafted
            self.seen_ahead += accepted


class Reply(NamedTuple):
    """Tokens [start, end) of a response that its environment wrote."""

    start: int
    end: int
    text: str


@dataclass
class Row:
    """A request and its tokens so far. The cache holds all of them but the last: that one is the root of the next
    round."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    full_logprobs: list[float] = field(default_factory=list)
    harvested: int = 0
    """entries of the feature window below this one have been given away"""
    finite: bool = True
    """whether all that the target computed for it was"""
    ahead: bool = False
    """decoded for a coming step: what comes of it is a draft, and no response"""
    decoded: Passes = field(default_factory=Passes)
    """how it came to these tokens"""
    proposed: str = ""
    """One letter a token: the source of the draft that it was accepted from. See `engine.state.source_of`."""
    replies: list[Reply] = field(default_factory=list)
    """What the environment of an episode has replied so far"""

    @property
    def turn(self) -> int:
        """Position of the first token of the present turn."""
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
        """Tokens that it may still get."""
        return self.request.sampling.max_new_tokens - len(self.tokens)


@dataclass
class Response:
    """What the engine gives back for a request; lists have one entry a token, the stop token included."""

    request: Request
    token_ids: list[int]
    logprobs: list[float]
    """under the law it was drawn from (after temperature, top-k, top-p)"""
    full_logprobs: list[float]
    """under softmax(logits / temperature) over the whole vocabulary: comparable with the trainer's"""
    finish_reason: str
    """`stop` or `length`; of an episode also `turns` or `reply`, see `tlt.rewards.episodes`"""
    text: str = ""
    """the prompt's prefill and what was decoded"""
    reward: float | None = None
    """None: it has none, and is left out of its group's statistics and of the update"""
    outcome: str = ""
    """why there is no reward; empty where there is one"""
    scores: dict[str, float] = field(default_factory=dict)
    """of each term of the reward, before its weight"""
    advantage: float | None = None
    """None: the policy is not trained on it"""
    decoded: Passes = field(default_factory=Passes)
    """how it came to its tokens"""
    proposed: str = ""
    """as `Row.proposed`"""
    old_logprobs: list[float] | None = None
    """the trainer's, of the policy that decoded it, where it is kept for the next step"""
    answer: str = ""
    """what the rewards take for the answer in `text`"""
    replies: list[Reply] = field(default_factory=list)
    """What the environment of an episode replied; these tokens have log-probs of 0 and are not trained on"""

    @property
    def turn(self) -> int:
        """Position of the first token of the last turn."""
        return self.replies[-1].end if self.replies else 0

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the model sampled."""
        return sum(self.mask)

    @property
    def mask(self) -> list[bool]:
        """For each token, whether the model sampled it."""
        mask = [True] * len(self.token_ids)
        for start, end, _ in self.replies:
            mask[start:end] = [False] * (end - start)
        return mask


@dataclass
class Group:
    """The G responses to one prompt, in index order."""

    prompt: Prompt
    responses: list[Response]


@dataclass
class RolloutStats(Passes):
    """Counters of one rollout; accept length is tokens committed per target pass of a row, the bonus token counted."""

    tokens: int = 0
    rounds: int = 0
    prefill_tokens: int = 0
    ahead_tokens: int = 0
    """that were decoded for coming steps"""
    preemptions: int = 0
    drafter_failures: int = 0
    drafter_tokens: int = 0
    """that the drafter was trained on meanwhile"""
    strategies: dict[str, int] = field(default_factory=dict)
    """rounds by strategy"""
    agreement: dict[str, float] = field(default_factory=dict)
    """by drafter, how often its first guess was right lately"""
    verified_to: dict[str, int] = field(default_factory=dict)
    """Number of drafts of a drafter by the deepest token that follows accepted tokens only. The key `eagle 2` is the
    drafter and the depth."""
    accepted_to: dict[str, int] = field(default_factory=dict)
    """Number of the same drafts by the deepest accepted token; the depth is 0 if none was accepted."""
    alarms: dict[str, float] = field(default_factory=dict)
    """those whose agreement is below half of what it was when they were published"""
    seconds: dict[str, float] = field(default_factory=dict)
    """prefill, draft, verify, commit; and spot, for which training of the drafter held the run up"""
    against_plain: dict[str, float] = field(default_factory=dict)
    """seconds of rounds without a prefill, and seconds that plain decoding would have taken for their tokens"""
    spot: dict[str, float] = field(default_factory=dict)
    """of that training: drafter version, accept length of the drafter in use and of the candidate, whether it rests"""

    @property
    def accept_length(self) -> float:
        return self.tokens / self.row_passes if self.row_passes else 1.0

    def __add__(self, other: RolloutStats) -> RolloutStats:
        """Two rollouts as one; of what is not a sum (agreement, alarms) the later one's."""
        mine, theirs = vars(self), vars(other)
        counts = {name: mine[name] + theirs[name] for name in mine if isinstance(mine[name], int)}
        return RolloutStats(
            **counts,
            strategies=_sum_by_key(self.strategies, other.strategies),
            verified_to=_sum_by_key(self.verified_to, other.verified_to),
            accepted_to=_sum_by_key(self.accepted_to, other.accepted_to),
            seconds=_sum_by_key(self.seconds, other.seconds),
            against_plain=_sum_by_key(self.against_plain, other.against_plain),
            agreement=other.agreement,
            alarms=other.alarms,
            spot=self.spot | other.spot,
        )


def _sum_by_key(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    return mine | {key: mine.get(key, 0) + value for key, value in theirs.items()}


@dataclass
class TrainBatch:
    """What the update sees, in prompt order whatever the order of arrival."""

    prompt_ids: list[tuple[int, ...]]
    response_ids: list[list[int]]
    advantages: list[float]
    rollout_logprobs: list[list[float]]
    """for the mismatch metric, and for truncated importance weights where those are on"""
    rewards: list[list[float]] = field(default_factory=list)
    """[group][response], of which the advantages were made"""
    old_logprobs: dict[int, list[float]] = field(default_factory=dict)
    """of the responses that were decoded a step before: those of the policy that did it"""
    masked: set[int] = field(default_factory=set)
    """responses that are compared with the others of their group, and no token of which is trained on"""
    masks: dict[int, list[bool]] = field(default_factory=dict)
    """Of responses with replies of an environment: for each token, whether the model sampled it. Log-probs are of these
    tokens alone"""

    def lengths(self, members: Sequence[int]) -> list[int]:
        """Tokens of these sequences, their prompts among them."""
        return [len(self.prompt_ids[i]) + len(self.response_ids[i]) for i in members]

    def num_sampled(self, i: int) -> int:
        """Number of tokens of a response that the model sampled."""
        return sum(self.mask(i))

    def mask(self, i: int) -> list[bool]:
        """For each token of a response, whether the model sampled it."""
        return self.masks.get(i, [True] * len(self.response_ids[i]))

    def groups(self) -> list[list[int]]:
        """Return the responses of each group. Several groups may have the same prompt."""
        numbers = iter(range(len(self.response_ids)))
        return [[next(numbers) for _ in group] for group in self.rewards]

    def part(self, members: Sequence[int]) -> TrainBatch:
        """Return these responses as a batch, without the rewards."""
        return TrainBatch(
            [self.prompt_ids[i] for i in members],
            [self.response_ids[i] for i in members],
            [self.advantages[i] for i in members],
            [self.rollout_logprobs[i] for i in members],
            old_logprobs={place: self.old_logprobs[i] for place, i in enumerate(members) if i in self.old_logprobs},
            masked={place for place, i in enumerate(members) if i in self.masked},
            masks={place: self.masks[i] for place, i in enumerate(members) if i in self.masks},
        )


class WorkerNow(NamedTuple):
    """What a worker is at, for whoever looks on."""

    state: str
    """of `tlt.trace`"""
    live: tuple[int, ...] = ()
    """tokens so far of each row that it decodes"""
    ahead: tuple[int, ...] = ()
    """how far on the steps are that it decodes ahead: 1 is the next one"""


@dataclass
class StepMetrics:
    """One line of metrics.jsonl; docs/metrics.md explains every number. `reward` is the mean over the responses that
    have one, 0 if none has. `seconds` are the driver's wall clock, disjoint, and sum to `seconds['total']`."""

    step: int
    reward: float
    reward_std: float
    rewards: dict[str, dict[str, float]]
    """mean and standard deviation of each term of the reward, before its weight"""
    tasks: dict[str, dict[str, float]]
    """of the rewards of each kind of question: mean, standard deviation, how many"""
    lengths: dict[str, float]
    accept_length: float
    responses: int
    tokens: int
    tokens_per_second: float
    seconds: dict[str, float]
    update: dict[str, float]
    rollout: dict[str, Any]
    batch: dict[str, float] = field(default_factory=dict)
    """what became of the groups decoded: waves, groups trained on, dropped or kept for the next step, and why"""
    outcomes: dict[str, int] = field(default_factory=dict)
    """responses without a reward, by why"""
    episodes: dict[str, Any] = field(default_factory=dict)
    """Turns, tokens of replies, and how episodes ended; empty without an environment"""
    eval: dict[str, float] = field(default_factory=dict)
    """of the policy before this step, on held-out prompts; empty where it was not evaluated"""
    prompts: list[tuple[int, int]] = field(default_factory=list)
    """(prompt id, epoch) of what the step consumed, in order"""
    compared: dict[str, int] = field(default_factory=dict)
    """of a step that was decoded by plain decoding too: tokens, responses, and how many of these differ; it took
    seconds['compare']"""
    workers: list[dict[str, float]] = field(default_factory=list)
    """each worker's seconds by state"""
    useful_share: float = 0.0
    """Share of the workers' time in the step that was useful, as `tlt.metrics.useful_share` defines it"""
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    """of the driver and each worker: peak memory so far in MiB, `resident` and on its device, `cuda`"""
    energy: dict[str, Any] = field(default_factory=dict)
    """CPU seconds, joules and cost of the step; empty where nothing is measured"""
    tokens_seen: int = 0
    """of prompts and responses, in all steps so far"""
    seconds_left: float = 0.0
    """for the steps to come, if they take as long as the last ten"""
