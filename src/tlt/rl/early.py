"""Early update: idle workers compute gradients of finished groups while other groups are still being decoded.

The groups of a step are ordered by the length of their longest response, then by prompt order. The last eighth in this
order, the longest groups, is never computed early. The other groups, in this order, are cut into early shards with
equally many groups, or with parts of one group if the recipe has more workers than prompts. Groups that do not fill a
last shard are left for the update. A worker that has nothing to decode computes the gradients of an early shard. It
computes the old and reference log-probs instead if there are several optimizer steps, if an advantage depends on other
groups, or if the KL term is in the reward. The shards, the order of sums, and the packing depend only on the responses.
So results have the same bits whether a shard was computed early or in the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, takewhile
from typing import NamedTuple, TypeVar

from tlt.config import Config, TrainConfig
from tlt.rl.advantages import OF_ONE_GROUP, WITH_BATCH_MEAN
from tlt.rl.groups import make_batch, usable
from tlt.types import Group, Request, Response, TrainBatch

T = TypeVar("T")
Counts = Callable[[TrainBatch, int, TrainConfig], bool]
"""Function (batch, response index, settings) -> whether the gradient or log-probs of the response are needed."""

PER_WORKER = 4
"""Largest number of early shards per worker, and of early gradients that a worker keeps in memory."""
_LATE = 8  # one group in 8 is never early: the longest groups, because a step waits for them


def has_early_shards(train: TrainConfig, workers: int) -> bool:
    """Return whether a step has early shards. A single worker has none, because it is never idle before the rollout
    ends. A sharded policy has none, because its members cannot compute alone."""
    return workers > 1 and not train.shard and (has_early_gradients(train) or bool(fixed_logprobs(train)))


def has_early_gradients(train: TrainConfig) -> bool:
    """Return whether early shards compute gradients. They do only if a group's gradient depends on that group alone."""
    return (
        not (_has_several_steps(train) or _has_kl_in_reward(train) or train.shard) and train.advantage in OF_ONE_GROUP
    )


