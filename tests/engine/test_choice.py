"""The tuner against a simulation without torch: the time of a round by active rows and strategy, and the acceptance
rate of each drafter. Regret is measured against the best fixed strategy, which the simulation knows."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.choice import (
    AcceptanceRates,
    Adaptive,
    RoundTimes,
    size_class,
    strategies,
    with_ahead,
)
from tlt.engine.tuner import Fixed, RoundResult

ARMS = [PLAIN, *(Strategy(drafter, depth) for drafter in ("eagle", "suffix") for depth in (1, 2, 4))]
BOTH = {"eagle", "suffix"}
ROWS = (1, 4, 16, 64)


@dataclass
class World:
    """Simulation. A round has a pass of rows x tokens, and a draft per level, in seconds. A draft token is
    accepted with a given probability if those before it are."""

    right: dict[str, float] = field(default_factory=lambda: {"eagle": 0.8, "suffix": 0.4})
    per_token: float = 0.02
    """of a pass, against 1 for the pass itself"""
    per_level: dict[str, float] = field(default_factory=lambda: {"eagle": 0.12, "suffix": 0.02})
    catch_up: float = 0.0
    """seconds of a drafter's first round after another's"""
    noise: float = 0.05
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def seconds(self, arm: Strategy, rows: int) -> float:
        return 1.0 + self.per_token * rows * arm.new + self.drafting(arm)

    def drafting(self, arm: Strategy) -> float:
        return arm.depth * self.per_level[arm.drafter] if arm.drafter != PLAIN.drafter else 0.0

    def tokens(self, arm: Strategy) -> float:
        return 1.0 if arm.drafter == PLAIN.drafter else sum(self.right[arm.drafter] ** k for k in range(arm.depth + 1))

    def speed(self, arm: Strategy, rows: int) -> float:
        return rows * self.tokens(arm) / self.seconds(arm, rows)

    def best(self, rows: int, arms: Collection[Strategy] = ARMS) -> float:
        return max(self.speed(arm, rows) for arm in arms)

    def play(self, arm: Strategy, rows: int) -> list[int]:
        """Return the tokens that one round commits, by row."""
        tokens = [1] * rows
        for row in range(rows):
            while tokens[row] <= arm.depth and self.rng.random() < self.right[arm.drafter]:
                tokens[row] += 1
        return tokens


def widths(arm: Strategy, offers: Sequence[int]) -> list[int]:
    """Return the number of look-ahead tokens that are verified for each row."""
    return [min(offer, arm.ahead) for offer in offers]


def seconds_of(world: World, arm: Strategy, offers: Sequence[int]) -> float:
    """Return the seconds of a padded pass, which is as wide as its longest chain."""
    return world.seconds(arm._replace(ahead=max(widths(arm, offers))), len(offers))


@dataclass
class Played:
    arms: list[Strategy]
    without: list[Strategy]
    """the choices without look-ahead drafts"""
    regret: float
    """of the seconds spent, how many the best arm of each round would not have needed"""
    against_plain: float
    """seconds that plain decoding needs for the same tokens, a second"""


def play(
    tuner: Adaptive,
    world: World,
    rows: Callable[[int], int] | int,
    rounds: int,
    usable: Collection[str] = BOTH,
    offers: Callable[[int], Sequence[int]] | None = None,
    right: float = 1.0,
) -> Played:
    """Play rounds. `offers` are the look-ahead tokens of each row, each of which is accepted with the probability
    `right`."""
    arms, without, drafter = [], [], "plain"
    spent = ideal = plain = 0.0
    for turn in range(rounds):
        B = rows if isinstance(rows, int) else rows(turn)
        offered = offers(turn) if offers else [0] * B
        arm = tuner.choose(B, 300.0, usable, offered)
        ahead = widths(arm, offered)
        extra = world.catch_up if arm.drafter not in (drafter, "plain") else 0.0
        drafter = arm.drafter
        seconds = seconds_of(world, arm, offered) + extra
        noise = math.exp(world.rng.gauss(0, world.noise))
        tokens = world.play(arm, B)
        for row, width in enumerate(ahead):
            if width:
                tokens[row] = 1 + next((k for k in range(width) if world.rng.random() >= right), width)
        drafting, computed = world.drafting(arm) + extra, B * arm._replace(ahead=max(ahead)).new
        tuner.record(RoundResult(arm, seconds * noise, drafting * noise, computed, tokens, True, ahead))
        expected = B * world.tokens(arm)
        arms.append(arm)
        without.append(tuner.current)
        spent += seconds
        ideal += expected / world.best(B, [a for a in ARMS if a == PLAIN or a.drafter in usable])
        plain += expected / world.speed(PLAIN, B)
    return Played(arms, without, 1 - ideal / spent, plain / spent)


@pytest.mark.parametrize(("rows", "seed"), [(1, 0), (1, 1), (4, 0), (16, 1), (64, 2)])
def test_it_is_soon_near_the_best_strategy(rows: int, seed: int) -> None:
    world, tuner = World(rng=random.Random(seed)), Adaptive(ARMS)
    assert play(tuner, world, rows, 600).regret < (0.1 if rows == 1 else 0.05)
    assert play(tuner, world, rows, 1000).regret < (0.06 if rows == 1 else 0.03)


def any_world(seed: int) -> World:
    rng = random.Random(seed)
    return World(
        right={"eagle": rng.choice([0, 0.2, 0.4, 0.6, 0.8, 0.95]), "suffix": rng.choice([0, 0.1, 0.3, 0.6])},
        per_token=rng.choice([0.002, 0.02, 0.06, 0.2]),
        per_level={"eagle": rng.choice([0.05, 0.12, 0.33]), "suffix": rng.choice([0.002, 0.02, 0.1])},
        catch_up=rng.choice([0, 0.1]),
        noise=rng.choice([0.02, 0.05, 0.1]),
        rng=rng,
    )


@pytest.mark.parametrize("rows", ROWS)
def test_it_is_never_slower_than_plain_decoding(rows: int) -> None:
    """Neither in a first rollout of 300 rounds, in which the rows end one by one, nor in the next three rollouts."""
    for seed in range(rows % 3, 20, 3):
        world, tuner = any_world(seed), Adaptive(ARMS)
        for rounds in (300, 900):
            played = play(tuner, world, lambda turn: max(1, rows - rows * (turn % 300) // 300), rounds)
            assert 1 / played.against_plain <= 1.03, (seed, rounds)


@pytest.mark.parametrize("rows", [1, 16])
def test_it_follows_a_drafter_that_gets_worse_or_better(rows: int) -> None:
    """The drafter was trained meanwhile. A strategy that was slow long ago is tried again."""
    worse, better = World(), World({"eagle": 0.1, "suffix": 0.1})
    for world, change, rounds, most in (
        (worse, {"eagle": 0.1, "suffix": 0.1}, 200, 0.2 if rows == 1 else 0.05),
        (better, {"eagle": 0.85, "suffix": 0.1}, 1000, 0.05),
    ):
        tuner = Adaptive(ARMS)
        play(tuner, world, rows, 500)
        world.right = change
        play(tuner, world, rows, rounds)
        assert play(tuner, world, rows, 300).regret < most


def test_time_that_drafts_saved_long_ago_may_not_be_lost_again() -> None:
    """Both drafters were good, and neither will be again. Trying them costs no more than if they had never been."""
    world = World()
    tuner = Adaptive(ARMS)
    assert play(tuner, world, 4, 1500).against_plain > 1.5
    assert tuner.lost > -0.01 * tuner.spent, "only tries count"
    world.right = {"eagle": 0.0, "suffix": 0.0}
    play(tuner, world, 4, 1500)
    assert play(tuner, world, 4, 1000).against_plain > 0.97


def test_a_wrong_evaluation_costs_little_and_a_cheap_drafter_is_tried() -> None:
    world = World({"eagle": 0.05, "suffix": 0.0})
    tuner = Adaptive(ARMS, {"eagle": 0.6})
    assert play(tuner, world, lambda turn: 64 if turn % 120 < 80 else 4, 2400).against_plain > 0.98
    world.right["eagle"] = 0.0
    played = play(Adaptive(ARMS, {"eagle": 0.9}), world, 1, 2000)
    tried = Counter(arm.drafter for arm in played.arms)
    assert tried["suffix"] > 0
    assert tried["eagle"] > 0
    assert played.against_plain > 0.985


@pytest.mark.parametrize("rows", [1, 4])
def test_a_drafter_published_in_a_rollout_is_used_at_once(rows: int) -> None:
    """A drafter that was never trained is not tried. An evaluated drafter is used at once."""
    world = World(right={"eagle": 0.0, "suffix": 0.4})
    tuner = Adaptive(ARMS, {"eagle": 0.0})
    cold = play(tuner, world, rows, 400)
    assert all(arm.drafter != "eagle" for arm in cold.arms)
    world.right["eagle"] = 0.8
    tuner.renew("eagle", 0.8)
    warm = play(tuner, world, rows, 100)
    assert sum(arm.drafter == "eagle" for arm in warm.arms[10:]) > 80
    tuner.renew("eagle", None)
    assert "eagle" not in tuner.seen.counts, "nothing is known of it"


def test_acceptance_is_not_forgotten_while_plain_decoding_is_faster() -> None:
    """Large batches are decoded without drafts for 400 rounds, so no recent round used the drafter."""
    world = World(per_token=0.5)
    tuner = Adaptive(ARMS)
    play(tuner, world, 1, 200)
    deep = Strategy("eagle", 4)
    before = tuner.tokens(deep)
    for _ in range(400):
        tuner.choose(64, 300.0, ())
        tuner.record(RoundResult(PLAIN, 33.0, 0.0, 64, [1] * 64, True))
    assert tuner.tokens(deep) == pytest.approx(before, rel=0.15)
    tuner.choose(1, 300.0, BOTH)
    assert tuner.current.drafter == "eagle"


@pytest.mark.parametrize(
    ("right", "catch_up", "what", "switches", "regret"),
    [
        ({"eagle": 0.8, "suffix": 0.4}, 0.0, "name", 120, 0.05),
        # one drafter is best below the border, and the other above, by a few per cent; a switch costs 0.3 plain rounds
        ({"eagle": 0.62, "suffix": 0.45}, 0.3, "drafter", 60, 0.12),
    ],
    ids=["a batch size that alternates at a border", "an expensive switch for a small gain"],
)
def test_strategies_are_rarely_switched(
    right: dict[str, float], catch_up: float, what: str, switches: int, regret: float
) -> None:
    """4 and 5 rows are in two classes."""
    assert size_class(4) != size_class(5)
    world = World(right, catch_up=catch_up)
    tuner = Adaptive(ARMS)
    play(tuner, world, lambda turn: 4 + turn % 2, 600)
    played = play(tuner, world, lambda turn: 4 + turn % 2, 400)
    names = [getattr(arm, what) for arm in played.arms]
    assert sum(a != b for a, b in itertools.pairwise(names)) < switches
    assert played.regret < regret


def known(arms: Sequence[Strategy], times: Mapping[int, float], rows: int = 1, chance: float | None = None) -> Adaptive:
    """Return a tuner with look-ahead that has timed passes: `times` maps numbers of tokens to seconds."""
    tuner = Adaptive(with_ahead(arms), {} if chance is None else {"eagle": chance})
    tuner.times.context = 1
    for tokens, seconds in times.items():
        for _ in range(2):
            tuner.times.add_pass(tokens, seconds)
    tuner.choose(rows, 300.0, ())
    return tuner


def test_the_first_look_ahead_pass_is_narrow() -> None:
    """Wide passes take no longer."""
    tuner = known([PLAIN], {1: 1.0, 64: 1.0})
    arm = tuner.choose(1, 300.0, (), [63])
    assert arm.ahead == 4
    tuner.record(RoundResult(arm, 1.0, 0.0, 5, [5], scored=True, ahead=[4]))
    assert tuner.choose(1, 300.0, (), [63]).ahead == 63


def test_strategies_of_a_failed_drafter_are_not_chosen() -> None:
    world, tuner = World(), Adaptive(ARMS)
    play(tuner, world, 1, 200)
    after = play(tuner, world, 1, 300, usable={"suffix"})
    assert "eagle" not in {arm.drafter for arm in after.arms}
    assert {arm.drafter for arm in after.arms} >= {"suffix"}
    assert set(play(tuner, world, 1, 100, usable=set()).arms) == {PLAIN}
    assert after.regret < 0.1


@pytest.mark.parametrize(("seconds", "offer", "ahead"), [(4.4, 4, 4), (4.8, 4, 0), (4.4, 3, 4)])
def test_look_ahead_is_chosen_by_its_tokens(seconds: float, offer: int, ahead: int) -> None:
    """Four look-ahead tokens, each accepted with 0.97, and the next one are 4.71 tokens. A chain may be shorter than
    all limits: three of them and the next one are 3.82 tokens, in the 3.55 s of a pass of four."""
    assert known([PLAIN], {1: 1.0, 5: seconds}).choose(1, 300.0, (), [offer]).ahead == ahead


@pytest.mark.parametrize(("seconds", "padded", "ahead"), [(5.0, False, 4), (9.0, False, 0), (5.0, True, 0)])
def test_padding_is_computed_on_some_devices(seconds: float, padded: bool, ahead: int) -> None:
    """One of four rows has a chain of four: 8 tokens without padding, and 20 with it."""
    tuner = known([PLAIN], {4: 4.0, 8: seconds, 20: 20.0}, rows=4)
    tuner.padded = padded
    assert tuner.choose(4, 300.0, (), [4, 0, 0, 0]).ahead == ahead


def test_rows_without_look_ahead_drafts_use_the_drafter() -> None:
    eagle = Strategy("eagle", 4)
    tuner = known([PLAIN, eagle], {2: 1.0, 16: 1.0}, rows=2, chance=0.9)
    assert eagle in [tuner.choose(2, 300.0, ("eagle",)) for _ in range(4)]
    assert tuner.choose(2, 300.0, ("eagle",), [4, 0]) == eagle._replace(ahead=4)


def test_the_time_of_unscored_rounds_is_ignored() -> None:
    tuner = Adaptive(ARMS)
    for _ in range(50):
        tuner.choose(4, 300.0, BOTH)
        tuner.record(RoundResult(ARMS[1], 99.0, 9.0, 8, [1] * 4, scored=False))
    assert tuner.times.passes == tuner.times.drafts == {}
    assert tuner.state()["seen"], "acceptance is counted all the same"


def test_passes_of_longer_contexts_are_timed_separately() -> None:
    tuner = known([PLAIN], {1: 1.0})
    tuner.choose(1, 2000.0, ())
    tuner.record(RoundResult(PLAIN, 5.0, 0.0, 1, [1], scored=True))
    assert [tuner.choose(1, context, ()) and tuner.times.pass_seconds(1) for context in (300.0, 2000.0)] == [1.0, 5.0]


def test_the_first_draft_is_paid_from_the_time_so_far_and_not_counted() -> None:
    """It takes 25 plain rounds, because it quantizes the model: 4 % of 625 rounds."""
    arms = strategies(["quantized"])
    tuner = Adaptive(arms)
    used: list[Strategy] = []
    for _ in range(640):
        used.append(arm := tuner.choose(1, 300.0, ("quantized",)))
        seconds = 0.5 if arm == PLAIN else 0.55 if used.count(arm) > 1 else 12.5
        tuner.record(RoundResult(arm, seconds, seconds - 0.5, arm.new, [arm.new], scored=True))
    assert 625 <= next(turn for turn, arm in enumerate(used) if arm != PLAIN) < 629
    tuner.renew("quantized", None)
    tuner.record(RoundResult(arms[-1], 25.0, 24.0, arms[-1].new, [arms[-1].new], scored=True))
    assert max(cost for kept in tuner.times.drafts.values() for cost, _ in kept) < 0.2
    assert tuner.lost < 1


def test_a_try_that_may_lose_more_than_a_plain_round_waits() -> None:
    """A pass of 3 tokens takes twice as long as a plain one, and a draft 0.2 times: a rejected one loses 1.2 rounds."""
    tuner = known([PLAIN, Strategy("suffix", 2)], {1: 1.0, 3: 2.0})
    tuner.seen.add("suffix", [2], [1])
    tuner.seen.unused["suffix"] = 10**4
    for tuner.spent, tuner.lost, tried in ((0.0, 0.0, False), (300.0, 0.0, True), (300.0, 2.5, False)):
        assert any(tuner.choose(1, 300.0, ("suffix",)).depth for _ in range(4)) == tried


def test_a_published_drafter_begins_with_its_evaluation_as_8_rows() -> None:
    tuner = Adaptive(ARMS)
    tuner.seen.add("eagle", [1] * 100, [1] * 100)
    tuner.renew("eagle", 0.5)
    assert tuner.seen.counts["eagle"][:3].tolist() == [[8, 4], [4, 2], [2, 1]]


WITH_AHEAD = with_ahead(ARMS)
WIDTHS = sorted({arm.ahead for arm in WITH_AHEAD})


def looking(world: World, arms: Sequence[Strategy] = WITH_AHEAD) -> Adaptive:
    return Adaptive(arms, world.right, padded=True)


def expected_speed(world: World, arm: Strategy, offers: Sequence[int], right: float) -> float:
    """Return the expected speed if each look-ahead token is accepted with this probability."""
    by_ahead = [sum(right**k for k in range(width + 1)) for width in widths(arm, offers) if width]
    others = (len(offers) - len(by_ahead)) * world.tokens(arm)
    return (sum(by_ahead) + others) / seconds_of(world, arm, offers)


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(("rows", "per_token"), [(1, 0.001), (4, 0.05), (16, 0.001), (16, 0.5), (64, 0.05)])
def test_look_ahead_is_used_if_it_is_faster(rows: int, per_token: float, right: float) -> None:
    """The rows with look-ahead drafts, and the lengths of the drafts, differ from round to round. The speed is compared
    with none, and with the best of all widths."""
    world = World(per_token=per_token, noise=0.0)

    def offers(turn: int) -> list[int]:
        rng = random.Random(turn)
        return [rng.choice([1, 3, 9, 40, 63]) if rng.random() < 0.6 else 0 for _ in range(rows)]

    def speed(arm: Strategy, turn: int) -> float:
        return expected_speed(world, arm, offers(turn), right)

    played = play(looking(world), world, rows, 450, offers=offers, right=right)
    late = list(enumerate(zip(played.arms, played.without, strict=True)))[150:]
    assert statistics.fmean(speed(arm, turn) / speed(without, turn) for turn, (arm, without) in late) > 0.97
    best = [max(speed(arm._replace(ahead=width), turn) for width in WIDTHS) for turn, (arm, _) in late]
    assert statistics.fmean(speed(arm, t) / most for (t, (arm, _)), most in zip(late, best, strict=True)) > 0.93


def test_without_look_ahead_drafts_the_choice_is_the_same() -> None:
    world, other = World(), World()
    known, unknown = looking(world), Adaptive(ARMS, other.right)
    assert play(known, world, 4, 300).arms == play(unknown, other, 4, 300).arms
    assert json.dumps(known.state()) == json.dumps(unknown.state())
    unknown = Adaptive(ARMS)
    assert unknown.choose(4, 300.0, BOTH, [63] * 4) in ARMS, "nor where it has no such arms"


def test_rows_with_look_ahead_do_not_count_for_the_drafter() -> None:
    world = World()
    eagle = Strategy("eagle", 4)
    mixed, alone = looking(world), looking(world)
    for tuner in (mixed, alone):
        tuner.choose(2, 300.0, BOTH)
    for _ in range(20):
        mixed.record(RoundResult(eagle._replace(ahead=16), 1.0, 0.1, 34, [17, 3], True, [16, 0]))
        alone.record(RoundResult(eagle, 1.0, 0.1, 10, [3], True))
    assert mixed.tokens(eagle) == pytest.approx(alone.tokens(eagle), rel=0.02)
    assert set(alone.times.drafts) == {eagle}
    assert not mixed.times.drafts


def test_its_state_survives_json() -> None:
    world = World()
    tuner, back = looking(world), looking(world)
    play(tuner, world, lambda turn: 1 + turn % 40, 500)
    play(tuner, world, 16, 300)
    play(tuner, world, 4, 100, offers=lambda turn: [16] * 4, right=0.5)
    text = json.dumps(tuner.state())
    back.load_state(json.loads(text))
    assert json.dumps(back.state()) == text
    assert "ahead" in back.seen.counts


def test_a_state_with_removed_strategies_is_read() -> None:
    tuner, world = Adaptive(ARMS), World({"eagle": 0.8, "suffix": 0.7})
    play(tuner, world, 2, 200)
    arms = [arm for arm in ARMS if arm.drafter != "eagle"]
    fewer = Adaptive(arms)
    fewer.load_state(json.loads(json.dumps(tuner.state())))
    fewer.load_state({})
    assert set(fewer.seen.counts) == {arm.drafter for arm in fewer.times.drafts} == {"suffix"}
    assert fewer.times.points()[0].tolist() == tuner.times.points()[0].tolist()
    assert set(play(fewer, World(), 2, 200).arms) <= set(arms)


def test_a_fixed_strategy_is_always_chosen() -> None:
    arm = ARMS[3]
    fixed = Fixed(arm)
    assert fixed.choose(1, 10.0, BOTH) == fixed.choose(64, 10.0, {arm.drafter}) == arm
    assert fixed.choose(1, 10.0, ()) == PLAIN
    assert (fixed.free_rows(3), fixed.brief_rows()) == (3, sys.maxsize)
    ahead = Fixed(arm._replace(ahead=16))
    assert ahead.choose(1, 10.0, ()) == PLAIN._replace(ahead=16), "a look-ahead needs no drafter"
    fixed.load_state(json.loads(json.dumps(fixed.state())))
    assert fixed.strategies == (arm,)


def test_the_tuner_needs_no_torch() -> None:
    code = "import sys, tlt.engine.choice; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("seconds", "most"),
    [
        ({1: 10.0, 16: 10.0, 64: 10.0}, 64),
        ({1: 10.0, 16: 18.0, 64: 50.0}, 16),
        ({1: 10.0, 11: 20.0, 64: 60.0}, 9),
        ({1: 20.0, 6: 10.0, 16: 20.0}, 14),
        ({1: 10.0, 4: 40.0}, 1),
        ({}, 1),
    ],
    ids=["rows are free", "a size that was timed", "in between", "the first pass was slow", "rows are dear", "unknown"],
)
def test_a_brief_round_takes_at_most_1_8_times_a_round_of_one_row(seconds: dict[int, float], most: int) -> None:
    assert known([PLAIN], seconds).brief_rows() == most


def test_free_rows_hardly_add_time_to_a_round() -> None:
    """At 1 % per row, three more rows are within 3 % of one."""
    assert [known([PLAIN], {1: 1.0, 101: 2.0}).free_rows(rows) for rows in (1, 101, 300)] == [4, 101, 300]


@pytest.mark.parametrize(
    ("chance", "with_drafts", "free"), [(0.8, 1.6, 1), (0.8, 1.01, 4), (0.0, 1.6, 4), (0.1, 1.6, 4)]
)
def test_rows_are_not_free_if_drafts_would_be_lost(
    chance: float, with_drafts: float, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain rounds of four rows and of one are equally fast. With drafts four rows take `with_drafts` times as long."""
    arm = Strategy("eagle", 1)
    tuner = known([PLAIN, arm], {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.2 * with_drafts - 0.2}, chance=chance)
    tuner.times.add_draft(arm, 0.2, 2.0)
    monkeypatch.setattr(tuner, "_most_rows", lambda rows, longer: 4)
    assert tuner.free_rows(1) == free


