"""The page: its sections in order, each a function of the runs. Sections without data are left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

from tlt.report import charts, story
from tlt.report.charts import Series, chart, mark, short, table
from tlt.report.energy import energy_rows
from tlt.report.groups import groups_of, ribbons
from tlt.report.read import Run, number

Section = Callable[[Sequence[Run]], str]

_STATE_CLASSES = {
    **{"prefill": "prefill", "draft": "draft", "verify": "verify", "commit": "decode", "other decoding": "decode"},
    **{"look-ahead": "ahead", "drafter training": "spot", "update": "update", "sync": "sync", "reward": "reward"},
    **{"save": "save", "idle": "idle", "absent": "absent"},
}


def page_of(runs: Sequence[Run]) -> str:
    """Return one self-contained HTML page."""
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    title = " and ".join(run.name for run in runs)
    found = [(name, anchor, section(runs)) for name, anchor, section in _SECTIONS]
    found = [(name, anchor, body) for name, anchor, body in found if body]
    links = "".join(f'<a href="#{anchor}">{name}</a>' for name, anchor, _ in found)
    body = "".join(f'<section id="{anchor}"><h2>{name}</h2>{body}</section>' for name, anchor, body in found)
    parts = {"{{title}}": escape(title), "{{links}}": links, "{{body}}": body}
    head, *pieces = template.split("{{")  # once only, so that a response which holds {{body}} stays what it is
    for piece in pieces:
        name, _, rest = piece.partition("}}")
        head += parts["{{" + name + "}}"] + rest
    return head


def columns(runs: Sequence[Run], block: Callable[[Run], str]) -> str:
    """Return a block for each run, side by side if there are several."""
    blocks = [(run, block(run)) for run in runs]
    if not any(html for _, html in blocks):
        return ""
    if len(runs) == 1:
        return blocks[0][1]
    shown = "".join(f"<div><h3>{escape(run.name)}</h3>{html or 'not recorded'}</div>" for run, html in blocks)
    return f'<div class="cols">{shown}</div>'


# -- words -------------------------------------------------------------------------------------------------------------


def _differences(runs: Sequence[Run]) -> str:
    if len(runs) < 2:
        return ""
    names = [escape(run.name) for run in runs]
    rows = [[name, *(short(value(run)) for run in runs)] for name, value in _KEY_NUMBERS.items()]
    fields = [
        [f"<code>{escape(key)}</code>", *(escape(json.dumps(value)) for value in values)]
        for key, values in story.differences(runs)
    ]
    settings = table(["field of the recipe", *names], fields) if fields else "<p>The recipes are the same.</p>"
    return table(["result", *names], rows) + settings


_KEY_NUMBERS: dict[str, Callable[[Run], float | None]] = {
    "steps": lambda run: len(run.steps),
    "seconds in total": lambda run: run.total("seconds/total"),
    "mean reward, last tenth": lambda run: found[1] if (found := story.rewards(run)) else None,
    "times plain decoding, measured": lambda run: found.times if (found := story.ratio(run, True)) else None,
    "times plain decoding, estimated": lambda run: found.times if (found := story.ratio(run, False)) else None,
    "tokens per second of rollout": lambda run: run.total("tokens") / (run.total("seconds/rollout") or 1),
    "accept length": lambda run: run.total("tokens") / (run.total("rollout/row_passes") or 1),
    "useful share of worker time": story.useful_share,
    "CPU seconds": lambda run: run.total("energy/cpu_seconds") or None,
}


def _words(runs: Sequence[Run]) -> str:
    def block(run: Run) -> str:
        said = "".join(f"<p>{escape(sentence)}</p>" for sentence in story.sentences(run))
        more = "".join(f"<li>{escape(line)}</li>" for line in story.advice(run)[1:])
        faults = "".join(f"<li>{escape(fault)}</li>" for fault in run.faults)
        return (
            f'<div class="lead">{said}</div>'
            + (f"<details><summary>More advice</summary><ul>{more}</ul></details>" if more else "")
            + (f'<ul class="faults">{faults}</ul>' if faults else "")
        )

    return columns(runs, block)


# -- the same tokens by plain decoding ---------------------------------------------------------------------------------


def _counterfactual(runs: Sequence[Run]) -> str:
    def block(run: Run) -> str:
        found = [ratio for ratio in (story.ratio(run, True), story.ratio(run, False)) if ratio]
        rows = [_ratio_row(ratio) for ratio in found]
        if not rows:
            return "<p>Not measured: set <code>run.compare_every</code> to decode some steps by plain decoding too.</p>"
        head = ["", "plain decoding", "tlt", "times as fast", "95 % interval", "steps", "steps that lost"]
        return table(head, rows) + chart("Seconds of each rollout", _rollout_series(run), "s")

    note = (
        '<p class="note"><b class="measured">measured</b>: whole steps were decoded a second time by plain decoding, '
        'with the same tokens (run.compare_every). <b class="estimated">estimated</b>: from some rounds with plain '
        "decoding. Every step with a number counts, those that lost included.</p>"
    )
    return columns(runs, block) + note


def _ratio_row(found: story.Ratio) -> list[str]:
    interval = "too few steps" if found.interval is None else "{:.2f} to {:.2f}".format(*found.interval)
    times = f"<strong>{found.times:.2f}</strong>"
    seconds = [f"{spent:,.1f} s" for spent in (found.plain, found.ours)]
    return [mark(found.measured), *seconds, times, interval, f"{found.steps:,}", f"{found.lost:,}"]


def _rollout_series(run: Run) -> list[Series]:
    steps = [step["step"] for step in run.steps]
    series = [Series("tlt, measured", steps, run.column("seconds/rollout"))]
    for measured in (True, False):
        found = story.pairs(run, measured)
        name = f"plain decoding, {'measured' if measured else 'estimated'}"
        series.append(Series(name, [pair[0] for pair in found], [pair[1] for pair in found], dots=measured))
    return series


def _proof(runs: Sequence[Run]) -> str:
    def block(run: Run) -> str:
        tokens, responses, differ = (run.total(f"compared/{name}") for name in ("tokens", "responses", "differ"))
        sha = run.summary.get("policy_sha256")
        restarts = max(0, run.driver_starts - 1)
        replaced = max(0, run.worker_starts - run.workers * max(1, run.driver_starts))
        rows = [
            ["policy sha256", f"<code>{escape(str(sha))}</code>" if sha else "known when the run ends"],
            ["tokens compared with plain decoding", f"{tokens:,.0f} in {responses:,.0f} responses"],
            ["responses that differ", f"<strong>{differ:,.0f}</strong>" if tokens else "not compared"],
            ["prompts replayed within an epoch", f"{run.replayed:,}"],
            ["steps skipped", f"{run.missing_steps:,}"],
            ["workers replaced", f"{replaced:,}" if run.worker_starts else "not recorded"],
            ["seconds that a worker was absent", short(run.states["ABSENT"])],
            ["restarts survived", f"{restarts:,}" if run.driver_starts else "not recorded"],
        ]
        return table(["", ""], rows)

    return columns(runs, block)


# -- time --------------------------------------------------------------------------------------------------------------


def _time(runs: Sequence[Run]) -> str:
    def block(run: Run) -> str:
        seconds = story.worker_seconds(run)
        classes = {name: _STATE_CLASSES.get(name, "other") for name in seconds}
        share = story.useful_share(run)
        useful = f"<p>Useful share of worker time: <strong>{share:.1%}</strong>.</p>" if share is not None else ""
        return useful + charts.bar(seconds, classes, "Worker seconds by kind of work") + _timeline(run)

    return columns(runs, block)


def _timeline(run: Run) -> str:
    """Return the spans of some steps, for the script of the page to draw."""
    if not run.timelines:
        return ""
    data = {}
    for step, spans in run.timelines.items():
        names = sorted({span.name for span in spans})
        places = {name: place for place, name in enumerate(names)}
        rows = [
            [places[span.name], span.process, int(span.is_state), round(span.start, 4), round(span.seconds, 4)]
            for span in spans
        ]
        data[step] = {"names": names, "spans": rows}
    options = "".join(f'<option value="{step}">step {step}</option>' for step in data)
    buttons = "".join(
        f'<button type="button" data-do="{do}" aria-label="{label}">{sign}</button>'
        for do, label, sign in (
            ("in", "zoom in", "+"),
            ("out", "zoom out", "−"),
            ("left", "left", "←"),
            ("right", "right", "→"),
        )
    )
    return (
        f'<figure class="timeline"><figcaption>Timeline of <select aria-label="step">{options}</select> {buttons}'
        '</figcaption><canvas tabindex="0" role="img" aria-label="What the driver and each worker did when. Keys: '
        'plus, minus, left, right."></canvas><output aria-live="polite"></output><ul class="legend"></ul>'
        f'<script type="application/json">{_json(data)}</script></figure>'
    )


def _json(tree: object) -> str:
    """Return JSON that cannot end its script element."""
    return json.dumps(tree, separators=(",", ":")).replace("<", "\\u003c")


# -- curves ------------------------------------------------------------------------------------------------------------


def _curve(runs: Sequence[Run], title: str, paths: Sequence[tuple[str, str]], unit: str = "", note: str = "") -> str:
    """Return a chart of some numbers by path, of all runs together."""
    series = []
    for run in runs:
        steps = [step["step"] for step in run.steps]
        for name, path in paths:
            values = run.column(path)
            sparse = sum(value is not None for value in values) < len(values)
            named = name if len(runs) == 1 else f"{run.name}: {name}"
            series.append(Series(named, steps, values, dots=sparse and len(values) < charts.MOST_POINTS))
    return chart(title, series, unit, note)


def _names(runs: Sequence[Run], path: str) -> list[str]:
    """Return the names that the steps have under a path, such as the tasks under `tasks`."""
    found: dict[str, None] = {}
    for step in (step for run in runs for step in run.steps):
        tree = step
        for name in path.split("/"):
            tree = tree.get(name) if isinstance(tree, dict) else None
        found |= dict.fromkeys(tree if isinstance(tree, dict) else ())
    return list(found)


_LENGTHS = [(name, f"lengths/{name}") for name in ("median", "p99", "max")]
_SHARES = [("truncated responses", "lengths/truncated"), ("groups of equal rewards", "batch/without_spread_share")]
_MISMATCH = [("mean", "update/mismatch_mean"), ("99.9 % of tokens", "update/mismatch_p999")]


def _learning(runs: Sequence[Run]) -> str:
    tasks = [(task, f"tasks/{task}/mean") for task in _names(runs, "tasks") if "/" not in task][:7]
    held_out = [(name, f"eval/{name}") for name in _names(runs, "eval") if name.startswith(("mean@", "pass@"))]
    curves = (
        ("Mean reward", [("all", "reward"), *tasks], ""),
        ("Held-out reward", held_out, ""),
        ("Length of responses", _LENGTHS, "tokens"),
        ("Shares", _SHARES, ""),
        ("Entropy", [("entropy", "update/entropy")], "nats"),
        ("Divergence from the first model", [("KL", "update/kl")], "nats"),
        ("Mismatch between trainer and rollout", _MISMATCH, "nats"),
    )
    return "".join(_curve(runs, *curve) for curve in curves)


_SPOT = [("drafter in use", "rollout/spot/accept_length"), ("drafter in training", "rollout/spot/candidate")]


def _drafter(runs: Sequence[Run]) -> str:
    curves = (
        ("Accept length", [("tokens per target pass", "accept_length")], "tokens"),
        ("Accept length on the last rollout's data", _SPOT, "tokens"),
        ("Version of the drafter", _present(runs, "rollout/spot/version"), ""),
        ("Training of the drafter", _present(runs, "rollout/drafter_tokens"), "tokens"),
        ("Rollout blocked by drafter training", _present(runs, "rollout/spot_seconds"), "s"),
    )
    depths = "".join(_by_depth(runs, name) for name in _names(runs, "rollout/by_depth"))
    return depths + "".join(_curve(runs, *curve) for curve in curves)


def _by_depth(runs: Sequence[Run], drafter: str) -> str:
    paths = [(f"depth {depth}", f"rollout/by_depth/{drafter}/{depth}") for depth in (1, 2, 3, 4, 6, 8, 12, 16)]
    note = "Of the drafts whose earlier tokens were all accepted."
    return _curve(runs, f"Acceptance rate by depth: {drafter}", paths, note=note)


def _present(runs: Sequence[Run], path: str) -> list[tuple[str, str]]:
    """Return the name and the path of a number, or nothing if it is 0 in every step."""
    name = path.rpartition("/")[2].replace("_", " ")
    return [(name, path)] if any(number(step, path) for run in runs for step in run.steps) else []


def _energy(runs: Sequence[Run]) -> str:
    return columns(runs, energy_rows)


def _responses(runs: Sequence[Run]) -> str:
    return columns(runs, ribbons)


def _groups(runs: Sequence[Run]) -> str:
    found = columns(runs, groups_of)
    box = '<label>Search prompts and responses <input type="search" id="search"></label> <output id="hits"></output>'
    return f"<p>{box}</p>{found}" if found else ""


_SECTIONS: Iterable[tuple[str, str, Section]] = (
    ("Differences", "differences", _differences),
    ("In words", "words", _words),
    ("Against plain decoding, on the same tokens", "plain", _counterfactual),
    ("Proof", "proof", _proof),
    ("Where the time went", "time", _time),
    ("Learning", "learning", _learning),
    ("Who proposed each token", "tokens", _responses),
    ("Best and worst groups", "groups", _groups),
    ("The drafter", "drafter", _drafter),
    ("Energy and cost", "energy", _energy),
)
