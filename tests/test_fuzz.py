"""Random invalid inputs. Each run ends well, or with one sentence and exit code 2. There is no traceback, no hang, and
no loss of a complete checkpoint.

`TLT_FUZZ=20` tries twenty times as many."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_tree, train, write_recipe

from tlt.cli import main
from tlt.config import Config, ConfigError, load_config
from tlt.store.checkpoint import CheckpointError, latest

TIMES = int(os.environ.get("TLT_FUZZ", "1"))
CASES = {"recipe": 100, "file of the recipe": 20, "data": 25, "model": 30, "checkpoint": 15}
LONGEST = 30  # seconds of one case
SECTIONS: dict[str, Any] = {
    "reward": {"name": "exact"},  # needs no process
    "rollout": {"prompts_per_step": 1, "group_size": 2, "max_new_tokens": 2},
    "speculation": {"drafter": "off"},
    "train": {"steps": 2},
    "run": {"save_every": 1},
}


class Hangs(BaseException):
    """Error of a run that hangs. No handler catches it."""


def _hangs(*_: Any) -> None:
    raise Hangs(f"after {LONGEST} s")


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(LONGEST)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def ends_in_a_sentence(*arguments: str) -> int:
    """Return the exit code: 0, or 2 with one line that gives the reason."""
    said = io.StringIO()
    with in_time(), contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code
    assert code in (0, 2), code
    lines = said.getvalue().splitlines()
    assert not any("Traceback" in line for line in lines)
    if code == 2:
        assert [line for line in lines if line.startswith("tlt: ")] == lines[-1:]
        assert len(lines[-1]) > 20
    return int(code)


@pytest.fixture(scope="module")
def sound(home: Path) -> Path:
    """Return valid inputs, and a run of two steps with both its checkpoints. No path in the recipe is absolute, so that
    a changed letter does not lead to another place."""
    tree = tiny_tree(home, **SECTIONS)
    tree["model"]["path"], tree["data"]["path"], tree["run"]["folder"] = "model", "prompts.jsonl", "run"
    write_recipe(home / "recipe.toml", tree)
    with contextlib.chdir(home):
        train(load_config("recipe.toml"))
    return home


@contextlib.contextmanager
def copy_of(sound: Path) -> Iterator[Path]:
    """Return a copy of the inputs, in which the command runs."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(shutil.copytree(sound, Path(folder) / "home"))
        with contextlib.chdir(home):
            yield home


deep = st.sampled_from(["[" * 100_000, '{"a":' * 100_000, "[" * 3000 + "]" * 3000])
texts = st.text(max_size=12) | st.sampled_from(["\ud800", "\0", "", "nan", "é" * 300, "{question}", "/"])
numbers = st.sampled_from([-1, 0, 1, 3, 7, 1000, -(2**31), 2**63, 10**30, 0.5, -0.5, 1e308, -1e-300])
leaves = st.none() | st.booleans() | numbers | st.floats() | texts
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))

Change = Callable[[bytes], bytes]


def _cut(share: float) -> Change:
    return lambda content: content[: int(share * len(content))]


def _flip(share: float, bit: int) -> Change:
    def flip(content: bytes) -> bytes:
        at = int(share * (len(content) - 1))
        return content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :] if content else b"\xff"

    return flip


def _put(words: str | bytes) -> Change:
    return lambda content: words if isinstance(words, bytes) else words.encode("utf-8", "surrogatepass")


def _set(place: int, value: Any) -> Change:
    """Change one value of a JSON object, or of an object in it."""

    def change(content: bytes) -> bytes:
        tree: Any = None
        with contextlib.suppress(ValueError):
            tree = json.loads(content)
        if not isinstance(tree, dict) or not tree:
            return json.dumps(value).encode()
        node, key = tree, sorted(tree)[place % len(tree)]
        if isinstance(node[key], dict) and node[key] and place % 3:
            node = node[key]
            key = sorted(node)[place % len(node)]
        node[key] = value
        return json.dumps(tree).encode()

    return change


