"""The spine: rollout, reward, update, sync, step after step. The only file that holds this order.

1. take the next prompts; each asks for a group of G responses, every response with a seed of its own
2. rollout: the engine decodes them, speculatively or not; the tokens are the same
3. reward each response; with dynamic sampling, more waves of prompts until enough groups have rewards that differ
4. update the policy on the batch, in prompt order whatever the order of arrival
5. give the new weights to the engine, and start over

A group that dynamic sampling leaves over opens the next step (or is dropped, `rollout.leftover`): it is one update old
by then, as no step leaves over more than the next one takes, and its ratio is to the policy that decoded it. Decoding
its prompt again would be on-policy and cost up to half the rollout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from tlt.config import Config
from tlt.data.prompts import Cursor
from tlt.draft.ahead import Ahead
from tlt.energy import MeteredTracer
from tlt.metrics import timed
from tlt.rewards import Reward
from tlt.rewards.alike import warn_if_alike
from tlt.rewards.turns import SingleTurn, Turns
from tlt.rewards.unrewarded import Unrewarded
from tlt.rl.early import EarlyGroups, has_early_shards
from tlt.rl.finite import refuse_responses
from tlt.rl.groups import make_batch, rewarded, usable
from tlt.rl.measure import measure
from tlt.sampling import request_seed
from tlt.trace import Span
from tlt.types import (
    Group,
    Prompt,
    Request,
    Response,
    RolloutStats,
    SamplingParams,
    StepMetrics,
    TrainBatch,
    WorkerNow,
)


class Rollout(Protocol):
    """Decodes requests with the target it last took."""

    def sync(self, policy: Trainable, version: int) -> None:
        """The target takes the policy's weights."""
        ...

    def generate(
        self,
        requests: Sequence[Request],
        on_response: Callable[[Response], None],
        coming: Iterable[list[Request]] = (),
        early: EarlyGroups | None = None,
    ) -> tuple[list[Response], RolloutStats]:
        """All responses, in any order; `on_response` is called as each one finishes. Those who are idle may compute
        early shards of the `early` groups, and decode what is `coming` in the next steps, a list each."""
        ...

    def plainly(self, requests: Sequence[Request], on_response: Callable[[Response], None]) -> list[Response]:
        """The same by plain decoding at its best, with nothing else done meanwhile and nothing learned from it."""
        ...

    def remember(self, drafts: Iterable[Ahead]) -> None:
        """Requests that will come again: what was said to them once is a draft of what will be said then."""
        ...

    def state(self) -> dict[str, Any]:
        """What it learned about speed, for a checkpoint: plain data that no token depends on."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...

    def release(self) -> None:
        """An update comes next, up to the next `sync`: give back the memory that it could use on the same device; the
        next `generate` takes it again."""
        ...

    def now(self) -> Sequence[WorkerNow]:
        """What each worker is at, or was a moment ago. Called from another thread, at any time."""
        ...

    def trace(self) -> list[list[Span]]:
        """What each worker did since this was last asked, its stays in the states of `tlt.trace` among it."""
        ...

    def peak_memory(self) -> dict[str, dict[str, float]]:
        """Return `metrics.peak_memory` of each worker that has a process of its own, by its name."""
        ...

    def close(self) -> None:
        """The run is over: end what was started for it."""
        ...


class Trainable(Protocol):
    """The policy: updated on a batch, read by name."""

    def update(self, batch: TrainBatch, step: int) -> dict[str, float]: ...

    def logprobs(self, batch: TrainBatch) -> list[list[float]]:
        """Of each response's tokens, under the present policy."""
        ...

    def state_dict(self) -> Mapping[str, Tensor]: ...


class Watcher(Protocol):
    """Somebody who looks on (the display); nothing depends on it."""

    def phase(self, step: int, name: str, total: int) -> None: ...

    def response(self, response: Response) -> None: ...


@dataclass
class Parts:
    """What a run consists of."""

    prompts: Sequence[Prompt]
    cursor: Cursor
    rollout: Rollout
    reward: Reward
    policy: Trainable
    sampling: SamplingParams
    carried: list[Group] = field(default_factory=list)
    """groups that the step before left over; they open the next one"""
    tracer: MeteredTracer = field(default_factory=MeteredTracer)
    """of the driver's own phases"""
    unrewarded: Unrewarded = field(default_factory=Unrewarded)
    turns: Turns = field(default_factory=SingleTurn)


@dataclass
class StepResult:
    groups: list[Group]
    """decoded in this step, trained on or not"""
    settled: list[Group]
    """trained on or dropped in this step, whenever they were decoded"""
    metrics: StepMetrics


