"""The size of the key-value cache, on made-up hosts, containers and devices."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from random_drafter import RandomDrafter
from twin import make_model

from tlt.attention.slot_memory import HeadShape
from tlt.config import EngineConfig
from tlt.draft.features import FeatureLayout
from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine import memory
from tlt.engine.engine import Engine
from tlt.engine.memory import cache_tokens, free_bytes, return_freed_memory, rows_that_fit
from tlt.engine.tuner import Fixed
from tlt.types import Prompt, Request, SamplingParams

CPU = torch.device("cpu")
MIB = 2**20


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Set up a host with 800 MiB of available memory."""
    found = SimpleNamespace(available=800 * MIB)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: found)
    return found


def group(folder: Path, limit: str, use: int, statistics: str, version: int) -> Path:
    names = memory._GROUPS[version][:3]
    for name, text in zip(names, (limit, str(use), statistics), strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    return folder


@pytest.mark.parametrize(
    ("version", "limit", "statistics", "free"),
    [
        (2, str(500 * MIB), f"anon 5\ninactive_file {30 * MIB}\nslab 7", 500 - 120 + 30),
        (1, str(500 * MIB), f"anon 5\ntotal_inactive_file {30 * MIB}\nslab 7", 500 - 120 + 30),
        (2, "max", "inactive_file 0", 800),
        (2, str(2**62), "inactive_file 0", 800),
    ],
)
def test_a_containers_limit_counts_and_its_file_cache_does_not(
    tmp_path: Path, version: int, limit: str, statistics: str, free: int
) -> None:
    assert free_bytes(CPU, tmp_path) == 800 * MIB, "without a container"
    assert free_bytes(CPU, group(tmp_path, limit, 120 * MIB, statistics, version)) == free * MIB


@pytest.mark.parametrize(
    ("device", "free", "given", "tokens"),
    [
        ("cpu", 0, (1,), MIB // 256),
        ("cpu", 10_000, ("auto",), 2500 // 256),
        ("cpu", 0, ("auto",), 1),
        ("cpu", 100_000, ("auto", 20_000, 50_000), 30_000 // 256),
        ("cuda", 100_000, ("auto", 20_000), 96_000 // 256),
        ("cuda", 100_000, ("auto", 20_000, 50_000, 64), 56_000 // 320),
        ("cuda", 100_000, ("auto", 0, 200_000), 1),
        ("cuda", 100_000, (1, 20_000, 50_000), MIB // 256),  # a size that is given is taken
    ],
)
def test_cache_tokens_of_a_size_and_of_a_share(
    monkeypatch: pytest.MonkeyPatch, device: str, free: int, given: tuple[Any, ...], tokens: int
) -> None:
    """A token takes 2 x 2 layers x 2 heads x 8 numbers x 4 bytes. Memory for other purposes stays free on a device."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    mib, *rest = given
    assert cache_tokens(mib, HeadShape(2, 4, 2, 8, torch.float32, torch.device(device)), *rest) == tokens


def test_memory_that_pytorch_keeps_for_itself_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, found in {"memory_reserved": 50, "memory_allocated": 20, "mem_get_info": (100, 999)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, found=found: found)
    assert free_bytes(torch.device("cuda")) == 100 + 50 - 20


def test_the_noise_of_a_rollout_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of the next rollout and the update need its memory."""
    engine, seen = Engine(make_model().decoder, EngineConfig()), list[int]()
    monkeypatch.setattr(memory, "free_bytes", lambda device: seen.append(engine.rollout.noise.ring.nbytes) or MIB)
    asked = [Request(Prompt(0, "", (1, 2)), 0, 0, 5, SamplingParams(max_new_tokens=3))]
    for _ in range(2):
        list(engine.generate(asked))
        assert engine.rollout.noise.ring.nbytes
    assert seen
    assert not any(seen)
    engine.release()
    assert not engine.rollout.noise.ring.nbytes
    engine.submit(asked)
    assert engine.round() == [], "a released engine goes on"


@pytest.mark.parametrize("depth", [0, 3])
def test_other_memory_of_a_full_rollout_is_counted(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """Noise and hidden states of all rows take what was counted, apart from the logits."""
    counted = list[tuple[int, ...]]()
    monkeypatch.setattr(memory, "cache_tokens", lambda mib, shape, *sizes: counted.append(sizes) or 4096)
    strategy, layout = (Strategy("random", depth), FeatureLayout((0,), 16)) if depth else (PLAIN, None)
    vocab_size = make_model().decoder.options.vocab_size
    drafters = [RandomDrafter(vocab_size)] if depth else []
    engine = Engine(make_model().decoder, EngineConfig(max_rows=6), drafters, Fixed(strategy), layout=layout)
    engine.start(Request(Prompt(n, "", (1, 2)), 0, 0, n, SamplingParams(max_new_tokens=30)) for n in range(9))
    engine.round()
    window = engine.runner.window
    used = engine.rollout.noise.ring.nbytes + (window.features.nbytes + window.tokens.nbytes if window else 0)
    _, others, masks = counted[-1]
    assert used == others - 3 * 6 * (depth + 1) * vocab_size * 4
    assert masks == 0
    engine.start(())
    assert counted[-1][0] == (window.bytes_of() if window else 0) + engine.cache.bytes, (
        "what exists is not counted twice"
    )


def test_the_cache_limit_is_set_when_a_rollout_begins(host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_left_in_groups", lambda folder: [])
    engine = Engine(make_model().decoder, EngineConfig())
    first = engine.cache.bound_tokens
    asked = [Request(Prompt(0, "", (1, 2)), 0, 0, 5, SamplingParams(max_new_tokens=3))]
    list(engine.generate(asked))
    host.available //= 4
    list(engine.generate(asked))
    assert engine.cache.bound_tokens == pytest.approx(first / 4, abs=2), "but for spare entries"


@pytest.mark.parametrize(
    ("max_rows", "device", "longest", "tokens", "rows"),
    [
        ("auto", "cpu", 40, 640, 64),  # 64 rows of 10 tokens
        ("auto", "cpu", 40, 639, 32),
        ("auto", "cuda", 40, 2560, 256),
        ("auto", "cuda", 40, 1279, 64),
        ("auto", "cpu", 40, 1, 1),
        ("auto", "cpu", 0, 64, 64),  # the longest sequence is not known
        (96, "cpu", 40, 1, 96),
    ],
)
def test_rows_follow_from_the_cache(max_rows: Any, device: str, longest: int, tokens: int, rows: int) -> None:
    config = EngineConfig(max_rows=max_rows)
    assert rows_that_fit(config, torch.device(device), longest, lambda rows: tokens) == rows


def test_other_memory_of_many_rows_leaves_room_for_fewer() -> None:
    """256 rows leave 10,000 - 256 * 30 = 2,320 tokens for 2,560. 128 rows leave 6,160 for 1,280."""
    assert rows_that_fit(EngineConfig(), torch.device("cuda"), 40, lambda rows: 10_000 - 30 * rows) == 128


def test_the_number_of_rows_follows_from_the_hosts_memory_and_changes_no_token(
    host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_left_in_groups", lambda folder: [])
    target, longest = make_model().decoder, 2048
    token = HeadShape.of(target.options, target.dtype, target.device).bytes_per_token
    host.available = 4 * 8 * 512 * token  # a quarter has room for 8 rows of 2048 / 4 tokens
    params = SamplingParams(max_new_tokens=12)
    requests = [Request(Prompt(n, "", (1, 2 + n)), 0, 0, n, params) for n in range(7)]
    found = []
    for max_rows in ("auto", 3):
        engine = Engine(target, EngineConfig(max_rows=max_rows), longest=longest)
        engine.start(())
        assert engine.rollout.scheduler.max_rows == (8 if max_rows == "auto" else 3)
        rows, _, noise = engine.memory._replace(vocab_size=2**20).sizes(0, 1)
        assert noise.width == 64 // rows, "256 MiB of noise"
        found.append({response.request.seed: response for response in engine.generate(requests)})
    assert found[0] == found[1]


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries have no mallinfo2")
@pytest.mark.parametrize(("left", "returned"), [(100 * MIB, True), (2**50, False)])
def test_freed_memory_returns_to_a_system_that_has_less_left(
    monkeypatch: pytest.MonkeyPatch, left: int, returned: bool
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: left)
    blocks = [torch.ones(2**14) for _ in range(4_000)]  # 64 KiB each, below the size that has a mapping of its own
    del blocks[:-1]  # the last block keeps the heap from shrinking by itself
    before = psutil.Process().memory_info().rss
    return_freed_memory()
    assert (before - psutil.Process().memory_info().rss > 200 * MIB) == returned
