"""Tests of the checks in small.py: each check fails for a bug that it must find.

`tests/mutants/table.py` plants the other bugs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import small
import torch
from small import PROMPTS, ContextDrafter, Target, Violation, build, decode, make_requests
from torch import Tensor

import tlt.engine.engine
import tlt.engine.noise
import tlt.engine.runner
from tlt import sampling
from tlt.attention.slots import SlotAttention
from tlt.draft.strategy import Strategy
from tlt.draft.tree import DraftTree
from tlt.engine.engine import Engine, Round
from tlt.engine.noise import DraftNoise, NoiseWindow
from tlt.engine.runner import Runner, Sampled
from tlt.models.decoder import Decoder
from tlt.sampling import SamplingTensors, gumbel_noise
from tlt.types import Prompt, Row, SamplingParams

Patch = pytest.MonkeyPatch

# -- bugs: the noise --------------------------------------------------------------------------------------------------


def _noise_is(patch: Patch, key: Callable[[NoiseWindow, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """Replace the noise of (row, position) by that of the (seed, counter) which `key` returns, all in one shape."""

    def at(self: NoiseWindow, rows: Tensor, positions: Tensor) -> Tensor:
        seeds, counters = key(self, *torch.broadcast_tensors(rows, positions))
        return gumbel_noise(seeds.reshape(-1), counters.reshape(-1), self.vocab_size).view(*seeds.shape, -1)

    def at_ids(self: NoiseWindow, rows: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        rows, positions, ids = torch.broadcast_tensors(rows, positions, ids)
        noise = at(self, rows, positions)
        return noise.gather(-1, ids.clamp(0, self.vocab_size - 1)[..., None]).squeeze(-1)

    patch.setattr(NoiseWindow, "at", at)
    patch.setattr(NoiseWindow, "at_ids", at_ids)


def _seeds(window: NoiseWindow, rows: Tensor) -> Tensor:
    return torch.tensor(window.seeds, dtype=torch.uint64).view(torch.int64)[rows]


def noise_shared_by_two_responses_of_a_group(patch: Patch) -> None:
    seed = sampling.request_seed
    patch.setattr(
        sampling, "request_seed", lambda run, domain, prompt, epoch, index: seed(run, domain, prompt, epoch, 0)
    )


def noise_shared_by_two_prompts(patch: Patch) -> None:
    seed = sampling.request_seed
    patch.setattr(
        sampling, "request_seed", lambda run, domain, prompt, epoch, index: seed(run, domain, 0, epoch, index)
    )


def noise_keyed_by_node(patch: Patch) -> None:
    """Let the target draw node n with the position of the root + n, so that siblings have different noise."""

    def key(window: NoiseWindow, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        in_target = positions.dim() == 2
        return _seeds(window, rows), positions[:, :1] + torch.arange(positions.shape[1]) if in_target else positions

    _noise_is(patch, key)


def draft_under_the_noise_of_the_next_position(patch: Patch) -> None:
    """Let drafts use the noise of the next position. Tokens and distributions stay right, so this only costs speed."""
    noise_of = DraftNoise.__call__
    patch.setattr(DraftNoise, "__call__", lambda self, depth, ids: noise_of(self, depth + 1, ids))


# -- bugs: the target pass --------------------------------------------------------------------------------------------


def top_p_at_the_root_only(patch: Patch) -> None:
    sampling_log_probs = tlt.engine.runner.sampling_log_probs

    def by_node(logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
        log_p, full = sampling_log_probs(logits, params)
        below, _ = sampling_log_probs(logits, params._replace(top_p=torch.ones_like(params.top_p)))
        return torch.cat([log_p[:, :1], below[:, 1:]], dim=1), full

    patch.setattr(tlt.engine.runner, "sampling_log_probs", by_node)


# -- bugs: the walk and the commit ------------------------------------------------------------------------------------


def bonus_token_from_the_drafter(patch: Patch) -> None:
    """Do not verify the last level of the tree. If the walk reaches it, commit its first token."""
    real = tlt.engine.engine.walk

    def walk(tree: DraftTree, sampled: list[int]) -> list[int]:
        path = [node for node in real(tree, sampled) if tree.depths[node] < max(tree.depths) or node == 0]
        last = path[-1]
        guesses = [tree.tokens[n] for n in range(1, len(tree.tokens)) if tree.parents[n] == last]
        if guesses and tree.depths[last] == max(tree.depths) - 1:
            sampled[last] = guesses[0]
        return path

    patch.setattr(tlt.engine.engine, "walk", walk)


def near_misses_accepted(patch: Patch) -> None:
    """Accept a draft token whose noisy score is within 0.5 of the best one."""
    scores: list[Tensor] = []
    gumbel_topk, commit = tlt.engine.runner.gumbel_topk, Engine._commit

    def observed(log_p: Tensor, noise: Tensor) -> sampling.TopK:
        scores[:] = [log_p + noise]
        return gumbel_topk(log_p, noise)

    def lenient(self: Engine, now: Round, trees: Sequence[DraftTree], sampled: Sampled) -> Any:
        for b, tree in enumerate(trees):
            for n in range(len(tree.tokens) - 1, 0, -1):
                at_parent = scores[0][b, tree.parents[n]]
                if at_parent[tree.tokens[n]] > at_parent.max() - 0.5:
                    sampled.tokens[b][tree.parents[n]] = tree.tokens[n]
        return commit(self, now, trees, sampled)

    patch.setattr(tlt.engine.runner, "gumbel_topk", observed)
    patch.setattr(Engine, "_commit", lenient)


def kv_of_a_freed_slot_kept(patch: Patch) -> None:
    """Move the last row to the place of a finished one, but leave its keys and values behind."""
    copy = SlotAttention.copy
    patch.setattr(
        SlotAttention,
        "copy",
        lambda self, source, target, T: copy(self, source, target, T) if source < target else None,
    )


def kv_not_rebuilt_after_preemption(patch: Patch) -> None:
    """Prefill only the prompt when a row returns."""
    patch.setattr(Row, "context", property(lambda row: row.request.prompt.token_ids))


def logprob_of_the_wrong_node(patch: Patch) -> None:
    """Let each node report the log-probs of the previous node."""
    verify = Runner.verify

    def shifted(self: Runner, *arguments: Any) -> Sampled:
        sampled = verify(self, *arguments)
        return sampled._replace(logprobs=[[row[0], *row[:-1]] for row in sampled.logprobs])

    patch.setattr(Runner, "verify", shifted)


def weights_of_the_target_before(patch: Patch) -> None:
    """Let an update change the version and nothing else."""
    load = Decoder.load

    def skip(self: Decoder, state: Any, version: int) -> None:
        if self.version < 0:
            load(self, state, version)
        self.version = version

    patch.setattr(Decoder, "load", skip)


# -- checks -----------------------------------------------------------------------------------------------------------

TREE = Strategy("", depth=3, branching=2, verify_tokens=8)
WARM = SamplingParams(0.7, max_new_tokens=4)
CUT = SamplingParams(0.7, top_p=0.8, max_new_tokens=4)
LONG = (
    SamplingParams(0.7, max_new_tokens=40),
    SamplingParams(0.7, top_k=3, max_new_tokens=40),
    SamplingParams(0.7, top_p=0.8, max_new_tokens=40),
    SamplingParams(0.7, max_new_tokens=40, stop_token_ids=(4,)),
)
LONG_PROMPTS = (*PROMPTS, Prompt(2, "", (3,)), Prompt(3, "", (2,) * 9))


@cache
def target() -> Target:
    return Target(seed=0)


def speculating(max_rows: int = 64, bound_tokens: int | None = None, strategy: Strategy = TREE) -> Engine:
    return build(target(), ContextDrafter(target(), 0.7, 0.7), strategy, max_rows, bound_tokens)


def joint(params: SamplingParams = WARM) -> None:
    for epochs in (300, 2_000):  # most bugs need few responses
        small.check_joint(small.draw(speculating(512), params, epochs, run_seed=epochs), target(), params)


def joint_under_top_p() -> None:
    joint(CUT)


def group_independence() -> None:
    small.check_group_independence(small.draw(speculating(512), WARM, epochs=600), target(), WARM)


def request_independence() -> None:
    small.check_request_independence(small.draw(speculating(512), WARM, epochs=600), target(), WARM)


@cache
def _long() -> tuple[list[small.Request], list[small.Reference]]:
    requests = make_requests(LONG_PROMPTS, LONG, group=3)
    return requests, small.reference(target(), requests)


def tokens(bound_tokens: int | None = None) -> None:
    requests, expected = _long()
    small.check_tokens(decode(speculating(bound_tokens=bound_tokens), requests), expected)


def tokens_after_preemption() -> None:
    tokens(bound_tokens=85)


def logprobs() -> None:
    requests, expected = _long()
    small.check_logprobs(decode(speculating(), requests), expected)


def cache_integrity() -> None:
    decode(speculating(bound_tokens=100), _long()[0], after_round=small.check_integrity)


def oracle() -> None:
    requests = [r for r in _long()[0] if not r.sampling.stop_token_ids]
    engine = build(target(), small.oracle(target()), TREE)
    steps = small.record_steps(engine)
    decode(engine, requests)
    small.check_oracle(steps, TREE)


def tokens_after_an_update() -> None:
    requests, _ = _long()
    old, new = Target(seed=0), Target(seed=1)
    old.decoder.load(new.model.state_dict(), version=1)
    small.check_tokens(decode(build(old), requests), small.reference(new, requests))


CHECKS: tuple[Callable[[], None], ...] = (
    joint,
    joint_under_top_p,
    group_independence,
    request_independence,
    tokens,
    tokens_after_preemption,
    logprobs,
    cache_integrity,
    oracle,
    tokens_after_an_update,
)


class Bug(NamedTuple):
    plant: Callable[[Patch], None]
    caught_by: tuple[Callable[[], None], ...]


BUGS = (
    Bug(noise_shared_by_two_responses_of_a_group, (group_independence,)),
    Bug(noise_shared_by_two_prompts, (request_independence,)),
    Bug(noise_keyed_by_node, (joint, tokens, oracle)),
    Bug(draft_under_the_noise_of_the_next_position, (oracle,)),
    Bug(top_p_at_the_root_only, (joint_under_top_p, tokens, oracle)),
    Bug(bonus_token_from_the_drafter, (tokens, oracle)),
    Bug(near_misses_accepted, (joint, tokens)),
    Bug(kv_of_a_freed_slot_kept, (tokens, cache_integrity)),
    Bug(kv_not_rebuilt_after_preemption, (tokens_after_preemption, cache_integrity)),
    Bug(logprob_of_the_wrong_node, (logprobs,)),
    Bug(weights_of_the_target_before, (tokens_after_an_update,)),
)


@pytest.fixture(autouse=True)
def narrow_ring(monkeypatch: Patch) -> None:
    """Compute less noise ahead than responses of four tokens use. Turn off the ledger, which would find most bugs
    before the checks do."""
    monkeypatch.setattr(tlt.engine.noise, "_MAX_WINDOW", 4)
    monkeypatch.delenv("TLT_AUDIT")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_checks_pass_without_a_bug(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.plant.__name__)
def test_each_bug_is_found(bug: Bug, monkeypatch: Patch) -> None:
    target(), _long()  # before the bug is there
    bug.plant(monkeypatch)
    for check in bug.caught_by:
        with pytest.raises(Violation):
            check()