def one_step(parts: Parts, config: Config, watcher: Watcher, step: int) -> StepResult:
    """The engine must hold the policy's present weights, and holds the new ones afterwards."""
    seconds: dict[str, float] = {}
    with timed("total", seconds):
        groups, stats, waves, compared = _decode(parts, config, watcher, step, seconds)
        parts.unrewarded.refuse_another(groups, step, last=step + 1 == config.train.steps)
        if step == 0:
            warn_if_alike(groups, config.reward)
        good = usable([*parts.carried, *groups], config)
        count = config.rollout.prompts_per_step if config.rollout.max_waves else len(good)
        before, used, left_over = parts.carried, good[:count], good[count:]
        with timed("update", seconds, parts.tracer):
            batch = make_batch(used, config)
            watcher.phase(step, "update", len(batch.response_ids))
            parts.rollout.release()
            parts.carried = _carry(left_over, parts.policy, config) if config.rollout.leftover == "carry" else []
            update = parts.policy.update(batch, step)
        with timed("sync", seconds, parts.tracer):
            parts.rollout.sync(parts.policy, version=step + 1)
    fate: dict[str, float] = {"waves": waves, "groups": len(used), "carried": len(parts.carried)}
    metrics = measure(step, groups, stats, update, fate, seconds)
    kept = {id(group) for group in parts.carried}
    settled = [group for group in (*before, *groups) if id(group) not in kept]
    return StepResult(groups, settled, replace(metrics, compared=compared))


def _carry(groups: list[Group], policy: Trainable, config: Config) -> list[Group]:
    """By the next step the policy that decoded these is gone: its log-probs are kept with them."""
    responses = [response for group in groups for response in rewarded(group)]
    if responses:
        for response, logprobs in zip(responses, policy.logprobs(make_batch(groups, config)), strict=True):
            response.old_logprobs = logprobs
    return groups


def _decode(
    parts: Parts, config: Config, watcher: Watcher, step: int, seconds: dict[str, float]
) -> tuple[list[Group], RolloutStats, int, dict[str, int]]:
    """Rewarded groups in prompt order, wave after wave until enough of them can be used; how, in how many waves, and
    beside plain decoding where that is asked for."""
    groups: list[Group] = []
    stats, waves, compared = RolloutStats(), 0, Counter[str]()
    every = config.run.compare_every
    while waves < max(1, config.rollout.max_waves):
        requests = _requests(parts, config, parts.cursor)
        plain: list[Response] = []
        if every and (step + 1) % every == 0:
            with timed("compare", seconds, parts.tracer):
                watcher.phase(step, "compare", len(requests))
                plain = parts.rollout.plainly(requests, watcher.response)
        with timed("rollout", seconds, parts.tracer):
            watcher.phase(step, "rollout", len(requests))
            is_last = waves + 1 >= config.rollout.max_waves
            early = _early_groups(parts, config, [*parts.carried, *groups], requests, is_last)
            heard = heard_by(parts.reward.submit, watcher.response, *([early.add_response] if early else []))
            responses, wave = parts.rollout.generate(requests, heard, coming(parts, config, step + 1), early)
            refuse_responses(responses, step)
        with timed("reward", seconds, parts.tracer):
            watcher.phase(step, "reward", len(requests))
            decoded = _in_prompt_order(requests, responses)
            parts.reward([response for group in decoded for response in group.responses])
        groups, stats, waves = groups + decoded, stats + wave, waves + 1
        compared.update(_compared(plain, responses))
        if len(usable([*parts.carried, *groups], config)) >= config.rollout.prompts_per_step:
            break
    return groups, stats, waves, dict(compared)


def _early_groups(
    parts: Parts, config: Config, before: Sequence[Group], requests: Sequence[Request], is_last_wave: bool
) -> EarlyGroups | None:
    """Return the groups that idle workers may compute early; None if they may not."""
    if not (config.train.early_update and has_early_shards(config.train, config.cluster.workers)):
        return None
    return EarlyGroups(config, before, requests, is_last_wave, parts.reward.settle)


def heard_by(*listeners: Callable[[Response], None]) -> Callable[[Response], None]:
    """Each response is scored, and shown, as it finishes, while others still decode."""

    def heard(response: Response) -> None:
        for listener in listeners:
            listener(response)

    return heard


def _compared(plain: Sequence[Response], responses: Sequence[Response]) -> dict[str, int]:
    """Of two ways to decode the same requests."""
    if not plain:
        return {}
    tokens = {response.request.seed: response.token_ids for response in responses}
    differ = sum(tokens[response.request.seed] != response.token_ids for response in plain)
    return {"tokens": sum(map(len, tokens.values())), "responses": len(plain), "differ": differ}


def _requests(parts: Parts, config: Config, cursor: Cursor) -> list[Request]:
    return [
        Request(
            parts.prompts[row], index, epoch, request_seed(config.run.seed, "train", row, epoch, index), parts.sampling
        )
        for row, epoch in cursor.take(config.rollout.prompts_per_step)
        for index in range(config.rollout.group_size)
    ]


def coming(parts: Parts, config: Config, step: int) -> Iterator[list[Request]]:
    """The requests of `step` and those behind it, a list each: what the cursor takes next."""
    cursor = replace(parts.cursor)
    for _ in range(step, config.train.steps):
        yield _requests(parts, config, cursor)


def _in_prompt_order(requests: Sequence[Request], responses: Sequence[Response]) -> list[Group]:
    """Groups in the order their prompts were taken, responses by index: arrival leaves no trace."""
    by_seed = {response.request.seed: response for response in responses}
    groups: dict[tuple[int, int], Group] = {}
    for request in requests:
        group = groups.setdefault((request.prompt.prompt_id, request.epoch), Group(request.prompt, []))
        group.responses.append(by_seed[request.seed])
    return list(groups.values())
