"""Figures of bench/simulate.py: from runs on this machine, rounds of bench/gpu_rounds.py, and the TLT paper."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from profile_run import SKIPPED
from simulated import Known, Profile, Rounds, Training

from tlt.config import Config, parse_config
from tlt.files import read_json
from tlt.metrics import read_metrics, write_json
from tlt.trace import SPOT

_BENCH = Path(__file__).parent
_ENOUGH = 5  # least number of recorded rounds with a number of rows
_CALL = 0.002  # assumed seconds from a worker's call to its next


class KnownGroup(NamedTuple):
    """Length of a prompt in tokens, and what the responses to it will be."""

    prompt: int
    responses: Sequence[Known]


# -- runs on this machine ----------------------------------------------------------------------------------------------


def run_all(config: Config, folder: Path, steps: int, workers: Sequence[int]) -> None:
    """Do all runs of a calibration, with one thread per worker: one with look-ahead drafts for all requests, and one
    with each number of workers."""
    _run(config, folder / "foreseen", steps, 1, foresees=True)
    for count in workers:
        _run(config, folder / f"workers_{count}", steps, count)


def _run(config: Config, folder: Path, steps: int, workers: int, foresees: bool = False) -> None:
    tree = config.model_dump(mode="json")
    tree["cluster"]["workers"], tree["train"]["steps"] = workers, steps
    tree["run"] |= {"folder": str(folder), "save_every": 0, "overwrite": True, "compare_every": 0, "trackers": []}
    write_json(folder.with_suffix(".json"), parse_config(tree).model_dump(mode="json"))
    command = [sys.executable, str(_BENCH / "profile_run.py"), str(folder.with_suffix(".json")), str(int(foresees))]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run's steps, without the first ones."""
    return read_metrics(folder)[SKIPPED:]


def mean_seconds(folder: Path, *phases: str) -> float:
    """Return the mean seconds of these phases in a run's steps."""
    return statistics.fmean(sum(line["seconds"].get(phase, 0.0) for phase in phases) for line in lines_of(folder))


def measured_profile(folder: Path, workers: Sequence[int]) -> Profile:
    """Return the profile of this machine, from the runs that `run_all` did in this folder."""
    alone, foreseen = folder / "workers_1", folder / "foreseen"
    lines = lines_of(alone)
    prefill = statistics.fmean(line["rollout"]["prefill_seconds"] for line in lines)  # of all prompts at once
    recorded, other = read_json(alone / "rounds.json"), read_json(foreseen / "rounds.json")
    inside = sum(seconds for _, seconds, _ in recorded["own"]) / len(lines) + prefill
    scale = mean_seconds(alone, "rollout") / inside
    update, optimizer = _update_seconds(alone)
    tokens = sum(line["tokens"] for line in lines_of(foreseen))
    return Profile(
        plain=_rounds(other["plain"], scale),
        drafted=_rounds(recorded["own"], scale),
        ahead=_rounds(other["own"], scale),
        seen=sum(line["rollout"]["seen_ahead"] for line in lines_of(foreseen)) / tokens,
        prefill=scale * prefill,
        update=update,
        optimizer=optimizer,
        sync=mean_seconds(alone, "sync"),
        other=mean_seconds(alone, "reward", "other"),
        call=_CALL,
        training=_training(folder / "workers_2"),
        speeds=tuple(_share_of_cores(folder / f"workers_{count}") for count in workers),
    )


def _share_of_cores(folder: Path) -> float:
    """Return the share of the time of an update, in which all workers compute, for which the run's threads had a core.
    Workers share cores with the driver, with Ray, and with one another if they are more than the cores."""
    updates = [line["energy"]["phases"]["update"] for line in lines_of(folder)]
    computed, waited = (sum(one[name] for one in updates) for name in ("cpu_seconds", "cpu_wait_seconds"))
    return computed / (computed + waited)


