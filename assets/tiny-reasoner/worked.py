"""Careful written solutions: small steps that need only copying and one small table look-up each."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23)


@dataclass
class Hand:
    """The hand that writes a solution: now and then it slips, and sometimes it notices at once."""

    rng: Random
    slip: float = 0.0
    plain: bool = False

    def put(self, value: int) -> tuple[str, int]:
        """The text written for a small result, and the value that the solution goes on with."""
        if self.rng.random() >= self.slip:
            return str(value), value
        wrong = max(0, value + self.rng.choice((-2, -1, 1, 2)))
        if self.rng.random() < 0.6:
            return f"{wrong} no {value}", value
        return str(wrong), wrong

    def pick(self, *words: str) -> str:
        """One of several ways to say the same; a plain hand has one way only."""
        return words[0] if self.plain else self.rng.choice(words)


@dataclass(frozen=True)
class Work:
    """A written solution and the answer it came to."""

    text: str
    answer: str


def _digits(number: int, width: int) -> list[int]:
    """Digits of a number from the units up, padded with zeros, as in a written sum."""
    return [number // 10**place % 10 for place in range(width)]


def _column_add(x: int, y: int, hand: Hand) -> tuple[str, int]:
    """x + y digit by digit from the units; a carry is written first."""
    width = max(len(str(x)), len(str(y)))
    parts, total, carry = [], 0, 0
    for place, (a, b) in enumerate(zip(_digits(x, width), _digits(y, width), strict=True)):
        text, value = hand.put(carry + a + b)
        parts.append(f"{'1+' if carry else ''}{a}+{b}={text}")
        carry = int(value >= 10) if place < width - 1 else 0
        total += (value - 10 * carry) * 10**place
    return ", ".join(parts), total


def _column_subtract(x: int, y: int, hand: Hand) -> tuple[str, int]:
    """x - y for x >= y digit by digit from the units; a borrowed ten is written into the upper digit."""
    width = len(str(x))
    parts, total, borrow = [], 0, 0
    for place, (a, b) in enumerate(zip(_digits(x, width), _digits(y, width), strict=True)):
        short = a - borrow < b and place < width - 1
        text, value = hand.put(max(0, a + 10 * short - borrow - b))
        parts.append(f"{a + 10 * short}-{'1-' if borrow else ''}{b}={text}")
        borrow = int(short)
        total += value % 10 * 10**place
    return ", ".join(parts), total


def _running_step(total: int, sign: str, term: int, hand: Hand) -> tuple[str, int]:
    """One line of a running sum: which signs apply, then the column sum or difference of the magnitudes."""
    size = abs(total)
    negative = total < 0
    if (sign == "+") != negative:
        shown, (columns, result) = f"{size} + {term}", _column_add(size, term, hand)
    else:
        negative ^= term > size
        big, small = max(size, term), min(size, term)
        shown, (columns, result) = f"{big} - {small}", _column_subtract(big, small, hand)
    line = f"{total} {sign} {term}"
    wrapped = f"-({shown})" if negative else f"({shown})"
    if wrapped != f"({line})":
        line += f" is {wrapped}"
    return f"{line}: {columns} -> {-result if negative else result}", -result if negative else result


def parse_sum(expression: str) -> tuple[int, list[tuple[str, int]]]:
    """First term, and the signed terms that follow it."""
    first, *rest = expression.split()
    return int(first), [(sign, int(term)) for sign, term in zip(rest[::2], rest[1::2], strict=True)]


def work_chain_sum(entry: dict, hand: Hand) -> Work:
    """A running sum, one line a term."""
    total, steps = parse_sum(entry["metadata"]["expression"])
    lines = []
    for sign, term in steps:
        line, total = _running_step(total, sign, term, hand)
        lines.append(hand.pick("", "", "Then ", "Next ", "Now ") + line if lines else line)
    return Work(".\n".join(lines) + ".", str(total))


def work_gcd(entry: dict, hand: Hand) -> Work:
    """Euclid by repeated subtraction: very many steps when one number is much the smaller."""
    big, small = sorted(entry["metadata"]["numbers"], reverse=True)
    text = f"{big} and {small}: "
    # A slip can only move the numbers, never end the descent: the bound keeps a bad one finite.
    for _ in range(150):
        if big == small or small <= 1:
            break
        written, rest = hand.put(big - small)
        text += f"{big}-{small}={written}" + hand.pick(", ", ", ", ", ", "; ", ", then ", ", so ")
        big, small = max(small, rest), min(small, rest)
    if small == 1:
        return Work(text + hand.pick("down to 1.", "1 is left."), "1")
    return Work(text + hand.pick("both are equal", "equal now", "the same") + f": {big}.", str(big))


def _long_division(number: int, divisor: int, hand: Hand) -> tuple[str, int, int]:
    """Written long division: text, quotient and remainder."""
    parts, quotient, rest = [], 0, 0
    for digit in str(number):
        partial = rest * 10 + int(digit)
        rest = partial
        if partial < divisor and not parts:
            continue
        written, value = hand.put(partial // divisor)
        # The remainder follows from what was written; a slip shows as a remainder that is off.
        rest = min(9 * divisor, max(0, partial - value * divisor)) % divisor if value * divisor <= partial else 0
        parts.append(f"{partial}={divisor}*{written}+{rest}")
        quotient = quotient * 10 + min(value, 9)
    return ", ".join(parts), quotient, rest


def _try_divisor(left: int, divisor: int, hand: Hand) -> tuple[str, int | None]:
    """Does the divisor divide what is left? The text, and the quotient if it does."""
    if divisor == 2:
        if left % 2:
            return f"{left} is odd", None
        return f"{left} is even, half is {left // 2}", left // 2
    if divisor == 5 and left % 5:
        return f"{left} ends in {left % 10}, " + hand.pick("not by 5", "so 5 is out"), None
    columns, quotient, rest = _long_division(left, divisor, hand)
    if rest or quotient < 2:
        return f"{left}/{divisor}: {columns}, {hand.pick('no', 'no', 'does not go')}", None
    return f"{left}/{divisor}: {columns}, {hand.pick('yes', 'it goes')} {quotient}", quotient


def work_prime_factorization(entry: dict, hand: Hand) -> Work:
    """Trial division by the primes, up to the square root of what is left."""
    left, found, index, parts = entry["metadata"]["number"], [], 0, []
    while index < len(PRIMES) - 1 and PRIMES[index] ** 2 <= left:
        text, quotient = _try_divisor(left, PRIMES[index], hand)
        parts.append(text)
        if quotient is None:
            index += 1
            continue
        found.append(PRIMES[index])
        left = quotient
        parts.append(f"so far {' × '.join(map(str, found))}, left {left}")
    square = PRIMES[index] ** 2
    parts.append(f"{PRIMES[index]}*{PRIMES[index]}={square} is over {left}, so {left} is prime")
    found.append(left)
    return Work(".\n".join(parts) + ".", " × ".join(map(str, found)))


def work_count_bits(entry: dict, hand: Hand) -> Work:
    """Halve until nothing is left and count the odd ones as they come."""
    number, ones, parts = entry["metadata"]["number"], 0, []
    while number:
        ones += number % 2
        written, ones = hand.put(ones)
        parts.append(f"{number} {'odd' if number % 2 else 'even'} {written}")
        number //= 2
    text = "".join(part + hand.pick(", ", ", ", ", half ", "; ") for part in parts)
    return Work(text + hand.pick("0 is the end.", "0, done."), str(ones))


WORK = {
    "chain_sum": work_chain_sum,
    "gcd": work_gcd,
    "prime_factorization": work_prime_factorization,
    "count_bits": work_count_bits,
}
