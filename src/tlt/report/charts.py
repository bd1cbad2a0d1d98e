"""Charts as SVG, and small pieces of HTML. Series differ by colour and by dash, so that colour is never needed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log10
from typing import NamedTuple

MOST_POINTS = 500
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 200, 60, 24, 10
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4", "12 3", "1 3", "6 2 1 2")


class Series(NamedTuple):
    name: str
    steps: Sequence[int]
    values: Sequence[float | None]
    dots: bool = False
    """Draw single dots, for values that only some steps have."""


def chart(title: str, series: Sequence[Series], unit: str = "", note: str = "") -> str:
    """Return a figure of lines over steps, or nothing if no series has a value."""
    shown = [thinned(one) for one in series]
    shown = [one for one in shown if one.steps]
    if not shown:
        return ""
    steps = [step for one in shown for step in one.steps]
    values = [value for one in shown for value in one.values if value is not None]
    low, high = min(0.0, *values), max(0.0, *values)
    ticks = _ticks(low, high if high > low else low + 1)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    first, last = min(steps), max(max(steps), min(steps) + 1)

    def x(step: float) -> float:
        return _LEFT + (step - first) / (last - first) * (_WIDTH - _LEFT - 8)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _BOTTOM - _TOP)

    grid = "".join(
        f'<path class="grid" d="M{_LEFT} {y(tick):.1f}H{_WIDTH}"/>'
        f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" class="end">{short(tick)}</text>'
        for tick in ticks
    )
    axis = "".join(
        f'<text x="{x(step):.1f}" y="{_HEIGHT - 6}" class="{place}">{step}</text>'
        for step, place in ((first, "start"), (last, "end"))
    )
    lines = "".join(_line(one, index, x, y) for index, one in enumerate(shown))
    data = {"x0": _LEFT, "x1": _WIDTH - 8, "first": first, "last": last, "unit": unit}
    data["series"] = [{"name": one.name, "steps": one.steps, "values": _rounded(one.values)} for one in shown]
    legend = "".join(
        f'<li class="s{index % 8}"><svg viewBox="0 0 24 8" aria-hidden="true">{_sample(one, index)}</svg>'
        f"{escape(one.name)}</li>"
        for index, one in enumerate(shown)
    )
    label = escape(f"{title}{', ' + unit if unit else ''}, over steps")
    return (
        f'<figure class="chart"><figcaption>{escape(title)}{_small(unit)}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" tabindex="0" aria-label="{label}" '
        f"data-chart='{escape(json.dumps(data), quote=True)}'>{grid}{axis}{lines}"
        f'<path class="cursor" d=""/></svg>'
        f'<output aria-live="polite"></output><ul class="legend">{legend}</ul>{_note(note)}</figure>'
    )


def thinned(series: Series) -> Series:
    """Return at most about MOST_POINTS values. Of each stretch of steps the lowest and the highest one stay."""
    points = [(step, value) for step, value in zip(series.steps, series.values, strict=True) if value is not None]
    if len(points) > MOST_POINTS:
        size = -(-len(points) * 2 // MOST_POINTS)
        stretches = [points[at : at + size] for at in range(0, len(points), size)]
        kept = [
            sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}) for part in stretches
        ]
        points = [point for part in kept for point in part]
    return series._replace(steps=[step for step, _ in points], values=[value for _, value in points])


def _line(series: Series, index: int, x, y) -> str:
    points = [(x(step), y(value)) for step, value in zip(series.steps, series.values, strict=True)]
    if series.dots or len(points) == 1:
        dots = "".join(f"M{a - 5:.1f} {b:.1f}h10m-5-5v10" for a, b in points)
        return f'<path class="line s{index % 8}" d="{dots}"/>'
    path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
    return f'<path class="line s{index % 8}" stroke-dasharray="{_DASHES[index % 8]}" d="{path}"/>'


def _sample(series: Series, index: int) -> str:
    path = "M7 4h10m-5-4v8" if series.dots else "M0 4H24"
    dash = "" if series.dots else _DASHES[index % 8]
    return f'<path class="line s{index % 8}" stroke-dasharray="{dash}" d="{path}"/>'


def _ticks(low: float, high: float) -> list[float]:
    """Return a few round numbers that span a range."""
    rough = (high - low) / 4
    power = 10.0 ** floor(log10(rough))
    size = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [size * index for index in range(floor(low / size), ceil(high / size) + 1)]


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [value if value is None else float(f"{value:.4g}") for value in values]


def short(value: float | None) -> str:
    """Return a number in few characters: `12,300`, `0.034`."""
    if value is None:
        return "–"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def bar(parts: Mapping[str, float], classes: Mapping[str, str], title: str) -> str:
    """Return one stacked bar with a table of its parts in seconds and shares."""
    total = sum(parts.values())
    if total <= 0:
        return ""
    pieces, at = "", 0.0
    for name, value in parts.items():
        width = 100 * value / total
        tip = escape(f"{name}: {short(value)} s, {width:.1f} %")
        pieces += (
            f'<rect class="f-{classes[name]}" x="{at:.3f}" width="{width:.3f}" height="10"><title>{tip}</title></rect>'
        )
        at += width
    rows = "".join(
        f'<tr><th scope="row"><i class="key k-{classes[name]}"></i>{escape(name)}</th><td>{short(value)} s</td>'
        f"<td>{value / total:.1%}</td></tr>"
        for name, value in parts.items()
        if value > 0
    )
    return (
        f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{escape(title)}">'
        f'{pieces}</svg><table class="parts">{rows}</table>'
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; cells are HTML already. The first cell of a row is its heading."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows
    )
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def mark(measured: bool) -> str:
    return '<b class="measured">measured</b>' if measured else '<b class="estimated">estimated</b>'


def _small(unit: str) -> str:
    return f" <small>{escape(unit)}</small>" if unit else ""


def _note(note: str) -> str:
    return f'<p class="note">{escape(note)}</p>' if note else ""
