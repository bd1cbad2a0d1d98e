"""Every numeric field of the configuration at its bounds. A run of two steps ends well, or with one sentence that names
the field.

The values are read from the schema, so that a new field is covered. Values share a run, because most have no effect on
others. A group that fails is halved while one of its halves fails."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import annotated_types
import pytest
from pydantic import BaseModel
from tiny import tiny_tree, train

from tlt.config import Config, ConfigError, parse_config
from tlt.config.section import is_state

WHOLE = 2**63 - 1  # the largest number that a recipe may hold
NOT_TRIED = {
    ("data.size", "most"): "a million problems take minutes to generate",
    ("eval.samples", "most"): "it is how much is decoded",
    ("train.steps", "most"): "it is how much is decoded",
    ("train.epochs", "most"): "it is how long an update takes",
    ("reward.timeout_seconds", "least"): "every response ends its process, and another takes a second to start",
    ("cluster.workers", "most"): "it is the number of processes",
}


class Value(NamedTuple):
    key: str
    bound: str
    value: float

    def __str__(self) -> str:
        return f"{self.key} = {self.value}"


def values(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[Value]:
    """Return the smallest and the largest value of every number in a section, and in sections and lists in it."""
    for name, field in section.model_fields.items():
        if is_state(field):
            continue
        kinds = (field.annotation, *get_args(field.annotation))
        for inner in kinds:
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from values(inner, f"{prefix}{name}." + ("0." if inner is not field.annotation else ""))
        if kind := next((kind for kind in (int, float) if kind in kinds), None):
            for bound, value in zip(("least", "most"), bounds(kind, field.metadata), strict=True):
                yield Value(f"{prefix}{name}", bound, value)


def bounds(kind: type, metadata: Sequence[Any]) -> tuple[float, float]:
    """Return the smallest and the largest allowed number. An open bound gives the nearest number that is allowed."""
    most = WHOLE if kind is int else sys.float_info.max
    least = -most
    for each in metadata:
        match each:
            case annotated_types.Ge(ge):
                least = kind(ge)
            case annotated_types.Gt(gt):
                least = gt + 1 if kind is int else math.nextafter(float(gt), math.inf)  # type: ignore[operator]
            case annotated_types.Le(le):
                most = kind(le)
            case annotated_types.Lt(lt):
                most = lt - 1 if kind is int else math.nextafter(float(lt), -math.inf)  # type: ignore[operator]
    return least, most


VALUES = [value for value in values() if (value.key, value.bound) not in NOT_TRIED]

STOPS = [chr(code) for code in range(ord("a"), ord("s"))]  # so that lengths, which are rewarded, vary
EVERYTHING: dict[str, dict[str, Any]] = {
    "reward": {"name": "reasoning_gym", "terms": [{"name": "length", "length_from": 1, "length_to": 9}]},
    "rollout": {"group_size": 2, "max_new_tokens": 6, "max_waves": 2, "stop_strings": STOPS},
    "speculation": {"drafter": "adaptive", "window": 8, "training": {"extra": 0.5, "micro_batch_tokens": 64}},
    "train": {"kl_weight": 0.01, "importance_cap": 2.0, "updates_per_step": 2, "epochs": 2, "weight_decay": 0.1},
    "eval": {"every": 1, "samples": 1, "size": 2},
    "run": {"save_every": 1, "compare_every": 1, "trackers": [], "overwrite": True},
}
TASKS = {"path": None, "size": 4, "tasks": [{"name": "chain_sum", "params": {"max_terms": 2, "max_digits": 1}}]}
OTHERS: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {
    ("data.tasks.", "data.size"): {"data": TASKS, "eval": {"path": None}},
    ("reward.timeout_seconds", "reward.memory_mb"): {
        "reward": {"name": "tiny_rewards:share_of_low_bytes", "terms": None},
        "eval": {"every": 0},
        "run": {"compare_every": 0},
    },
    ("train.lora.",): {"train": {"lora": {"rank": 2}}},
    ("speculation.depth",): {"speculation": {"drafter": "suffix"}},
}


def place_of(value: Value) -> int:
    """Return the number of the settings in which the field has an effect."""
    return next((i for i, keys in enumerate(OTHERS, 1) if value.key.startswith(keys)), 0)


def tree_of(home: Path, group: Sequence[Value]) -> dict[str, Any]:
    """Return a recipe with these values, which belong to the same settings."""
    tree = copy.deepcopy(tiny_tree(home, **EVERYTHING))
    tree["eval"]["path"] = str(home / "held_out.jsonl")
    for name, changes in [{}, *OTHERS.values()][place_of(group[0])].items():
        tree[name] = {key: v for key, v in (tree[name] | copy.deepcopy(changes)).items() if v is not None}
    for value in group:
        *path, last = value.key.split(".")
        node: Any = tree
        for part in path:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        node[last] = value.value
    return tree


def faults(home: Path, group: Sequence[Value]) -> list[str]:
    """Run all values at once. Leave out a value that is refused by name. Halve a group that fails otherwise."""
    if not group:
        return []
    try:
        assert train(parse_config(tree_of(home, group)))["steps"] > 0
    except Exception as error:
        sentence = str(error) if isinstance(error, ValueError) and "\n" not in str(error) else ""
        if named := next((value for value in group if value.key in sentence), None):
            return faults(home, [value for value in group if value != named])
        middle = len(group) // 2
        alone = faults(home, group[:middle]) + faults(home, group[middle:]) if middle else []
        return alone or [f"{', '.join(map(str, group))}: {type(error).__name__}: {error}"]
    return []


def refused(home: Path, value: Value) -> str | None:
    """Return the error of the configuration for a value."""
    try:
        parse_config(tree_of(home, [value]))
    except ConfigError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    (home / "held_out.jsonl").write_text('{"question": "x"}\n{"question": "yy"}\n', encoding="utf-8")
    return home


@pytest.mark.parametrize("bound", ["least", "most"])
@pytest.mark.parametrize("place", range(len(OTHERS) + 1))
def test_bounds_run_or_are_refused_by_name(place: int, bound: str, home: Path) -> None:
    group = []
    for value in VALUES:
        if place_of(value) == place and value.bound == bound:
            if said := refused(home, value):
                assert value.key.split(".")[-1] in said
            else:
                group.append(value)
    assert faults(home, group) == []


def test_all_fields_of_the_schema_are_read() -> None:
    """An open bound, a field of a section in a section, and a field of a list are examples."""
    found = {(value.key, value.bound): value.value for value in values()}
    assert found["train.adam_beta2", "most"] == math.nextafter(1, 0)
    assert found["speculation.training.unroll", "most"] == 16
    assert found["data.tasks.0.weight", "least"] == 5e-324
    assert set(NOT_TRIED) <= set(found)


@pytest.mark.parametrize("wrong", [math.nan, -math.inf, True, "1"])
def test_no_field_accepts_a_number_that_is_not_finite(wrong: Any, home: Path) -> None:
    for key in {value.key for value in values()}:
        assert key.split(".")[-1] in str(refused(home, Value(key, "", wrong)))
