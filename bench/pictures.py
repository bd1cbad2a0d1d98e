"""Draws docs/step.svg, docs/tokens.svg and docs/gain.svg: python bench/pictures.py RUN

RUN is the folder of a run with several workers and run.compare_every, such as
tlt train recipes/longtail.toml --workers 2 --rollout.prompts_per_step 8 --run.compare_every 4
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from look_ahead_picture import FAINT, INK, PAPER, box, text

from tlt.report.read import RunData, TimelineSpan, read_run

ROOT = Path(__file__).parent.parent
WIDTH, LEFT, RIGHT = 760, 130, 20
LINE, SHOWN = 90, 270  # tokens in a line, and shown of a response
WORK = {
    "decode": ("#0072b2", ("plain", "speculative", "prefill")),
    "update early": ("#e69f00", ("early",)),
    "train the drafter": ("#cc79a7", ("spot", "judge")),
    "decode ahead": ("#009e73", ("ahead",)),
}
SOURCES = {"a": ("look-ahead", "#009e73"), "e": ("learned drafter", "#0072b2"), "s": ("suffix drafter", "#e69f00")}
PLAIN, UPDATE, WAIT = "#8aa4c8", "#d55e00", "#eef0f3"
OWN = ("no draft: the model's own token", "#d0d7de")


def picture(name: str, height: float, parts: list[str]) -> None:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-family="Helvetica, Arial">'
    card = f'<rect width="{WIDTH}" height="{height:.0f}" rx="8" fill="{PAPER}"/>'
    path = ROOT / "docs" / name
    path.write_text("\n".join([head, card, *parts, "</svg>"]) + "\n", encoding="utf-8")
    print(path)


def legend(y: float, colours: dict[str, str]) -> list[str]:
    found, x = [], 20.0
    for name, colour in colours.items():
        found += [box(x, y, 12, 12, colour), text(x + 17, y + 11, name, 12, INK)]
        x += 36 + 5.9 * len(name)
    return found


# -- a step: plain decoding above, the same tokens by tlt below --------------------------------------------------------


def step_picture(run: RunData) -> None:
    """Draw the compared step whose gain is nearest to that of all compared steps together."""
    compared = [step for step in run.steps if step.get("compared") and step["step"] in run.timelines]
    sums = [sum(step["seconds"][name] for step in compared) for name in ("compare", "rollout")]

    def from_mean(step: dict[str, Any]) -> float:
        return abs(step["seconds"]["compare"] / step["seconds"]["rollout"] - sums[0] / sums[1])

    step = min(compared, key=from_mean)
    spans = run.timelines[step["step"]]
    start = {span.name: span.start for span in spans if span.process == 0}
    plain, ours, update = (step["seconds"][name] for name in ("compare", "rollout", "update"))
    scale = (WIDTH - LEFT - RIGHT) / (plain + update)
    y, parts = 48.0, [text(20, 28, f"One step of RL, {run.workers} workers, {step['tokens']:,} tokens", 15)]
    lanes = [("plain decoding", plain, [])]
    for worker in range(1, run.workers + 1):
        mine = [span for span in spans if span.process == worker and not span.is_state]
        lanes.append((f"tlt, worker {worker - 1}", ours, _pieces(mine, start["rollout"], ours)))
    for name, seconds, pieces in lanes:
        parts += [text(20, y + 17, name), box(LEFT, y, seconds * scale, 24, WAIT if pieces else PLAIN)]
        parts += [box(LEFT + at * scale, y, (end - at) * scale, 24, colour) for colour, at, end in pieces]
        parts.append(box(LEFT + seconds * scale, y, update * scale, 24, UPDATE))
        y += 30
        if not pieces or name == lanes[-1][0]:  # below the lane of plain decoding and below those of tlt
            parts.append(text(LEFT + (seconds + update) * scale, y + 8, f"{seconds + update:.1f} s", 12, INK, "end"))
            y += 28
    used = {name: colour for name, (colour, _) in WORK.items() if any(colour in part for part in parts)}
    parts += legend(y, {"all workers, plain decoding": PLAIN, **used, "update": UPDATE, "wait": WAIT})
    picture("step.svg", y + 28, parts)


def _pieces(spans: list[TimelineSpan], begins: float, seconds: float) -> list[tuple[str, float, float]]:
    """Return (colour, start, end) of a worker's work in a rollout, in seconds since the rollout began. Work of one kind
    with a pause of less than 0.1 s is one piece."""
    found: list[tuple[str, float, float]] = []
    for span in spans:
        colour = next((colour for colour, names in WORK.values() if span.name in names), None)
        at, end = max(0.0, span.start - begins), min(seconds, span.start - begins + span.seconds)
        if colour is None or end <= at:
            continue
        if found and found[-1][0] == colour and at - found[-1][2] < 0.1:
            found[-1] = (colour, found[-1][1], end)
        else:
            found.append((colour, at, end))
    return found


# -- the tokens of a response, by who proposed them --------------------------------------------------------------------


def tokens_picture(run: RunData) -> None:
    """Draw the longest response of each of the last steps, one cell per token."""
    last = sorted({row["step"] for row in run.completions})[-6:]
    cell = (WIDTH - LEFT - RIGHT) / LINE
    y, parts = 52.0, [text(20, 28, "The first tokens of the longest response of a step, by who proposed them", 15)]
    for step in last:
        row = max((row for row in run.completions if row["step"] == step), key=lambda row: row["length"])
        parts.append(text(20, y + 11, f"step {step + 1}", 12, FAINT))
        parts.append(text(20, y + 26, f"{row['length']:,} tokens", 11, FAINT))
        at = 0
        for count, letter in re.findall(r"(\d+)(\D)", row["proposed"]):
            left = min(int(count), SHOWN - at)
            while left:  # a run of tokens goes on in the next line
                here = min(left, LINE - at % LINE)
                x, colour = LEFT + at % LINE * cell, SOURCES.get(letter, OWN)[1]
                parts.append(box(x, y + at // LINE * 13, here * cell - 1, 11, colour))
                at, left = at + here, left - here
        y += 13 * (SHOWN // LINE) + 12
    parts += legend(y + 4, dict((*SOURCES.values(), OWN)))
    picture("tokens.svg", y + 28, parts)


# -- the gain by batch size --------------------------------------------------------------------------------------------


def gain_picture() -> None:
    """Draw how many times as fast as plain decoding each batch size was, from two result files."""
    results = {
        "adaptive, learned and suffix drafter": ("longtail_rollout", "adaptive", "#0072b2"),
        "with look-ahead drafts": ("look_ahead_rollout", "adaptive, look-ahead", "#009e73"),
    }
    batches, tall, base = (1, 4, 16, 64), 24.0, 245.0
    parts = [text(20, 28, "Times as fast as plain decoding, by number of responses decoded at once", 15)]
    for times in range(9):
        y = base - times * tall
        parts.append(f'<path d="M{LEFT} {y} H{WIDTH - RIGHT}" stroke="{INK if times == 1 else "#e3e6ea"}"/>')
        parts.append(text(LEFT - 10, y + 4, f"{times}", 12, FAINT, "end"))
    for place, (file, strategy, colour) in enumerate(results.values()):
        rows = json.loads((ROOT / "bench" / "results" / f"{file}.json").read_text(encoding="utf-8"))["rows"]
        for at, batch in enumerate(batches):
            row = next(row for row in rows if row["strategy"] == strategy and row["case"] == f"batch {batch}")
            ratio = row["ratio_to_plain"][1]
            x = LEFT + 40 + at * 150 + place * 44
            parts += [box(x, base - ratio * tall, 40, ratio * tall, colour)]
            parts.append(text(x + 20, base - ratio * tall - 5, f"{ratio:.2f}", 12, INK, "middle"))
    for at, batch in enumerate(batches):
        parts.append(text(LEFT + 82 + at * 150, base + 18, f"{batch}", 12, FAINT, "middle"))
    parts += legend(base + 32, {name: colour for name, (_, _, colour) in results.items()})
    picture("gain.svg", base + 56, parts)


if __name__ == "__main__":
    found = read_run(Path(sys.argv[1]))
    step_picture(found)
    tokens_picture(found)
    gain_picture()
