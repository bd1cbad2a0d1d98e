"""Finds the step in which two recorded training runs fork: there rounding must explain each response that differs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from tlt.build import open_workplace
from tlt.config import Config
from tlt.models.weights import read_safetensors
from tlt.rl.groups import from_plain, to_plain
from tlt.types import Group, Response
from tlt.verify.oracle import EXPLAINED_GAP, Fork, float64_target, fork_of

FILE = "responses.jsonl"


def record(folder: Path, groups: list[Group]) -> None:
    """Append the responses of one more step of a run to its file."""
    with (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(to_plain(groups)) + "\n")


class Comparison(NamedTuple):
    first: int | None
    """the first step in which responses differ; later steps have other policies, and cannot be compared"""
    explained: int = 0
    """number of differing responses of that step that rounding alone can explain"""
    unexplained: int = 0
    forks: tuple[Fork, ...] = ()


def compare(name: str, plain: Path, other: Path, config: Config) -> Comparison:
    """Compare the runs in two folders; `plain` must hold a checkpoint of every step. The two noisy scores of each first
    differing token are recomputed in float64, with the policy that both runs had before that step."""
    for step, (ours, theirs) in enumerate(zip_longest(_steps(plain), _steps(other), fillvalue=[])):
        pairs = [pair for pair in zip(ours, theirs, strict=False) if _tokens(pair[0]) != _tokens(pair[1])]
        if pairs:
            forks = _forks(name, step, pairs, _policy_before(plain, step, config), config)
            explained = sum(fork.gap < EXPLAINED_GAP[config.model.dtype] for fork in forks)
            return Comparison(step, explained, len(forks) - explained, tuple(forks))
        if len(ours) != len(theirs):
            return Comparison(step, unexplained=1)
    return Comparison(None)


def _steps(folder: Path) -> Iterator[list[dict[str, Any]]]:
    with (folder / FILE).open(encoding="utf-8") as file:
        yield from (json.loads(line) for line in file)


def _tokens(group: dict[str, Any]) -> list[list[int]]:
    return [group["row"], *(response["token_ids"] for response in group["responses"])]


def _policy_before(folder: Path, step: int, config: Config) -> Path:
    return folder / "checkpoints" / f"step_{step:08d}" / "policy" if step else Path(config.model.path)


def _forks(name: str, step: int, pairs: list[Any], policy: Path, config: Config) -> list[Fork]:
    place = open_workplace(config)
    reference = float64_target(config, read_safetensors(policy))
    ours, theirs = (from_plain(side, place.prompts, place.sampling) for side in zip(*pairs, strict=True))
    both: list[tuple[Response, Response]] = [
        pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a.responses, b.responses, strict=True)
    ]
    return [fork_of(name, step, a, b, reference) for a, b in both if a.token_ids != b.token_ids]
