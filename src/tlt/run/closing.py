"""Summary that is logged at the end of a run, with advice if speculative decoding gained little."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from tlt.gain import FEWEST, NO_DRAFT, Gain, verdict
from tlt.wording import counted

_LITTLE = 1.05  # gain over plain decoding below which `NO_GAIN` is shown
NO_GAIN = (
    "speculation gained little or nothing, because few draft tokens were accepted for the time they took. A drafter "
    "for this model and these prompts helps most: `tlt draft train RECIPE --out FOLDER` trains one in some minutes, "
    "and --speculation.path FOLDER loads it. More --tokens make a drafter better. Short responses and a high "
    "temperature gain least"
)


def closing(summary: dict[str, Any], folder: str) -> list[Text]:
    """Return the lines that are printed at the end of a run. `summary` is the content of summary.json."""
    missing = summary["without_reward"]
    lines = [
        Text(
            f"{counted(summary['steps'], 'step')}: mean reward {_first_and_last(summary)}; "
            f"{summary['seconds']['total']:.0f} s, {summary['tokens_per_second']:,.0f} tokens/s, "
            f"accept length {summary['accept_length']:.2f}, "
            f"{summary['useful_share']:.0%} of the workers' time useful"
        )
    ]
    if summary["gain"]:
        gain = Gain(**summary["gain"])
        lines.append(Text(f"{verdict(gain)}; {same_tokens(summary['compared'])}"))
        if summary["compared"]["differ"]:
            lines.append(Text(why_they_differ(summary)))
        if gained_little(gain):
            lines.append(Text(NO_GAIN))
    trained = sum(worker["idle_seconds_trained"] for worker in summary["workers"])
    if trained >= 0.05:  # less is shown as 0.0
        last = summary["by_step"]["drafter_version"][-1]
        better = f"version {last:.0f} is in use" if last else "the first drafter is still in use"
        lines.append(Text(f"the drafter was trained for {trained:.1f} worker seconds; {better}"))
    if missing:
        share = sum(missing.values()) / summary["responses"]
        named = ", ".join(f"{count:,} {outcome}" for outcome, count in missing.items())
        responses = counted(summary["responses"], "response")
        line = f"{share:.1%} of {responses} had no reward ({named}): see the errors above"
        lines.append(Text(line, "bold red"))
    if peaks := summary["peak_memory"]:
        lines.append(Text(_memory(**peaks)))
    return [*lines, Text(f"all files are in {folder}: summary.json, metrics.jsonl, completions, checkpoints")]


def _memory(driver: dict[str, float], **workers: dict[str, float]) -> str:
    """Return a line with the peak memory of the main process, and of the worker process with the highest peak."""
    if not workers:
        return f"peak memory: {_mib(driver)}"
    largest = max(workers.values(), key=lambda peak: peak["resident"])
    return f"peak memory: main process {_mib(driver)}, largest worker process {_mib(largest)}"


def _mib(peak: dict[str, float]) -> str:
    return f"{peak['resident']:,.0f} MiB" + (f" and {peak['cuda']:,.0f} MiB on CUDA" if "cuda" in peak else "")


def _first_and_last(summary: dict[str, Any]) -> str:
    """Return text with the mean rewards of the first and the last steps, and the number of these steps."""
    first, last, steps = (summary[f"reward_{name}"] for name in ("first", "last", "steps"))
    some = "step" if steps == 1 else f"{steps} steps"
    return f"{first:.3f} in the first {some}, {last:.3f} in the last{'' if steps == 1 else f' {steps}'}"


def gained_little(gain: Gain) -> bool:
    """Return whether drafts were used and gained little or nothing."""
    was_used = gain.is_trusted and gain.fault != NO_DRAFT
    return was_used and gain.pairs >= FEWEST and (gain.times or 1.0) < _LITTLE


def same_tokens(compared: dict[str, Any]) -> str:
    """Return text that says whether the responses equal those of plain decoding, or how many differ."""
    if not compared["differ"]:
        return "same tokens"
    return f"{compared['differ']:,} of {counted(compared['responses'], 'response')} differ"


def why_they_differ(summary: Mapping[str, Any]) -> str:
    """Return text on the cause of responses that differ from those of plain decoding."""
    if summary["exact"]:
        return "the engine was exact at the start, so this is a bug in tlt: `tlt verify` shows which responses differ"
    return f"{summary['exactness']}. The two times are of different responses"