def _rounds(recorded: Sequence[tuple[int, float, int]], scale: float) -> Rounds:
    """Return mean rounds by number of rows. `scale`: (seconds of rollouts) / (seconds of their rounds)."""
    by_rows: dict[int, list[tuple[float, float]]] = {}
    for rows, seconds, tokens in recorded:
        by_rows.setdefault(rows, []).append((scale * seconds, tokens / rows))
    known = {rows: np.mean(found, axis=0) for rows, found in sorted(by_rows.items()) if len(found) >= _ENOUGH}
    return Rounds(list(known), [float(mean[0]) for mean in known.values()], [float(mean[1]) for mean in known.values()])


def _update_seconds(folder: Path) -> tuple[float, float]:
    """Return the seconds of an update for each token of a response that has a gradient, and those without tokens."""
    tokens: dict[int, float] = {}
    for line in _completions(folder):
        tokens[line["step"]] = tokens.get(line["step"], 0.0) + line["length"] * bool(line["advantage"])
    counts, seconds = zip(
        *((tokens[line["step"]], line["seconds"]["update"]) for line in lines_of(folder)), strict=True
    )
    per_token, fixed = map(float, np.polyfit(counts, seconds, 1))
    if min(per_token, fixed) < 0:  # too few steps, or too noisy
        per_token, fixed = sum(seconds) / sum(counts), 0.0
    return per_token, fixed


def _training(folder: Path) -> Training | None:
    """Return the cost of drafter training in a run. Its gain is assumed to be 0, because the task stays the same."""
    lines = lines_of(folder)
    seconds = sum(worker[SPOT] for line in lines for worker in line["workers"])
    tokens = sum(line["rollout"]["drafter_tokens"] for line in lines)
    each = read_json(folder / "config.json")["speculation"]["training"]["micro_batch_tokens"]
    return Training(seconds * each / tokens) if tokens else None


def _completions(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text(encoding="utf-8").splitlines()]


def recorded_lengths(folder: Path) -> list[list[KnownGroup]]:
    """Return the groups of each step of a run, in prompt order."""
    found: dict[tuple[int, int, int], dict[int, Known]] = {}
    for line in _completions(folder):
        group = found.setdefault((line["step"], line["prompt_id"], line["epoch"]), {})
        pace = line["length"] / max(1, line["decoded"]["row_passes"])
        group[line["index"]] = Known(line["length"], line["reward"] or 0.0, pace)
    steps, seen = [], 0
    for line in read_metrics(folder):
        prompt = round((line["tokens_seen"] - seen - line["tokens"]) / line["responses"])
        groups = [found[line["step"], row, epoch] for row, epoch in line["prompts"]]
        steps.append([KnownGroup(prompt, [group[index] for index in sorted(group)]) for group in groups])
        seen = line["tokens_seen"]
    return steps


def resampled(steps: Sequence[Sequence[KnownGroup]], prompts: int, count: int) -> list[list[KnownGroup]]:
    """Return `count` steps of `prompts` groups each, drawn from recorded groups."""
    groups, draws = [group for step in steps for group in step], random.Random(0)
    return [draws.choices(groups, k=prompts) for _ in range(count)]


# -- rounds of bench/gpu_rounds.py -------------------------------------------------------------------------------------

_ACCEPTED = 0.7  # assumed acceptance rate of each draft token
_AHEAD_TOKENS = 8.0  # assumed tokens that a row with a look-ahead draft gains in a round


def gpu_profile(file: Path, shape: str) -> Profile:
    """Return the profile of a GPU from a JSON file of bench/gpu_rounds.py with chains 0 and another one, and an update
    (`--train`). Acceptance is assumed. A round with look-ahead drafts takes as long as one with the chain."""
    cases = [case for case in read_json(file)["cases"] if case["shape"] == shape]
    plain, drafted = dict[int, float](), dict[int, float]()
    chain = max(case["chain"] for case in cases)
    for case in cases:
        if "ms" in case and case["chain"] in (0, chain):
            (drafted if case["chain"] else plain)[case["batch"]] = case["ms"] / 1000
    gained = sum(_ACCEPTED**level for level in range(chain + 1))
    update = next(case for case in cases if "update_seconds" in case)
    return Profile(
        plain=_constant(plain, 1.0),
        drafted=_constant(drafted, gained),
        ahead=_constant(drafted, _AHEAD_TOKENS),
        seen=1 - 1 / _AHEAD_TOKENS,
        prefill=4 * plain[min(plain)],
        update=update["update_seconds"] / (8 * update["context"]),
    )