def most_early_gradients(config: Config) -> int:
    """Return the number of early gradients that a worker keeps, if they are spread evenly over the workers."""
    prompts, workers = config.rollout.prompts_per_step, config.cluster.workers
    if not (has_early_shards(config.train, workers) and has_early_gradients(config.train)):
        return 0
    shards = len(in_shards(range(prompts), prompts, prompts, workers))
    pieces = len(in_pieces(range(config.rollout.group_size), lambda i: True, prompts, workers))
    return -(-shards * pieces // workers)


def most_responses(config: Config) -> int:
    """Return an upper bound on the number of responses in a shard whose gradient is computed."""
    rollout, train, workers = config.rollout, config.train, config.cluster.workers
    prompts = rollout.prompts_per_step
    if not (has_early_shards(train, workers) and has_early_gradients(train)):
        return -(-prompts * rollout.group_size // train.updates_per_step)
    groups = 0
    for count in range(1, prompts + 1):  # number of groups with a gradient
        early = [len(shard) for shard in in_shards(range(count), count, prompts, workers)]
        groups = max(groups, count - sum(early), *early)
    return groups * rollout.group_size


def fixed_logprobs(train: TrainConfig) -> tuple[str, ...]:
    """Return the kinds of log-probs that are computed before the first gradient and then stay fixed: names of fields of
    `FixedLogprobs`. If there is only one optimizer step, the old log-probs are not among them, because the policy is
    then still the one that decoded the responses."""
    if has_early_gradients(train):
        return ()
    old = _has_several_steps(train) or _has_kl_in_reward(train)
    return (*(["old"] if old else []), *(["reference"] if train.kl_weight else []))


def _has_several_steps(train: TrainConfig) -> bool:
    return train.updates_per_step * train.epochs > 1


def _has_kl_in_reward(train: TrainConfig) -> bool:
    return bool(train.kl_weight) and train.kl_in == "reward"


def has_gradient(batch: TrainBatch, i: int, train: TrainConfig) -> bool:
    """Return whether the loss depends on response `i`: the response is not masked, and either its advantage is not 0 or
    the loss has a KL term."""
    kl_in_loss = bool(train.kl_weight) and train.kl_in == "loss"
    return (bool(batch.advantages[i]) or kl_in_loss) and i not in batch.masked


def needs_logprobs(batch: TrainBatch, i: int, train: TrainConfig) -> bool:
    """Return whether the log-probs that `fixed_logprobs` names are computed for response `i`. The result depends only
    on the response's own group. With reinforce_pp, log-probs are computed even if the advantage is 0, because the
    advantage depends on all groups."""
    if _has_kl_in_reward(train):
        return True
    learns = i not in batch.masked if train.advantage in WITH_BATCH_MEAN else has_gradient(batch, i, train)
    return learns and (bool(train.kl_weight) or i not in batch.old_logprobs)


def counts_early(train: TrainConfig) -> Counts:
    """Return the function that selects which responses of an early shard are computed."""
    return has_gradient if has_early_gradients(train) else needs_logprobs


class Cut(NamedTuple):
    early: list[list[int]]
    """indices of all responses of each early shard, in prompt order"""
    late: list[int]
    """indices of the other responses that are computed"""


def cut(batch: TrainBatch, counts: Callable[[int], bool], prompts: int, workers: int) -> Cut:
    """Cut the responses of a batch into early shards and the rest. `counts(i)` returns whether response i needs a
    gradient (or log-probs). Groups without such a response are left out. `prompts` is the number of prompts in a step,
    `workers` the number of workers in the recipe."""
    groups = [group for group in batch.groups() if any(map(counts, group))]
    order = sorted(groups, key=lambda group: (max(len(batch.response_ids[i]) for i in group), group[0]))
    whole = [sorted(i for group in shard for i in group) for shard in in_shards(order, len(order), prompts, workers)]
    early = [piece for shard in whole for piece in in_pieces(shard, counts, prompts, workers)]
    taken = {i for shard in early for i in shard}
    return Cut(early, [i for group in groups for i in group if counts(i) and i not in taken])


def in_shards(order: Sequence[T], count: int, prompts: int, workers: int) -> list[Sequence[T]]:
    """Return the early shards, which are slices of `order`. `order` has all groups, or the first ones, in ascending
    order of their longest response. `count` is the number of groups in the batch, or a lower bound of it. If a step has
    one or two prompts, no group is early, because the batch may turn out to have a single group, and the longest group
    is never early."""
    if prompts <= 2:
        return []
    each = max(1, -(-_num_early(prompts) // (PER_WORKER * workers)))
    whole = min(len(order), _num_early(count)) // each
    return [order[k * each : (k + 1) * each] for k in range(whole)]


def in_pieces(responses: Sequence[int], counts: Callable[[int], bool], prompts: int, workers: int) -> list[list[int]]:
    """Return the early shards of some groups, whose `responses` are given in prompt order. If a recipe has more workers
    than prompts, one worker would compute a whole group while the others wait. So the group is cut, as far as workers
    may keep early shards. Pieces without a response that `counts` are left out."""
    if workers <= prompts:
        return [list(responses)]
    number = min(len(responses), PER_WORKER * workers // _num_early(prompts))
    ends = [len(responses) * k // number for k in range(number + 1)]
    pieces = [list(responses[first:last]) for first, last in pairwise(ends)]
    return [piece for piece in pieces if any(map(counts, piece))]


def _num_early(groups: int) -> int:
    return groups - -(-groups // _LATE)


def owners_of(work: Sequence[float], held: Sequence[Mapping[int, float]]) -> list[list[int]]:
    """Return the indices of the shards that each member computes in an update, in ascending order.

    `work` has the work of each shard in tokens. `held` has for each member the shards that it has begun, and the
    fraction of each that is done. A shard stays with the member that has begun it. The other shards are assigned in
    descending order of work, each to the member with the least work left (LPT: Graham, 1969)."""
    owners: list[list[int]] = [[] for _ in held]
    loads = [0.0] * len(held)
    left = dict(enumerate(work))
    for member, done in enumerate(held):
        for shard in done.keys() & left.keys():
            owners[member].append(shard)
            loads[member] += left.pop(shard) * (1 - done[shard])
    for shard in sorted(left, key=lambda number: (-left[number], number)):
        member = min(range(len(held)), key=lambda m: (loads[m], len(owners[m])))
        owners[member].append(shard)
        loads[member] += left[shard]
    return [sorted(own) for own in owners]


class _Finished(NamedTuple):
    """Finished group: all its responses are decoded, and their rewards are known."""

    counts: bool
    """whether the group is usable, so that the batch includes it if there is room"""
    group: Group | None = None
    """the group; None if none of its responses has to be computed"""
    longest: int = 0
    """number of tokens of the group's longest response; 0 if `group` is None"""


class _EarlyPlace(NamedTuple):
    """Place of a group in the order by longest response. An unfinished group has the first place that it may get."""

    longest: int
    number: int
    group: Group | None
    """the group; None if it is not finished, or if it is not certain that the batch includes it"""


class EarlyGroups:
    """Groups of the current step, and the early shards that can be computed by now.

    A group's place in the order by longest response is certain once no unfinished group can come before it. A wrong
    early shard would only cost time, because the update uses it only if the shard of the update has exactly the same
    responses."""

    def __init__(
        self,
        config: Config,
        before: Sequence[Group],
        requests: Sequence[Request],
        is_last_wave: bool,
        set_rewards: Callable[[Sequence[Response]], bool],
    ) -> None:
        """Begin a wave of decoding with these requests. `before`: groups of the previous step and of earlier waves,
        which come first in the batch. `set_rewards`: function that sets the rewards of responses if all are known, and
        returns whether they are."""
        self.config, self.is_last_wave, self.set_rewards = config, is_last_wave, set_rewards
        self._ended: dict[int, Response] = {}
        self._finished = {number: self._as_finished(group) for number, group in enumerate(before)}
        self._shards: list[TrainBatch] = []
        self._num_cut = 0  # number of slices of `in_shards` that are in `_shards`
        groups: dict[tuple[int, int], list[Request]] = {}
        for request in requests:
            groups.setdefault((request.prompt.prompt_id, request.epoch), []).append(request)
        self._asked = dict(enumerate(groups.values(), len(before)))  # number of an unfinished group -> its requests
        self._count = len(before) + len(groups)

    def add_response(self, response: Response) -> None:
        self._ended[response.request.seed] = response

    def shards(self, so_far: Mapping[int, int]) -> list[TrainBatch]:
        """Return the early shards whose groups can no longer change, in order. `so_far`: request seed -> number of
        tokens decoded so far, for each unfinished response."""
        places = self._places(so_far)
        if places is not None:
            known = sum(place.group is not None for place in places)
            certain = list(takewhile(lambda place: place.group, sorted(places, key=lambda p: (p.longest, p.number))))
            prompts, workers = self.config.rollout.prompts_per_step, self.config.cluster.workers
            for shard in in_shards(certain, known, prompts, workers)[self._num_cut :]:
                in_order = sorted(shard, key=lambda place: place.number)
                batch = make_batch([place.group for place in in_order if place.group], self.config)
                counts = partial(self._counts, batch)
                pieces = in_pieces(range(len(batch.response_ids)), counts, prompts, workers)
                self._shards += [batch.part(piece) for piece in pieces]
                self._num_cut += 1
        return self._shards

    def _places(self, so_far: Mapping[int, int]) -> list[_EarlyPlace] | None:
        """Return the places of all groups that the batch may include, or None if a later wave may add groups."""
        self._finish()
        room = self.config.rollout.prompts_per_step if self.config.rollout.max_waves else self._count
        places: list[_EarlyPlace] = []
        sure = possible = 0  # number of groups that the batch certainly includes, and that it may include
        for number in range(self._count):
            if sure == room:
                break
            if requests := self._asked.get(number):
                places.append(_EarlyPlace(max(self._length(request, so_far) for request in requests), number, None))
                possible += 1
                continue
            done = self._finished[number]
            possible += done.counts
            sure += done.counts and possible <= room
            if done.group:
                places.append(_EarlyPlace(done.longest, number, done.group if possible <= room else None))
        return None if sure < room and not self.is_last_wave else places

    def _length(self, request: Request, so_far: Mapping[int, int]) -> int:
        response = self._ended.get(request.seed)
        return len(response.token_ids) if response else so_far.get(request.seed, 0)

    def _finish(self) -> None:
        """Move groups whose rewards are known by now from `_asked` to `_finished`."""
        for number, requests in list(self._asked.items()):
            responses = [self._ended[request.seed] for request in requests if request.seed in self._ended]
            if len(responses) == len(requests) and self.set_rewards(responses):
                self._finished[number] = self._as_finished(Group(requests[0].prompt, responses))
                del self._asked[number]

    def _as_finished(self, group: Group) -> _Finished:
        if not usable([group], self.config):
            return _Finished(False)
        alike = Group(group.prompt, [replace(response) for response in group.responses])  # `make_batch` sets advantages
        batch = make_batch([alike], self.config)
        if not any(self._counts(batch, i) for i in range(len(batch.response_ids))):
            return _Finished(True)
        return _Finished(True, alike, max(map(len, batch.response_ids)))

    def _counts(self, batch: TrainBatch, i: int) -> bool:
        return counts_early(self.config.train)(batch, i, self.config.train)


class Wave(NamedTuple):
    """Requests of a rollout, and work for idle workers meanwhile."""

    requests: Sequence[Request]
    on_response: Callable[[Response], None]
    """function that is called with each response as soon as it ends"""
    coming: Iterable[list[Request]] = ()
    """requests of each future step, for which idle workers may decode look-ahead drafts"""
    early: EarlyGroups | None = None
    """groups from which idle workers may compute early shards of the update"""
