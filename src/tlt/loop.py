"""Training loop: rollout, reward, update, sync. Only this file defines their order.

1. Take the next prompts. Each gets a group of G responses, and every response has a seed of its own.
2. Rollout: the engine decodes the responses. The tokens are the same with and without speculation.
3. Reward each response. With dynamic sampling, decode further waves until enough groups have rewards that differ.
4. Update the policy on the batch, in prompt order whatever the order of arrival.
5. Give the new weights to the engine.

Groups that dynamic sampling leaves over are used first in the next step. The next step
uses all of them, so they are never more than one update old. Their old log-probs are those of the policy that decoded
them. Decoding their prompts again would be on-policy, but it would cost up to half the rollout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from tlt.config import Config
from tlt.data.prompts import Cursor
from tlt.energy import MeteredTracer
from tlt.engine.exactness import Exactness
from tlt.environments.episodes import Turns
from tlt.metrics import timed
from tlt.rewards import Reward
from tlt.rewards.verdicts import Unrewarded, warn_if_alike, warn_if_all_masked
from tlt.rl.groups import make_batch, rewarded, usable
from tlt.rl.measure import episodes_of, measure, refuse_responses
from tlt.sampling import request_seed
from tlt.trace import Span
from tlt.types import Group, Prompt, Request, Response, RolloutStats, SamplingParams, StepMetrics, TrainBatch, WorkerNow


class Rollout(Protocol):
    """Protocol of a rollout, which decodes requests with the weights of the last `sync`."""

    def sync(self, policy: Trainable, version: int) -> None:
        """Load the policy's weights into the engine's target. `version` is the number of policy updates so far."""
        ...

    def generate(
        self, requests: Sequence[Request], on_response: Callable[[Response], None], coming: Iterable[list[Request]] = ()
    ) -> tuple[list[Response], RolloutStats]:
        """Decode all requests. Return the responses, in any order, and the counters of the rollout. `on_response` is
        called with each response as soon as it ends. `coming` has the requests of each future step, for which idle
        workers may decode look-ahead drafts."""
        ...

    def generate_plain(self, requests: Sequence[Request], on_response: Callable[[Response], None]) -> list[Response]:
        """Decode the same requests with plain decoding, for comparison. The tuner and the drafter are not updated."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the measurements of the tuner and of the drafter training, as plain data for a checkpoint. No token
        depends on them."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...

    def save_history(self, folder: Path) -> None:
        """Write the last responses to each prompt to a checkpoint's folder. No token depends on them."""
        ...

    def load_history(self, folder: Path) -> None: ...

    def release(self) -> None:
        """Free device memory for the update that follows. The next `generate` allocates it again."""
        ...

    def now(self) -> Sequence[WorkerNow]:
        """Return the present or a recent state of each worker. It may be called from another thread at any time."""
        ...

    def trace(self) -> list[list[Span]]:
        """Return each worker's trace spans since the last call. They include a span for each period that the worker
        spent in one state of `tlt.trace`."""
        ...

    def peak_memory(self) -> dict[str, dict[str, float]]:
        """Return the peak memory in MiB (`metrics.peak_memory`) of each worker with its own process, by name."""
        ...

    def close(self) -> None:
        """End the processes that were started for the run."""
        ...


class Trainable(Protocol):
    """Protocol of a policy that is updated on a batch. Its weights are read by their Hugging Face names."""

    def update(self, batch: TrainBatch, step: int) -> dict[str, float]: ...

    def logprobs(self, batch: TrainBatch) -> list[list[float]]:
        """Return the log-probs of each response's sampled tokens under the current policy."""
        ...

    def state_dict(self) -> Mapping[str, Tensor]: ...


class Watcher:
    """Base class of observers of a run, such as the display. It shows nothing. No result of a run depends on it.
    `phase` is called when a phase such as `rollout` begins, with its number of responses (`total`). `response` is
    called when a response ends."""

    def phase(self, step: int, name: str, total: int) -> None: ...

    def response(self, response: Response) -> None: ...


@dataclass
class Parts:
    """Objects that a step uses, built once per run by `run/opening.py`."""

    prompts: Sequence[Prompt]
    cursor: Cursor
    rollout: Rollout
    reward: Reward
    policy: Trainable
    sampling: SamplingParams
    carried: list[Group] = field(default_factory=list)
    """groups left over by the previous step; the next step uses them first"""
    tracer: MeteredTracer = field(default_factory=MeteredTracer)
    """tracer of the driver's own phases"""
    unrewarded: Unrewarded = field(default_factory=Unrewarded)
    turns: Turns = field(default_factory=Turns)
    held_out: Sequence[Prompt] = ()
    """prompts of evaluations; empty if there are no evaluations"""
    exactness: Exactness = field(default_factory=Exactness)
    """result of the check at start: whether drafts and other rows can change a response"""


@dataclass
class StepResult:
    groups: list[Group]
    """groups decoded in this step, used for training or not"""
    completed: list[Group]
    """groups trained on or dropped in this step, including those decoded earlier"""
    metrics: StepMetrics


