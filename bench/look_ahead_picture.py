"""Draws docs/look_ahead.svg: python bench/look_ahead_picture.py"""

from __future__ import annotations

from pathlib import Path

INK, FAINT, PAPER = "#24292f", "#6e7781", "#ffffff"
SAME, NEW, OLD = "#2da44e", "#bf8700", "#d0d7de"
COLOURS = {"decodes": "#2da44e", "decodes ahead": "#1b9aaa", "update": "#0969da"}
CELL, GAP, LEFT = 34, 4, 150

OLDER = ["48", "/", "2", "=", "24", "so", "24", "/", "2", "=", "12", "end"]
NEWER = ["48", "/", "2", "=", "24", ",", "then", "24", "/", "2", "=", "12", "end"]
PARTED, FOUND = 5, 11  # in the newer one: the first token that differs, and where the older one drafts again


def text(x: float, y: float, words: str, size: int = 13, colour: str = INK, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{colour}"/>'


def tokens(y: float, words: list[str], colours: list[str]) -> list[str]:
    found = []
    for i, (word, colour) in enumerate(zip(words, colours, strict=True)):
        x = LEFT + i * (CELL + GAP)
        found += [box(x, y, CELL, 24, colour), text(x + CELL / 2, y + 16, word, 12, _ink(colour), "middle")]
    return found


def _ink(colour: str) -> str:
    return INK if colour == OLD else PAPER


def responses() -> list[str]:
    before = [OLD if PARTED <= i < FOUND - 1 else SAME for i in range(len(OLDER))]
    after = [NEW if PARTED <= i < FOUND else SAME for i in range(len(NEWER))]
    x = [LEFT + i * (CELL + GAP) for i in range(len(NEWER) + 1)]
    pairs = [(i, i + (i > PARTED)) for i in range(len(OLDER)) if i != PARTED]
    return [
        text(20, 32, "One request, the same noise at every position, two versions of the target", 15),
        text(20, 67, "decoded ahead"),
        *tokens(50, OLDER, before),
        text(20, 117, "when it is due"),
        *tokens(100, NEWER, after),
        *[_line(x[a] + CELL / 2, x[b] + CELL / 2, FAINT if PARTED <= b < FOUND else SAME) for a, b in pairs],
        _brace(x[0], x[PARTED] - GAP, "a chain, right at once"),
        _brace(x[PARTED], x[FOUND] - GAP, "an argmax turned: drafted as ever"),
        _brace(x[FOUND], x[-1] - GAP, "found again"),
    ]


def _line(x0: float, x1: float, colour: str) -> str:
    return f'<line x1="{x0}" y1="76" x2="{x1}" y2="98" stroke="{colour}" stroke-width="1.5"/>'


def _brace(x0: float, x1: float, words: str) -> str:
    line = f'<path d="M{x0} 130 v5 H{x1} v-5" fill="none" stroke="{FAINT}"/>'
    return line + text((x0 + x1) / 2, 151, words, 12, FAINT, "middle")


WORKERS = (
    [("decodes", 210), ("update", 50), ("decodes", 80), ("update", 50)],
    [("decodes", 70), ("decodes ahead", 140), ("update", 50), ("decodes", 40), ("decodes ahead", 40), ("update", 50)],
)


def time_line() -> list[str]:
    found = [text(20, 195, "Two workers, two steps", 15)]
    for row, stays in enumerate(WORKERS):
        x, y = float(LEFT), 225 + row * 36
        found.append(text(20, y + 17, f"worker {row}"))
        for state, width in stays:
            found.append(box(x, y, width - 2, 24, COLOURS[state]))
            x += width
    found += [
        text(LEFT + 130, 217, "a step", 12, FAINT, "middle"),
        text(LEFT + 325, 217, "the next one", 12, FAINT, "middle"),
        f'<path d="M{LEFT + 140} 286 v12 H{LEFT + 280} v-10" fill="none" stroke="{COLOURS["decodes ahead"]}"'
        ' stroke-width="1.5" marker-end="url(#tip)"/>',
        text(LEFT + 210, 313, "what was decoded ahead is checked, many tokens in a pass", 12, FAINT, "middle"),
    ]
    for i, state in enumerate(("decodes", "decodes ahead", "update")):
        found += [box(LEFT + 420, 228 + i * 22, 14, 14, COLOURS[state]), text(LEFT + 442, 240 + i * 22, state, 12)]
    return found


def main() -> None:
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{COLOURS["decodes ahead"]}"/></marker></defs>'
    )
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 330" font-family="Helvetica, Arial, sans-serif">'
    card = f'<rect width="700" height="330" rx="8" fill="{PAPER}"/>'
    lines = [head, tip, card, *responses(), *time_line(), "</svg>"]
    path = Path(__file__).parent.parent / "docs" / "look_ahead.svg"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