# -- times of rounds ---------------------------------------------------------------------------------------------------


def times_of(passes: Mapping[int, float]) -> RoundTimes:
    times = RoundTimes()
    for tokens, seconds in passes.items():
        times.add_pass(tokens, seconds)
    return times


def test_a_pass_lies_on_lines_between_timed_passes() -> None:
    """Beyond the last one, of 16 tokens, it follows the line from that of 8 tokens, not from the one of 12."""
    times = times_of({4: 2.0, 8: 3.0, 12: 4.9, 16: 5.0})
    assert [times.pass_seconds(n) for n in (2, 4, 6, 16, 32)] == pytest.approx([1.5, 2.0, 2.5, 5.0, 9.0])
    assert times.pass_seconds(0.0) == 1.0, "half of the smallest timed pass"
    one = times_of({4: 2.0})
    assert [one.pass_seconds(n) for n in (8, 40)] == pytest.approx([3.0, 11.0])
    assert [one.pass_seconds(n, fixed_share=1.0) for n in (8, 40)] == [2.0, 2.0]


def test_another_length_of_contexts_has_the_same_shape() -> None:
    """Passes of longer contexts take twice as long, as the one of 4 tokens shows."""
    times = times_of({4: 2.0, 8: 3.0})
    times.context = 1
    times.add_pass(4, 4.0)
    for times.context in (3, 1):
        assert times.pass_seconds(8) == 6.0
    times.add_pass(8, 5.0)
    assert times.pass_seconds(8) == 5.0
    for times.context, seconds in ((3, 5.0), (0, 3.0)):
        assert times.pass_seconds(8) == seconds, "from the nearest length"


