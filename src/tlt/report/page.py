"""Reader of a run's files, and content of report.html as one JSON value, with conclusions on speed-up over plain
decoding, use of worker time, advice. If a file is missing or damaged, the page says so. The script page.js defines the
sections of the page and draws them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from tlt.energy import total_energy
from tlt.files import parse_json, read_json
from tlt.gain import gain_of, verdict
from tlt.metrics import LAST_EVALUATION, first_and_last, leaves
from tlt.trace import FACTS, IDLE, ROLLOUT, UPDATE
from tlt.wording import counted

FILES = ("metrics.jsonl", "summary.json", "config.json")


@dataclass
class RunData:
    """Data of a run for its page. `steps` are the lines of metrics.jsonl without prompts, workers and memory."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    last_evaluation: dict[str, Any] = field(default_factory=dict)
    """evaluation after the last step: `step` (the number of steps) and `eval`"""
    states: Counter[str] = field(default_factory=Counter)
    """state of a worker -> seconds in it, summed over all workers and steps"""
    useful_seconds: float = 0.0
    """seconds of useful work, summed over all workers and steps, as `metrics.useful_share` defines it"""
    workers: int = 0
    replayed: int = 0
    """number of times that a prompt was used again in the same epoch"""
    faults: list[str] = field(default_factory=list)
    """one sentence for each missing or damaged file of the run"""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def missing_steps(self) -> int:
        return self.steps[-1]["step"] - len(self.steps) if self.steps else 0

    @cached_property
    def columns(self) -> dict[str, dict[int, float]]:
        """Path of a metric in metrics.jsonl, such as `seconds/rollout` -> step -> number."""
        found: dict[str, dict[int, float]] = {}
        for step in [*self.steps, *([self.last_evaluation] if self.last_evaluation else [])]:
            for path, value in leaves(step, "/"):
                if isinstance(value, (int, float)) and isfinite(value):
                    found.setdefault(path, {})[step["step"]] = value
        return found

    def column(self, path: str) -> dict[int, float]:
        return self.columns.get(path, {})

    def total(self, path: str) -> float:
        return sum(self.column(path).values())


def read_run(folder: Path) -> RunData:
    run = RunData(folder)
    run.config, run.summary = _object(run, "config.json"), _object(run, "summary.json")
    _read_metrics(run)
    return run


@contextmanager
def _reading(run: RunData, name: str) -> Iterator[None]:
    """Report in `run.faults` that a file cannot be read or is damaged, if the block raises OSError or ValueError."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        run.faults.append(f"{name} cannot be read ({why})." if why else f"{name} is damaged.")


def _object(run: RunData, name: str) -> dict[str, Any]:
    found, path = dict[str, Any](), run.folder / name
    if not path.exists():
        run.faults.append(f"{name} is missing{' because the run has not ended' * (name == 'summary.json')}.")
        return found
    with _reading(run, name):
        found = read_json(path)
    return found


def _lines(run: RunData, name: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of each line of a file. A line that cannot be parsed, such as the incomplete last line of a
    killed run, is skipped and reported in `run.faults`."""
    path, damaged = run.folder / name, 0
    if not path.is_file():
        run.faults.append(f"{name} is missing.")
        return
    with _reading(run, name), path.open("rb") as file:
        for line in file:
            try:
                yield parse_json(line)
            except ValueError:
                damaged += 1
    if damaged:
        run.faults.append(f"{name} has {damaged} damaged line(s), which this page leaves out.")


def _read_metrics(run: RunData) -> None:
    seen: set[tuple[int, ...]] = set()
    for line in _lines(run, "metrics.jsonl"):
        if line.keys() == LAST_EVALUATION:
            run.last_evaluation = line
            continue
        for prompt in map(tuple, line.pop("prompts", ())):
            run.replayed += prompt in seen
            seen.add(prompt)
        workers, _ = line.pop("workers", []), line.pop("memory", None)
        run.workers = max(run.workers, len(workers))
        for worker in workers:
            run.states.update(worker)
            run.useful_seconds += line.get("useful_share", 0.0) * sum(worker.values())
        run.steps.append(line)
    if not run.steps:
        run.faults.append("No step has ended yet.")