cuts = st.builds(_cut, st.floats(0, 1))
flips = st.builds(_flip, st.floats(0, 1), st.integers(0, 7))
puts = st.builds(_put, deep | st.binary(max_size=40) | values.map(json.dumps))
sets = st.builds(_set, st.integers(0, 99), values)
changes = st.one_of(cuts, flips, puts, sets, sets, sets)


def spoil(path: Path, change: Change) -> None:
    path.write_bytes(change(path.read_bytes()))


FIELDS = [
    f"{name}.{field}"
    for name, section in Config.model_fields.items()
    for field in section.annotation.model_fields  # type: ignore[union-attr]
]
AGAIN = ("train", "recipe.toml", "--run.overwrite", "true", "--train.steps", "1")


@settings(max_examples=CASES["recipe"] * TIMES)
@given(key=st.sampled_from(FIELDS), text=deep | texts | values.map(json.dumps))
def test_values_of_the_recipe(sound: Path, key: str, text: str) -> None:
    """Values that the configuration accepts are skipped, because a run with them may take a week."""
    with contextlib.chdir(sound):
        try:
            load_config("recipe.toml", [f"--{key}={text}"])
        except ConfigError:
            assert ends_in_a_sentence("train", "recipe.toml", f"--{key}={text}") == 2


@settings(max_examples=CASES["file of the recipe"] * TIMES)
@given(change=cuts | flips | puts)
def test_files_of_the_recipe(sound: Path, change: Change) -> None:
    with copy_of(sound) as home:
        spoil(home / "recipe.toml", change)
        ends_in_a_sentence(*AGAIN)


rows = st.dictionaries(st.sampled_from(["question", "answer", "x"]), values, min_size=1)
lines = st.one_of(st.just('{"question": "a", "answer": "b"}'), rows.map(json.dumps), values.map(json.dumps), deep)


@settings(max_examples=CASES["data"] * TIMES)
@given(content=st.lists(lines, max_size=3).map(lambda found: "\n".join(found).encode()) | st.binary(max_size=60))
def test_prompts(sound: Path, content: bytes) -> None:
    with copy_of(sound) as home:
        (home / "prompts.jsonl").write_bytes(content)
        ends_in_a_sentence(*AGAIN)


OF_THE_MODEL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


@settings(max_examples=CASES["model"] * TIMES)
@given(name=st.sampled_from(OF_THE_MODEL), change=changes)
def test_model_folders(sound: Path, name: str, change: Change) -> None:
    with copy_of(sound) as home:
        spoil(home / "model" / name, change)
        ends_in_a_sentence(*AGAIN)


OF_THE_RUN = ("metrics.jsonl", "completions.jsonl", "trace.json", "config.json", "summary.json")
OF_A_CHECKPOINT = (
    *("manifest.json", "state.json", "optimizer.safetensors"),
    *(f"policy/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")),
)


@settings(max_examples=CASES["checkpoint"] * TIMES)
@given(name=st.sampled_from(OF_THE_RUN + OF_A_CHECKPOINT), change=changes, both=st.booleans())
def test_checkpoints(sound: Path, name: str, change: Change, both: bool) -> None:
    with copy_of(sound) as home:
        checkpoints = sorted((home / "run" / "checkpoints").iterdir())
        places = [home / "run"] if name in OF_THE_RUN else checkpoints[0 if both else 1 :]
        for place in places:
            spoil(place / name, change)
        whole = step_of(home)
        code = ends_in_a_sentence("train", "recipe.toml", "--resume", "--train.steps", "3")
        assert step_of(home) == (3 if code == 0 else whole)
        assert code == 2 or whole


def step_of(home: Path) -> int:
    """Return the step of the checkpoint that a run would continue from; 0 if there is none."""
    try:
        return latest(home / "run" / "checkpoints").state["step"]
    except CheckpointError:
        return 0
