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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest

from tlt.config.registry import DRAFTERS
from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.bandit import Bandit, strategies, with_ahead
from tlt.engine.estimates import bucket_of
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
        verified = 1.0 + self.per_token * rows * arm.new
        return verified + (arm.depth * self.per_level[arm.drafter] if arm.drafter != PLAIN.drafter else 0.0)

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

    def profile(
        self, wrong: Callable[[Strategy], float] = lambda arm: 1.0, arms: Collection[Strategy] = ARMS
    ) -> dict[int, dict[Strategy, float]]:
        return {rows: {arm: self.seconds(arm, rows) * wrong(arm) for arm in arms} for rows in (*ROWS, 256)}


def widths(arm: Strategy, offers: Sequence[int]) -> list[int]:
    """Return the number of look-ahead tokens that are verified for each row."""
    return [min(offer, arm.ahead) for offer in offers]


def seconds_of(world: World, arm: Strategy, offers: Sequence[int]) -> float:
    """Return the seconds of a pass, which is as wide as its longest chain, whatever the strategy allows."""
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
    tuner: Bandit,
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
        measured = seconds * math.exp(world.rng.gauss(0, world.noise))
        tokens = world.play(arm, B)
        for row, width in enumerate(ahead):
            if width:
                tokens[row] = 1 + next((k for k in range(width) if world.rng.random() >= right), width)
        tuner.record(RoundResult(arm, measured, tokens, True, ahead))
        expected = B * world.tokens(arm)
        arms.append(arm)
        without.append(tuner.current)
        spent += seconds
        ideal += expected / world.best(B, [a for a in ARMS if a == PLAIN or a.drafter in usable])
        plain += expected / world.speed(PLAIN, B)
    return Played(arms, without, 1 - ideal / spent, plain / spent)


def test_the_time_of_a_plain_round_depends_on_its_rows() -> None:
    """Rounds of three rows count for the bucket of four, with the ratio of the profile."""
    world = World(right={"eagle": 0.3, "suffix": 0.7}, per_token=0.2, noise=0.0)
    bandit = Bandit(ARMS, world.profile, {"eagle": 0.3})
    play(bandit, world, lambda turn: 3 + turn % 2, 600)
    seconds = bandit.times.seconds(PLAIN, bucket_of(4, 100.0))
    assert seconds == pytest.approx(world.seconds(PLAIN, 4), rel=0.01)
    assert seconds * bandit.times.share(PLAIN, 3) == pytest.approx(world.seconds(PLAIN, 3), rel=0.1)


@pytest.mark.parametrize(("rows", "seed"), [(1, 0), (1, 1), (4, 0), (16, 1), (64, 2)])
def test_it_is_soon_near_the_best_strategy(rows: int, seed: int) -> None:
    world, bandit = World(rng=random.Random(seed)), Bandit(ARMS, World().profile)
    assert play(bandit, world, rows, 600).regret < (0.1 if rows == 1 else 0.05)
    assert play(bandit, world, rows, 1000).regret < (0.06 if rows == 1 else 0.03)


def any_world(seed: int) -> tuple[World, Bandit]:
    """Return a random simulation, and a tuner whose profile of it is wrong by about 10 %."""
    rng = random.Random(seed)
    world = World(
        right={"eagle": rng.choice([0, 0.2, 0.4, 0.6, 0.8, 0.95]), "suffix": rng.choice([0, 0.1, 0.3, 0.6])},
        per_token=rng.choice([0.002, 0.02, 0.06, 0.2]),
        per_level={"eagle": rng.choice([0.05, 0.12, 0.33]), "suffix": rng.choice([0.002, 0.02, 0.1])},
        catch_up=rng.choice([0, 0.1]),
        noise=rng.choice([0.02, 0.05, 0.1]),
        rng=rng,
    )
    wrong = {arm: math.exp(rng.gauss(0, 0.1)) for arm in ARMS}
    return world, Bandit(ARMS, partial(world.profile, lambda arm: wrong[arm]))