def page_of(run: RunData) -> str:
    """Return the page about a run as self-contained HTML."""
    content = content_of(run)
    # JSON.parse in browsers refuses NaN, and a "<" could end the HTML script element
    finite = json.loads(json.dumps(content), parse_constant=lambda name: None)
    text = json.dumps(finite, separators=(",", ":")).replace("<", "\\u003c")
    html, script = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.html", "page.js"))
    return html.replace("{{script}}", script).replace("{{content}}", text)


def content_of(run: RunData) -> dict[str, Any]:
    """Return the numbers and texts of a run that the script page.js shows, as a dictionary for JSON."""
    gain = gain_of(run.steps)
    return {
        "name": run.name,
        "num_steps": len(run.steps),
        "sentences": sentences(run),
        "advice": advice(run)[1:],
        "faults": run.faults,
        "gain": gain._asdict() | {"verdict": verdict(gain)} if gain else None,
        "policy_sha256": run.summary.get("policy_sha256"),
        "proof": _proof(run),
        "useful_share": useful_share(run),
        "worker_seconds": worker_seconds(run),
        "has_trace": (run.folder / "trace.json").exists(),
        "columns": {path: list(column.items()) for path, column in run.columns.items()},
        "energy": total_energy(run.steps),
    }


def _proof(run: RunData) -> dict[str, str | float]:
    tokens, responses, differ = (run.total(f"compared/{name}") for name in ("tokens", "responses", "differ"))
    compared = {"tokens compared with plain decoding": f"{tokens:,.0f} in {responses:,.0f} responses"} if tokens else {}
    return {
        "bits with and without speculation": run.summary.get("exactness", "known when the run ends"),
        **compared,
        "responses that differ": differ if tokens else "not compared",
        "prompts replayed within an epoch": run.replayed,
        "steps skipped": run.missing_steps,
        "seconds that a worker was absent": run.states["ABSENT"],
    }


# -- conclusions -------------------------------------------------------------------------------------------------------


def worker_seconds(run: RunData) -> dict[str, float]:
    """Return the seconds of each kind of work, summed over all workers. The phases of decoding (prefill, draft, verify,
    commit) are scaled down if their sum exceeds the workers' rollout time."""
    states, workers = run.states.copy(), max(1, run.workers)
    rollout, idle = states.pop(ROLLOUT, 0.0), states.pop(IDLE, 0.0)
    found = {name: run.total(f"rollout/{name}_seconds") for name in ("prefill", "draft", "verify", "commit")}
    inside = sum(found.values())
    found = {name: spent * min(1.0, rollout / inside) for name, spent in found.items() if inside}
    found["other decoding"] = rollout - sum(found.values())
    for state, spent in states.items():
        word = FACTS[state].word if state in FACTS else state.lower()
        found[word] = found.get(word, 0.0) + spent
    found["sync"] = min(states[UPDATE], workers * run.total("seconds/sync"))
    found["update"] = found.get("update", 0.0) - found["sync"]
    for phase in ("reward", "save"):
        found[phase] = min(idle, workers * run.total(f"seconds/{phase}"))
        idle -= found[phase]
    found["idle"] = idle
    return {name: spent for name, spent in found.items() if spent > 0}


def useful_share(run: RunData) -> float | None:
    return run.useful_seconds / run.states.total() if run.useful_seconds else None


def rewards(run: RunData) -> tuple[float, float, int] | None:
    """Return the mean rewards of the first and of the last steps, and the number of these steps."""
    values = list(run.column("reward").values())
    return first_and_last(values) if values else None


