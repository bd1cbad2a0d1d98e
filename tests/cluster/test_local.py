"""Worker in this process: its cache is freed before an update, and allocated again afterwards."""

from __future__ import annotations

from pathlib import Path

from tiny import tiny_config

from tlt.cluster.local import LocalRollout
from tlt.data.tokenizer import load_tokenizer
from tlt.run.parts import make_parts
from tlt.types import Request


def test_memory_is_freed_and_allocated_again_without_a_change_of_tokens(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    parts, _ = make_parts(config, load_tokenizer(config.model.path))
    assert isinstance(parts.rollout, LocalRollout)
    store = parts.rollout.engine.cache.store
    requests = [Request(parts.prompts[i % 3], i, 0, i, parts.sampling) for i in range(6)]

    def decode() -> list[list[int]]:
        responses, _ = parts.rollout.generate(requests, lambda response: None)
        assert store.slots > 0
        return [r.token_ids for r in sorted(responses, key=lambda r: r.request.seed)]

    first = decode()
    parts.rollout.release()
    assert sum(tensor.numel() for tensor in store.layers) == 0
    assert decode() == first
