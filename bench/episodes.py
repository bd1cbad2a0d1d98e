"""Speed of a rollout of episodes whose tool takes 0, 0.1 and 2 s, and how many draft tokens are accepted in each turn.

    python bench/episodes.py [--recipe FILE] [--seconds 0 0.1 2] [--repeats 5] [--json FILE] [--section.key value ...]

The same episodes are decoded in three ways, which take turns: by tlt, by plain decoding, and by tlt if no episode goes
on before all of them have their reply. Each way must give the same tokens. The two ways with drafts have an engine
each, and each repeat has its own seed, so that no drafter has seen a response before. The tool is the environment of
the recipe. Each of its replies is there this many seconds after the model's turn, and needs no processor time to wait.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import count, islice, pairwise
from pathlib import Path
from statistics import fmean, median
from threading import Timer
from typing import Any

from tlt.build import settled
from tlt.cluster.local import LocalRollout
from tlt.config import Config, load_config
from tlt.data.prompts import reply_encoder
from tlt.data.tokenizer import load_tokenizer
from tlt.engine.spelling import Detokenizer
from tlt.metrics import provenance, write_json
from tlt.rewards.environments import Environments, Turn
from tlt.rewards.episodes import REPLY, Episodes
from tlt.rewards.scores import imported
from tlt.rewards.verdicts import Verdict
from tlt.run.parts import make_parts
from tlt.sampling import make_requests
from tlt.types import Prompt, Request, Response, Row

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "calculator.toml"
NOT_DRAFTED = "."
LATER = 3
"""turns from this one on are one group"""
WARM_UP = 10**6
"""seed of episodes that are not measured"""


class Delayed:
    """An environment in this process, in the place of a pool of processes. Each reply is there after a delay."""

    def __init__(self, make: Callable[[], Any], seconds: float) -> None:
        self.environments, self.seconds = Environments(make, 60.0), seconds

    def submit(self, prompt: Prompt, turn: Turn, key: int) -> Future[Verdict]:
        found: Future[Verdict] = Future()
        (verdict,) = self.environments.answer_all([(prompt, turn)])
        if not (turn.texts and self.seconds):
            found.set_result(verdict)
            return found
        timer = Timer(self.seconds, found.set_result, [verdict])
        timer.daemon = True
        timer.start()
        return found

    def result(self, verdict: Future[Verdict]) -> Verdict:
        return verdict.result()

    def ready(self, verdicts: Iterable[Future[Verdict]], seconds: float) -> set[Future[Verdict]]:
        return wait(verdicts, seconds, FIRST_COMPLETED).done

    def forget_keys(self) -> None: ...

    def close(self) -> None: ...


class Together(Episodes):
    """Episodes of which none goes on before each has ended or has its reply."""

    def begin(self, requests: Sequence[Request]) -> list[Row]:
        self._decoded, self._held = len(requests), list[Row]()
        return super().begin(requests)

    def take(self, ended: Sequence[Response], seconds: float = 0.0) -> tuple[list[Response], list[Row]]:
        self._decoded -= len(ended)
        finished, rows = super().take(ended, 0.0 if self._decoded else seconds)
        self._held += rows
        if self._decoded or self.awaits:
            return finished, []
        rows, self._held = self._held, []
        self._decoded = len(rows)
        return finished, rows


def accept_lengths(responses: Sequence[Response]) -> dict[str, float]:
    """Return the mean accept length by turn. A target pass commits one token that was in no draft."""
    tokens, passes = dict[str, int](), dict[str, int]()
    for response in responses:
        borders = [0, *(reply.end for reply in response.replies), len(response.token_ids)]
        for turn, (start, end) in enumerate(pairwise(borders), 1):
            name = str(turn) if turn < LATER else f"{LATER} and later"
            own = response.proposed[start:end].replace(REPLY, "")
            tokens[name] = tokens.get(name, 0) + len(own)
            passes[name] = passes.get(name, 0) + own.count(NOT_DRAFTED)
    return {name: tokens[name] / max(1, passes[name]) for name in sorted(tokens)}


class Workplace:
    """Two engines for one recipe, and its requests."""

    def __init__(self, config: Config) -> None:
        self.config, tokenizer = config, load_tokenizer(config.model.path)
        self.rollouts: dict[type[Episodes], LocalRollout] = {}
        for kind in (Episodes, Together):
            self.parts, _ = make_parts(config, tokenizer)
            assert isinstance(self.parts.rollout, LocalRollout), "one worker"
            self.parts.turns.close()
            self.rollouts[kind] = self.parts.rollout
        self.encode, self.decode = reply_encoder(tokenizer, config.data), Detokenizer(tokenizer)
        name, folder = str(config.reward.environment), config.reward.folder
        self.environment = imported(name, folder, "reward.environment", "module:Class")

    def decoded(self, kind: type[Episodes], delay: float, seed: int, plain: bool) -> tuple[list[Response], float]:
        """Return responses in the order of their requests, and the seconds that they took."""
        prompts = self.parts.prompts[: self.config.rollout.prompts_per_step]
        requests = make_requests(prompts, self.config.rollout.group_size, self.parts.sampling, seed)
        rollout, pool = self.rollouts[kind], Delayed(self.environment, delay)
        rollout.turns = kind(pool, self.encode, self.decode, self.config.reward.turns)  # type: ignore[arg-type]
        began = time.perf_counter()
        if plain:
            responses = rollout.generate_plain(requests, lambda response: None)
        else:
            responses, _ = rollout.generate(requests, lambda response: None)
        seconds = time.perf_counter() - began
        by_seed = {response.request.seed: response for response in responses}
        return [by_seed[request.seed] for request in requests], seconds


WAYS: dict[str, tuple[type[Episodes], bool]] = {
    "tlt": (Episodes, False),
    "plain": (Episodes, True),
    "together": (Together, False),
}


def bench(config: Config, delays: Sequence[float], repeats: int) -> dict[str, Any]:
    place, seeds = Workplace(config), count()
    for kind, plain in WAYS.values():
        place.decoded(kind, 0.0, WARM_UP, plain)  # the tuners learn what is fast
    cases, episodes = [], list[Response]()
    for delay in delays:
        seconds: dict[str, list[float]] = {name: [] for name in WAYS}
        own: list[Response] = []
        for seed in islice(seeds, repeats):
            tokens = []
            for name, (kind, plain) in WAYS.items():
                responses, took = place.decoded(kind, delay, seed, plain)
                seconds[name].append(took)
                tokens.append([response.token_ids for response in responses])
                own += responses if name == "tlt" else []
            if tokens.count(tokens[0]) != len(tokens):
                sys.exit(f"the ways gave different tokens (tool of {delay:g} s, seed {seed})")
        cases.append(case_of(delay, seconds) | {"accept_length_by_turn": accept_lengths(own)})
        print(shown(cases[-1]), flush=True)
        episodes += own
    return {
        "episodes": len(episodes),
        "turns": fmean(1 + len(response.replies) for response in episodes),
        "sampled_tokens": sum(response.num_sampled for response in episodes),
        "cases": cases,
    }


def case_of(delay: float, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians, and the median, least and largest ratio to tlt within a repeat."""
    ratios = {
        name: sorted(other / own for other, own in zip(seconds[name], seconds["tlt"], strict=True))
        for name in ("plain", "together")
    }
    return {
        "tool_seconds": delay,
        "seconds": seconds,
        "median_seconds": {name: median(found) for name, found in seconds.items()},
        "times_as_fast": {name: [median(found), found[0], found[-1]] for name, found in ratios.items()},
    }


def shown(case: dict[str, Any]) -> str:
    by_way = "  ".join(f"{name} {seconds:.2f} s" for name, seconds in case["median_seconds"].items())
    faster = "  ".join(
        f"{middle:.2f} ({least:.2f} to {largest:.2f}) times as fast as {name}"
        for name, (middle, least, largest) in case["times_as_fast"].items()
    )
    lengths = "  ".join(f"turn {name}: {length:.2f}" for name, length in case["accept_length_by_turn"].items())
    return f"tool of {case['tool_seconds']:g} s: {by_way}  {faster}  accept length {lengths}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.0, 0.1, 2.0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        config = settled(load_config(asked.recipe, [*overrides, "--run.folder", folder]))
        found = bench(config, asked.seconds, asked.repeats)
    if asked.json:
        write_json(asked.json, {"recipe": asked.recipe.name, "overrides": overrides, **found, **provenance()})


if __name__ == "__main__":
    main()
