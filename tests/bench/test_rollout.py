"""`tlt bench rollout` on the tiny model: its file, and that it refuses to compare different tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config

from tlt.bench import rollout
from tlt.bench.peers import peers
from tlt.bench.rollout import bench_rollout
from tlt.engine import engine


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def bench(home: Path, file: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    config = tiny_config(home, **({"rollout": {"group_size": 2, "max_new_tokens": 12}} | sections))
    bench_rollout(config, [1, 3], repeats=1, with_peers=False, json_file=file)
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def result(home: Path) -> dict[str, Any]:
    return bench(home, home / "bench.json")


def test_result_has_the_promised_keys(result: dict[str, Any]) -> None:
    assert {"rows", "peers", "machine", "versions", "commit"} <= set(result)
    assert result["peers"] == []
    assert {"tlt", "torch", "transformers", "python"} <= set(result["versions"])
    assert result["machine"]["cpu"]
    for row in result["rows"]:
        assert {"batch", "strategy", "tokens_per_second", "accept_length"} <= set(row)
        assert row["tokens_per_second"] > 0


def test_every_strategy_is_measured_at_every_batch_size(result: dict[str, Any]) -> None:
    strategies = ["plain", "suffix", "suffix after an epoch"]
    assert [(row["batch"], row["strategy"]) for row in result["rows"]] == [(b, s) for b in (1, 3) for s in strategies]


def test_plain_is_the_measure(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        if row["strategy"] == "plain":
            assert row["accept_length"] == 1.0
            assert row["ratio_to_plain"] == 1.0
        else:
            assert row["accept_length"] >= 1.0


def test_without_a_drafter_plain_is_all_there_is(home: Path, tmp_path: Path) -> None:
    rows = bench(home, tmp_path / "bench.json", speculation={"drafter": "off"})["rows"]
    assert [row["strategy"] for row in rows] == ["plain", "plain"]


def test_history_is_an_earlier_epoch_of_the_same_prompts(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught: list[set[tuple[int, int]]] = []
    teach = rollout._teach

    def observed(drafter: Any, responses: Any) -> None:
        taught.append({(r.request.prompt.prompt_id, r.request.epoch) for r in responses})
        teach(drafter, responses)

    monkeypatch.setattr(rollout, "_teach", observed)
    bench(home, tmp_path / "bench.json")
    assert taught == [{(0, 0), (1, 0)}, {(0, 0), (1, 0), (2, 0)}]  # batches of 1 and 3; every strategy decodes epoch 1


def test_strategies_that_decode_other_tokens_are_not_compared(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "walk", lambda tree, sampled: [0, 1] if len(tree.tokens) > 1 else [0])
    with pytest.raises(AssertionError, match="differ from plain"):
        bench(home, tmp_path / "bench.json", rollout={"group_size": 2, "max_new_tokens": 24})


def test_the_peer_decodes_what_it_is_asked_for(home: Path) -> None:
    """transformers' generate asserts its own length; its continuous batching is left to the real bench."""
    found = peers(tiny_config(home).model, torch.device("cpu"), [[1, 2, 3], [4, 5, 6]], 5)
    assert {"transformers.generate", "transformers.generate_batch"} <= set(found)
    found["transformers.generate"]()
