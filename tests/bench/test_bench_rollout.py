"""`bench/rollout.py` on the tiny model: its file, and its error if strategies decode different tokens."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tiny import tiny_config

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import rollout
from older_target import decode_ahead, older_and_present
from other_engines import peers

from tlt.data.tokenizer import load_tokenizer
from tlt.draft.eagle import EagleLayer, eagle_options, save_drafter
from tlt.engine import committing
from tlt.engine.engine import Engine
from tlt.models.families import decoder_options, read_config
from tlt.spelling import Detokenizer
from tlt.types import Prompt, Request, SamplingParams


def bench(home: Path, file: Path, tail: int = 0, look_ahead: int = 0, **sections: dict[str, Any]) -> dict[str, Any]:
    shape = {"group_size": 2, "max_new_tokens": 12, "stop_strings": ["qz"]}
    config = tiny_config(home, **({"rollout": shape} | sections))
    rollout.bench_rollout(config, [3], tail, repeats=1, with_peers=False, json_file=file, look_ahead=look_ahead)
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def result(home: Path) -> dict[str, Any]:
    config = tiny_config(home)
    save_drafter(EagleLayer(eagle_options(decoder_options(read_config(config.model.path)), "eagle3", 16)), home / "d")
    speculation = {"drafter": "adaptive", "path": str(home / "d")}
    with patch.object(rollout, "_HALF_WIDTH", math.inf):  # wide enough after one repeat
        return bench(home, home / "bench.json", tail=4, look_ahead=1, speculation=speculation)


def test_every_strategy_is_measured_in_every_case(result: dict[str, Any]) -> None:
    cases = {(row["batch"], row["case"]): [] for row in result["rows"]}
    for row in result["rows"]:
        cases[row["batch"], row["case"]].append(row["strategy"])
    assert list(cases) == [(3, "batch 3"), (4, "rollout of 4")]
    for strategies in cases.values():
        assert strategies == cases[3, "batch 3"]
        assert strategies[0] == "plain"
        assert strategies[-2:] == ["adaptive", "adaptive, look-ahead"]
        assert {name.split()[0] for name in strategies} >= {"plain", "suffix", "eagle", "ahead"}


def test_ratios_are_relative_to_plain_decoding_and_to_the_best_fixed_strategy(result: dict[str, Any]) -> None:
    rows, measured = result["rows"], ("adaptive", "adaptive, look-ahead", "plain, harvest")
    for row in rows:
        assert row["accept_length"] >= 1.0
        if row["strategy"] == "plain":
            assert (row["accept_length"], row["ratio_to_plain"]) == (1.0, [1.0, 1.0, 1.0])
        if row["strategy"] == row["best"]:
            assert row["ratio_to_best"] == [1.0, 1.0, 1.0]
        fixed = [other for other in rows if other["case"] == row["case"] and other["strategy"] not in measured]
        assert row["best"] == max(fixed, key=lambda other: other["tokens_per_second"])["strategy"]


def test_look_ahead_tokens_are_accepted_only_with_look_ahead(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        if row["strategy"].startswith("ahead"):
            assert 0.2 < row["seen_ahead"] < 1
            assert row["accept_length"] > 1.2
            assert row["accept_length_ahead"] > 1
        elif row["strategy"] != "adaptive, look-ahead":
            assert row["seen_ahead"] == 0


@pytest.mark.parametrize("shift", [1.0, 1.5])
def test_a_ratio_is_the_median_of_pairs_in_its_interval(shift: float) -> None:
    """A machine that slows down during the repeats slows both sides of a pair."""
    theirs = [100.0 / (1 + 0.1 * k) for k in range(9)]
    ours = [speed * shift * (1 + 0.001 * (k - 4)) for k, speed in enumerate(theirs)]
    low, middle, high = rollout.ratio(ours, theirs)
    assert middle == pytest.approx(shift)
    assert shift * 0.996 <= low <= middle <= high <= shift * 1.004


def test_an_interval_contains_the_true_ratio_in_95_percent_of_cases() -> None:
    rng, inside = np.random.default_rng(1), 0
    for _ in range(200):
        theirs = rng.normal(100, 5, 15)
        low, _, high = rollout.ratio(theirs * rng.normal(1.3, 0.05, 15), theirs)
        inside += low <= 1.3 <= high
    assert inside >= 180


def test_the_older_target_lacks_the_given_number_of_updates(home: Path) -> None:
    config = tiny_config(home, cluster={"workers": 3}, train={"steps": 1})
    for steps in (1, 2):
        older, present = older_and_present(config, steps)
        assert present.version - older.version == steps
        request = Request(Prompt(0, "", (1, 2, 3)), 0, 0, 5, SamplingParams(max_new_tokens=20, stop_strings=("a",)))
        (known,) = decode_ahead(older, config, [request])
        detokenize = Detokenizer(load_tokenizer(config.model.path))
        (said,) = Engine(older, config.engine, detokenize=detokenize).generate([request])
        assert known.tokens.tolist() == said.token_ids
        assert (known.version, known.ended) == (older.version, True)


def test_repeats_decode_other_responses_and_strategies_take_turns(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The strategy with the fewest tokens is next, so the minimum over strategies never falls while all decode."""
    seeds: dict[str, list[frozenset[int]]] = {}
    before: list[list[int]] = []
    decode, turn = rollout._Bench._decode, rollout._Run.turn

    def observed(self: Any, contenders: Any, batch: int, requests: Any, **named: Any) -> Any:
        before.append([])
        for contender in contenders:
            seeds.setdefault(contender.name, []).append(frozenset(r.seed for r in requests))
        return decode(self, contenders, batch, requests, **named)

    def counted(self: Any) -> None:
        before[-1].append(self.engine.stats.tokens)
        turn(self)

    monkeypatch.setattr(rollout._Bench, "_decode", observed)
    monkeypatch.setattr(rollout._Run, "turn", counted)
    monkeypatch.setattr(rollout, "_TURN", 1e-4)
    monkeypatch.setattr(rollout, "_HALF_WIDTH", -1.0)  # never narrow enough: as many repeats as are allowed
    bench(home, tmp_path / "bench.json")
    one, *others = seeds.values()
    assert all(other == one for other in others), "all decode the same"
    assert len(one) == len(set(one)) == 2 + 1, "two repeats and one to warm up"
    assert all(tokens == sorted(tokens) for tokens in before)
    assert max(len(tokens) for tokens in before) > 20


def test_strategies_with_other_tokens_are_refused(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TLT_AUDIT")  # the ledger would see it first
    monkeypatch.setattr(committing, "num_accepted", lambda draft, sampled: min(1, len(draft.tokens)))
    with pytest.raises(AssertionError, match="other tokens"):
        bench(home, tmp_path / "bench.json", rollout={"group_size": 2, "max_new_tokens": 24})


def test_the_peer_decodes_the_requested_tokens(home: Path) -> None:
    """transformers' generate asserts its own length. Its continuous batching is tested only by the real benchmark."""
    found = peers(tiny_config(home).model, torch.device("cpu"), [[1, 2, 3], [4, 5, 6]], 5)
    assert {"transformers.generate", "transformers.generate_batch"} <= set(found)
    found["transformers.generate"]()
