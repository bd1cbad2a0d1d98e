"""`tlt verify`: trains the same steps with every kind of drafter, and checks that the results are the same.

Each step of each mode starts from the plain run's state at that step, so a difference does not affect later steps. If
every step ends with the plain run's sha256, whole runs are equal by induction. If the check at start finds the engine
exact, no token and no log-prob may differ. Else rounding may explain a difference. A fork is the first token that
differs in a response. Whether rounding explains it is checked with the target in float64. The target is also run as its
own drafter and its own look-ahead. All its tokens must be accepted, because a rejection there is a bug that no other
check shows.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tlt.cluster.pool import local_worker
from tlt.cluster.remote import ClusterRollout
from tlt.config import ClusterConfig, Config
from tlt.data.prompts import Cursor
from tlt.data.tokenizer import load_tokenizer
from tlt.engine.exactness import Exactness
from tlt.environments.tools import with_tools
from tlt.loop import Parts, Rollout, StepResult, Watcher, one_step
from tlt.metrics import provenance, write_json
from tlt.models.decoder import Decoder
from tlt.models.weights import sha256
from tlt.progress import Work, working
from tlt.rl.policy import Policy
from tlt.run.opening import make_parts
from tlt.store.hub import from_hub
from tlt.types import Response
from tlt.verify.modes import modes
from tlt.verify.oracle import EXPLAINED_GAP, Fork, float64_target, fork_of, look_ahead_checks, oracle_checks


@dataclass
class ModeRun:
    mode: str
    policy_sha256: str = ""
    tokens_different: int = 0
    logprobs_different: int = 0
    """number of tokens with other log-probs, up to the first token that differs"""
    steps_equal: bool = True
    rewards: list[float] = field(default_factory=list)
    accept_length: float = 1.0
    seen_ahead: int = 0
    seconds: float = 0.0


@dataclass
class Comparison:
    """Results of all modes, from which the verdict follows."""

    runs: dict[str, ModeRun]
    dtype: str
    exactness: Exactness
    weighted: bool
    """whether the loss depends on log-probs of the rollout that may differ by rounding; if so, rewards are compared
    instead of the sha256"""
    tokens: int = 0
    forks: list[Fork] = field(default_factory=list)
    oracle: list[dict[str, Any]] = field(default_factory=list)
    look_ahead: list[dict[str, Any]] = field(default_factory=list)


def verify(config: Config, steps: int, dtype: str, json_file: Path | None) -> bool:
    """Run `steps` training steps in every mode and compare them. Print the verdict, write it to `json_file`, and return
    whether all checks hold."""
    console = Console(highlight=False)
    config = with_tools(_verify_config(from_hub(config), dtype))
    tokenizer = load_tokenizer(config.model.path)
    parts, policy = make_parts(config.model_copy(update={"engine": config.engine.ours}), tokenizer)
    assert isinstance(parts.rollout, ClusterRollout)
    assert isinstance(policy, Policy)
    target = local_worker(parts.rollout.supervisor.pool).target  # one copy of the weights serves every mode
    assert isinstance(target, Decoder)
    rollouts = modes(config, target, tokenizer, parts.turns, policy)
    exactness = parts.exactness if config.engine.backend == "tlt" else Exactness()
    weighted = bool(config.train.importance_cap) and not exactness.exact
    found = Comparison({name: ModeRun(name) for name in rollouts}, dtype, exactness, weighted)
    with working("verify", steps * len(rollouts) + 1, "runs") as work:
        for step in range(steps):
            _verify_step(config, step, policy, parts, rollouts, found, work)
        work.note = "oracle drafter"
        in_float64 = float64_target(config, dict(policy.state_dict())), config.engine, parts.prompts, parts.sampling
        found.oracle, found.look_ahead = oracle_checks(*in_float64), look_ahead_checks(*in_float64)
    checks = _checks(found)
    agree = all(checks.values())
    console.print(_verdict(found, checks), style="bold green" if agree else "bold red", soft_wrap=True)
    _print(console, found, checks)
    if json_file:
        result = {
            "agree": agree,
            **exactness.facts,
            "compared": "tokens and rewards" if weighted else "tokens and sha256",
            "dtype": dtype,
            "steps": steps,
            "tokens": found.tokens,
            "runs": [asdict(r) for r in found.runs.values()],
            "forks": [asdict(f) for f in found.forks],
            "oracle": found.oracle,
            "look_ahead": found.look_ahead,
        }
        write_json(json_file, {**result, **provenance()})
    return agree


def _verify_config(config: Config, dtype: str) -> Config:
    device = "cpu" if dtype == "float64" else config.model.device
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"dtype": dtype, "device": device}),
            "train": config.train.model_copy(update={"shard": False}),
            "cluster": ClusterConfig(),
            "run": config.run.model_copy(update={"compare_every": 0}),
            "eval": config.eval.model_copy(update={"every": 0}),
        }
    )


def _verify_step(
    config: Config, step: int, policy: Policy, parts: Parts, rollouts: dict[str, Rollout], found: Comparison, work: Work
) -> None:
    """Run one step of all modes from the same state, the plain run last. Add the results to `found`."""
    before = _Snapshot.take(policy)
    start, carried = asdict(parts.cursor), parts.carried
    results: dict[str, StepResult] = {}
    parts.turns.step = step
    for name, rollout in rollouts.items():
        work.note = f"step {step + 1}: {name}"
        before.restore(policy)
        began = time.perf_counter()
        mode = replace(parts, rollout=rollout, cursor=Cursor(**start), carried=carried)
        rollout.sync(policy, step)
        results[name] = one_step(mode, config, Watcher(), step)
        run, metrics = found.runs[name], results[name].metrics
        run.seconds += time.perf_counter() - began
        run.rewards.append(metrics.reward)
        run.accept_length = metrics.accept_length
        run.seen_ahead += metrics.rollout["seen_ahead"]
        run.policy_sha256 = sha256(policy.state_dict())
        parts.cursor, parts.carried = mode.cursor, mode.carried
        work.advance()
    plain, reference = results["plain"], None
    found.tokens += plain.metrics.tokens
    for name, result in results.items():
        run = found.runs[name]
        if found.weighted:
            run.steps_equal &= _rewards(result) == _rewards(plain)
        else:
            run.steps_equal &= run.policy_sha256 == found.runs["plain"].policy_sha256
        for ours, theirs in _pairs(plain, result):
            run.logprobs_different += _different_logprobs(ours, theirs)
            if ours.token_ids != theirs.token_ids:
                reference = reference or float64_target(config, before.weights)
                run.tokens_different += _different(ours.token_ids, theirs.token_ids)
                found.forks.append(fork_of(name, step, ours, theirs, reference))


@dataclass
class _Snapshot:
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]

    @classmethod
    def take(cls, policy: Policy) -> _Snapshot:
        return cls(
            {name: tensor.clone() for name, tensor in policy.trained_state().items()},
            {name: tensor.clone() for name, tensor in policy.optimizer_state().items()},
        )

    def restore(self, policy: Policy) -> None:
        policy.load_state_dict(self.weights)
        policy.load_optimizer_state(self.optimizer)


def _pairs(plain: StepResult, other: StepResult) -> list[tuple[Response, Response]]:
    """Pair the responses to prompts that both runs decoded. After a fork, one run may have decoded more waves."""
    return [
        pair
        for ours, theirs in zip(plain.groups, other.groups, strict=False)
        for pair in zip(ours.responses, theirs.responses, strict=True)
    ]


def _rewards(result: StepResult) -> list[float | None]:
    return [response.reward for group in result.groups for response in group.responses]


def _different_logprobs(ours: Response, theirs: Response) -> int:
    """Return the number of tokens whose log-probs differ, before the first token that differs."""
    both = [zip(it.token_ids, it.logprobs, it.full_logprobs, strict=True) for it in (ours, theirs)]
    alike = itertools.takewhile(lambda pair: pair[0][0] == pair[1][0], zip(*both, strict=False))
    return sum(a != b for a, b in alike)


def _different(ours: Sequence[int], theirs: Sequence[int]) -> int:
    return sum(a != b for a, b in zip(ours, theirs, strict=False)) + abs(len(ours) - len(theirs))


# -- the verdict -------------------------------------------------------------------------------------------------------


def _checks(found: Comparison) -> dict[str, bool]:
    """Return whether each condition of the verdict holds."""
    runs = found.runs.values()
    end = "with the same rewards" if found.weighted else "in the same sha256"
    checks = {f"runs with equal tokens end {end}": all(run.steps_equal or run.tokens_different for run in runs)}
    if found.exactness.exact:
        tokens, logprobs = (sum(getattr(run, f"{what}_different") for run in runs) for what in ("tokens", "logprobs"))
        checks |= {f"{tokens:,} tokens and {logprobs:,} log-probs differ": tokens == logprobs == 0}
    else:
        most = max(1, 1e-5 * found.tokens * len(runs))
        allowed = {"float64": 0, "float32": most, "bfloat16": math.inf}[found.dtype]
        explained = all(fork.gap < EXPLAINED_GAP[found.dtype] for fork in found.forks)
        forks = len(found.forks)
        checks |= {"every difference is explained by rounding": explained}
        checks |= {f"forks: {forks}, at most {allowed:.0f} are allowed": forks <= allowed}
    return checks | {
        "every token of the oracle drafter is accepted": all(
            c["drafted"] == c["accepted"] > 0 < c["preemptions"] for c in found.oracle
        ),
        "every look-ahead token of the target itself is accepted, in the fewest passes": all(
            c["drafted"] == c["accepted"] > 0 < c["preemptions"] and c["passes"] == c["fewest_passes"]
            for c in found.look_ahead
        ),
    }


def _print(console: Console, found: Comparison, checks: dict[str, bool]) -> None:
    title = f"{found.tokens:,} tokens, {found.dtype} (columns tokens and logprobs: how many differ)"
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in ("mode", "sha256", "tokens", "logprobs", "reward", "accept", "ahead", "seconds"):
        table.add_column(column, justify="left" if column in ("mode", "sha256") else "right", no_wrap=True)
    for run in found.runs.values():
        reward = sum(run.rewards) / len(run.rewards)
        differ = str(run.tokens_different), str(run.logprobs_different)
        numbers = (f"{reward:.4f}", f"{run.accept_length:.2f}", str(run.seen_ahead), f"{run.seconds:.1f}")
        table.add_row(run.mode, run.policy_sha256[:8], *differ, *numbers)
    console.print(table)
    for check in found.oracle:
        console.print(f"oracle drafter, {_accepted(check)}", soft_wrap=True)
    for check in found.look_ahead:
        passes = f"{check['passes']} passes, at least {check['fewest_passes']}"
        console.print(f"the target's own look-ahead, {_accepted(check)}, {passes}", soft_wrap=True)
    for fork in found.forks:
        word = "explained" if fork.gap < EXPLAINED_GAP[found.dtype] else "NOT explained"
        console.print(
            f"fork {word}: {fork.mode}, step {fork.step}, prompt {fork.prompt}, response {fork.index}, "
            f"position {fork.position}, gap {fork.gap:.2e}",
            soft_wrap=True,
        )
    console.print(found.exactness.meaning, soft_wrap=True)
    if found.weighted:
        console.print(
            "the policies' sha256 cannot be compared, because with train.importance_cap the loss depends on rollout "
            "log-probs, which differ by rounding between modes; tokens and rewards are compared instead"
        )
    for check, holds in checks.items():
        console.print(f"{check}: {'yes' if holds else 'NO'}", style="green" if holds else "bold red", soft_wrap=True)


def _accepted(check: dict[str, Any]) -> str:
    preemptions = check["preemptions"]
    return (
        f"temperature {check['temperature']}, top-k {check['top_k']}, top-p {check['top_p']}: {check['accepted']} of "
        f"{check['drafted']} draft tokens accepted, {preemptions} preemption{'s' * (preemptions != 1)}"
    )


def _verdict(found: Comparison, checks: dict[str, bool]) -> str:
    if all(checks.values()):
        what = "token and log-prob" if found.exactness.exact else "token"
        explained = f", except {len(found.forks)} explained by rounding" * bool(found.forks)
        return f"verdict: all {len(found.runs)} modes agree in every {what}{explained}"
    apart = [
        run.mode
        for run in found.runs.values()
        if run.tokens_different or not run.steps_equal or (found.exactness.exact and run.logprobs_different)
    ]
    names = f" ({'; '.join(apart)})" * bool(apart)
    failed = f"{list(checks.values()).count(False)} of {len(checks)} checks fail"
    return f"verdict: DIFFER in {len(apart)} of {len(found.runs)} modes{names}; {failed}"