@pytest.mark.parametrize("rows", ROWS)
def test_it_is_never_slower_than_plain_decoding(rows: int) -> None:
    """Neither in a first rollout of 300 rounds, in which the rows end one by one, nor in the next three rollouts."""
    for seed in range(rows % 3, 20, 3):
        world, bandit = any_world(seed)
        for rounds in (300, 900):
            played = play(bandit, world, lambda turn: max(1, rows - rows * (turn % 300) // 300), rounds)
            assert 1 / played.against_plain <= 1.02, (seed, rounds)


@pytest.mark.parametrize("rows", [1, 16])
def test_it_follows_a_drafter_that_gets_worse_or_better(rows: int) -> None:
    """The drafter was trained meanwhile. A strategy that was slow long ago is tried again."""
    worse, better = World(), World({"eagle": 0.1, "suffix": 0.1})
    for world, change, rounds, most in (
        (worse, {"eagle": 0.1, "suffix": 0.1}, 200, 0.2 if rows == 1 else 0.05),
        (better, {"eagle": 0.85, "suffix": 0.1}, 1000, 0.05),
    ):
        bandit = Bandit(ARMS, world.profile)
        play(bandit, world, rows, 500)
        world.right = change
        play(bandit, world, rows, rounds)
        assert play(bandit, world, rows, 300).regret < most


def test_time_that_drafts_saved_long_ago_may_not_be_lost_again() -> None:
    """Both drafters were good, and neither will be again. Trying them costs no more than if they had never been."""
    world = World()
    bandit = Bandit(ARMS, world.profile)
    assert play(bandit, world, 4, 1500).against_plain > 1.5
    world.right = {"eagle": 0.0, "suffix": 0.0}
    play(bandit, world, 4, 1500)
    assert play(bandit, world, 4, 1000).against_plain > 0.97


def test_a_wrong_evaluation_costs_little_and_a_cheap_drafter_is_tried() -> None:
    world = World({"eagle": 0.05, "suffix": 0.0})
    bandit = Bandit(ARMS, world.profile, {"eagle": 0.6})
    assert play(bandit, world, lambda turn: 64 if turn % 120 < 80 else 4, 2400).against_plain > 0.98
    world.right["eagle"] = 0.0
    played = play(Bandit(ARMS, world.profile, {"eagle": 0.9}), world, 1, 2000)
    tried = Counter(arm.drafter for arm in played.arms)
    assert tried["suffix"] > tried["eagle"] > 0
    assert played.against_plain > 0.985


@pytest.mark.parametrize("rows", [1, 4])
def test_a_drafter_published_in_a_rollout_is_used_at_once(rows: int) -> None:
    """A drafter that was never trained is not tried. An evaluated drafter is used at once."""
    world = World(right={"eagle": 0.0, "suffix": 0.4})
    tuner = Bandit(ARMS, world.profile, {"eagle": 0.0})
    cold = play(tuner, world, rows, 400)
    assert all(arm.drafter != "eagle" for arm in cold.arms)
    world.right["eagle"] = 0.8
    tuner.renew("eagle", 0.8)
    warm = play(tuner, world, rows, 100)
    assert sum(arm.drafter == "eagle" for arm in warm.arms[10:]) > 80
    tuner.renew("eagle", None)
    assert "eagle" not in tuner.seen.seen, "nothing is known of it"


def test_acceptance_is_not_forgotten_while_plain_decoding_is_faster() -> None:
    """Large batches are decoded without drafts for 400 rounds, so no recent round used the drafter."""
    world = World(per_token=0.5)
    tuner = Bandit(ARMS, world.profile)
    play(tuner, world, 1, 200)
    deep = Strategy("eagle", 4)
    before = tuner.tokens(deep)
    for _ in range(400):
        tuner.choose(64, 300.0, ())
        tuner.record(RoundResult(PLAIN, 33.0, [1] * 64, True))
    assert tuner.tokens(deep) == pytest.approx(before, rel=0.15)
    tuner.choose(1, 300.0, BOTH)
    assert tuner.current.drafter == "eagle"


@pytest.mark.parametrize(
    ("right", "catch_up", "what", "switches", "regret"),
    [
        ({"eagle": 0.8, "suffix": 0.4}, 0.0, "name", 120, 0.05),
        # one drafter is best below the border, and the other above, by a few per cent; a switch costs two rounds
        ({"eagle": 0.62, "suffix": 0.45}, 3.0, "drafter", 60, 0.12),
    ],
    ids=["a batch size that alternates at a border", "an expensive switch for a small gain"],
)
def test_strategies_are_rarely_switched(
    right: dict[str, float], catch_up: float, what: str, switches: int, regret: float
) -> None:
    """4 and 5 rows are in two buckets."""
    assert bucket_of(4, 300) != bucket_of(5, 300)
    world = World(right, catch_up=catch_up)
    bandit = Bandit(ARMS, world.profile)
    play(bandit, world, lambda turn: 4 + turn % 2, 600)
    played = play(bandit, world, lambda turn: 4 + turn % 2, 400)
    names = [getattr(arm, what) for arm in played.arms]
    assert sum(a != b for a, b in itertools.pairwise(names)) < switches
    assert played.regret < regret


def test_the_first_look_ahead_pass_is_narrow_and_times_no_wider_one() -> None:
    """Wide passes take no longer. Plain decoding was measured."""
    arms, wide = with_ahead([PLAIN]), PLAIN._replace(ahead=63)
    tuner = Bandit(arms, lambda: {1: dict.fromkeys(arms, 1.0)})
    for _ in range(4):
        tuner.record(RoundResult(tuner.choose(1, 300.0, ()), 1.0, [1], scored=True))
    arm = tuner.choose(1, 300.0, (), [63])
    assert arm.ahead == 4
    tuner.record(RoundResult(arm, 1.0, [5], scored=True, ahead=[4]))
    assert tuner.choose(1, 300.0, (), [63]).ahead == 63
    for width, timed in ((10, 0), (63, 1)):
        tuner.record(RoundResult(wide, 1.0, [width + 1], scored=True, ahead=[width]))
        assert tuner.times.rounds(wide, bucket_of(1, 300.0)) == timed


def test_strategies_of_a_failed_drafter_are_not_chosen() -> None:
    world, bandit = World(), Bandit(ARMS, World().profile)
    play(bandit, world, 1, 200)
    after = play(bandit, world, 1, 300, usable={"suffix"})
    assert "eagle" not in {arm.drafter for arm in after.arms}
    assert {arm.drafter for arm in after.arms} >= {"suffix"}
    assert set(play(bandit, world, 1, 100, usable=set()).arms) == {PLAIN}
    assert after.regret < 0.1


def known(arms: Sequence[Strategy], seconds: Callable[[Strategy], float], rows: int = 1, chance: float = 0.0) -> Bandit:
    """Return a tuner that has timed plain decoding, with look-ahead and these seconds of a round."""
    every = with_ahead(arms)
    bandit = Bandit(every, lambda: {rows: {arm: seconds(arm) for arm in every}}, {"eagle": chance} if chance else None)
    for _ in range(4):
        bandit.record(RoundResult(bandit.choose(rows, 300.0, ()), seconds(PLAIN), [1] * rows, scored=True))
    return bandit


@pytest.mark.parametrize(("seconds", "offer", "ahead"), [(4.4, 4, 4), (4.8, 4, 0), (1.0, 3, 4)])
def test_look_ahead_is_chosen_by_its_tokens(seconds: float, offer: int, ahead: int) -> None:
    """Four look-ahead tokens, each accepted with 0.97, and the next one are 4.71 tokens. A chain may be shorter than
    all limits."""
    bandit = known([PLAIN], lambda arm: seconds if arm.ahead else 1.0)
    assert bandit.choose(1, 300.0, (), [offer]).ahead == ahead


def test_rows_without_look_ahead_drafts_use_the_drafter() -> None:
    eagle = Strategy("eagle", 4)
    bandit = known([PLAIN, eagle], lambda arm: 1.0, rows=2, chance=0.9)
    assert eagle in [bandit.choose(2, 300.0, ("eagle",)) for _ in range(4)]
    assert bandit.choose(2, 300.0, ("eagle",), [4, 0]) == eagle._replace(ahead=4)


def test_a_shorter_longest_chain_makes_a_faster_round() -> None:
    """Ten tokens with the limit 16 take 8.5 s: 7.7 s for 8 tokens, and a quarter of the 3.2 s for 8 more."""
    bandit = known([PLAIN], lambda arm: {0: 1.0, 4: 4.9, 8: 7.7}.get(arm.ahead, 10.9))
    bandit.seen_ahead.add("ahead", [16] * 1000, [17] * 1000)
    assert [bandit.choose(1, 300.0, (), [longest]).ahead for longest in (8, 10, 16)] == [8, 16, 16]


def test_free_rows_follow_the_acceptance_rates() -> None:
    """Four rows are free for plain decoding. They are not while a drafter that is accepted makes one row faster."""
    arms = [PLAIN, Strategy("suffix", 4)]
    bandit = Bandit(arms, lambda: {1: dict.fromkeys(arms, 1.0), 4: {PLAIN: 1.0, arms[1]: 4.0}})
    assert bandit.free_rows(1) == 1
    for _ in range(8):
        bandit.record(RoundResult(PLAIN, 1.0, [1], scored=True))
        bandit.seen.add("suffix", [4] * 50, [1] * 50)
        bandit.choose(1, 300.0, ("suffix",))
    assert bandit.free_rows(1) == 4


def test_the_time_of_unscored_rounds_is_ignored() -> None:
    bandit = Bandit(ARMS, World().profile)
    for _ in range(50):
        bandit.choose(4, 300.0, BOTH)
        bandit.record(RoundResult(ARMS[1], 99.0, [1] * 4, scored=False))
    assert bandit.state()["took"] == []
    assert bandit.state()["seen"], "how right the guesses were is seen all the same"


@pytest.mark.parametrize(("catch_up", "is_tried"), [(0.5, True), (2.0, False)])
def test_a_try_is_charged_the_whole_catch_up(catch_up: float, is_tried: bool) -> None:
    """At first, tries may lose 1 % of 128 plain rounds of 1 s."""
    arms = [PLAIN, Strategy("suffix", 4)]
    bandit = Bandit(arms, lambda: {1: dict.fromkeys(arms, 1.0)})
    bandit.catch_up["suffix"] = catch_up
    assert any(arm == arms[1] for arm in play(bandit, World(per_token=0.0, noise=0.0), 1, 12).arms) == is_tried


def test_a_published_drafter_begins_with_its_evaluation_as_8_rows() -> None:
    bandit = Bandit(ARMS, World().profile)
    bandit.seen.add("eagle", [1] * 100, [1] * 100)
    bandit.renew("eagle", 0.5)
    assert bandit.seen.seen["eagle"][:3].tolist() == [[8, 4], [4, 2], [2, 1]]


def test_the_catch_up_is_the_mean_of_slow_and_fast_rounds() -> None:
    """A drafter without catch-up alternates with plain decoding. Its rounds take 0.5 s more or less than profiled."""
    eagle = next(arm for arm in ARMS if arm.drafter == "eagle")
    bandit = Bandit([PLAIN, eagle], lambda: {1: {PLAIN: 1.0, eagle: 1.0}}, {"eagle": 0.9})
    for _ in range(8):
        bandit.record(RoundResult(bandit.choose(1, 300.0, ()), 1.0, [1], scored=True))
    used = 0
    while used < 100:
        if bandit.choose(1, 300.0, ("eagle",)) == eagle:
            used += 1
            bandit.record(RoundResult(eagle, 1.5 if used % 2 else 0.5, [eagle.depth + 1], scored=True))
            bandit.choose(1, 300.0, ())
        bandit.record(RoundResult(PLAIN, 1.0, [1], scored=True))
    assert abs(bandit.catch_up["eagle"]) < 0.1


WITH_AHEAD = with_ahead(ARMS)
WIDTHS = sorted({arm.ahead for arm in WITH_AHEAD})


def looking(world: World, arms: Sequence[Strategy] = WITH_AHEAD) -> Bandit:
    return Bandit(arms, partial(world.profile, arms=arms), world.right)


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
    known, unknown = looking(world), Bandit(ARMS, other.profile, other.right)
    assert play(known, world, 4, 300).arms == play(unknown, other, 4, 300).arms
    assert json.dumps(known.state()) == json.dumps(unknown.state())
    unknown = Bandit(ARMS, world.profile)
    assert unknown.choose(4, 300.0, BOTH, [63] * 4) in ARMS, "nor where it has no such arms"


def test_rows_with_look_ahead_do_not_count_for_the_drafter() -> None:
    world = World()
    eagle = Strategy("eagle", 4)
    mixed, alone = looking(world), looking(world)
    for bandit in (mixed, alone):
        bandit.choose(2, 300.0, BOTH)
    for _ in range(20):
        mixed.record(RoundResult(eagle._replace(ahead=16), 1.0, [17, 3], True, [16, 0]))
        alone.record(RoundResult(eagle, 1.0, [3], True))
    assert mixed.tokens(eagle) == pytest.approx(alone.tokens(eagle), rel=0.02)


def test_the_strategies_begin_with_plain_decoding_and_differ() -> None:
    arms = strategies(DRAFTERS)
    assert arms[0] == PLAIN
    assert len(set(arms)) == len({arm.name for arm in arms}) == len(arms)
    assert {arm.drafter for arm in arms} == {"plain", *DRAFTERS}
    assert all(arm.depth > 0 for arm in arms[1:])


def test_its_state_survives_json() -> None:
    world = World()
    bandit, back = looking(world), looking(world)
    play(bandit, world, lambda turn: 1 + turn % 40, 500)
    play(bandit, world, 16, 300)
    play(bandit, world, 4, 100, offers=lambda turn: [16] * 4, right=0.5)
    text = json.dumps(bandit.state())
    back.load_state(json.loads(text))
    assert json.dumps(back.state()) == text
    assert back.state()["seen_ahead"]


def test_a_state_with_removed_strategies_is_read() -> None:
    bandit, world = Bandit(ARMS, World().profile), World({"eagle": 0.8, "suffix": 0.7})
    play(bandit, world, 2, 200)
    arms = [arm for arm in ARMS if arm.drafter != "eagle"]
    fewer = Bandit(arms, World().profile)
    fewer.load_state(json.loads(json.dumps(bandit.state())))
    fewer.load_state({})
    assert set(fewer.seen.seen) == {"suffix"}
    assert {arm[0] for _, arm, _ in fewer.times.state()} == {"plain", "suffix"}
    assert set(play(fewer, World(), 2, 200).arms) <= set(arms)


def test_a_fixed_strategy_is_always_chosen() -> None:
    arm = ARMS[3]
    fixed = Fixed(arm)
    assert fixed.choose(1, 10.0, BOTH) == fixed.choose(64, 10.0, {arm.drafter}) == arm
    assert fixed.choose(1, 10.0, ()) == PLAIN
    ahead = Fixed(arm._replace(ahead=16))
    assert ahead.choose(1, 10.0, ()) == PLAIN._replace(ahead=16), "a look-ahead needs no drafter"
    fixed.load_state(json.loads(json.dumps(fixed.state())))
    assert fixed.strategies == (arm,)


def test_the_tuner_needs_no_torch() -> None:
    code = "import sys, tlt.engine.bandit; print([m for m in ('torch', 'transformers') if m in sys.modules])"
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
    ],
    ids=["rows are free", "a row that was timed", "in between", "the first ones were timed cold", "rows are dear"],
)
def test_a_brief_round_takes_at_most_1_8_times_a_round_of_one_row(seconds: dict[int, float], most: int) -> None:
    assert Bandit([PLAIN], lambda: {rows: {PLAIN: spent} for rows, spent in seconds.items()}).brief_rows() == most


def test_free_rows_hardly_add_time_to_a_round() -> None:
    """At 1 % per row, three more rows are within 3 % of one."""
    bandit = Bandit([PLAIN], lambda: {1: {PLAIN: 1.0}, 101: {PLAIN: 2.0}})
    assert [bandit.free_rows(rows) for rows in (1, 101, 300)] == [4, 101, 300]
    assert bandit.brief_rows() == 81, "not mixed up with the free rows of one row"


@pytest.mark.parametrize(
    ("chance", "with_drafts", "free"), [(0.8, 1.6, 1), (0.8, 1.01, 4), (0.0, 1.6, 4), (0.1, 1.6, 4)]
)
def test_rows_are_not_free_if_drafts_would_be_lost(chance: float, with_drafts: float, free: int) -> None:
    """Plain rounds of four rows and of one are equally fast. With drafts four rows take `with_drafts` times as long."""
    arm = Strategy("eagle", 1)
    seconds = {rows: {PLAIN: 1.0, arm: 1.2 * (with_drafts if rows > 1 else 1.0)} for rows in (1, 4)}
    assert Bandit([PLAIN, arm], lambda: seconds, {"eagle": chance}).free_rows(1) == free
