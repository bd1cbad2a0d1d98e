"""Conclusions from a run's numbers: speed against plain decoding, use of worker seconds, and advice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tlt.report.read import Run, number


class Ratio(NamedTuple):
    """Seconds of plain decoding divided by seconds of the run's own decoding, for the same tokens."""

    plain: float
    ours: float
    measured: bool
    steps: int
    lost: int
    """Steps in which plain decoding was faster."""
    interval: tuple[float, float] | None
    """95 % interval of `times`, by drawing steps with replacement."""

    @property
    def times(self) -> float:
        return self.plain / self.ours


def pairs(run: Run, measured: bool) -> list[tuple[int, float, float]]:
    """Return (step, plain seconds, own seconds): of whole rollouts that were compared (measured), or of the rounds that
    have an estimate."""
    names = ("seconds/compare", "seconds/rollout")
    if not measured:
        names = ("rollout/against_plain/plain_seconds", "rollout/against_plain/seconds")
    found = []
    for step in run.steps:
        plain, ours = (number(step, name) for name in names)
        if ours and plain and (step.get("compared") or not measured):
            found.append((step["step"], plain, ours))
    return found


def ratio(run: Run, measured: bool) -> Ratio | None:
    found = pairs(run, measured)
    if not found:
        return None
    plain, ours = (sum(pair[place] for pair in found) for place in (1, 2))
    lost = sum(pair[1] < pair[2] for pair in found)
    return Ratio(plain, ours, measured, len(found), lost, _interval([pair[1:] for pair in found]))


def _interval(found: Sequence[Sequence[float]], draws: int = 400) -> tuple[float, float] | None:
    """Return the 95 % interval of the ratio of sums, or None with fewer than four steps."""
    if len(found) < 4:
        return None
    source, (plain, ours) = np.random.default_rng(0), np.array(found).T
    drawn = (source.integers(len(found), size=len(found)) for _ in range(draws))
    ratios = [plain[steps].sum() / ours[steps].sum() for steps in drawn]
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)


def best_ratio(run: Run) -> Ratio | None:
    """Return the measured ratio, or the estimated one if no step was compared."""
    return ratio(run, measured=True) or ratio(run, measured=False)


def worker_seconds(run: Run) -> dict[str, float]:
    """Return the worker seconds of each kind of work. Phases inside the rollout are scaled to its worker seconds."""
    states, workers = run.states, max(1, run.workers)
    decoding = {name: run.total(f"rollout/{name}_seconds") for name in ("prefill", "draft", "verify", "commit")}
    inside = sum(decoding.values())
    scale = min(1.0, states["ROLLOUT"] / inside) if inside else 0.0
    found = {name: spent * scale for name, spent in decoding.items()}
    found["other decoding"] = states["ROLLOUT"] - sum(found.values())
    found["look-ahead"], found["drafter training"] = states["AHEAD"], states["SPOT"]
    sync = min(states["UPDATE"], workers * run.total("seconds/sync"))
    found["update"], found["sync"] = states["UPDATE"] + states.get("EARLY", 0.0) - sync, sync
    idle = states["IDLE"]
    for phase in ("reward", "save"):
        found[phase] = min(idle, workers * run.total(f"seconds/{phase}"))
        idle -= found[phase]
    found["idle"], found["absent"] = idle, states["ABSENT"]
    known = {"ROLLOUT", "EARLY", "AHEAD", "SPOT", "UPDATE", "IDLE", "ABSENT", "COMPARE"}
    found |= {state.lower(): spent for state, spent in states.items() if state not in known}
    return {name: spent for name, spent in found.items() if spent > 0}


def useful_share(run: Run) -> float | None:
    return run.useful_seconds / sum(run.states.values()) if run.useful_seconds else None