def one_step(parts: Parts, config: Config, watcher: Watcher, step: int) -> StepResult:
    """Run one training step: rollout, reward, update, sync. Before the step the engine must have the current weights of
    the policy. After the step it has the updated weights."""
    seconds: dict[str, float] = {}
    with timed("total", seconds):
        groups, stats, waves, compared = _decode(parts, config, watcher, step, seconds)
        parts.unrewarded.refuse_another(groups, step, last=step + 1 == config.train.steps)
        if step == 0:
            warn_if_alike(groups)
        good = usable([*parts.carried, *groups], config)
        count = config.rollout.prompts_per_step if config.rollout.max_waves else len(good)
        before, used, left_over = parts.carried, good[:count], good[count:]
        with timed("update", seconds, parts.tracer):
            batch = make_batch(used, config)
            if step == 0:
                warn_if_all_masked(batch)
            watcher.phase(step, "update", len(batch.response_ids))
            parts.rollout.release()
            parts.carried = _carry(left_over, parts.policy, config)
            update = parts.policy.update(batch, step)
        with timed("sync", seconds, parts.tracer):
            parts.rollout.sync(parts.policy, version=step + 1)
    fate: dict[str, float] = {"waves": waves, "groups": len(used), "carried": len(parts.carried)}
    metrics = measure(step, groups, stats, update, fate, seconds)
    kept = {id(group) for group in parts.carried}
    completed = [group for group in (*before, *groups) if id(group) not in kept]
    responses = [response for group in groups for response in group.responses]
    episodes = episodes_of(responses) if config.reward.environment else {}
    return StepResult(groups, completed, replace(metrics, compared=compared, episodes=episodes))


def _carry(groups: list[Group], policy: Trainable, config: Config) -> list[Group]:
    """Store the current policy's log-probs in the responses of these groups, and return the groups. The next step needs
    these log-probs, and it can no longer compute them, because the update changes the policy."""
    responses = [response for group in groups for response in rewarded(group)]
    if responses:
        for response, logprobs in zip(responses, policy.logprobs(make_batch(groups, config)), strict=True):
            response.old_logprobs = logprobs
    return groups


def _decode(
    parts: Parts, config: Config, watcher: Watcher, step: int, seconds: dict[str, float]
) -> tuple[list[Group], RolloutStats, int, dict[str, int]]:
    """Decode waves of `rollout.prompts_per_step` prompts until enough groups are usable for training. Return the
    rewarded groups in prompt order, the rollout counters, the number of waves, and the counts of the comparison with
    plain decoding, which are empty if no comparison is due."""
    groups: list[Group] = []
    stats, waves, compared = RolloutStats(), 0, Counter[str]()
    every = config.run.compare_every
    while waves < max(1, config.rollout.max_waves):
        requests = _requests(parts, config, parts.cursor)
        plain: list[Response] = []
        if every and (step + 1) % every == 0:
            with timed("compare", seconds, parts.tracer):
                watcher.phase(step, "compare", len(requests))
                plain = parts.rollout.generate_plain(requests, watcher.response)
        with timed("rollout", seconds, parts.tracer):
            watcher.phase(step, "rollout", len(requests))
            on_response = call_each(parts.reward.submit, watcher.response)
            responses, counts = parts.rollout.generate(requests, on_response, coming(parts, config, step + 1))
            refuse_responses(responses, step)
        with timed("reward", seconds, parts.tracer):
            watcher.phase(step, "reward", len(requests))
            decoded = _in_prompt_order(requests, responses)
            parts.reward([response for group in decoded for response in group.responses])
        groups, stats, waves = groups + decoded, stats + counts, waves + 1
        compared.update(_compared(plain, responses))
        if len(usable([*parts.carried, *groups], config)) >= config.rollout.prompts_per_step:
            break
    return groups, stats, waves, dict(compared)


def call_each(*listeners: Callable[[Response], None]) -> Callable[[Response], None]:
    """Return a function that passes each response to all listeners."""

    def call(response: Response) -> None:
        for listener in listeners:
            listener(response)

    return call


def _compared(plain: Sequence[Response], responses: Sequence[Response]) -> dict[str, int]:
    """Compare responses with those of plain decoding. Return the numbers of tokens, of responses, and of responses that
    differ, or an empty dictionary if there are no `plain` responses."""
    if not plain:
        return {}
    tokens = {response.request.seed: response.token_ids for response in responses}
    differ = sum(tokens[response.request.seed] != response.token_ids for response in plain)
    decoded = sum(response.num_sampled for response in responses)
    return {"tokens": decoded, "responses": len(plain), "differ": differ}


def _requests(parts: Parts, config: Config, cursor: Cursor) -> list[Request]:
    return [
        Request(
            parts.prompts[row], index, epoch, request_seed(config.run.seed, "train", row, epoch, index), parts.sampling
        )
        for row, epoch in cursor.take(config.rollout.prompts_per_step)
        for index in range(config.rollout.group_size)
    ]


def coming(parts: Parts, config: Config, step: int) -> Iterator[list[Request]]:
    """Yield a list with the requests of `step`, then one for each later step. The prompt cursor is not moved."""
    cursor = replace(parts.cursor)
    for _ in range(step, config.train.steps):
        yield _requests(parts, config, cursor)


def _in_prompt_order(requests: Sequence[Request], responses: Sequence[Response]) -> list[Group]:
    """Group the responses in the order of the requests. The order of arrival has no influence."""
    by_seed = {response.request.seed: response for response in responses}
    groups: dict[tuple[int, int], Group] = {}
    for request in requests:
        group = groups.setdefault((request.prompt.prompt_id, request.epoch), Group(request.prompt, []))
        group.responses.append(by_seed[request.seed])
    return list(groups.values())