def sentences(run: RunData) -> list[str]:
    """Return three sentences for the page: what was trained, the gain in reward and speed, the first advice."""
    model = Path(run.config.get("model", {}).get("path", "a model")).name
    done, advised = len(run.steps), advice(run)[0]
    if not done:
        return [f"The run of {model} has not ended a step yet.", "There is no gain to measure yet.", advised]
    wanted, workers = run.config.get("train", {}).get("steps", done), run.workers or 1
    took, ended = _duration(run.total("seconds/total")), "ended" if run.summary else "has not ended"
    trained = f"{model} was trained for {done:,} of {counted(int(wanted), 'step')} in {took}"
    return [f"{trained} on {counted(workers, 'worker')}; the run {ended}.", _gain(run), advised]


def _duration(seconds: float) -> str:
    """Return a duration as text, such as `42 s`, `3 min` or `2.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _gain(run: RunData) -> str:
    reward = ""
    if found := rewards(run):
        first, last, count = found
        steps = "step" if count == 1 else f"{count:,} steps"
        reward = f"The mean reward went from {first:.3f} to {last:.3f} (first and last {steps}), and "
    if gained := gain_of(run.steps):
        return f"{reward}{verdict(gained)}."
    return f"{reward}the speed against plain decoding was not measured."


_RULES = {
    "not measured": (0, "To see what speculation gains, set run.compare_every, for example to 20."),
    "unrewarded": (0.05, "{:.0%} of responses got no reward: read reward.log in the run's folder, which has what the "
                   "reward function printed, or raise reward.timeout_seconds."),
    "truncated": (0.1, "{:.0%} of responses were truncated: raise rollout.max_new_tokens."),
    "equal": (0.4, "{:.0%} of groups had equal rewards and gave no gradient: choose prompts that are neither too easy "
              "nor too hard, or set rollout.max_waves above 1."),
    "slower": (1, "Rollouts took {:.2f} times as long as plain decoding: set speculation.drafter = 'off', or train a "
               "drafter for this model (tlt draft train)."),
    "idle": (0.15, "Workers were idle for {:.0%} of their time, because a few long responses kept the others waiting: "
             "raise speculation.look_ahead, or use fewer workers."),
    "update": (0.5, "The update took {:.0%} of the time, and faster decoding cannot shorten it: raise "
               "train.micro_batch_tokens if the memory allows, or use more GPUs or machines."),
    "preempted": (0.05, "Requests were preempted {:.2f} times per response, because the key-value cache was full: "
                  "raise engine.kv_memory_mb."),
    "rejected": (0.6, "The target rejected {:.0%} of draft tokens: start from a drafter trained for this model (tlt "
                 "draft train)."),
}  # fmt: skip
"""name of a number -> (limit, advice if the number is above the limit); the most important comes first"""


def advice(run: RunData) -> list[str]:
    """Return advice on what to change in the recipe, the most important first, or a sentence that there is none."""
    total, seconds, found = run.total, worker_seconds(run), gain_of(run.steps)
    without_compare = total("seconds/total") - total("seconds/compare")
    numbers = {
        "not measured": float(bool(run.steps) and not found),
        "unrewarded": total("batch/unrewarded") / (total("responses") or 1),
        "truncated": fmean(run.column("lengths/truncated").values() or [0.0]),
        "equal": fmean(run.column("batch/without_spread_share").values() or [0.0]),
        "slower": 1 / found.median if found and found.is_trusted and found.high < 1 else 0.0,
        "idle": seconds.get("idle", 0.0) / (sum(seconds.values()) or 1),
        "update": total("seconds/update") / (without_compare or 1),
        "preempted": total("rollout/preemptions") / (total("responses") or 1),
        "rejected": 1 - total("rollout/accepted") / drafted if (drafted := total("rollout/drafted")) else 0.0,
    }
    advised = [text.format(numbers[name]) for name, (limit, text) in _RULES.items() if numbers[name] > limit]
    none = "No number of this run asks for a change." if run.steps else "Advice needs the numbers of a finished step."
    return advised or [none]
