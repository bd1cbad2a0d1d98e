"""Questions from reasoning-gym, and several ways to respond to each: careful, sloppy, or a quick guess.

A response's opening words say which it will be, so that reinforcement learning can find the better ways and move
towards them. Careful responses check themselves a geometric number of times: that makes the long tail of lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import reasoning_gym
from worked import WORK, Hand, parse_sum

# The exact reasoning-gym parameters that the model was made for; recipes should use the same.
TASKS: dict[str, dict[str, int]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 5, "min_digits": 1, "max_digits": 2},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 60},
    "prime_factorization": {"min_value": 2, "max_value": 200},
    "count_bits": {"min_n": 1, "max_n": 2047},
}
PROMPT = "{question}\n"
MARKER = "Answer: "
# Recipes draw their questions from seeds below this, training data from seeds above: other draws of the same law.
FIRST_SEED = 1_000_000
# Share of careful, sloppy and quick responses, per task: set so that each task starts at 20 to 60 % solved.
MIX: dict[str, tuple[float, float, float]] = {
    "chain_sum": (0.36, 0.18, 0.46),
    "gcd": (0.30, 0.20, 0.50),
    "prime_factorization": (0.30, 0.20, 0.50),
    "count_bits": (0.33, 0.20, 0.47),
}
OPEN_CAREFUL = ("Let's work it out.\n", "Step by step.\n", "Carefully now.\n", "Okay, one step at a time.\n")
OPEN_SLOPPY = ("Roughly: ", "In my head: ", "Without writing much: ")
OPEN_QUICK = ("Quick guess: ", "I would say ", "Looks like ")
SLIP = 0.004
MAX_WORKS = 14
# Characters after which no further check begins: about 600 tokens, so that nearly all end within 1,024.
LONGEST = 1000


def _careful(task: str, entry: dict, rng: Random) -> str:
    """Worked in small steps, then worked again as long as doubts last, or until two results agree."""
    worried = rng.random() < 0.25
    doubt = 0.75 if worried else 0.12
    hand = Hand(rng, SLIP)
    work = WORK[task](entry, hand)
    text, works, agree = rng.choice(OPEN_CAREFUL) + work.text, 1, True
    while works < MAX_WORKS and len(text) < LONGEST and (not agree or rng.random() < doubt):
        text += "\n" + hand.pick("Let me check.", "Is that right? Again.", "Once more.", "Wait, check it.") + "\n"
        again = WORK[task](entry, Hand(rng, SLIP / 4))
        agree = again.answer == work.answer
        text += again.text + "\n"
        text += hand.pick("The same.", "It agrees.", "Good.") if agree else hand.pick("That differs.", "Not the same.")
        work, works = again, works + 1
    return f"{text}\n{MARKER}{work.answer}"


def drill(task: str, entry: dict, rng: Random) -> str:
    """One plain careful pass, no slips: the early training, in which the steps themselves are learned."""
    work = WORK[task](entry, Hand(rng, plain=True))
    return f"{rng.choice(OPEN_CAREFUL)}{work.text}\n{MARKER}{work.answer}"


def _near(value: int, rng: Random) -> int:
    """A plausible wrong result: off by a little, or by a carry that was forgotten."""
    return value + rng.choice((-20, -10, -10, -2, -1, 1, 2, 10, 10, 20, 100 if abs(value) > 99 else 3))


def _factors(entry: dict) -> list[int]:
    return list(entry["metadata"]["factors"])


def _sloppy_chain_sum(entry: dict, rng: Random) -> tuple[str, str]:
    """Running totals at one go, carries often dropped."""
    total, steps = parse_sum(entry["metadata"]["expression"])
    totals = [str(total)]
    for sign, term in steps:
        total += term if sign == "+" else -term
        if rng.random() < 0.4:
            total = _near(total, rng)
        totals.append(str(total))
    return ", ".join(totals), totals[-1]


def _sloppy_gcd(entry: dict, rng: Random) -> tuple[str, str]:
    """A common divisor that comes to mind, rarely shown to be the greatest."""
    big, small = sorted(entry["metadata"]["numbers"], reverse=True)
    common = [d for d in range(1, small + 1) if big % d == 0 and small % d == 0]
    guess = common[-1] if rng.random() < 0.15 else rng.choice([*common, 1, 2, 3, 4, 5])
    return f"{big} and {small} share {guess}", str(guess)


def _sloppy_prime_factorization(entry: dict, rng: Random) -> tuple[str, str]:
    """Take out a first factor or two and take the rest for prime."""
    factors = _factors(entry)
    keep = rng.choice((0, 1, 1, 2))
    rest = 1
    for factor in factors[keep:]:
        rest *= factor
    if rng.random() < 0.5:
        rest = max(2, rest + rng.choice((-2, -1, 1, 2)))
    shown = " × ".join(map(str, [*factors[:keep], rest]))
    return f"{rest} looks prime", shown


def _sloppy_count_bits(entry: dict, rng: Random) -> tuple[str, str]:
    """The halves are listed but the odd ones are counted by eye."""
    number, halves = entry["metadata"]["number"], []
    while number:
        halves.append(str(number))
        number //= 2
    guess = int(entry["answer"]) if rng.random() < 0.25 else max(1, int(entry["answer"]) + rng.choice((-2, -1, 1, 2)))
    return ", ".join(halves), str(guess)


SLOPPY = {
    "chain_sum": _sloppy_chain_sum,
    "gcd": _sloppy_gcd,
    "prime_factorization": _sloppy_prime_factorization,
    "count_bits": _sloppy_count_bits,
}


def _quick(task: str, entry: dict, rng: Random) -> str:
    """A guess with no work: right now and then."""
    if task == "prime_factorization":
        factors = _factors(entry)
        if rng.random() < 0.85:
            place = rng.randrange(len(factors))
            factors[place] = max(2, factors[place] + rng.choice((-2, -1, 1, 2, 4)))
        return " × ".join(map(str, factors))
    answer = int(entry["answer"])
    if rng.random() < 0.15:
        return str(answer)
    if task == "gcd":
        return str(rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 9, 12, min(entry["metadata"]["numbers"]))))
    if task == "count_bits":
        return str(max(1, answer + rng.choice((-3, -2, -1, 1, 2, 3))))
    return str(_near(answer, rng))


def respond(task: str, entry: dict, rng: Random) -> tuple[str, str]:
    """A response to a question and the name of the behaviour behind it."""
    behaviour = rng.choices(("careful", "sloppy", "quick"), weights=MIX[task])[0]
    if behaviour == "careful":
        return _careful(task, entry, rng), behaviour
    if behaviour == "sloppy":
        text, answer = SLOPPY[task](entry, rng)
        return f"{rng.choice(OPEN_SLOPPY)}{text}.\n{MARKER}{answer}", behaviour
    answer = _quick(task, entry, rng)
    return f"{rng.choice(OPEN_QUICK)}{answer}.\n{MARKER}{answer}", behaviour


def questions(task: str, seed: int, size: int) -> Iterator[dict]:
    """Entries of one task from reasoning-gym's own generator."""
    dataset = reasoning_gym.create_dataset(task, seed=seed, size=size, **TASKS[task])
    return iter(dataset)


def examples(seed: int, size: int, plain: bool = False) -> Iterator[tuple[str, str]]:
    """(prompt, response) pairs, the tasks in turn, of the whole mixture or plain drill."""
    rng = Random(seed)
    share = size // len(TASKS)
    # Entry i of a reasoning-gym dataset is drawn from seed + i, so each task gets a stretch of seeds of its own.
    streams = [questions(task, FIRST_SEED + seed * 1_000_003 + k * 10**9, share) for k, task in enumerate(TASKS)]
    for entries in zip(*streams, strict=True):
        for task, entry in zip(TASKS, entries, strict=True):
            response = drill(task, entry, rng) if plain else respond(task, entry, rng)[0]
            yield PROMPT.format(question=entry["question"]), response


def extract(text: str) -> str | None:
    """What stands after the last answer marker, or None where there is none."""
    _, marker, answer = text.rpartition(MARKER)
    return answer.strip() if marker else None
