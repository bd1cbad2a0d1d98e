"""Faults of what a run records and shows."""

from __future__ import annotations

from mutants.mutant import Mutant

RECORD, DISPLAY = "test_record.py", "test_display.py"

MUTANTS = [
    Mutant(
        "a resumed run keeps the completions of the step it does again",
        "completions.py",
        "_step(line) >= first_step",
        "_step(line) > first_step",
        RECORD,
    ),
    Mutant(
        "completions grow beyond their limit",
        "completions.py",
        "+ len(lines) > self.half",
        "> 2 * self.half",
        RECORD,
    ),
    Mutant(
        "groups that are carried are written down before they are trained on",
        "loop.py",
        "if id(group) not in kept]",
        "]",
        "test_loop.py",
    ),
    Mutant(
        "a tracker that fails ends the run",
        "trackers.py",
        "except Exception as error:  # a network",
        "except KeyError as error:  # a network",
        RECORD,
    ),
    Mutant(
        "a new run goes on in the tracker's old one",
        "trackers.py",
        "if place.first_step and path.is_file() else None",
        "if path.is_file() else None",
        RECORD,
    ),
    Mutant(
        "tokens seen begin anew after a resume",
        "record.py",
        '(last or {}).get("tokens_seen", 0)',
        "0",
        RECORD,
    ),
    Mutant(
        "a response whose reward's process was killed by somebody else has no reward",
        "rewards/pool.py",
        "verdict == DIED and not one.again",
        "verdict == DIED and one.again",
        "rewards/test_pool.py",
    ),
    Mutant(
        "a term of the reward is recorded after its weight",
        "rewards/isolated.py",
        "scores[term.name] = score",
        "scores[term.name] = term.weight * score",
        "rewards/test_scores.py",
    ),
    Mutant(
        "rows that a lost worker had decoded count twice",
        "cluster/coordinator.py",
        "for name in vars(Passes()):",
        "for name in ():",
        "cluster/test_coordinator.py",
    ),
    Mutant(
        "the time left rises while a step runs",
        "display.py",
        "last.seconds_left - gone))",
        "last.seconds_left + gone))",
        DISPLAY,
    ),
    Mutant(
        "the worst response is shown as the best",
        "sample_view.py",
        "(1 if which == BEST else -1)",
        "(1 if which != BEST else -1)",
        DISPLAY,
    ),
]