def test_the_last_32_passes_are_kept_and_a_disturbed_one_does_not_matter() -> None:
    times = times_of({4: 2.0})
    for seconds in (9.0, 9.0, 2.0):
        times.add_pass(4, seconds)
    assert times.pass_seconds(4) == 2.0
    for _ in range(32):
        times.add_pass(4, 7.0)
    assert (times.pass_seconds(4), times.num_passes(4)) == (7.0, 32)


def test_a_draft_of_another_depth_is_scaled() -> None:
    times = RoundTimes()
    assert times.draft_cost(Strategy("eagle", 4)) == (pytest.approx(0.4), 5.0)
    for tokens in (2.0, 3.0):
        times.add_draft(Strategy("eagle", 2), 0.3, tokens)
    assert times.draft_cost(Strategy("eagle", 2)) == (0.3, 2.5)
    assert times.draft_cost(Strategy("eagle", 8)) == (pytest.approx(1.2), 7.0)
    assert times.draft_cost(PLAIN) == (0.0, 1.0)


# -- acceptance rates --------------------------------------------------------------------------------------------------


def test_chains_that_were_cut_count_only_their_verified_tokens() -> None:
    """There are chains of two: three rows accept one token and reject the next, five accept both, and two reject the
    first. In the same round there are chains of three: one is accepted to the end, and one is rejected at the third
    token. The numbers are worked by hand."""
    model = AcceptanceRates()
    model.add("eagle", [3, 3] + [2] * 10, [4, 3] + [2] * 3 + [3] * 5 + [1] * 2)
    assert model.counts["eagle"][:4].tolist() == [[12, 10], [10, 7], [2, 1], [0, 0]]
    one = model.rates("eagle", 4, 0.5)
    assert one[:2] == pytest.approx([(10 + 2 * 0.5) / 14, (7 + 2 * one[0]) / 12])
    assert one[3] == one[2], "of a level that no row reached, the one before it tells most"


def test_counts_lose_weight_in_the_rounds_of_their_source_and_fade_in_others() -> None:
    """8 rows accept one of two tokens, and 64 rounds later 8 rows accept none."""
    model, kept = AcceptanceRates(), 63 / 64
    model.add("eagle", [2] * 8, [2] * 8)
    for _ in range(64):
        model.next_round()
    assert model.rates("eagle", 1, 0.5) == [9 / 10]
    assert model.rates("eagle", 1, 0.5, fading=True) == pytest.approx([(8 * kept**64 + 1) / (8 * kept**64 + 2)])
    model.add("eagle", [2] * 8, [1] * 8)
    assert model.rates("eagle", 1, 0.5) == pytest.approx([(8 * kept + 1) / (8 * kept + 10)])
    for rate in (0.9, None):
        model.renew("eagle", rate)
    assert model.rates("eagle", 1, 0.5, fading=True) == [0.5]
