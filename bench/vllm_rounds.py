"""Rollouts by vLLM with tlt's drafts and without: python bench/vllm_rounds.py RECIPE --json FILE

Two vLLMs in this process decode the same requests in turn: one without speculation, one with `adaptive`. The first
rollout of each number of rows is a warm-up. The last row has look-ahead drafts, which the policy before its last update
decoded. Tokens are compared in float32, because in bfloat16 vLLM's sums depend on the number of rows.

Keys of the JSON file: `rows`, each with `batch`, `ratio` (median of the rollouts after the first one) and `ratios`; and
`equal`, whether all responses are equal.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from older_target import decode_ahead, trained
from rollout import bench_requests

from tlt.build import load_detokenizer, open_target, open_workplace
from tlt.config import Config, load_config
from tlt.draft.ahead import Ahead, AheadStore
from tlt.metrics import provenance, write_json
from tlt.models.decoder import Decoder
from tlt.models.loading import make_target
from tlt.models.weights import read_safetensors
from tlt.store.hub import from_hub
from tlt.types import Request
from tlt.vllm.settings import vllm_version
from tlt.vllm.target import VllmTarget
from tlt.vllm.vllm_engine import VllmEngine

_SHORT = {"prompts_per_step": 2, "group_size": 4}  # steps between the two versions of the policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--rollouts", type=int, default=6, help="timed rollouts for each number of rows (default 6)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a response (default 64)")
    parser.add_argument("--no-look-ahead", action="store_true", help="leave the last row out")
    asked, overrides = parser.parse_known_args()
    longest = ["--rollout.max_new_tokens", str(asked.tokens), "--engine.max_rows", str(max(asked.batches))]
    given = ["--engine.backend", "vllm", "--model.dtype", "float32", "--speculation.drafter", "adaptive"]
    config = from_hub(load_config(asked.recipe, [*given, *longest, *overrides]))
    bench = Bench(config, not asked.no_look_ahead, asked.json)
    for batch in asked.batches:
        bench.measure(batch, asked.rollouts)
    if not asked.no_look_ahead:
        bench.measure(1, asked.rollouts, ahead=True)
    bench.print()


class Bench:
    def __init__(self, config: Config, look_ahead: bool, file: Path | None) -> None:
        """Start both vLLMs, and load the present policy into them."""
        self.config, self.file, self.place = config, file, open_workplace(config)
        now, self.older = dict(read_safetensors(config.model.path)), None
        if look_ahead:
            steps = config.model_copy(update={"rollout": config.rollout.model_copy(update=_SHORT)})
            now, before = trained(steps, 1)
            self.older = make_target(config.model)
            self.older.load(before, 0)
        self.plain, self.ours = (self._start(drafter) for drafter in ("off", "adaptive"))
        for target in (self.plain, self.ours):
            target.load(now, 0)
        self.tree: dict[str, Any] = {"rows": [], "equal": True, "vllm": vllm_version(), **provenance()}

    def _start(self, drafter: str) -> VllmTarget:
        speculation = self.config.speculation.model_copy(update={"drafter": drafter})
        target = open_target(self.config.model_copy(update={"speculation": speculation}), self.config.model.path)
        assert isinstance(target, VllmTarget), "the backend is vllm"
        return target

    def measure(self, batch: int, rollouts: int, ahead: bool = False) -> None:
        rows, spell = self.config.engine.model_copy(update={"max_rows": batch}), load_detokenizer(self.config.model)
        plain = VllmEngine(self.plain, rows, spell)
        ours = VllmEngine(self.ours, rows, spell, store=AheadStore(), speculation=self.config.speculation)
        row: dict[str, Any] = {
            "batch": batch,
            "look_ahead": ahead,
            "ratios": [],
            "cpu_ratios": [],
            "accept_lengths": [],
            "strategies": [],
            "plain_seconds": [],
        }
        self.tree["rows"].append(row)
        for repeat in range(rollouts + 1):
            requests = bench_requests(self.config, self.place.prompts, self.place.sampling, batch, repeat)
            if ahead:
                ours.store.put(self._ahead(requests))
            order = (plain, ours) if repeat % 2 else (ours, plain)
            found = {engine: decode(engine, requests) for engine in order}
            self.tree["equal"] &= found[plain][0] == found[ours][0]
            if repeat:
                row["ratios"].append(found[plain][1] / found[ours][1])
                row["cpu_ratios"].append(found[plain][2] / found[ours][2])
                row["accept_lengths"].append(ours.stats.accept_length)
                row["ratio"], row["lowest"] = statistics.median(row["ratios"]), min(row["ratios"])
                row["strategies"].append(ours.stats.strategies)
                row["plain_seconds"].append(found[plain][1])
            if self.file:
                write_json(self.file, self.tree)

    def _ahead(self, requests: Sequence[Request]) -> list[Ahead]:
        assert isinstance(self.older, Decoder), "the older policy was trained"
        return decode_ahead(self.older, self.config, requests)

    def print(self) -> None:
        for row in self.tree["rows"]:
            kind, speeds = "look-ahead" if row["look_ahead"] else "adaptive", [f"{x:.2f}" for x in row["ratios"]]
            print(f"{row['batch']:3} rows, {kind}: {row['ratio']:.2f} times plain ({', '.join(speeds)})")
        print("all responses are equal" if self.tree["equal"] else "RESPONSES DIFFER")


def decode(engine: VllmEngine, requests: Sequence[Request]) -> tuple[dict[int, list[int]], float, float]:
    """Return the tokens of each response by seed, and the wall-clock and CPU seconds of the rollout."""
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = {response.request.seed: response.token_ids for response in engine.generate(requests)}
    return tokens, time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    main()