def rewards(run: Run) -> tuple[float, float, int] | None:
    """Return the mean reward of the first and the last tenth of the steps, and how many steps that is."""
    values = [value for value in run.column("reward") if value is not None]
    if not values:
        return None
    tenth = max(1, len(values) // 10)
    return sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth, tenth


def sentences(run: Run) -> list[str]:
    """Return three sentences: what was trained, what was gained, what to change."""
    model = str((run.config.get("model") or {}).get("path", "a model")).rstrip("/").rpartition("/")[2]
    done, wanted = len(run.steps), number(run.config, "train/steps")
    if not done:
        return [f"The run of {model} has not ended a step yet.", "There is no gain to measure yet.", advice(run)[0]]
    ended = "ended" if run.summary else "has not ended"
    trained = (
        f"{model} was trained for {done:,} of {wanted or done:,.0f} steps in {duration(run.total('seconds/total'))} on "
        f"{run.workers or 1} worker{'s' if run.workers > 1 else ''}; the run {ended}."
    )
    return [trained, _gain(run), advice(run)[0]]


def _gain(run: Run) -> str:
    said = []
    if found := rewards(run):
        first, last, tenth = found
        steps = "step" if tenth == 1 else f"{tenth:,} steps"
        said.append(f"The mean reward went from {first:.3f} to {last:.3f} (first and last {steps})")
    if gained := best_ratio(run):
        kind = "measured" if gained.measured else "estimated"
        faster = (
            f"{gained.times:.2f} times as fast as plain decoding" if gained.times >= 1 else "slower than plain decoding"
        )
        said.append(f"rollouts were {faster} ({kind}, {gained.times:.2f} ×)")
    else:
        said.append("the speed against plain decoding was not measured")
    return ", and ".join(said) + "."


class Rule(NamedTuple):
    """Advice that holds if a measured number is above a limit."""

    measured: Callable[[Run], float]
    above: float
    advice: str
    """`{0}` is the measured number."""


def _share(run: Run, part: str, whole: str) -> float:
    return run.total(part) / (run.total(whole) or 1)


def _mean(run: Run, path: str) -> float:
    values = [value for value in run.column(path) if value is not None]
    return sum(values) / len(values) if values else 0.0


def _idle(run: Run) -> float:
    seconds = worker_seconds(run)
    return seconds.get("idle", 0.0) / (sum(seconds.values()) or 1)


def _rejected(run: Run) -> float:
    return 1 - _share(run, "rollout/accepted", "rollout/drafted") if run.total("rollout/drafted") else 0.0


def _update(run: Run) -> float:
    return run.total("seconds/update") / ((run.total("seconds/total") - run.total("seconds/compare")) or 1)


def _slowdown(run: Run) -> float:
    found = best_ratio(run)
    return 1 / found.times if found else 0.0


_RULES = (
    Rule(
        lambda run: float(bool(run.steps) and not best_ratio(run)),
        0,
        "To see what speculation gains, set run.compare_every, for example to 20.",
    ),
    Rule(
        lambda run: _mean(run, "lengths/truncated"),
        0.1,
        "{0:.0%} of responses were truncated: raise rollout.max_new_tokens.",
    ),
    Rule(
        lambda run: _mean(run, "batch/without_spread_share"),
        0.4,
        "{0:.0%} of groups had equal rewards and taught nothing: choose prompts of a fitting difficulty, or set "
        "rollout.max_waves above 1.",
    ),
    Rule(
        _slowdown,
        1,
        "Rollouts took {0:.2f} times as long as plain decoding: set speculation.drafter = 'off', or train a drafter "
        "for this model (tlt draft train).",
    ),
    Rule(
        _idle,
        0.15,
        "Workers were idle for {0:.0%} of their time, because a few long responses kept the others waiting: raise "
        "speculation.look_ahead, or use fewer workers.",
    ),
    Rule(
        _update,
        0.5,
        "The update took {0:.0%} of the time, which faster decoding cannot shorten: raise train.micro_batch_tokens, or "
        "add workers.",
    ),
    Rule(
        lambda run: _share(run, "rollout/preemptions", "responses"),
        0.05,
        "The full cache preempted {0:.2f} requests for each response: raise engine.kv_memory_mb.",
    ),
    Rule(
        _rejected,
        0.6,
        "The target rejected {0:.0%} of draft tokens: start from a drafter trained for this model (tlt draft train).",
    ),
)


def advice(run: Run) -> list[str]:
    """Return what to change to gain more, the most important first."""
    found = [(rule, rule.measured(run)) for rule in _RULES]
    said = [rule.advice.format(value) for rule, value in found if value > rule.above]
    return said or ["No number of this run asks for a change."]


def duration(seconds: float) -> str:
    """Return `42 s`, `3 min` or `2.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def differences(runs: Sequence[Run]) -> list[tuple[str, list[Any]]]:
    """Return the fields of the configuration that differ, each with the value of every run."""
    flat = [dict(_leaves(run.config)) for run in runs]
    keys = sorted({key for tree in flat for key in tree})
    found = [(key, [tree.get(key) for tree in flat]) for key in keys if key != "run.folder"]
    return [(key, values) for key, values in found if any(value != values[0] for value in values)]


def _leaves(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, dict):
        return [(prefix, tree)]
    return [leaf for key, value in tree.items() for leaf in _leaves(value, f"{prefix}.{key}" if prefix else str(key))]
