"""One worker, driven by its calls."""

from __future__ import annotations

from pathlib import Path

from tiny import tiny_config

from tlt.cluster.worker import Slice, Work, Worker
from tlt.types import Prompt, Request, SamplingParams


def request(prompt: tuple[int, ...], seed: int, new_tokens: int) -> Request:
    return Request(Prompt(seed // 10, "", prompt), seed % 10, 0, seed, SamplingParams(max_new_tokens=new_tokens))


def decoded(worker: Worker, rollout: int, *requests: Request) -> dict[int, list[int]]:
    found: Slice = worker.decode(Work(rollout, requests), seconds=600)
    return {response.request.seed: response.token_ids for response in found.responses}


def test_a_sibling_that_comes_after_the_cache_was_released_is_decoded_as_on_its_own(tmp_path: Path) -> None:
    """As where an update came between two of a rollout's calls."""
    folder = tmp_path / "model"
    worker, other = (Worker(tiny_config(tmp_path, speculation={"drafter": "off"}), 0, folder) for _ in range(2))
    first, late = request((7, 8, 9, 10), 10, 4), request((7, 8, 9, 10), 11, 12)
    assert decoded(worker, 0, request((1, 2, 3), 0, 30), first)
    worker.engine.cache.release()
    assert decoded(worker, 0, late) == decoded(other, 0, late)
