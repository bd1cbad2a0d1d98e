"""Write recipes/data: word problems in the manner of GSM8K, series to forecast, texts that must hold given words, and
sums. The files are the same on every machine.

python recipes/make_data.py [FOLDER [ROWS]]    # ROWS prompts in each file (default 100), and others held out
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAMES = ("Ada", "Ben", "Chen", "Dara", "Emre", "Femi", "Grace", "Hugo")
THINGS = ("apples", "books", "cards", "eggs", "marbles", "pens", "shells", "stamps")


# -- word problems -----------------------------------------------------------------------------------------------------


def gives_and_buys(r: random.Random, name: str, things: str) -> tuple[str, str]:
    have, give, packs, each = r.randint(20, 90), r.randint(2, 19), r.randint(2, 9), r.randint(3, 12)
    text = f"{name} has {have} {things}, gives away {give}, then buys {packs} boxes of {each}. How many {things} now?"
    return text, str(have - give + packs * each)


def shares(r: random.Random, name: str, things: str) -> tuple[str, str]:
    friends, each, rest = r.randint(3, 9), r.randint(4, 15), r.randint(0, 2)
    total = friends * each + rest
    text = f"{name} shares {total} {things} equally among {friends} friends and keeps the rest. How many does each get?"
    return text, str(each)


def earns(r: random.Random, name: str, things: str) -> tuple[str, str]:
    sold, price, cost = r.randint(5, 40), r.randint(2, 12), r.randint(3, 30)
    text = (
        f"{name} sells {sold} {things} at ${price} each and spends ${cost} on a stall. What is the profit in dollars?"
    )
    return text, str(sold * price - cost)


def part_of(r: random.Random, name: str, things: str) -> tuple[str, str]:
    part, whole = r.choice(((1, 2), (1, 3), (1, 4), (2, 3), (3, 4), (2, 5), (3, 5)))
    total = whole * r.randint(4, 20)
    text = f"{part}/{whole} of the {total} {things} of {name} are blue. What share of them is not blue, as a fraction?"
    return text, f"{whole - part}/{whole}"


def word_problem(r: random.Random) -> dict[str, str]:
    make: Callable[[random.Random, str, str], tuple[str, str]] = r.choice((gives_and_buys, shares, earns, part_of))
    question, answer = make(r, r.choice(NAMES), r.choice(THINGS))
    return {"question": question, "answer": answer}


# -- series ------------------------------------------------------------------------------------------------------------


def series(r: random.Random) -> dict[str, object]:
    """Level, trend, a season of four and noise; the answer is the next value, `scale` the usual step of the series."""
    level, trend, swing, noise = r.randint(20, 80), r.uniform(-1.5, 1.5), r.uniform(0, 8), r.uniform(0.5, 3)
    season = [r.uniform(-swing, swing) for _ in range(4)]
    values = [round(level + trend * t + season[t % 4] + r.gauss(0, noise)) for t in range(13)]
    *past, following = values
    steps = [abs(b - a) for a, b in itertools.pairwise(past)]
    text = f"The last 12 values: {' '.join(map(str, past))}. Give the mean and the deviation of the next one."
    return {"question": text, "answer": following, "scale": max(1.0, sum(steps) / len(steps))}


# -- texts that must hold given words ----------------------------------------------------------------------------------

WORDS = (
    *("river", "lantern", "bread", "garden", "clock", "winter", "horse", "letter", "island", "music", "stone"),
    *("market", "bridge", "apple", "storm", "candle", "forest", "silver", "kitchen", "teacher", "mountain", "window"),
    *("pepper", "blanket", "rocket", "feather", "anchor", "violin", "ladder", "cloud", "turtle", "pocket"),
)
TOPICS = (
    "a fox",
    "a long journey",
    "an old friend",
    "a rainy day",
    "a small town",
    "a lost key",
    "a school",
    "the sea",
)


def keywords(r: random.Random) -> dict[str, str]:
    words = r.sample(WORDS, 4)
    wanted = f"{', '.join(words[:3])} and {words[3]}"
    text = f"Write two or three sentences about {r.choice(TOPICS)} with the words {wanted}."
    return {"question": text, "answer": ", ".join(words)}


# -- sums --------------------------------------------------------------------------------------------------------------


def sums() -> list[dict[str, str]]:
    """Return 184 of all sums of three digits, each once, so that no held-out sum is in the training data."""
    terms = list(itertools.product(range(1, 10), repeat=3))
    random.Random(3).shuffle(terms)
    return [{"question": " + ".join(map(str, each)), "answer": str(sum(each))} for each in terms[:184]]


def write(folder: Path, count: int = 100) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, make, held_out in (
        ("word_problems", word_problem, 20),
        ("forecast", series, 20),
        ("keywords", keywords, 20),
    ):
        r = random.Random(name)
        _write(folder, name, [make(r) for _ in range(count + held_out)], held_out)
    _write(folder, "sums", sums(), 64)


def _write(folder: Path, name: str, rows: list[dict[str, str]], held_out: int) -> None:
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / f"{name}.jsonl").write_text("".join(lines[:-held_out]), encoding="utf-8")
    (folder / f"{name}_held_out.jsonl").write_text("".join(lines[-held_out:]), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "data", *map(int, sys.argv[2:]))