def _constant(seconds: Mapping[int, float], tokens: float) -> Rounds:
    rows = sorted(seconds)
    return Rounds(rows, [seconds[n] for n in rows], [tokens] * len(rows))


# -- the TLT paper -----------------------------------------------------------------------------------------------------

PAPER_ROWS = (1, 2, 4, 8, 16, 32, 33, 256)
_SPEEDUP = (3.62, 3.39, 3.13, 2.73, 2.67, 2.48)
"""Table 4 of arXiv 2511.16665 (Qwen-32B, H100): times as fast as plain decoding at batch 1 to 32, with the best number
of tokens to verify. Above 32 rows the paper decodes plainly."""
_ACCEPT = (8.21, 7.97, 7.97, 6.80, 6.80, 6.80)  # accept lengths of these, from Figure 13 (depth 10)
_VERIFY_16 = (3.22, 3.08, 3.01, 2.73, 2.67, 2.48)  # the same with 16 tokens to verify, accept length 6.80
_FROZEN, _TRAINED = 4.59, 6.53  # Table 6: accept length during RL of a drafter that is not trained, and of one that is
_ROUND, _PER_ROW = 0.01, 0.01  # assumed seconds of a plain round of one row, and its growth with each further row
_DRAFTING = 1.0  # assumed duration of the drafter's ten passes, in plain rounds
_MEDIAN, _BETWEEN, _WITHIN, _LONGEST = 3_000, 0.8, 0.6, 20_480  # log-normal lengths; 75th percentile 5,900


def paper_profile(update: float) -> Profile:
    """Return a profile with the speeds of the paper. `update`: seconds per token of an update."""
    plain = [_ROUND * (1 + _PER_ROW * rows) for rows in PAPER_ROWS]
    few = len(_SPEEDUP)
    drafted = [accept / speedup for accept, speedup in zip(_ACCEPT, _SPEEDUP, strict=True)]
    ahead = [6.80 / speedup - _DRAFTING for speedup in _VERIFY_16]
    tokens = [1 + (accept - 1) * (_FROZEN - 1) / (_ACCEPT[0] - 1) for accept in _ACCEPT]
    wide = len(PAPER_ROWS) - few
    return Profile(
        plain=Rounds(PAPER_ROWS, plain, [1.0] * len(plain)),
        drafted=Rounds(PAPER_ROWS, _times(plain, [*drafted, *[1.0] * wide]), [*tokens, *[1.0] * wide]),
        ahead=Rounds(PAPER_ROWS, _times(plain, [*ahead, *[2.0] * wide]), [_AHEAD_TOKENS] * len(plain)),
        seen=1 - 1 / _AHEAD_TOKENS,
        prefill=4 * _ROUND,
        update=update,
        training=Training(0.2, (_TRAINED - 1) / (_FROZEN - 1) - 1),
    )


def _times(seconds: Sequence[float], factors: Sequence[float]) -> list[float]:
    return [one * factor for one, factor in zip(seconds, factors, strict=True)]


def paper_lengths(prompts: int, count: int, group: int) -> list[list[KnownGroup]]:
    """Return `count` steps of groups with log-normal lengths, cut off at the paper's 20,480 tokens. The paper says that
    the longest response is far above the 75th percentile. Lengths in a group are alike. Rewards are 0 or 1."""
    draws = random.Random(0)

    def drawn() -> KnownGroup:
        middle = draws.gauss(np.log(_MEDIAN), _BETWEEN)
        lengths = [int(min(_LONGEST, max(16.0, np.exp(draws.gauss(middle, _WITHIN))))) for _ in range(group)]
        return KnownGroup(200, [Known(length, float(draws.random() < 0.5)) for length in lengths])

    return [[drawn() for _ in range(prompts)] for _ in range(count)]
